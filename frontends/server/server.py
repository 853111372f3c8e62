"""`trouper serve` as a whole: listeners open first, the engine ends last.

    signals ⊃ engine ⊃ listeners

The first SIGTERM or SIGINT: readiness goes, the listeners close, open requests get `shutdown_timeout_s`,
the rest their final abort output, exit 0.  The second ends the process at once.  Whatever is stuck then
is ended by a watchdog that needs no interpreter.
"""

import faulthandler
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import anyio
from anyio.abc import TaskGroup, TaskStatus

from trouper.frontends.server.app import App
from trouper.frontends.server.gc_control import Heap
from trouper.frontends.server.http.listeners import address
from trouper.frontends.server.monitor import watch
from trouper.frontends.server.service import Service

if TYPE_CHECKING:
    from hypercorn.config import Config

    from trouper.actors.engine.engine import Engine
    from trouper.frontends.python.async_engine import AsyncLLMEngine

GRACE_S = 1.5  # for the final outputs to reach their readers
GUARD_S = 5.0  # beyond the shutdown's own time
KEEP_ALIVE_S = 5.0  # an idle connection; also the time for a request's head to come
LARGEST_HEAD = 256 * 2**10  # for the parser; the application refuses a quarter of it, and says so
EXIT_SIGNALLED = 128
# So long the device's thread waits for the interpreter while the loop has it, several times in a step.  Python's own is
# 5 ms; with 0.1 in place of 1 ms a crowd reads a twentieth more.
SWITCH_S = 0.0001


class _Signals:
    """Calls `stop` for each; the library itself installs no handler."""

    def __init__(self, stop: Callable[[int], None]) -> None:
        self._stop = stop

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for number in signals:
                self._stop(number)


class Server:
    """One run: starting, serving, draining, over."""

    def __init__(
        self,
        service: Service,
        *,
        shutdown_timeout_s: float,
        report: Callable[[str], None],
        certificate: tuple[str | None, str | None] = (None, None),
        root_path: str = "",
        stays_dead: bool = False,
    ) -> None:
        self._service = service
        self._shutdown_timeout_s = shutdown_timeout_s
        self._report = report
        self._certificate = certificate  # file, and file of the key; for the public listeners
        self._root_path = root_path  # what comes before the paths of the public listeners
        self._stays_dead = stays_dead  # answering 5xx until somebody ends it
        self._is_stopping = False  # by a signal
        self._should_close = anyio.Event()
        self._are_closed = anyio.Event()
        self._is_engine_closed = anyio.Event()
        self._loading = anyio.CancelScope()
        self._heap = Heap()
        self._error: Exception | None = None

    async def run(
        self,
        unopened: "AsyncLLMEngine",
        public: Sequence[socket.socket],
        admin: Sequence[socket.socket],
        backend: str,
    ) -> None:
        """Until a signal, or the death of the engine.

        Raises:
            Exception: why the engine could not start, or what it died of.
        """
        switch_before = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        try:
            with self._heap:
                await self._run(unopened, public, admin, backend)
        finally:
            sys.setswitchinterval(switch_before)
        faulthandler.cancel_dump_traceback_later()
        if self._error is not None:
            raise self._error

    async def _run(
        self,
        unopened: "AsyncLLMEngine",
        public: Sequence[socket.socket],
        admin: Sequence[socket.socket],
        backend: str,
    ) -> None:
        async with anyio.create_task_group() as helpers:
            await helpers.start(_Signals(self._stop).run, name="signals")
            async with anyio.create_task_group() as troupe:
                async with anyio.create_task_group() as listeners:
                    for listener in (*public, *admin):
                        app = App(self._service, is_admin_listener=listener in admin)
                        config = self._config(listener, is_public=listener in public)
                        self._report(f"listening at {address(listener)}, loading the model")
                        listen = partial(self._listen, app, config, listener, backend)
                        listeners.start_soon(listen, name="listener")
                    await self._serve(unopened, public, troupe, helpers)
                self._are_closed.set()
            helpers.cancel_scope.cancel()

    async def _serve(
        self,
        unopened: "AsyncLLMEngine",
        public: Sequence[socket.socket],
        troupe: TaskGroup,
        helpers: TaskGroup,
    ) -> None:
        engine: Engine | None = None
        async with anyio.create_task_group() as loading:
            loading.start_soon(self._leave_loading, name="stop while loading")
            with self._loading:
                engine = await troupe.start(self._perform, unopened, name="engine")
            loading.cancel_scope.cancel()
        if engine is not None:
            for listener in public:
                self._report(f"serving {self._service.model_names[0]} at {address(listener)}")
            helpers.start_soon(self._watch_death, name="death")
            helpers.start_soon(watch, self._service, self._heap, name="watch")
            await self._should_close.wait()
            helpers.start_soon(self._abort_later, engine, name="deadline")
        self._service.drain()
        self._should_close.set()

    async def _perform(
        self, unopened: "AsyncLLMEngine", *, task_status: TaskStatus["Engine | None"]
    ) -> None:
        """The engine, until all connections are closed."""
        is_open = False
        try:
            async with unopened as engine:
                self._heap.settle()
                self._service.open(engine)
                is_open = True
                task_status.started(engine.engine)
                await self._are_closed.wait()
        except Exception as error:
            self._error = error  # carried to `run`, which raises it as it is
            if not is_open:
                task_status.started(None)
        self._is_engine_closed.set()

    def _config(self, listener: socket.socket, *, is_public: bool) -> "Config":
        from hypercorn.config import Config

        config = Config()
        config.bind = f"fd://{os.dup(listener.fileno())}"  # hypercorn closes it
        config.accesslog = config.errorlog = None
        config.include_server_header = False
        config.h11_max_incomplete_size = LARGEST_HEAD
        config.keep_alive_timeout = KEEP_ALIVE_S
        config.graceful_timeout = self._shutdown_timeout_s + GRACE_S / 2
        if is_public:
            config.certfile, config.keyfile = self._certificate
            config.root_path = self._root_path
        return config

    async def _listen(
        self, app: App, config: "Config", listener: socket.socket, backend: str
    ) -> None:
        wait_close = self._close_listener(listener)
        if backend == "trio":
            from trouper.frontends.server.connections import serve as serve_on_trio

            await serve_on_trio(app, config, wait_close)
        else:
            from hypercorn.asyncio import serve

            await serve(
                app,  # pyright: ignore[reportArgumentType]  # its own names for ASGI's three
                config,
                shutdown_trigger=wait_close,
                mode="asgi",
            )

    def _close_listener(self, listener: socket.socket) -> Callable[[], Awaitable[None]]:
        async def wait() -> None:
            await self._should_close.wait()
            listener.close()

        return wait

    async def _watch_death(self) -> None:
        await self._service.died.wait()
        if not self._should_close.is_set():
            self._report("the engine has failed")
        if not self._stays_dead:
            self._should_close.set()

    async def _abort_later(self, engine: "Engine") -> None:
        """What is open at the deadline is aborted; what nobody reads even then is left behind.

        Nothing can cancel the HTTP server's write to such a connection.
        """
        await anyio.sleep(self._shutdown_timeout_s)
        self._service.close_door()
        engine.abort_all()
        await anyio.sleep(GRACE_S)
        self._are_closed.set()
        await self._is_engine_closed.wait()
        self._report("left connections behind that nobody reads")
        os._exit(0 if self._error is None else 1)

    def _stop(self, number: int) -> None:
        if self._is_stopping:
            os._exit(EXIT_SIGNALLED + number)
        self._is_stopping = True
        self._service.drain()
        faulthandler.dump_traceback_later(self._shutdown_timeout_s + GUARD_S, exit=True)
        self._report("shutting down")
        self._loading.cancel()
        self._should_close.set()

    async def _leave_loading(self) -> None:
        """Nothing can cancel what loads weights in a thread, and nothing would be lost with it."""
        await self._should_close.wait()
        await anyio.sleep(GRACE_S)
        os._exit(0)
