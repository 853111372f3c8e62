"""A worker process that is started before the engine that will have it.

Importing torch takes it longer than the engine's process takes to import its own modules, so the two go side by side.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from trouper.actors.executor.devices import launch_local
from trouper.actors.executor.devices.launch_local import LocalPeer
from trouper.actors.executor.devices.wire import Prepare, encode


class LaunchedAhead:
    """`Launcher` whose first worker runs already; it is ended with the block where no engine has taken it.

    Enter it in the thread of the event loop: the kernel ends a worker with the thread that made it.
    """

    def __init__(self) -> None:
        self._first: LocalPeer | None = None

    def __repr__(self) -> str:
        return f"<LaunchedAhead {self._first!r}>"

    def __enter__(self) -> Self:
        self._first = launch_local.launch(0)
        self._first.send(*encode(Prepare()))
        return self

    def __call__(self, rank: int, *, files: Sequence[int] = ()) -> LocalPeer:
        """Return the worker that runs, once; then, and for other ranks, start one."""
        if rank or files or self._first is None:
            return launch_local.launch(rank, files=files)
        first, self._first = self._first, None
        return first

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._first is not None:
            self._first.kill()
            self._first = None
