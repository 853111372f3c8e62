"""A device in a worker process that may die: it is started again, and the engine goes on.

`receive` is the supervisor: the one task that calls it reads the worker's frames, watches the deadline of the eldest step, and
after a loss starts the successor. A loss is told once, by `DeviceLost`, when the worker is reaped and all it had
answered has been handed out; `DeviceBack` follows when the successor is loaded.
"""

import logging
import math
import os
from collections import deque
from collections.abc import Callable
from typing import cast

import anyio
import msgspec

from trouper.actors.executor.device import DeviceEvent, DeviceInfo, StepResult
from trouper.actors.executor.devices.launch_local import Launcher, Peer, launch
from trouper.actors.executor.devices.model_host import check_call
from trouper.actors.executor.devices.supervision import (
    Death,
    RestartBudget,
    StepDeadlines,
    WorkerEvent,
    WorkerState,
    next_state,
)
from trouper.actors.executor.devices.wire import (
    Broken,
    Call,
    Close,
    ErrorText,
    Frame,
    FrameReader,
    Load,
    Loaded,
    LogRecord,
    Progress,
    Returned,
    WireError,
    as_exception,
    encode,
)
from trouper.actors.messages.plans import PoolPlan, StepPlan
from trouper.actors.messages.results import (
    DeviceBack,
    DeviceLost,
    PoolDone,
    StepDone,
    StepFailed,
)
from trouper.actors.runtime.future import Future
from trouper.config.resolve import EngineConfig
from trouper.errors import DeviceStartError, RetryableRequestError

logger = logging.getLogger(__name__)
CLOSE_S = 10.0  # for a worker to give its memory back, before it is killed
ALL_MEMORY = frozenset({"weights", "kv_cache"})


class SubmittedPlan(msgspec.Struct, frozen=True):
    """A plan that the worker has not answered."""

    step: int
    num_tokens: int
    submitted_s: float


class ProcessDevice:
    """`Device` in a process of its own.

    Args:
        config: `max_worker_restarts`, `worker_restart_window_s` and `step_timeout_s` bound losses.
        launcher: starts a worker; tests have their own.
    """

    def __init__(self, config: EngineConfig, launcher: Launcher = launch) -> None:
        self._config = config
        self._launcher = launcher
        self._state = WorkerState.STARTING
        self._peer: Peer | None = None
        self._frames = FrameReader()
        self._error: ErrorText | None = None  # of a `Broken` frame
        self._waiting = (
            anyio.CancelScope()
        )  # around the wait for a frame; its deadline is the step's
        self._info: DeviceInfo | None = None
        self._plans: deque[SubmittedPlan] = deque()  # at most `max_steps_in_flight`
        self._last_answer_s = -math.inf
        self._last_epoch = self._lost_epoch = -1
        self._calls: dict[
            int, tuple[Call, Future[object]]
        ] = {}  # one from the lifecycle, one probe
        self._next_call = 0
        self._sleep_level, self._woken = 0, ALL_MEMORY
        self._profile: tuple[str, str] | None = None
        self._budget = RestartBudget(config.max_worker_restarts, config.worker_restart_window_s)
        self._deadlines = StepDeadlines(config.step_timeout_s)
        self._lost_s = 0.0
        self._restart_in_s = 0.0

    def __repr__(self) -> str:
        return f"<ProcessDevice {self._state.value}, {len(self._plans)} steps out, {self._peer!r}>"

    async def load(self) -> DeviceInfo:
        """Start the worker and have it load the model; a first load that fails is not repeated.

        Raises:
            TrouperValidationError: checkpoint, traits or KV memory do not fit the config.
            UnsupportedFeatureError: the architecture is not known.
            DeviceStartError: the process could not be started, or died.
        """
        loaded = await self._start()
        if isinstance(loaded, Death):
            if self._error is not None:
                raise as_exception(self._error)
            raise DeviceStartError(loaded.describe())
        self._info = loaded
        self._state = next_state(self._state, WorkerEvent.LOADED)
        return loaded

    def submit(self, plan: StepPlan | PoolPlan) -> None:
        """Send a plan.

        One that was made before its maker heard of a loss is void, as those are that the worker had.
        """
        is_void = self._state is not WorkerState.UP or plan.epoch <= self._lost_epoch
        self._last_epoch = max(self._last_epoch, plan.epoch)
        if is_void:
            self._lost_epoch = self._last_epoch
            return
        self._plans.append(SubmittedPlan(plan.step, _num_tokens(plan), anyio.current_time()))
        self._send(plan)
        self._waiting.deadline = self._deadline_s()

    async def receive(self) -> DeviceEvent:
        while True:
            if self._state is WorkerState.LOST:
                if await self._restart():
                    return DeviceBack(anyio.current_time() - self._lost_s)
                continue
            frame = await self._next_frame()
            if isinstance(frame, StepDone | PoolDone | StepFailed):
                if self._plans and self._plans[0].step == frame.step:
                    return self._note_result(frame)
                frame = await self._reap(broken=f"it answered step {frame.step}")
            if isinstance(frame, Death):
                return self._lose(frame)
            self._note(frame)

    async def call(self, method: str, *args: object) -> object:
        check_call(method)
        if method == "explain":
            self._budget.explain(cast("int", args[0]))
            return None
        if self._state is not WorkerState.UP:
            raise RetryableRequestError("device_restarting: the device is being started again")
        call = _make_call(self._next_call, method, args)
        self._next_call += 1
        future: Future[object] = Future()
        self._calls[call.number] = call, future
        self._send(call)
        try:
            return await future.wait()
        finally:
            self._calls.pop(call.number, None)

    async def aclose(self) -> None:
        """Have the worker give everything back, and end it.  Idempotent."""
        if self._state is WorkerState.CLOSED:
            return
        self._state = next_state(self._state, WorkerEvent.CLOSE)
        if self._peer is not None:
            self._send(Close())
            await self._peer.end(CLOSE_S)
        self._frames.close()

    # Starting

    async def _start(self) -> DeviceInfo | Death:
        """Start a worker and load it into the state that is in force.

        Raises:
            DeviceStartError: the system has refused.
        """
        config = self._config
        if self._info is not None:  # the successor must offer the same blocks
            config = msgspec.structs.replace(config, num_blocks=self._info.num_blocks - 1)
        self._frames.close()
        self._frames = FrameReader()
        self._peer = self._launcher(0)
        woken = () if self._sleep_level == 0 else tuple(sorted(self._woken))
        self._send(Load(config, 0, self._sleep_level, woken, self._profile))
        while True:
            frame = await self._next_frame()
            if isinstance(frame, Loaded):
                return frame.info
            if isinstance(frame, Death):
                return frame
            self._note(frame)

    async def _restart(self) -> bool:
        """Start the successor.  Returns whether it is up; if not, the next try comes later.

        Raises:
            DeviceStartError: the budget is spent.
        """
        await anyio.sleep(self._restart_in_s)
        self._state = next_state(self._state, WorkerEvent.RESTART)
        try:
            loaded = await self._start()
        except DeviceStartError as error:
            loaded = Death(0, broken=str(error))
        if isinstance(loaded, DeviceInfo) and loaded != self._info:
            end = await self._reap(broken=f"the successor offers {loaded}, not {self._info}")
            loaded = end
        if isinstance(loaded, Death):
            self._spend(loaded)
            return False
        self._state = next_state(self._state, WorkerEvent.LOADED)
        return True

    # Frames

    def _send(self, frame: Frame) -> None:
        if self._peer is None:
            return
        data, file = encode(frame)
        try:
            self._peer.send(data, file)
        except OSError:
            pass  # the worker is gone: `receive` finds its end
        finally:
            if file is not None:
                os.close(file)

    async def _next_frame(self) -> Frame | Death:
        """Wait for a whole frame, or for the worker's death, which has then been reaped."""
        assert self._peer is not None
        self._error = None
        while True:
            try:
                frame = self._frames.take()
            except WireError as error:
                return await self._reap(broken=str(error))
            if isinstance(frame, Broken):
                self._error = frame.error
                return await self._reap(broken=f"{frame.error.kind}: {frame.error.message}")
            if frame is not None:
                return frame
            with anyio.CancelScope(deadline=self._deadline_s()) as self._waiting:
                data, files = await self._peer.receive()
                if not data:
                    return await self._reap()
                self._frames.feed(data, files)
            if self._waiting.cancelled_caught:
                return await self._reap(hung_s=anyio.current_time() - self._step_begin_s())

    def _deadline_s(self) -> float:
        """When the eldest plan counts as hung; never, without one."""
        if not self._plans or self._state is not WorkerState.UP:
            return math.inf
        return self._step_begin_s() + self._deadlines.deadline_s(self._plans[0].num_tokens)

    def _step_begin_s(self) -> float:
        """When the worker can have begun the eldest plan: once it was sent, and the one before was answered."""
        return max(self._plans[0].submitted_s, self._last_answer_s)

    async def _reap(self, broken: str | None = None, hung_s: float | None = None) -> Death:
        assert self._peer is not None
        is_alive = hung_s is not None or broken is not None
        end = await self._peer.end(0.0 if is_alive else 1.0)
        step = self._plans[0].step if self._plans else None
        return Death(
            rank=0, step=step, exit_status=end.status, hung_s=hung_s,
            was_out_of_memory=end.was_out_of_memory, broken=broken, stderr=end.stderr,
        )  # fmt: skip

    # What frames and deaths mean

    def _note_result(self, result: StepResult) -> StepResult:
        plan = self._plans.popleft()
        now = anyio.current_time()
        self._deadlines.note(plan.num_tokens, now - max(plan.submitted_s, self._last_answer_s))
        self._last_answer_s = now
        self._budget.note_progress()
        return result

    def _note(self, frame: Frame) -> None:
        """Take a frame that is no result."""
        match frame:
            case Returned(number, error):
                call, future = self._calls.pop(number, (None, None))
                if call is None or future is None:
                    return  # its asker has left
                if error is not None:
                    future.fail(as_exception(error))
                else:
                    self._follow(call)
                    future.set(None)
            case LogRecord(name, level, message):
                logging.getLogger(f"trouper.worker.0.{name}").log(level, "%s", message)
            case Progress(phase):
                logger.info("worker 0: %s", phase)
            case _:
                logger.warning("worker 0 sent a %s", type(frame).__name__)

    def _follow(self, call: Call) -> None:
        """Remember what a successor has to be brought into."""
        match call.method:
            case "sleep":
                self._sleep_level, self._woken = call.level, frozenset()
            case "wake":
                self._woken |= frozenset(call.tags)
                if self._woken >= ALL_MEMORY:
                    self._sleep_level = 0
            case "start_profile":
                self._profile = call.folder, call.prefix
            case "stop_profile":
                self._profile = None
            case _:
                pass

    def _lose(self, death: Death) -> DeviceLost:
        """Count a loss; calls under way fail for their askers.

        Raises:
            DeviceStartError: the budget is spent.
        """
        self._lost_s = anyio.current_time()
        self._lost_epoch = self._last_epoch
        self._plans.clear()
        for _, future in self._calls.values():
            future.fail(RetryableRequestError(f"device_restarting: {death.describe()}"))
        self._calls.clear()
        self._spend(death)
        return DeviceLost(death.describe(), death.step, death.is_from_outside)

    def _spend(self, death: Death) -> None:
        self._state = next_state(self._state, WorkerEvent.LOSS)
        logger.error("%s", death.describe())
        wait_s = self._budget.note_loss(anyio.current_time())
        if wait_s is None:
            self._state = next_state(self._state, WorkerEvent.BUDGET_SPENT)
            allowed = self._config.max_worker_restarts
            raise DeviceStartError(
                f"{death.describe()}; max_worker_restarts={allowed} in "
                f"{self._config.worker_restart_window_s:g} s are spent"
            )
        self._restart_in_s = wait_s


def _num_tokens(plan: StepPlan | PoolPlan) -> int:
    if isinstance(plan, StepPlan):
        return sum(plan.num_scheduled_tokens)
    return sum(len(entry.token_ids) for entry in plan.entries)


def _make_call(number: int, method: str, args: tuple[object, ...]) -> Call:
    names: dict[str, Callable[..., Call]] = {
        "sleep": lambda level: Call(number, "sleep", level=level),
        "wake": lambda tags: Call(number, "wake", tags=tuple(sorted(tags))),
        "start_profile": lambda folder, prefix: Call(
            number, "start_profile", folder=folder, prefix=prefix
        ),
        "stop_profile": lambda: Call(number, "stop_profile"),
        "probe": lambda: Call(number, "probe"),
    }
    return names[method](*args)
