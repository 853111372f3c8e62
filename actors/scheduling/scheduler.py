"""The scheduler actor: a `SchedulingPolicy` on one side, channels on the other.

It waits in one place only, its inbox.  Plans need no waiting because the policy never has more of them
in flight than the executor's channel holds; outputs need none because their receiver's channel has room
for many steps beside everything the renderers may send.
"""

from typing import Generic, TypeVar, assert_never

import anyio
from anyio.abc import TaskStatus
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from trouper.actors.messages.controls import (
    DeviceCall,
    Pause,
    Probe,
    ResetPrefixCache,
    SetPause,
    Step,
)
from trouper.actors.messages.grammar import GrammarWork
from trouper.actors.messages.inboxes import ExecutorInbox, SchedulerInbox
from trouper.actors.messages.outputs import Stop
from trouper.actors.messages.promise import Promise
from trouper.actors.messages.requests import Abort, Admit, AdmitPooling
from trouper.actors.messages.results import (
    DeviceBack,
    DeviceLost,
    PoolDone,
    StepDone,
    StepFailed,
)
from trouper.actors.messages.stats import SchedulerStats, StepStats
from trouper.actors.runtime.future import Future
from trouper.actors.runtime.reporter import Reporter
from trouper.actors.scheduling.scheduling_policy import SchedulingPolicy
from trouper.actors.scheduling.snapshot import SchedulerSnapshot

OutputsT = TypeVar("OutputsT")


class Scheduler(Generic[OutputsT]):
    """Owns the policy, and with it every KV block and the state of every sequence.

    With `is_stepped` it plans once for each `Step`, and while a pause waits for what still runs.
    """

    def __init__(
        self,
        inbox: MemoryObjectReceiveStream[SchedulerInbox],
        executor: MemoryObjectSendStream[ExecutorInbox],
        output: MemoryObjectSendStream[OutputsT],
        policy: SchedulingPolicy[OutputsT],
        *,
        reporter: Reporter | None = None,
        is_stepped: bool = False,
    ) -> None:
        self._inbox = inbox
        self._executor = executor
        self._output = output  # to the Detokenizer or the Pooler
        self.policy = policy
        self._reporter = reporter or Reporter(None)
        self._is_stepped = is_stepped
        self._num_reported = 0  # tokens that the Observer knows of
        self._grammar_work: tuple[GrammarWork, ...] = ()  # of the steps since the last turn
        self._num_plans_due = 0  # when stepped: plans that were requested and not made
        self._steps: list[Promise[None]] = []
        self._pauses: list[SetPause] = []  # not in full effect yet

    def statistics(self) -> SchedulerStats:
        """Describe the state in numbers."""
        return self.policy.statistics()

    def snapshot(self) -> SchedulerSnapshot:
        """Describe where every sequence is, and what is to be answered."""
        return SchedulerSnapshot(
            policy=self.policy.snapshot(),
            num_plans_due=self._num_plans_due,
            num_pauses=len(self._pauses),
        )

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        with self._inbox, self._executor, self._output, self._reporter:
            task_status.started()
            async for message in self._inbox:
                self._handle(message)
                try:
                    while True:  # everything already here is part of the same decision
                        self._handle(self._inbox.receive_nowait())
                except (anyio.WouldBlock, anyio.EndOfStream):
                    pass
                # The device first: what it computes next hides what the others do with the outputs.
                self._plan()
                outputs = self.policy.take_outputs(self._due_answers())
                self._report()
                if outputs is not None:
                    try:  # a wait, and so a turn of the loop, only where there is no room
                        self._output.send_nowait(outputs)
                    except anyio.WouldBlock:
                        await self._output.send(outputs)

    def _handle(self, message: SchedulerInbox) -> None:  # noqa: C901  # a table, one line a message
        policy = self.policy
        match message:
            case StepDone() | PoolDone():
                policy.apply(message)
                if isinstance(message, StepDone) and message.grammar is not None:
                    self._grammar_work += (message.grammar,)
            case Admit() | AdmitPooling():
                policy.admit(message)
            case Abort(id):
                policy.abort(id)
            case Stop(ids):
                policy.stop(ids)
            case StepFailed(step, error, is_out_of_memory):
                policy.fail_step(step, error, is_out_of_memory=is_out_of_memory)
            case DeviceLost():
                self._reporter.report(message)
                if num_losses := policy.lose_device(message):
                    call = DeviceCall("explain", (num_losses,), Future())
                    self._executor.send_nowait(call)  # room: one at a time, it waits for nothing
            case DeviceBack():
                self._reporter.report(message)
                policy.return_device()
            case SetPause(pause, answer):
                policy.set_pause(pause)
                if pause is Pause.NONE:  # an earlier pause that is not in effect yet never will be
                    self._pauses = []
                    answer.set(None)
                else:
                    self._pauses.append(message)
            case ResetPrefixCache(preempt, answer):
                if preempt == "recompute":
                    policy.preempt_all()
                answer.set(policy.reset_prefix_cache(reset_running=preempt == "resample"))
            case Step(answer):
                self._num_plans_due += 1
                self._steps.append(answer)
            case Probe(answer):
                self._executor.send_nowait(DeviceCall("probe", (), answer))  # room: one at a time
            case _:
                assert_never(message)

    def _plan(self) -> None:
        while not self._is_stepped or self._num_plans_due > 0 or self._pauses:
            plan = self.policy.plan()
            if plan is None:
                break
            if self._num_plans_due:
                self._num_plans_due -= 1
            self._executor.send_nowait(plan)

    def _report(self) -> None:
        num_tokens = self.policy.num_tokens - self._num_reported
        if num_tokens and self._reporter.report(StepStats(num_tokens, self._grammar_work)):
            self._num_reported += num_tokens
        self._grammar_work = ()

    def _due_answers(self) -> tuple[Promise[None], ...]:
        """Take the answers that are due; they travel with the outputs, and are delivered behind them."""
        if not (self._steps or self._pauses) or self.policy.num_steps_in_flight:
            return ()
        due, self._steps, self._num_plans_due = self._steps, [], 0
        is_quiet = self.policy.num_started == 0
        due += [pause.answer for pause in self._pauses if is_quiet or pause.pause is Pause.ALL]
        self._pauses = [
            p for p in self._pauses if not is_quiet and p.pause is Pause.NO_NEW_REQUESTS
        ]
        return tuple(due)
