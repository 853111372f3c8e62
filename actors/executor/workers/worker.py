"""Run a worker process: `python -m trouper.actors.executor.workers.worker [--machine JSON] CONTROL PARENT [FILE …]`.

CONTROL is the descriptor of a socket to the engine, PARENT the process id of the parent, and each FILE the descriptor
of a link between workers. The main thread owns the model and answers frames in order. Two guards, set before torch is
imported, end the worker if the engine dies: a thread that waits until the socket hangs up, and Linux's parent-death
signal. A worker on another machine is connected by TCP, which cannot carry descriptors. The worker ignores the signals
of a terminal, because the engine handles them.
"""

import ctypes
import faulthandler
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from typing import Any

from trouper.actors.executor.device import PendingResult, StepResult
from trouper.actors.executor.workers.model_files import MachineFacts, check_model
from trouper.actors.executor.workers.model_host import GrammarThread, ModelHost
from trouper.actors.executor.workers.wire import (
    MAX_FRAME,
    MAX_INLINE,
    Broken,
    Call,
    Close,
    Frame,
    FrameReader,
    KeepMemory,
    Load,
    Loaded,
    LogRecord,
    Prepare,
    Progress,
    Returned,
    WireError,
    describe_error,
    encode,
)
from trouper.actors.messages.controls import Sleep, StartProfile, Wake
from trouper.actors.messages.requests import PrepareGrammar, Vocabulary
from trouper.actors.messages.steps import TierOrder
from trouper.actors.rendering.grammar.matchers import ReceivedGrammars
from trouper.actors.runtime.startup import collections_paused, set_torch_environment

READ_BYTES = 2**18
# Memory files received in one read; a frame has at most one.
MAX_FILES = 16
# Seconds for which the worker polls after a step before it sleeps: a plan and its answer take 0.1 ms in transit, and
# waking a sleeping thread as long again. With only one processor, polling would just delay the engine.
AWAKE_S = 2e-4 if (os.cpu_count() or 1) > 1 else 0.0
# Seconds between two polls of a launched step and of the socket.
POLL_S = 5e-5
PR_SET_PDEATHSIG = 1
EXIT_ORPHANED, EXIT_BROKEN = 70, 71


def main() -> None:
    """Serve one engine until it closes this worker, then exit."""
    arguments = sys.argv[1:]
    machine = None
    if arguments[0] == "--machine":
        machine, arguments = MachineFacts.of_argument(arguments[1]), arguments[2:]
    control, parent = socket.socket(fileno=int(arguments[0])), int(arguments[1])
    files = tuple(map(int, arguments[2:]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # The parent may have closed stderr.
    if sys.stderr is not None:  # pyright: ignore[reportUnnecessaryComparison]
        faulthandler.enable()
    end_with_the_engine(control, parent)
    Worker(control, files, machine).run()


def end_with_the_engine(control: socket.socket, parent: int) -> None:
    """Make this process end when the engine ends, even if the engine is killed.

    The guards are the end of the connection and, on Linux, the parent-death signal.
    """
    threading.Thread(target=_exit_at_hang_up, args=(control.fileno(),), daemon=True).start()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # The parent may have died before the signal was requested.
        if os.getppid() != parent:
            os._exit(EXIT_ORPHANED)


def _exit_at_hang_up(control: int) -> None:
    poll = select.poll()
    # A hang-up is always reported, but on TCP only after both sides have closed, so the other side's close is
    # requested explicitly.
    poll.register(control, getattr(select, "POLLRDHUP", 0))
    poll.poll()
    os._exit(EXIT_ORPHANED)


class Worker:
    """Read frames, perform them and write the answers, all on the main thread. Another thread compiles grammars.

    Args:
        machine: facts of this machine; None on the coordinator's own machine.
    """

    def __init__(
        self,
        control: socket.socket,
        files: tuple[int, ...] = (),
        machine: MachineFacts | None = None,
    ) -> None:
        self._control, self._files = control, files
        self._machine = machine
        self._grammars = ReceivedGrammars()
        self._is_remote = control.family != socket.AF_UNIX
        self._frames = FrameReader(
            self._grammars.make, max_inline=MAX_FRAME if self._is_remote else MAX_INLINE
        )
        # Log records and grammar answers are written by other threads.
        self._writing = threading.Lock()
        self._preparing = GrammarThread(self._write)
        # The descriptor of the memory file for the KV cache, which outlives this process, or None.
        self._kept: int | None = None
        self._host: ModelHost | None = None
        # Launched steps without a result; the scheduler bounds the steps in flight.
        self._launched: deque[PendingResult[StepResult | None]] = deque()
        self._awake_until_s = 0.0

    def __repr__(self) -> str:
        return f"<Worker: {self._host!r}, {len(self._launched)} steps launched>"

    def run(self) -> None:
        """Answer frames until the engine closes the worker. A broken worker reports its error and exits."""
        logging.basicConfig(handlers=[_ForwardedLog(self._write)], level=logging.INFO, force=True)
        try:
            while self._answer(self._next_frame()):
                pass
        # The process ends here, and the engine receives the error.
        except BaseException as error:  # noqa: ASYNC103
            self._write(Broken(words := describe_error(error)))
            if self._is_remote and sys.stderr is not None:  # pyright: ignore[reportUnnecessaryComparison]
                sys.stderr.write(f"{words.kind}: {words.message}\n")
            logging.shutdown()
            os._exit(EXIT_BROKEN)
        # Exit without waiting for threads of libraries.
        os._exit(0)

    def _next_frame(self) -> Frame:
        """Return the next frame. While waiting for it, write the results of launched steps."""
        while True:
            while self._launched and self._launched[0].is_ready():
                self._finish_first()
            frame = self._frames.take()
            if frame is not None:
                return frame
            is_here = bool(select.select([self._control], [], [], 0)[0])
            if not is_here and time.monotonic() < self._awake_until_s:
                continue
            if not is_here and self._launched:
                time.sleep(POLL_S)
                continue
            data, files, _, _ = socket.recv_fds(self._control, READ_BYTES, MAX_FILES)
            if not data:
                os._exit(EXIT_ORPHANED)
            self._frames.feed(data, files)

    def _answer(self, frame: Frame) -> bool:
        """Perform a frame. Returns False if it was the last one."""
        match frame:
            case Prepare():
                _import_torch()
            case KeepMemory(file):
                self._kept = file
            case Load():
                self._load(frame)
            case Call():
                self._call(frame)
            case Vocabulary():
                self._grammars.take(frame)
                self._preparing.do(self._grammars.read_vocabulary)
            case PrepareGrammar():
                self._prepare(frame)
            case TierOrder():
                self._finish_all()
                self._loaded.order_tier(frame)
            case Close():
                self._finish_all()
                if self._host is not None:
                    self._host.close()
                return False
            case _:
                self._step(frame)
        return True

    def _load(self, load: Load) -> None:
        config = load.config if self._machine is None else self._machine.localise(load.config)
        check_model(config, load.files)
        self._host = ModelHost(config, load.rank, self._files, self._kept)
        info = self._host.load(lambda phase: self._write(Progress(phase)))
        layout = self._host.layout
        if load.sleep_level:
            self._host.call(Sleep(load.sleep_level))
            if load.woken:
                self._host.call(Wake(frozenset(load.woken)))
        if load.profile is not None:
            self._host.call(StartProfile(*load.profile))
        self._host.open_tier(self._write)
        self._write(Loaded(info, layout))

    def _call(self, call: Call) -> None:
        self._finish_all()
        try:
            self._loaded.call(call.action)
        except Exception as error:
            self._write(Returned(call.number, describe_error(error)))
        else:
            self._write(Returned(call.number))

    def _prepare(self, order: PrepareGrammar) -> None:
        for key in order.released:
            self._grammars.release(key)
        source = order.grammar.rules.source
        assert source is not None, "the grammar is already compiled"
        self._preparing.do(lambda: self._grammars.hold(source), order.grammar.key)

    def _step(self, plan: Any) -> None:
        result = self._loaded.execute(plan)
        if isinstance(result, PendingResult):
            self._launched.append(result)
        elif result is not None:
            self._write(result)
        self._awake_until_s = time.monotonic() + AWAKE_S

    @property
    def _loaded(self) -> ModelHost:
        if self._host is None:
            raise WireError("the engine sent a plan or a call before the Load frame")
        return self._host

    def _finish_first(self) -> None:
        result = self._launched.popleft().finish()
        if isinstance(result, PendingResult):
            raise TypeError("a finished step is still pending")
        # Without a result, another rank answers.
        if result is not None:
            self._write(result)

    def _finish_all(self) -> None:
        while self._launched:
            self._finish_first()

    def _write(self, frame: Frame) -> None:
        data, file = encode(frame, is_inline=self._is_remote)
        with self._writing:
            try:
                if file is not None:
                    socket.send_fds(self._control, [data], [file])
                else:
                    self._control.sendall(data)
            # The engine has ended, and a guard will end this process.
            except OSError:
                pass
            finally:
                if file is not None:
                    os.close(file)


def _import_torch() -> None:
    set_torch_environment()
    with collections_paused(is_frozen=True):
        import torch  # noqa: F401


class _ForwardedLog(logging.Handler):
    """Send log records to the engine, which logs them under the worker's name."""

    def __init__(self, write: Any) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._write(LogRecord(record.name, record.levelno, self.format(record)))
        except Exception:
            self.handleError(record)


if __name__ == "__main__":
    main()
