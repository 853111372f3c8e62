"""The scheduler actor: it connects a `SchedulingPolicy`, which decides, with the channels of the other actors.

Everything in its inbox is handled before the next decision, so one plan takes all that is known.  It waits only for its inbox.  Plans
never wait, because the policy has at most as many in flight as the executor's channel holds.  Outputs hardly ever wait, because the
receiver's channel has room for many steps in addition to all messages of the renderers.
"""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Generic, TypeVar, assert_never, cast

import anyio
import msgspec
from anyio.abc import TaskStatus
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from trouper.actors.messages.controls import (
    DeviceCall,
    ExecutorInbox,
    ExplainLosses,
    Pause,
    Probe,
    ProbeDevice,
    ResetPrefixCache,
    SchedulerInbox,
    SetPause,
    Step,
)
from trouper.actors.messages.outputs import Expected, SchedulerStats, StepStats, StepTokens, Stop
from trouper.actors.messages.requests import (
    Abort,
    Admit,
    AdmitPooling,
    GrammarReady,
    GrammarWork,
    RequestId,
)
from trouper.actors.messages.sinks import Promise
from trouper.actors.messages.steps import (
    DeviceBack,
    DeviceFailed,
    DeviceLost,
    PoolDone,
    ReplicaEvent,
    StepDone,
    StepFailed,
    TierAnswer,
)
from trouper.actors.runtime.event_loop import Future, Reporter
from trouper.actors.scheduling.replicas import Probes, Replicas
from trouper.actors.scheduling.scheduling_policy import SchedulerSnapshot, SchedulingPolicy
from trouper.actors.scheduling.step_planner import FirstTokens
from trouper.errors import DeviceStartError

logger = logging.getLogger(__name__)
OutputsT = TypeVar("OutputsT")


class Scheduler(Generic[OutputsT]):
    """Own the policy, and with it every KV block and the state of every sequence.

    Args:
        executors: one for each replica.
        policy: the policy of the only replica, or `Replicas`.
        is_stepped: plan only once for each `Step`, and while a pause waits for running sequences.
    """

    def __init__(
        self,
        inbox: MemoryObjectReceiveStream[SchedulerInbox],
        executors: Sequence[MemoryObjectSendStream[ExecutorInbox]],
        output: MemoryObjectSendStream[OutputsT],
        policy: SchedulingPolicy[OutputsT] | Replicas[OutputsT, Any],
        *,
        reporter: Reporter | None = None,
        is_stepped: bool = False,
    ) -> None:
        self._inbox = inbox
        self._executors = tuple(executors)
        self._output = output  # to the Detokenizer or the Pooler
        self.policy: SchedulingPolicy[OutputsT] | Replicas[OutputsT, Any] = policy
        self._replicas = policy if isinstance(policy, Replicas) else None
        # By replica.
        self._policies: tuple[SchedulingPolicy[OutputsT], ...] = (
            policy.policies if isinstance(policy, Replicas) else (policy,)
        )
        self._reporter = reporter or Reporter(None)
        self._is_stepped = is_stepped
        # By replica: tokens reported to the observer, and the cost of grammars since the last report.
        self._num_reported = [0] * len(self._executors)
        self._num_preemptions_reported = [0] * len(self._executors)
        self._num_lost_reported = [0] * len(self._executors)
        self._grammar_work: list[tuple[GrammarWork, ...]] = [()] * len(self._executors)
        # If stepped: requested plans not made yet.
        self._num_plans_due = 0
        self._steps: list[Promise[None]] = []
        # Not in full effect yet.
        self._pauses: list[SetPause] = []
        self._probes = Probes()
        # In this turn.
        self._admitted: list[RequestId] = []
        self._first_tokens = FirstTokens()
        # By replica: when the eldest plan in flight became the eldest.
        self._eldest_s = [0.0] * len(self._executors)

    @property
    def num_tokens(self) -> int:
        """Count the prompt tokens computed and the tokens sampled so far, by all replicas.  It reads one counter of each.

        Admission reads it for every request to measure the throughput.
        """
        return sum([policy.num_tokens for policy in self._policies])

    def statistics(self) -> SchedulerStats:
        """Describe the state in numbers, of all replicas together.

        It reads all tables, so it is meant for metrics and health checks.
        """
        return self.policy.statistics()

    def replica_statistics(self) -> tuple[SchedulerStats, ...]:
        """Describe the state of each replica in numbers.

        Metrics show each replica with a label of its own.
        """
        return tuple(policy.statistics() for policy in self._policies)

    def snapshot(self) -> SchedulerSnapshot:
        """Describe the state of every sequence, and the unanswered orders.

        Tests compare it, and the engine's snapshot for debugging contains it.
        """
        return SchedulerSnapshot(
            policies=tuple(policy.snapshot() for policy in self._policies),
            num_plans_due=self._num_plans_due,
            num_pauses=len(self._pauses),
        )

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        with ExitStack() as ends:
            for end in (self._inbox, *self._executors, self._output, self._reporter):
                ends.enter_context(end)
            task_status.started()
            while True:
                try:
                    message = await self._next_message()
                except anyio.EndOfStream:
                    break
                if message is not None:
                    self._handle(message)
                try:
                    while True:  # everything already here is part of the same decision
                        self._handle(self._inbox.receive_nowait())
                except (anyio.WouldBlock, anyio.EndOfStream):
                    pass
                # Plan before handing over outputs, so that the device works while the other actors use them.
                self._rebalance()
                self._order_tiers()
                self._plan()
                while self._rebalance():  # a search for a culprit has ended in a plan
                    self._plan()
                self._prepare_grammars()
                answers = self._due_answers()
                outputs = self._with_expected(self.policy.take_outputs(answers))
                self._report()
                if outputs is not None:
                    try:
                        # Waiting would cost a turn of the event loop, so it waits only without room.
                        self._output.send_nowait(outputs)
                    except anyio.WouldBlock:
                        await self._output.send(outputs)

    async def _next_message(self) -> SchedulerInbox | None:
        """Wait for a message, or until a sequence has waited long enough for its blocks on disk."""
        deadlines = [
            deadline
            for policy in self._policies
            if (deadline := policy.tier_deadline_s) is not None
        ]
        if not deadlines:
            return await self._inbox.receive()
        with anyio.CancelScope(deadline=min(deadlines)):
            return await self._inbox.receive()
        return None

    def _order_tiers(self) -> None:
        """Send the orders to the tiers on disk: few at once, so the executors have room."""
        for policy, executor in zip(self._policies, self._executors, strict=True):
            if policy.tier_deadline_s is not None:
                policy.expire_tier(anyio.current_time())
            for order in policy.take_tier_orders(anyio.current_time()):
                executor.send_nowait(order)

    def _handle(self, message: SchedulerInbox) -> None:  # noqa: C901  # a table, one line a message
        policy = self.policy
        match message:
            case (
                StepDone()
                | PoolDone()
                | StepFailed()
                | GrammarReady()
                | TierAnswer()
                | DeviceLost()
                | DeviceBack()
            ):  # of the one replica
                self._note_event(0, message)
            case ReplicaEvent(replica, event):
                self._note_event(replica, event)
            case Admit() | AdmitPooling():
                if self._replicas is not None:
                    now = anyio.current_time()
                    self._replicas.elapsed_s = [now - since for since in self._eldest_s]
                policy.admit(message)
                self._admitted.append(message.id)
            case Abort(id):
                policy.abort(id)
            case Stop(ids):
                policy.stop(ids)
            case SetPause(pause, answer):
                policy.set_pause(pause)
                if pause is Pause.NONE:  # an earlier pause not in effect yet never will be
                    self._pauses = []
                    answer.set(None)
                else:
                    self._pauses.append(message)
            case ResetPrefixCache(preempt, answer, clears_tier):
                if clears_tier:
                    policy.clear_tier()
                if preempt == "recompute":
                    policy.preempt_all()
                answer.set(policy.reset_prefix_cache(reset_running=preempt == "resample"))
            case Step(answer):
                self._num_plans_due += 1
                self._steps.append(answer)
            case Probe(answer):
                self._probe(answer)
            case _:
                assert_never(message)

    def _note_event(
        self,
        replica: int,
        event: StepDone
        | PoolDone
        | StepFailed
        | GrammarReady
        | TierAnswer
        | DeviceLost
        | DeviceBack
        | DeviceFailed,
    ) -> None:
        """Take an event of a device.  The requests of a lost device go to the other replicas.

        Raises:
            DeviceStartError: all replicas have failed.
        """
        policy, replicas = self._policies[replica], self._replicas
        self._eldest_s[replica] = anyio.current_time()
        match event:
            case StepDone() | PoolDone():
                policy.apply(event)
                if isinstance(event, StepDone) and event.grammar is not None:
                    self._grammar_work[replica] += (event.grammar,)
            case StepFailed(step, error, is_out_of_memory):
                policy.fail_step(step, error, is_out_of_memory=is_out_of_memory)
            case GrammarReady():
                policy.note_grammar(event)
            case TierAnswer():
                policy.note_tier(event)
            case DeviceLost():
                self._note_loss(replica, event)
            case DeviceBack():
                self._report_event(replica, event)
                policy.return_device(keeps_memory=event.keeps_memory)
            case DeviceFailed(message):
                self._note_failure(replica, message)
            case _:
                assert_never(event)
        if replicas is not None:
            replicas.note_change(replica)

    def _note_loss(self, replica: int, loss: DeviceLost) -> None:
        self._report_event(replica, loss)
        policy = self._policies[replica]
        num_preemptions = policy.num_preemptions
        num_losses = policy.lose_device(loss)
        # A loss takes the blocks of all sequences, which is reported as a loss, not as preemptions.
        self._num_preemptions_reported[replica] += policy.num_preemptions - num_preemptions
        if num_losses:
            call = DeviceCall(ExplainLosses(num_losses), Future())
            # Room: one at a time, it waits for nothing.
            self._executors[replica].send_nowait(call)
        if self._replicas is not None:
            self._replicas.note_loss(replica)

    def _note_failure(self, replica: int, message: str) -> None:
        logger.error("engine %d stays out: %s", replica, message)
        self._policies[replica].fail_device(message)
        if self._replicas is None or self._replicas.have_failed:
            raise DeviceStartError(message)
        self._replicas.note_failure(replica)
        self._reporter.report(ReplicaEvent(replica, DeviceFailed(message)))

    def _report_event(self, replica: int, event: DeviceLost | DeviceBack) -> None:
        self._reporter.report(event if self._replicas is None else ReplicaEvent(replica, event))

    def _probe(self, answer: Promise[object]) -> None:
        """Probe all loaded devices, or the lost ones if none is loaded.  At most one probe is on its way to each."""
        everywhere = range(len(self._executors))
        if self._replicas is not None:
            policies = self._replicas.policies
            living = [i for i in everywhere if not policies[i].has_device_failed]
            everywhere = [i for i in living if not policies[i].is_device_lost] or living
        for probe in self._probes.begin(answer, everywhere):
            self._executors[probe.replica].send_nowait(DeviceCall(ProbeDevice(), probe))

    def _rebalance(self) -> bool:
        return self._replicas is not None and self._replicas.rebalance()

    def _plan(self) -> None:
        """Plan for all replicas until no policy has a plan.  If stepped, plan once for each."""
        while not self._is_stepped or self._num_plans_due > 0 or self._pauses:
            has_planned = False
            for replica, executor in enumerate(self._executors):
                policy = self._policies[replica]
                plan = policy.plan()
                if plan is not None:
                    has_planned = True
                    if policy.num_steps_in_flight == 1:
                        self._eldest_s[replica] = anyio.current_time()
                    for order in policy.take_tier_cancel():
                        executor.send_nowait(order)
                    executor.send_nowait(plan)
            if not has_planned:
                break
            if self._num_plans_due:
                self._num_plans_due -= 1

    def _prepare_grammars(self) -> None:
        """Order the next grammars to compile.  Each executor's channel has room for one without an answer."""
        for policy, executor in zip(self._policies, self._executors, strict=True):
            if (order := policy.next_grammar()) is not None:
                executor.send_nowait(order)

    def _with_expected(self, outputs: OutputsT | None) -> OutputsT | None:
        """Compare first tokens with their predictions, and add predictions for the requests admitted in this turn."""
        now, first_tokens = anyio.current_time(), self._first_tokens
        if len(first_tokens) and isinstance(outputs, StepTokens):
            ids = ((update.id, bool(update.token_ids)) for update in outputs.sequences)
            first_tokens.compare(ids, now)
        if not self._admitted:
            return outputs
        found: list[Expected] = []
        for id in self._admitted:
            for replica, policy in enumerate(self._policies):
                expected = policy.predict_first_token(id, now - self._eldest_s[replica])
                if expected is not None:
                    expected = msgspec.structs.replace(expected, error=first_tokens.error)
                    first_tokens.note(expected, now)
                    found.append(expected)
        self._admitted.clear()
        if not found:
            return outputs
        tokens = StepTokens(()) if outputs is None else outputs
        assert isinstance(tokens, StepTokens), "texts that are pooled have no first token"
        return cast("OutputsT", msgspec.structs.replace(tokens, expected=tuple(found)))

    def _report(self) -> None:
        ratios = self._first_tokens.take_ratios()
        for replica, policy in enumerate(self._policies):
            num_tokens = policy.num_tokens - self._num_reported[replica]
            num_preemptions = policy.num_preemptions - self._num_preemptions_reported[replica]
            num_lost = policy.num_lost_tokens - self._num_lost_reported[replica]
            stats = StepStats(
                num_tokens,
                replica,
                self._grammar_work[replica],
                policy.take_ratios(),
                ratios,
                num_preemptions,
                num_lost,
            )
            ratios = ()  # predictions are those of all replicas together
            if num_tokens and self._reporter.report(stats):
                self._num_reported[replica] += num_tokens
                self._num_preemptions_reported[replica] += num_preemptions
                self._num_lost_reported[replica] += num_lost
            self._grammar_work[replica] = ()

    def _due_answers(self) -> tuple[Promise[None], ...]:
        """Take the answers of orders in full effect.  They travel with the outputs and are delivered after them."""
        if not (self._steps or self._pauses) or self.policy.num_steps_in_flight:
            return ()
        due, self._steps, self._num_plans_due = self._steps, [], 0
        is_quiet = self.policy.num_started == 0
        due += [pause.answer for pause in self._pauses if is_quiet or pause.pause is Pause.ALL]
        self._pauses = [
            p for p in self._pauses if not is_quiet and p.pause is Pause.NO_NEW_REQUESTS
        ]
        return tuple(due)
