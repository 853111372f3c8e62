"""Tasks that go on when the client that has started them has its answer."""

from collections.abc import Awaitable, Callable

import anyio
from anyio.abc import TaskGroup, TaskStatus

from trouper.frontends.server.shared.errors import unavailable

Work = Callable[[], Awaitable[None]]


class BackgroundTasks:
    """Runs tasks by name while `run_tasks` does.

    How many there may be is the admission gate's affair: each holds its ticket as other requests do.
    """

    def __init__(self) -> None:
        self._scopes: dict[str, anyio.CancelScope] = {}
        self._group: TaskGroup | None = None

    def __repr__(self) -> str:
        state = "off" if self._group is None else "on"
        return f"<BackgroundTasks {state}: {len(self._scopes)} run>"

    @property
    def is_on(self) -> bool:
        return self._group is not None

    @property
    def num_running(self) -> int:
        return len(self._scopes)

    async def run_tasks(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Run what is started until cancelled, which cancels all of it."""
        async with anyio.create_task_group() as self._group:
            task_status.started()
            try:
                await anyio.sleep_forever()
            finally:
                self._group = None

    def start(self, name: str, work: Work) -> None:
        """Start work that raises nothing.

        Raises:
            HTTPError: the server is shutting down.
        """
        if self._group is None:
            raise unavailable("draining", "no background work is taken now")
        scope = self._scopes[name] = anyio.CancelScope()
        self._group.start_soon(self._perform, name, scope, work, name="background")

    def cancel(self, name: str) -> None:
        """Cancel the work of that name, if it runs; it may have some cleaning up to do."""
        scope = self._scopes.get(name)
        if scope is not None:
            scope.cancel()

    async def _perform(self, name: str, scope: anyio.CancelScope, work: Work) -> None:
        try:
            with scope:
                await work()
        finally:
            del self._scopes[name]
