"""The scheduler actor: a `Policy` or a `PoolingPolicy` on one side, channels on the other.

It waits in one place only, its inbox.  Plans need no waiting because the policy never has more of them
out than the executor's channel holds; news need none because their reader's channel has room for many
steps beside everything the Renderers may send.
"""

from typing import Any, assert_never

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
from trouper.actors.messages.inboxes import ExecutorInbox, SchedulerInbox
from trouper.actors.messages.outputs import Stop
from trouper.actors.messages.promise import Promise
from trouper.actors.messages.requests import Abort, Admit, AdmitPooling
from trouper.actors.messages.results import PoolDone, StepDone, StepFailed
from trouper.actors.messages.stats import SchedulerStats, StepStats
from trouper.actors.observability.reporter import Reporter
from trouper.actors.scheduling.policy import Policy
from trouper.actors.scheduling.pooling_policy import PoolingPolicy


class Scheduler:
    """Owns the policy: every KV block and every sequence's truth.

    `is_stepped`: it plans once for each `Step`, and while a pause waits for what still runs.
    """

    def __init__(
        self,
        inbox: MemoryObjectReceiveStream[SchedulerInbox],
        executor: MemoryObjectSendStream[ExecutorInbox],
        reader: MemoryObjectSendStream[Any],
        policy: Policy | PoolingPolicy,
        *,
        reporter: Reporter | None = None,
        is_stepped: bool = False,
    ) -> None:
        self._inbox = inbox
        self._executor = executor
        self._reader = reader  # of the news: the Detokenizer or the Pooler
        self._policy = policy
        self._reporter = reporter or Reporter(None)
        self._is_stepped = is_stepped
        self._num_reported = 0  # tokens of which the Observer was told
        self._num_plans_due = 0  # when stepped: plans that were asked for and not made
        self._steps: list[Promise[None]] = []
        self._pauses: list[SetPause] = []  # not in full effect yet

    def statistics(self) -> SchedulerStats:
        return self._policy.statistics()

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        with self._inbox, self._executor, self._reader, self._reporter:
            task_status.started()
            async for message in self._inbox:
                self._handle(message)
                try:
                    while True:  # everything already here is part of the same decision
                        self._handle(self._inbox.receive_nowait())
                except (anyio.WouldBlock, anyio.EndOfStream):
                    pass
                # The device first: what it computes next hides what the others do with the news.
                self._plan()
                news = self._policy.take_news(self._due_answers())
                self._report()
                if news is not None:
                    try:  # a wait, and so a turn of the loop, only where there is no room
                        self._reader.send_nowait(news)
                    except anyio.WouldBlock:
                        await self._reader.send(news)

    def _handle(self, message: SchedulerInbox) -> None:  # noqa: C901  # a table, one line a message
        policy: Any = self._policy  # of the kind that these messages are for
        match message:
            case StepDone() | PoolDone():
                policy.apply(message)
            case Admit() | AdmitPooling():
                policy.admit(message)
            case Abort(id):
                policy.abort(id)
            case Stop(ids):
                policy.stop(ids)
            case StepFailed(step, error, is_out_of_memory):
                policy.fail_step(step, error, is_out_of_memory=is_out_of_memory)
            case SetPause(pause, answer):
                policy.set_pause(pause)
                if pause is Pause.NONE:  # whoever still waits for an earlier pause waits in vain
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
            plan = self._policy.plan()
            if plan is None:
                break
            if self._num_plans_due:
                self._num_plans_due -= 1
            self._executor.send_nowait(plan)

    def _report(self) -> None:
        num_tokens = self._policy.num_tokens - self._num_reported
        if num_tokens and self._reporter.report(StepStats(num_tokens)):
            self._num_reported += num_tokens

    def _due_answers(self) -> tuple[Promise[None], ...]:
        """Who has waited long enough; they are told behind the news, through the Detokenizer."""
        if not (self._steps or self._pauses) or self._policy.num_steps_in_flight:
            return ()
        due, self._steps, self._num_plans_due = self._steps, [], 0
        is_quiet = self._policy.num_started == 0
        due += [pause.answer for pause in self._pauses if is_quiet or pause.pause is Pause.ALL]
        self._pauses = [
            p for p in self._pauses if not is_quiet and p.pause is Pause.NO_NEW_REQUESTS
        ]
        return tuple(due)
