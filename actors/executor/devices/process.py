"""Run a device in worker processes, and restart workers that die or hang, so that the engine survives their loss.

A worker holds one stage of the model, one rank of a stage, or the whole model. Every worker receives every
plan and call. Only the first rank of the last stage answers plans. All workers of a device are replaced together.

The task that calls `receive` is the supervisor: it reads the workers' frames, enforces the deadline of the
oldest step and restarts the workers after a loss. It returns `DeviceLost` once for each loss, after the
workers are reaped and all their answers were returned; `DeviceBack` follows when the new workers are loaded.
"""

import logging
import math
from collections import deque
from typing import TypeVar

import anyio
import msgspec

from trouper.actors.executor.device import DeviceEvent, DeviceInfo, StepResult
from trouper.actors.executor.devices.outstanding import (
    OpenCalls,
    RestoredState,
    SubmittedPlan,
    TierParts,
)
from trouper.actors.executor.devices.supervision import (
    Death,
    RestartBudget,
    StepDeadlines,
    WorkerEvent,
    WorkerKilledError,
    WorkerState,
    call_deadline_s,
    is_memory_sound,
    next_state,
)
from trouper.actors.executor.devices.worker_link import (
    KeptFiles,
    WorkerLink,
    drain,
    receive_from_any,
    send_adapter,
    send_to_all,
)
from trouper.actors.executor.worker_links import LinkLostError
from trouper.actors.executor.workers.launching import (
    Launcher,
    LocalLauncher,
    WorkersLauncher,
    launch,
)
from trouper.actors.executor.workers.model_files import FileSample
from trouper.actors.executor.workers.model_host import log_phase
from trouper.actors.executor.workers.wire import (
    Broken,
    Call,
    Close,
    ErrorText,
    Frame,
    Loaded,
    LogRecord,
    Progress,
    Returned,
    WireError,
    as_exception,
)
from trouper.actors.messages.controls import DeviceAction, ExplainLosses, LoadAdapter
from trouper.actors.messages.requests import Grammar, GrammarReady, PrepareGrammar, Vocabulary
from trouper.actors.messages.steps import (
    DeviceBack,
    DeviceLost,
    PoolDone,
    PoolPlan,
    StepDone,
    StepFailed,
    StepPlan,
    TierAnswer,
    TierOrder,
)
from trouper.config.engine_config import EngineConfig
from trouper.errors import DeviceStartError, RetryableRequestError, invalid

logger = logging.getLogger(__name__)
FrameKind = TypeVar("FrameKind", Loaded, Returned)
# The number of all calls that restore a worker's state during its start, before `OpenCalls` numbers any.
NO_CALL = -1
# Seconds for workers to release their memory before they are killed.
CLOSE_S = 4.0


class ProcessDevice:
    """Implement `Device` by worker processes, one for each rank of each stage.

    Args:
        config: `max_worker_restarts` and `worker_restart_window_s` limit losses, `step_timeout_s` limits steps.
        launcher: starts one worker on this machine; tests substitute their own.
        launch_workers: replaces `launcher` and starts all workers, if some run on other machines.
        replica: index among the engine's replicas; worker numbers continue across replicas.
        files: a sample of the model's files, which each worker compares with its own; empty to skip the
            comparison.
    """

    def __init__(
        self,
        config: EngineConfig,
        launcher: Launcher = launch,
        *,
        replica: int = 0,
        launch_workers: WorkersLauncher | None = None,
        files: tuple[FileSample, ...] = (),
    ) -> None:
        self._first_number = first = replica * config.workers_per_replica
        # Select the processors of this replica's workers.
        if config.cpu_bind is not None:
            own = config.cpu_bind[first : first + config.workers_per_replica]
            config = msgspec.structs.replace(config, cpu_bind=own)
        self._config = config
        self._launch_workers = launch_workers or LocalLauncher(config, replica, launcher)
        self._state = WorkerState.STARTING
        self._workers: list[WorkerLink] = []
        self._error: ErrorText | None = None
        self._waiting = (
            anyio.CancelScope()
        )  # around the wait for a frame, till a step or call is late
        self._info: DeviceInfo | None = None
        self._plans: deque[SubmittedPlan] = deque()  # at most `max_steps_in_flight`
        self._last_answer_s = -math.inf
        # The epoch of plans that the scheduler makes once it has received all events so far, and the last epoch lost with workers.
        self._last_epoch, self._lost_epoch = 0, -1
        # The scheduler counts losses as well, and puts its count into orders to the tier, so that outdated orders can be dropped.
        self._num_losses = 0
        self._calls = OpenCalls()
        self._restored = RestoredState(files)
        self._kept = KeptFiles(config)
        # The vocabulary, once it was sent to the workers. Restarted workers receive it again.
        self._vocabulary: Vocabulary | None = None
        self._tier = TierParts(config.workers_per_replica)
        # Answers to the open grammar order, one for each worker.
        self._ready: list[GrammarReady] = []
        self._budget = RestartBudget(config.max_worker_restarts, config.worker_restart_window_s)
        self._deadlines = StepDeadlines(config.step_timeout_s)
        self._lost_s = self._load_s = 0.0
        self._restart_in_s = 0.0
        # The reason for which the device is not restarted again.
        self._failure = ""

    def __repr__(self) -> str:
        return f"<ProcessDevice {self._state.value}, {len(self._plans)} steps out, {self._workers}>"

    @property
    def process_ids(self) -> tuple[int, ...]:
        return tuple(
            worker.pid for worker in self._workers if worker.pid and not worker.has_hung_up
        )

    async def load(self) -> DeviceInfo:
        """Start the workers and load the model. A failed first load is not retried.

        Raises:
            TrouperValidationError: the checkpoint, its traits or the KV memory do not fit the config.
            UnsupportedFeatureError: the architecture is not supported.
            DeviceStartError: a process could not be started, or died.
        """
        loaded = await self._start()
        if isinstance(loaded, Death):
            if self._error is not None:
                raise as_exception(self._error)
            kind = WorkerKilledError if loaded.is_from_outside else DeviceStartError
            raise kind(loaded.describe())
        self._info = loaded
        self._state = next_state(self._state, WorkerEvent.LOADED)
        return loaded

    def submit(self, plan: StepPlan | PoolPlan) -> None:
        """Send a plan to all workers.

        A plan made before the scheduler received a loss is dropped. The policy will schedule its sequences again.
        """
        is_void = self._state is not WorkerState.UP or plan.epoch <= self._lost_epoch
        self._last_epoch = max(self._last_epoch, plan.epoch)
        if is_void:
            return
        self._plans.append(SubmittedPlan.of(plan, anyio.current_time()))
        if isinstance(plan, StepPlan) and self._vocabulary is None:
            for new in plan.new_sequences:
                self._send_vocabulary(new.grammar)
        send_to_all(self._workers, plan)
        self._waiting.deadline = self._deadline_s()

    def prepare(self, order: PrepareGrammar) -> None:
        """Ask all workers to compile a grammar; `receive` returns `GrammarReady` after the last one.

        If the workers are lost, the order is dropped, because the scheduler repeats it after a loss.
        """
        if self._state is WorkerState.UP:
            self._send_vocabulary(order.grammar)
            send_to_all(self._workers, order)

    def order_tier(self, order: TierOrder) -> None:
        """Send an order to the tier of each worker.

        An order made before the scheduler received a loss is dropped; the scheduler expects no answer to it.
        """
        if self._state is WorkerState.UP and order.epoch == self._num_losses:
            send_to_all(self._workers, order)

    def _send_vocabulary(self, grammar: Grammar | None) -> None:
        """Send the vocabulary before the first grammar."""
        if grammar is not None and self._vocabulary is None:
            assert grammar.vocabulary is not None, "a grammar for another process has a vocabulary"
            self._vocabulary = grammar.vocabulary
            send_to_all(self._workers, grammar.vocabulary)

    async def receive(self) -> DeviceEvent:
        while True:
            # Workers may report tier files while they load, but answers to the scheduler begin when all of them are up.
            if self._state is WorkerState.UP and (answer := self._tier.take()) is not None:
                return answer
            if self._state is WorkerState.FAILED:
                await self._launch_workers.release()
                raise DeviceStartError(self._failure)
            if self._state is WorkerState.LOST:
                if await self._restart():
                    pause_s = anyio.current_time() - self._lost_s
                    return DeviceBack(pause_s, self._kept.are_sound)
                continue
            found = await self._next_frame()
            if isinstance(found, Death):
                return self._lose(found)
            if (event := await self._event_of(*found)) is not None:
                return event

    async def _event_of(self, rank: int, frame: Frame) -> DeviceEvent | None:
        """Convert a worker's frame to an event. Returns None if it does not concern the scheduler."""
        if isinstance(frame, GrammarReady):
            return self._note_ready(frame)
        if not isinstance(frame, StepDone | PoolDone | StepFailed):
            self._note(rank, frame)
            if (differ := self._calls.differ) is not None:
                return self._lose(await self._reap(rank, broken=differ))
            return None
        if self._plans and self._plans[0].step == frame.step:
            return self._note_result(frame)
        expected = f"step {self._plans[0].step} is next" if self._plans else "no step is in flight"
        return self._lose(
            await self._reap(rank, broken=f"it answered step {frame.step}, but {expected}")
        )

    async def call(self, action: DeviceAction) -> object:
        if isinstance(action, ExplainLosses):
            return self._budget.explain(action.num_losses)
        if self._state is not WorkerState.UP:
            raise RetryableRequestError(
                "the device is restarting; retry in a few seconds", "device_restarting"
            )
        open_call = self._calls.open(action, anyio.current_time())
        self._waiting.deadline = self._deadline_s()
        try:
            await self._send_call(open_call.call)
            return await open_call.future.wait()
        finally:
            self._calls.close(open_call)
            self._waiting.deadline = self._deadline_s()

    async def _send_call(self, call: Call) -> None:
        """Send a call after the plans already sent.

        Raises:
            RetryableRequestError: the workers were lost and replaced while a thread wrote an adapter.
        """
        if not isinstance(call.action, LoadAdapter):
            send_to_all(self._workers, call)
            return
        workers = self._workers
        # Sending to workers that died meanwhile has no effect.
        await send_adapter(workers, call)
        if workers is not self._workers:
            raise RetryableRequestError(
                "the device restarted during the call; retry it", "device_restarting"
            )

    async def aclose(self) -> None:
        """Ask the workers to exit, and kill those that remain after `CLOSE_S` seconds, or at once while they are loading. Idempotent."""
        if self._state is WorkerState.CLOSED:
            return
        grace_s = CLOSE_S if self._state is WorkerState.UP else 0.0
        self._state = next_state(self._state, WorkerEvent.CLOSE)
        send_to_all(self._workers, Close())
        over_s = anyio.current_time() + grace_s
        for worker in self._workers:
            await worker.end(max(0.0, over_s - anyio.current_time()))
        self._kept.close()

    # Starting

    async def _start(self) -> DeviceInfo | Death:
        """Start the workers, load them, and restore the state set by earlier calls. Returns how a worker died, if one did.

        Raises:
            DeviceStartError: the operating system or a machine refused; no worker remains.
        """
        config = self._config
        # Restarted workers must offer the same number of blocks.
        if self._info is not None:
            num_groups = len(self._info.kv_layout.windows)
            num_blocks = (self._info.num_blocks - 1) // num_groups
            config = msgspec.structs.replace(config, num_blocks=num_blocks)
        # This may wait for an absent machine.
        peers = await self._launch_workers()
        began_s = anyio.current_time()
        self._workers = [WorkerLink(rank, peer) for rank, peer in enumerate(peers)]
        self._ready.clear()
        self._tier = TierParts(len(peers))
        self._kept.send(self._workers)
        for worker in self._workers:
            send_to_all([worker], self._restored.load(config, worker.rank))
        loaded = await self._frames_of_all(Loaded)
        if isinstance(loaded, Death):
            return loaded
        if not self._kept.note_loaded(loaded):
            return await self._reap(
                0, broken="the layout of its KV memory differs from that of the previous worker"
            )
        if self._vocabulary is not None:
            send_to_all(self._workers, self._vocabulary)
        for slot, files in self._restored.adapters.items():
            # Send adapters one by one, so that they fit into the sockets' buffers.
            await send_adapter(self._workers, Call(NO_CALL, LoadAdapter(slot, files)))
            answers = await self._frames_of_all(Returned)
            if isinstance(answers, Death):
                return answers
            error = next((answer.error for answer in answers if answer.error is not None), None)
            if error is not None:
                words = f"it cannot load an adapter again: {error.kind}: {error.message}"
                return await self._reap(0, broken=words)
        infos, self._load_s = [frame.info for frame in loaded], anyio.current_time() - began_s
        # The ranks of a stage, and all stages, hold a part of each block.
        size = sum(info.kv_layout.block_bytes for info in infos)
        state_size = sum(info.state_bytes for info in infos)
        if config.tier is not None and max(size, state_size) > config.tier.max_bytes:
            rule = f"is too small for one block of {size} bytes or one state of {state_size} bytes"
            raise invalid("kv_tier_size", rule, config.tier.max_bytes)
        return msgspec.structs.replace(
            infos[0],
            layout=msgspec.structs.replace(infos[0].kv_layout, block_bytes=size),
            # Every stage holds a part of each block.
            num_blocks=min(info.num_blocks for info in infos),
            num_weight_bytes=sum(info.num_weight_bytes for info in infos),
            # Every stage has the states of its own layers, and all have the same number of rows.
            state_bytes=state_size,
        )

    async def _frames_of_all(self, kind: type[FrameKind]) -> list[FrameKind] | Death:
        """Wait until each starting worker has sent a frame of this kind.  Returns them in the order of ranks."""
        frames: dict[int, FrameKind] = {}
        while len(frames) < len(self._workers):
            found = await self._next_frame()
            if isinstance(found, Death):
                return found
            rank, frame = found
            if isinstance(frame, kind):
                frames[rank] = frame
            else:
                self._note(rank, frame)
        return [frames[rank] for rank in sorted(frames)]

    async def _restart(self) -> bool:
        """Start new workers. Returns False if that fails; the restart budget then decides about another attempt."""
        await anyio.sleep(self._restart_in_s)
        self._state = next_state(self._state, WorkerEvent.RESTART)
        try:
            loaded = await self._start()
        except DeviceStartError as error:
            loaded = Death(self._first_number, broken=str(error))
        if isinstance(loaded, DeviceInfo) and loaded != self._info:
            words = (
                f"the restarted worker reports {loaded}, but the previous one reported {self._info}"
            )
            loaded = await self._reap(0, broken=words)
        if isinstance(loaded, Death):
            self._spend(loaded)
            return False
        self._state = next_state(self._state, WorkerEvent.LOADED)
        return True

    # Frames

    async def _next_frame(self) -> tuple[int, Frame] | Death:
        """Wait for a complete frame and its sender's rank, or for the death of a worker, after which all workers
        are reaped.

        Frames received before a death are returned first.
        """
        self._error = None
        is_late = False
        while True:
            for worker in self._workers:
                try:
                    frame = worker.take()
                except WireError as error:
                    return await self._reap(worker.rank, broken=str(error))
                if isinstance(frame, Broken):
                    self._error = error = self._located(worker, frame.error)
                    words = f"{error.kind}: {error.message}"
                    is_lost = error.kind == LinkLostError.__name__
                    return await self._reap(worker.rank, broken=words, was_machine_lost=is_lost)
                if frame is not None:
                    return worker.rank, frame
            for worker in self._workers:
                if worker.has_hung_up:
                    return await self._reap(worker.rank)
            if is_late:
                hung_s = anyio.current_time() - self._begin_s()
                return await self._reap(self._workers[-1].rank, hung_s=hung_s)
            with anyio.CancelScope(deadline=self._deadline_s()) as self._waiting:
                await receive_from_any(self._workers)
            is_late = self._waiting.cancelled_caught
            if any(worker.has_hung_up for worker in self._workers):
                await drain(self._workers)

    def _located(self, worker: WorkerLink, error: ErrorText) -> ErrorText:
        """Prefix an error with the worker's name if it runs on another machine, to which paths in the message then refer."""
        if not worker.where:
            return error
        name = f"worker {self._first_number + worker.rank} {worker.where}"
        return msgspec.structs.replace(error, message=f"{name}: {error.message}")

    def _deadline_s(self) -> float:
        """Return the deadline of the oldest plan, or of the oldest call if there is no plan; infinite without either.

        In seconds of the event loop's clock. The workers count as hung at this time.
        """
        if self._state is not WorkerState.UP:
            return math.inf
        if self._plans:
            return self._begin_s() + self._deadlines.deadline_s(self._plans[0].num_tokens)
        return self._begin_s() + call_deadline_s(self._load_s)

    def _begin_s(self) -> float:
        """Return the earliest time at which the workers can have begun the oldest plan or call.

        They begin when it was sent or after their previous answer, whichever is later.
        """
        sent_s = self._plans[0].submitted_s if self._plans else self._calls.since_s
        return max(sent_s, self._last_answer_s)

    async def _reap(
        self,
        rank: int,
        *,
        broken: str | None = None,
        hung_s: float | None = None,
        was_machine_lost: bool = False,
    ) -> Death:
        """End all workers. The worker of `rank` is the cause of the loss and is described in the result."""
        is_alive = hung_s is not None or broken is not None
        cause = self._workers[rank]
        ends = [await worker.end(0.0) for worker in self._workers if worker is not cause]
        end = await cause.end(0.0 if is_alive else 1.0)
        ends.append(end)
        self._kept.note_end(
            is_sound=is_memory_sound(
                [each.status for each in ends],
                was_out_of_memory=any(each.was_out_of_memory for each in ends),
                # A worker that only lost its link to another machine has not damaged its memory.
                is_broken=broken is not None and not was_machine_lost,
            )
        )
        step = self._plans[0].step if self._plans else None
        return Death(
            rank=self._first_number + rank, step=step, exit_status=end.status, hung_s=hung_s,
            was_out_of_memory=end.was_out_of_memory, was_machine_lost=was_machine_lost or end.was_machine_lost, broken=broken, stderr=end.stderr,
            num_workers=len(self._workers), first_rank=self._first_number,
        )  # fmt: skip

    # Bookkeeping

    def _note_result(self, result: StepResult) -> StepResult:
        plan = self._plans.popleft()
        if isinstance(result, StepFailed):
            self._last_epoch = max(self._last_epoch, plan.epoch + 1)
        now = anyio.current_time()
        seconds = now - max(plan.submitted_s, self._last_answer_s)
        self._deadlines.note(plan.num_tokens, seconds)
        self._last_answer_s = now
        self._budget.note_progress()
        return result

    def _note_ready(self, ready: GrammarReady) -> GrammarReady | None:
        """Count a worker's answer to a grammar order. Returns the combined answer after the last worker: an
        error if any worker had one.
        """
        self._ready = [other for other in self._ready if other.key == ready.key] + [ready]
        if len(self._ready) < len(self._workers):
            return None
        answers, self._ready = self._ready, []
        return next((answer for answer in answers if answer.error is not None), ready)

    def _note(self, rank: int, frame: Frame) -> None:
        """Handle all frames except results."""
        number = self._first_number + rank
        match frame:
            case Returned():
                self._last_answer_s = anyio.current_time()
                call = self._calls.note(frame, len(self._workers))
                if call is not None:
                    self._restored.follow(call)
            case LogRecord(name, level, message):
                logging.getLogger(f"trouper.worker.{number}.{name}").log(level, "%s", message)
            case TierAnswer():
                self._tier.note(rank, frame)
            case Progress(phase):
                log_phase(phase, where=f"worker {number}: ")
            case _:
                logger.warning(
                    "worker %d sent an unexpected frame: %s", number, type(frame).__name__
                )

    def _lose(self, death: Death) -> DeviceLost:
        """Record a loss: open calls fail and plans in flight are dropped."""
        self._lost_s = anyio.current_time()
        self._lost_epoch = self._last_epoch
        self._last_epoch += 1
        self._num_losses += 1
        num_suspects = self._plans[0].num_requests if self._plans else 0
        self._plans.clear()
        self._calls.fail_all(
            RetryableRequestError(f"the device is lost: {death.describe()}", "device_restarting")
        )
        self._spend(death, 0 if death.is_from_outside else num_suspects)
        return DeviceLost(death.describe(), death.step, death.is_from_outside, death.cause)

    def _spend(self, death: Death, num_suspects: int = 0) -> None:
        """Count a loss against the budget, and schedule a restart or the failure that `receive` raises."""
        self._state = next_state(self._state, WorkerEvent.LOSS)
        logger.error("%s", death.describe())
        wait_s = self._budget.note_loss(anyio.current_time(), num_suspects)
        if wait_s is None:
            self._state = next_state(self._state, WorkerEvent.BUDGET_SPENT)
            allowed = self._config.max_worker_restarts
            self._failure = (
                f"{death.describe()}; the engine gives up because all restarts are used "
                f"(max_worker_restarts={allowed} in {self._config.worker_restart_window_s:g} s)"
            )
        else:
            self._restart_in_s = wait_s
