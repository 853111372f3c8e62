"""Run `trouper serve`: listeners open first, and the engine closes last.

    signals ⊃ engine ⊃ listeners

On the first SIGTERM or SIGINT, the readiness check fails and the listeners close.  Open requests may continue for `shutdown_timeout_s`;
then they are aborted and their clients get a final event.  Connections that do not read it are closed, and the process exits with 0.  A
second signal ends the process at once.  A watchdog outside the interpreter kills a stuck process.  SIGHUP is ignored: there is no
configuration to reload, and a closed terminal should not interrupt streams.
"""

import faulthandler
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TextIO

import anyio
import anyio.to_thread
import msgspec
from anyio.abc import TaskGroup, TaskStatus

from trouper.errors import invalid
from trouper.frontends.server.apis.responses.background import resume_responses
from trouper.frontends.server.asgi.app import App
from trouper.frontends.server.asgi.routes import durable_route
from trouper.frontends.server.generation.durable import resume_streams
from trouper.frontends.server.http.listeners import (
    KEEP_ALIVE_S,
    Listener,
    OpenListeners,
    Shutdown,
)
from trouper.frontends.server.models.residency import Residency
from trouper.frontends.server.program.hand_over import Ask, HandOver, Predecessor
from trouper.frontends.server.program.monitor import Heap, watch
from trouper.frontends.server.program.start_report import LoadingLine, summarise
from trouper.frontends.server.service.service import Service
from trouper.lora import LoRARequest

if TYPE_CHECKING:
    from trouper.actors.engine.engine import Engine
    from trouper.frontends.python.async_engine import AsyncLLMEngine
    from trouper.frontends.server.durable.journal import Journal

# How long final outputs may take to reach their clients, in seconds.
GRACE_S = 1.5
# How long open requests may continue after a take-over without --shutdown-timeout, in seconds.  It is long, because no client waits for the
# end of this process.
DRAIN_S = 600.0
# The longest list of model names in a line, in characters.
MAX_NAMES = 200
# The watchdog acts this many seconds after the shutdown's time limit: `GRACE_S` and 4 s for stuck workers, about doubled.
GUARD_S = 10.0
EXIT_SIGNALLED = 128
# How long the device's thread waits for the interpreter lock while the event loop holds it, several times in a step.  Python's default is
# 5 ms.  With 0.1 instead of 1 ms, many concurrent streams get 5 % more tokens.
SWITCH_S = 0.0001


def listener_task(loop: str) -> Callable[[Any, Listener, Shutdown], Coroutine[Any, Any, None]]:
    """Return the function that serves an ASGI application on this event loop, `asyncio` or `trio`.

    The module is imported only here, because each server library takes a while to import.
    """
    if loop == "trio":
        from trouper.frontends.server.http.hypercorn_server import serve
    else:
        from trouper.frontends.server.http.uvicorn_server import serve
    return serve


def loop_options(loop: str) -> dict[str, Any]:
    """Return the options of `anyio.run` for this event loop: uvloop if it is installed (not on Windows).

    trio has no options.  uvloop makes network input and output faster.
    """
    return {"use_uvloop": find_spec("uvloop") is not None} if loop == "asyncio" else {}


class _Signals:
    """Call `stop` for each SIGINT and SIGTERM.  Only `trouper serve` uses it; the library installs no signal handlers."""

    def __init__(self, stop: Callable[[int], None], report: Callable[[str], None]) -> None:
        self._stop = stop
        self._report = report

    async def forward(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        with anyio.open_signal_receiver(*handled) as signals:
            task_status.started()
            async for number in signals:
                if number == signal.SIGHUP:
                    self._report("SIGHUP is ignored; stop the server with SIGTERM")
                else:
                    self._stop(number)


async def load_adapters(engine: "AsyncLLMEngine", adapters: Sequence[LoRARequest]) -> None:
    """Load the adapters of the command line, so that a bad one fails the start.  Clients use their names as models.

    Raises:
        TrouperValidationError: an adapter has the model's name, or its files do not fit the model.
    """
    for adapter in adapters:
        if adapter.lora_name == engine.config.model.name:
            text = "is also the name of the model; give the adapter another name"
            raise invalid("lora_modules", text, adapter.lora_name)
        await engine.engine.adapters.load_named(adapter)


class Server:
    """Run a server once: starting, serving, draining, closed.

    Its parts open and close in a fixed order, so that no request uses a closed part.
    """

    def __init__(
        self,
        service: Service,
        *,
        shutdown_timeout_s: float,
        report: Callable[[str], None],
        root_path: str = "",
        names: Sequence[str] = (),
        stays_dead: bool = False,
        terminal: TextIO | None = None,
    ) -> None:
        self._service = service
        self._shutdown_timeout_s = self._drain_s = shutdown_timeout_s
        self._report = report
        # A prefix of all public paths that the reverse proxy does not strip.
        self._root_path = root_path
        # Host names under which browsers may open the page, in addition to IP addresses.
        self._names = names
        # Whether the server keeps answering with 5xx after the engine has died, until a signal arrives.
        self._stays_dead = stays_dead
        # Shows the progress of loading, which is always logged.
        self._terminal = terminal
        self._is_stopping = False  # by a signal
        self._shutdown = Shutdown()
        # The server from which this one takes over, and the function that opens the journal afterwards.
        self._predecessor: Predecessor | None = None
        self._open_journal: Callable[[], Journal | None] = lambda: None
        self._name_model: Callable[[], bytes] = bytes
        # The facts that a successor must share, and the socket at which it connects.
        self._offered: tuple[Ask, socket.socket] | None = None
        # The listeners with their applications.
        self._accepting: list[tuple[App, Listener]] = []
        self._start_accepting: Callable[[], None] = lambda: None
        # Cancelled when open requests may not continue any longer.
        self._grace = anyio.CancelScope()
        self._are_closed = anyio.Event()
        self._loading = anyio.CancelScope()
        self._heap = Heap()
        self._error: Exception | None = None

    def succeed(
        self,
        predecessor: Predecessor,
        open_journal: "Callable[[], Journal | None]",
        name_model: Callable[[], bytes],
    ) -> None:
        """Prepare to take over from a running server as soon as the model is loaded.  Call it before `run`.

        Args:
            open_journal: opens the journal; called in a thread.
            name_model: returns the fingerprint of the model; called in a thread.
        """
        self._predecessor = predecessor
        self._open_journal, self._name_model = open_journal, name_model

    def offer(self, description: Ask, offered: socket.socket) -> None:
        """Let another server take over from this one.  Call it before `run`."""
        self._offered = description, offered

    async def run(
        self, unopened: "AsyncLLMEngine | Residency", listeners: OpenListeners, backend: str
    ) -> None:
        """Serve until a signal arrives, or until the engine dies if there is only one.

        Args:
            unopened: the engine of the only model, or the residency of several.

        Raises:
            Exception: the error by which the engine failed to start, or died.
        """
        switch_before = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        try:
            with self._heap:
                await self._run(unopened, listeners, backend)
        finally:
            sys.setswitchinterval(switch_before)
        faulthandler.cancel_dump_traceback_later()
        if self._error is not None:
            raise self._error

    async def _run(
        self,
        unopened: "AsyncLLMEngine | Residency",
        opened: OpenListeners,
        backend: str,
    ) -> None:
        serve = listener_task(backend)
        public = opened.public
        several = isinstance(unopened, Residency)
        async with anyio.create_task_group() as helpers:
            await helpers.start(_Signals(self._stop, self._report).forward, name="signals")
            if self._service.journal is not None:
                # Started first, so that it ends after all tasks that write to it.
                await helpers.start(self._service.journal.run_writer, name="journal")
            if self._service.recorder is not None:
                await helpers.start(self._service.recorder.run_writer, name="recorder")
            async with anyio.create_task_group() as engines:
                async with anyio.create_task_group() as listeners:

                    def start_accepting() -> None:
                        for app, listener in self._accepting:
                            listeners.start_soon(
                                serve, app, listener, self._shutdown, name="listener"
                            )

                    for listener in opened.all:
                        is_admin = listener in opened.admin
                        root_path = "" if is_admin else self._root_path
                        app = App(
                            self._service,
                            is_admin_listener=is_admin,
                            root_path=root_path,
                            is_loopback=listener.is_loopback,
                            names=self._names,
                        )
                        what = "with several models" if several else "loading the model"
                        self._report(f"listening at {listener.address}, {what}")
                        self._accepting.append((app, listener))
                    self._start_accepting = start_accepting
                    if self._predecessor is None:
                        start_accepting()
                    listeners.start_soon(self._run_background, name="background")
                    if isinstance(unopened, Residency):
                        addresses = ", ".join(listener.address for listener in public)
                        await self._serve_several(unopened, addresses, engines, helpers)
                    else:
                        await self._serve(unopened, opened, engines, helpers)
                self._are_closed.set()
            helpers.cancel_scope.cancel()

    async def _serve(
        self,
        unopened: "AsyncLLMEngine",
        opened: OpenListeners,
        engines: TaskGroup,
        helpers: TaskGroup,
    ) -> None:
        engine: Engine | None = None
        begun_s = anyio.current_time()
        async with anyio.create_task_group() as loading:
            if self._terminal is not None:
                loading.start_soon(LoadingLine(self._terminal).keep_drawn, name="progress")
            loading.start_soon(self._leave_loading, name="stop while loading")
            with self._loading:
                run_engine = partial(self._run_engine, unopened, opened, helpers)
                engine = await engines.start(run_engine, name="engine")
            loading.cancel_scope.cancel()
        if engine is not None:
            seconds = anyio.current_time() - begun_s
            addresses = [listener.address for listener in opened.public]
            name, config = self._service.model_names[0], unopened.config
            for line in summarise(name, config, engine.info, addresses, seconds):
                self._report(line)
            helpers.start_soon(self._watch_death, name="death")
            helpers.start_soon(watch, self._service, self._heap, name="watch")
            if self._offered is not None:
                hand_over = HandOver(self, opened, self._offered[1], self._report)
                await helpers.start(hand_over.listen, name="hand-over")
            await self._shutdown.closing.wait()
        helpers.start_soon(self._abort_later, engine, name="deadline")
        self._service.drain()
        self._shutdown.closing.set()

    async def _serve_several(
        self, residency: Residency, addresses: str, engines: TaskGroup, helpers: TaskGroup
    ) -> None:
        """Serve several models, which are loaded on demand.  A model's failure does not end the server."""
        self._heap.settle()
        names = ", ".join(model.name for model in residency.table)[:MAX_NAMES]
        self._report(f"serving {len(residency.table.models)} models at {addresses}: {names}")
        await engines.start(self._run_residency, residency, name="residency")
        helpers.start_soon(watch, self._service, self._heap, name="watch")
        for model in residency.table:
            if model.options.is_preloaded:
                residency.load_later(model)
        await self._shutdown.closing.wait()
        helpers.start_soon(self._close_several, residency, name="deadline")
        self._service.drain()

    async def _run_residency(
        self, residency: Residency, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Run the engines of several models until all connections are closed."""
        async with anyio.create_task_group() as tasks:
            await tasks.start(residency.carry_out, name="transitions")
            task_status.started()
            await self._are_closed.wait()
            tasks.cancel_scope.cancel()

    async def _close_several(self, residency: Residency) -> None:
        """Abort the open requests at the deadline, then close the remaining connections."""
        await anyio.sleep(self._shutdown_timeout_s)
        residency.close()
        for service in self._service.services:
            service.close_gate()
            if not service.is_starting:
                service.engine.requests.abort_all()
        await self._close_connections()

    async def _run_engine(
        self,
        unopened: "AsyncLLMEngine",
        opened: OpenListeners,
        helpers: TaskGroup,
        *,
        task_status: TaskStatus["Engine | None"],
    ) -> None:
        """Keep the engine open until all connections are closed."""
        is_open = False
        try:
            async with unopened as engine:
                await load_adapters(engine, self._service.settings.lora_modules)
                self._heap.settle()
                if self._predecessor is not None:
                    await self._take_journal(self._predecessor, helpers)
                self._service.open(engine.engine)
                self._resume()
                if self._predecessor is not None:
                    await anyio.to_thread.run_sync(self._predecessor.finish, opened)
                    self._report(f"took over from process {self._predecessor.pid}")
                    self._start_accepting()
                is_open = True
                task_status.started(engine.engine)
                await self._are_closed.wait()
        except Exception as error:
            # `run` raises it without an exception group.
            self._error = error
            if not is_open:
                task_status.started(None)

    async def _take_journal(self, predecessor: Predecessor, helpers: TaskGroup) -> None:
        """Wait until the running server has stopped accepting, and open its journal.

        Raises:
            TrouperValidationError: the running server refuses, or the journal cannot be opened.  Then that server continues.
        """
        name = await anyio.to_thread.run_sync(self._name_model)
        await anyio.to_thread.run_sync(predecessor.take, name)
        self._service.journal = await anyio.to_thread.run_sync(self._open_journal)
        if self._service.journal is not None:
            await helpers.start(self._service.journal.run_writer, name="journal")

    def describe(self) -> Ask:
        assert self._offered is not None
        names = [adapter.lora_name for adapter in self._service.adapters]
        return msgspec.structs.replace(self._offered[0], adapters=names)

    def sockets(self) -> dict[str, socket.socket]:
        return {listener.option: listener.sock for _, listener in self._accepting}

    def stop_accepting(self) -> None:
        # After a signal the listeners have already ended and closed their sockets.
        if not self._shutdown.closing.is_set():
            # Ending listeners close their sockets, so keep copies in case the take-over fails.
            copies = [(app, replace(each, sock=each.sock.dup())) for app, each in self._accepting]
            self._shutdown.leaving.set()
            self._shutdown = replace(self._shutdown, leaving=anyio.Event())
            self._accepting = copies
        self._service.is_leaving = True

    def accept_again(self) -> None:
        self._service.is_leaving = False
        if not self._shutdown.closing.is_set():
            self._start_accepting()

    async def close_journal(self, fingerprint: bytes) -> str | None:
        journal = self._service.journal
        if journal is None:
            return None
        num_running = journal.streams.count()["running"]
        if num_running and fingerprint != journal.fingerprint:
            return (
                f"{num_running} durable answers are running, which only the same model can resume; "
                "start the same model, or wait until they have ended"
            )
        if not await journal.lend():
            return "cannot be written at present, so durable answers would be lost; try again later"
        return None

    def reopen_journal(self) -> None:
        if self._service.journal is not None:
            self._service.journal.take_back()

    async def leave(self) -> None:
        for _, listener in self._accepting:
            listener.sock.close()
        unread = [] if self._service.journal is None else self._service.journal.give()
        for name in unread:
            self._service.background.cancel(name)
        self._report("another server has taken over; this one finishes its open requests")
        self._drain_s = self._shutdown_timeout_s or DRAIN_S
        faulthandler.dump_traceback_later(KEEP_ALIVE_S + self._drain_s + GUARD_S, exit=True)
        # Clients may still send requests on idle connections, until these reach their own time limit.
        await anyio.sleep(KEEP_ALIVE_S)
        self._service.drain()
        self._shutdown.closing.set()

    def _resume(self) -> None:
        """Resume the answers of an earlier process, before any client is served."""
        journal = self._service.journal
        if journal is not None:
            responses, streams = journal.take_recovered()
            resume_responses(self._service, responses)
            resume_streams(self._service, streams, durable_route)

    async def _run_background(self) -> None:
        """Run background tasks until the listeners close, because afterwards no client can ask for their results."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._service.background.run_tasks, name="background work")
            await self._shutdown.closing.wait()
            if self._service.journal is not None:
                # Durable answers with connected readers may finish like other requests.  A later process resumes the rest.
                with anyio.move_on_after(max(0.0, self._drain_s - GRACE_S)):
                    await self._service.journal.streams.wait_unread()
            tasks.cancel_scope.cancel()

    async def _watch_death(self) -> None:
        await self._service.died.wait()
        if not self._shutdown.closing.is_set():
            self._report("the engine has failed; the log above has the error")
        if not self._stays_dead:
            self._shutdown.closing.set()

    async def _abort_later(self, engine: "Engine | None") -> None:
        """Abort the open requests at the deadline, then close the remaining connections."""
        if engine is not None:
            with self._grace:
                await anyio.sleep(self._drain_s)
            self._service.close_gate()
            engine.requests.abort_all()
        await self._close_connections()

    async def _close_connections(self) -> None:
        await anyio.sleep(GRACE_S)
        self._report("closing the remaining connections")
        self._shutdown.aborting.set()

    def _stop(self, number: int) -> None:
        if self._is_stopping:
            os._exit(EXIT_SIGNALLED + number)
        self._is_stopping = True
        self._service.drain()
        self._drain_s = self._shutdown_timeout_s
        if self._service.is_leaving:
            self._grace.deadline = anyio.current_time() + self._drain_s
        faulthandler.dump_traceback_later(self._shutdown_timeout_s + GUARD_S, exit=True)
        self._report("shutting down")
        self._loading.cancel()
        self._shutdown.closing.set()

    async def _leave_loading(self) -> None:
        """Exit the process during loading, because the thread that loads the weights cannot be cancelled."""
        await self._shutdown.closing.wait()
        await anyio.sleep(GRACE_S)
        os._exit(0)
