"""Run tasks that outlive the request that started them, such as background responses."""

from collections.abc import Awaitable, Callable

import anyio
from anyio.abc import TaskGroup, TaskStatus

from trouper.frontends.server.shared.errors import unavailable

Work = Callable[[], Awaitable[None]]


class BackgroundTasks:
    """Run named tasks while `run_tasks` is running.

    The admission gate bounds their number, because each task holds a ticket like any other request.
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
        """Run all started tasks until cancelled, which cancels them, too.

        Handlers may start tasks as soon as `task_status.started` has been called.
        """
        async with anyio.create_task_group() as self._group:
            task_status.started()
            try:
                await anyio.sleep_forever()
            finally:
                self._group = None

    def start(self, name: str, work: Work) -> None:
        """Start a task.  Its name must be unique among running tasks, and `work` must not raise.

        Raises:
            HTTPError: the server is shutting down.
        """
        if self._group is None:
            raise unavailable(
                "draining", "the server is shutting down and accepts no background work"
            )
        scope = self._scopes[name] = anyio.CancelScope()
        self._group.start_soon(self._perform, name, scope, work, name="background")

    def cancel(self, name: str) -> None:
        """Cancel the task of this name if it is running.  It may need some time to clean up."""
        scope = self._scopes.get(name)
        if scope is not None:
            scope.cancel()

    async def _perform(self, name: str, scope: anyio.CancelScope, work: Work) -> None:
        try:
            with scope:
                await work()
        finally:
            del self._scopes[name]
