"""Run a device in this process, on one thread that owns the runner and torch for the device's whole life.

Torch's intra-op settings, inference mode and current stream are thread-local, and a thread pool may run each
call on a different thread, so the device has its own thread, on which torch is first imported. A launched step
may finish later, on a GPU or on other threads; meanwhile the thread launches the next submitted work.
"""

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar, cast

import anyio
import anyio.lowlevel

from trouper.actors.executor.device import (
    DeviceEvent,
    DeviceInfo,
    PendingResult,
    StepResult,
)
from trouper.actors.executor.workers.model_host import (
    GrammarThread,
    ModelHost,
    log_phase,
)
from trouper.actors.messages.controls import DeviceAction
from trouper.actors.messages.requests import Grammar, GrammarReady, PrepareGrammar
from trouper.actors.messages.steps import PoolPlan, StepPlan, TierAnswer, TierOrder
from trouper.actors.runtime.event_loop import EventLoop, Future, WakeupPipe
from trouper.config.engine_config import EngineConfig

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
DEVICE_THREAD = "trouper-device"
# Wakes the device thread when a launched step is ready.
LOOK = "look"
# Seconds between two polls of a launched step and of the queue.
POLL_S = 5e-5


class DeviceTask(Generic[Result]):
    """Hold work for the device thread, and later its result.

    The event loop creates a task; the device thread runs it. Work returns its result, or a `PendingResult` that
    `finish` completes later. When the task is done, the device thread calls `announce`, which wakes the event loop.
    """

    def __init__(
        self, work: Callable[[], Result | PendingResult[Result]], announce: Callable[[], None]
    ) -> None:
        self._work = work
        self._announce = announce
        # The device thread sets this last, so the event loop never reads it before the result or the error is set.
        self.is_done = False
        self._pending: PendingResult[Result] | None = None
        self._result: Result | None = None
        self._error: BaseException | None = None

    @property
    def is_launched(self) -> bool:
        return self._pending is not None

    @property
    def calls_back(self) -> bool:
        """Return whether a launched task calls back when it is ready. If not, the device must poll `is_ready`."""
        return self._pending is not None and self._pending.when_ready is not None

    def when_ready(self, act: Callable[[], None]) -> None:
        """Call `act` when this launched task is ready. Does nothing if the task must be polled."""
        if self._pending is not None and self._pending.when_ready is not None:
            self._pending.when_ready(act)

    def is_ready(self) -> bool:
        """Return whether `finish` of a launched task would return or raise immediately."""
        assert self._pending is not None
        try:
            return self._pending.is_ready()
        except Exception:
            # `finish` raises the same error and delivers it to the waiter.
            return True

    def run(self) -> None:
        """Do the work, or launch it. `finish` later completes launched work, such as a step on a GPU."""
        self._settle(self._work)

    def finish(self) -> None:
        """Wait for the result of a launched task, and announce it to the event loop. Called only on the device thread."""
        assert self._pending is not None
        pending, self._pending = self._pending, None
        self._settle(pending.finish)

    def _settle(self, work: Callable[[], Result | PendingResult[Result]]) -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: ASYNC103  # a thread: it belongs to the waiter
            self._error = error
        else:
            if isinstance(result, PendingResult):
                self._pending = result
                return
            self._result = result
        self.is_done = True
        self._announce()

    def result(self) -> Result:
        """Return the result of a finished task.

        Raises:
            BaseException: the error that the work raised.
        """
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # set, since there is no error


class ThreadedDevice:
    """Implement `Device` on the CPU or the GPU of this process.

    All work runs in the order of its submission, and completes even if its waiter was cancelled. An exception
    in a step also fails the later steps of its epoch; the scheduler must then schedule their sequences again.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        # Bounded by the executor's credits: `max_steps_in_flight` steps, one action and the end marker (None), plus
        # one `LOOK` for each launched step that calls back.
        self._tasks: queue.SimpleQueue[DeviceTask[Any] | str | None] = queue.SimpleQueue()
        # Submitted plans, until `receive` returns their results.
        self._steps: deque[DeviceTask[StepResult]] = deque()
        # At most one grammar, because one is compiled at a time, and one answer for each tier order in flight.
        self._ready: deque[GrammarReady | TierAnswer] = deque()
        self._grammars = GrammarThread(self._note_ready)
        self._held: dict[bytes, Grammar] = {}  # by key
        # Wakes the event loop when a step is done or `_ready` has grown.
        self._news = WakeupPipe()
        self._loop: EventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closing: Future[None] | None = None
        # The fields below belong to the device thread.
        self._host = ModelHost(config)
        self._launched: deque[DeviceTask[Any]] = deque()

    def __repr__(self) -> str:
        alive = self._thread is not None and self._thread.is_alive()
        state = f"{len(self._steps)} steps out" if alive else "not running"
        return f"<ThreadedDevice {self._config.model.name!r} {state}>"

    @property
    def process_ids(self) -> tuple[int, ...]:
        return ()

    async def load(self) -> DeviceInfo:
        """Start the thread, import torch and load the model.

        Raises:
            TrouperValidationError: the checkpoint, its traits or the KV memory do not fit the config.
            UnsupportedFeatureError: the architecture is not supported.
        """
        if self._thread is not None:
            raise RuntimeError("the device was already loaded")
        self._loop = EventLoop()
        self._thread = threading.Thread(target=self._serve, name=DEVICE_THREAD, daemon=True)
        self._thread.start()
        return await self._post(self._load).wait()

    def submit(self, plan: StepPlan | PoolPlan) -> None:
        self._check_open()
        task = DeviceTask(lambda: self._execute(plan), self._news.notify)
        self._tasks.put(task)
        self._steps.append(task)

    def prepare(self, order: PrepareGrammar) -> None:
        for key in order.released:
            if (grammar := self._held.pop(key, None)) is not None:
                # The release runs after the plans that may still use the grammar.
                self._post(partial(grammar.release, key))
        self._held[order.grammar.key] = order.grammar
        self._grammars.do(order.grammar.prepare, order.grammar.key)

    def order_tier(self, order: TierOrder) -> None:
        self._post(lambda: self._order_tier(order))

    def _note_ready(self, ready: GrammarReady | TierAnswer) -> None:
        """Forward an answer from another thread to the event loop."""
        self._ready.append(ready)
        self._news.notify()

    def _execute(self, plan: StepPlan | PoolPlan) -> StepResult | PendingResult[StepResult]:
        result = self._host.execute(plan)
        assert result is not None, "only a worker of several workers may not answer"
        return cast("StepResult | PendingResult[StepResult]", result)

    async def receive(self) -> DeviceEvent:
        if self._has_news:
            # Without this checkpoint, a call could neither be cancelled nor let other tasks run.
            await anyio.lowlevel.checkpoint()
        while not self._has_news:
            await self._news.wait()
        if self._ready:
            return self._ready.popleft()
        result = self._steps[0].result()
        self._steps.popleft()
        return result

    @property
    def _has_news(self) -> bool:
        return bool(self._ready or (self._steps and self._steps[0].is_done))

    async def call(self, action: DeviceAction) -> object:
        return await self._post(lambda: self._call(action)).wait()

    async def aclose(self) -> None:
        """Finish the work in progress, release memory and end the thread.

        Idempotent.  It completes even if its caller is cancelled, because a thread cannot be abandoned.
        """
        if self._thread is None:
            return
        if self._closing is None:
            self._closing = self._post(self._close)
            self._tasks.put(None)
        with anyio.CancelScope(shield=True):  # bounded: by the load or the steps under way
            await self._closing.wait()
        self._thread.join()
        self._grammars.close()
        self._news.close()
        for key, grammar in self._held.items():
            grammar.release(key)
        self._held.clear()

    def _post(self, work: Callable[[], Result]) -> Future[Result]:
        """Queue work other than a step. Its result or error returns to the event loop in the future."""
        loop = self._check_open()
        future = Future[Result]()

        def deliver() -> None:
            try:
                future.set(task.result())
            except BaseException as error:  # noqa: ASYNC103  # it belongs to the waiter
                future.fail(error)

        def announce() -> None:
            # `call_soon` fails if the loop has ended, but then no task waits for the result.
            with contextlib.suppress(RuntimeError):
                loop.call_soon(deliver)

        task = DeviceTask(work, announce)
        self._tasks.put(task)
        return future

    def _check_open(self) -> EventLoop:
        if self._loop is None or self._closing is not None:
            raise RuntimeError("the device is closed or was never loaded")
        return self._loop

    # The methods below run on the device thread.

    def _serve(self) -> None:
        while True:
            while self._launched and self._launched[0].is_ready():
                self._launched.popleft().finish()
            if self._launched and not self._launched[0].calls_back and self._tasks.empty():
                # Sleep instead of calling `get` with a timeout, which before CPython 3.13 may wait forever
                # if the thread is preempted while it sets its timer.
                time.sleep(POLL_S)
                continue
            task = self._tasks.get()
            if task is None:
                return
            if isinstance(task, str):
                continue
            task.run()
            if task.is_launched:
                self._launched.append(task)
                task.when_ready(partial(self._tasks.put, LOOK))

    def _finish_launched(self) -> None:
        while self._launched:
            self._launched.popleft().finish()

    def _load(self) -> DeviceInfo:
        info = self._host.load(log_phase)
        self._host.open_tier(self._note_ready)
        return info

    def _order_tier(self, order: TierOrder) -> None:
        self._finish_launched()
        self._host.order_tier(order)

    def _call(self, action: DeviceAction) -> None:
        self._finish_launched()
        self._host.call(action)

    def _close(self) -> None:
        self._finish_launched()
        self._host.close()
