"""An event loop in a thread of its own, with a portal to it."""

import threading
from concurrent.futures import Future
from types import TracebackType

import anyio
from anyio.from_thread import BlockingPortal


class PortalThread:
    """Entering starts the loop, leaving stops it.

    As anyio's `start_blocking_portal`, but no generator: what is suspended in one runs when it is garbage, and in a
    forked child, which has no such thread, it would wait for the loop for ever.
    """

    def __init__(self, name: str) -> None:
        self._portal: Future[BlockingPortal] = Future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __repr__(self) -> str:
        return f"<PortalThread {'running' if self._thread.is_alive() else 'not running'}>"

    def __enter__(self) -> BlockingPortal:
        self._thread.start()
        return self._portal.result()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        portal = self._portal.result()
        try:
            portal.call(portal.stop, error is not None)
        except RuntimeError:
            pass  # it has stopped already
        self._thread.join()

    def _run(self) -> None:
        try:
            anyio.run(self._serve, backend="trio")
        except BaseException as error:  # noqa: ASYNC103  # a thread: it belongs to `__enter__`
            if not self._portal.done():
                self._portal.set_exception(error)

    async def _serve(self) -> None:
        async with BlockingPortal() as portal:
            self._portal.set_result(portal)
            await portal.sleep_until_stopped()
