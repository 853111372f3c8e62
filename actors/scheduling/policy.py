"""Decide which sequences compute how many tokens in the next step of an engine that generates text.

The policy is a pure state machine without waits, clock or channels, so tests and the simulation can try any order of events.
Callers feed it events (`admit`, `abort`, `stop`, `apply`, `fail_step`), and take its plans (`plan`) and outputs (`take_outputs`).
Every event is allowed at any time, whatever is in flight.

Laws:
1. *In order.*  The device runs plans in the order in which they were made, so the next plan may reuse a request slot or a KV block
   that is freed now: the steps in flight write to it first.
2. *Only computed KV is shared.*  A block is offered as a prefix, and a prompt is forked, only after the device has answered the step
   that computed it.  So no other sequence depends on a step that may still fail.
3. *Preemption epochs.*  A result belongs to the preemption epoch in which it was planned.  A sequence that ended meanwhile drops it.
   A sequence that was preempted meanwhile appends it, and restarts only after receiving it.
4. *One end.*  Each sequence has exactly one finishing output, except those that the detokenizer has stopped at a stop string.
5. *Progress.*  The best running sequence is never preempted while another one runs.  (The best is a sequence that was preempted the
   allowed number of times, else the first in the order.)  Its blocks always fit when no other sequence runs, because its `limit` is at
   most the capacity of all blocks.  So each plan advances the best running sequence or waits for its sample in flight.  Sequences are
   finite, so it ends, and the next one becomes the best.
   While the head of the queue waits for an adapter slot, a bounded number of sequences may overtake it; otherwise none does
   (`start_waiting`).  So it starts at the latest when all sequences that are running now have ended.  With step times
   (`prompt_turns.py`) the head is the first in the fluid order, and a bounded number may overtake it also while it lacks KV blocks.
6. *No idling.*  `plan()` returns None only while paused, while the device is lost, while enough steps (or one long step) are in flight,
   or if nothing is runnable.  The scheduler calls it again after an answer from the device or a new event.
"""

import collections.abc
from typing import Any

from trouper.actors.messages.controls import Pause
from trouper.actors.messages.outputs import Expected, StepTokens
from trouper.actors.messages.requests import (
    Admit,
    AdmitPooling,
    GrammarReady,
    PrepareGrammar,
    RequestId,
    SequenceId,
)
from trouper.actors.messages.sinks import Promise
from trouper.actors.messages.steps import (
    DeviceLost,
    EntryFailure,
    PoolDone,
    StepDone,
    StepPlan,
    TierAnswer,
    TierOrder,
)
from trouper.actors.scheduling.culprit_search import FaultBisection, Quarantine
from trouper.actors.scheduling.policy_base import PolicyBase
from trouper.actors.scheduling.prompt_turns import PromptTurns
from trouper.actors.scheduling.routing import Demand
from trouper.actors.scheduling.state.grammar_ledger import MAX_DEATHS
from trouper.actors.scheduling.state.kv_blocks import KVBlocks
from trouper.actors.scheduling.state.sequence import Request, Sequence, State
from trouper.actors.scheduling.state.sequence_table import SequenceTable, Shared
from trouper.actors.scheduling.state.state_snapshots import StateSnapshots
from trouper.actors.scheduling.state.step_builder import (
    InFlightStep,
    InFlightSteps,
    StepBuilder,
    find_in_question,
)
from trouper.actors.scheduling.state.tier import MAX_SOUGHT, Tier
from trouper.actors.scheduling.step_planner import StepPlanner, expect, predict_first_token
from trouper.config.engine_config import SchedulerConfig
from trouper.outputs import RequestError

FAILURES: dict[EntryFailure, RequestError] = {
    "not_finite": RequestError("numerical_error", "the logits are not finite"),
    "no_valid_token": RequestError(
        "no_valid_token", "no token satisfies all constraints of the request"
    ),
    "grammar_error": RequestError(
        "grammar_error", "the grammar needs more steps than the limit to find the allowed tokens"
    ),
}


class Policy(PolicyBase[InFlightStep, Request]):
    """The scheduling policy of one replica of an engine that generates text.

    Tests read `blocks`, `table` and `in_flight`, which contain most of the state; only the policy writes them.
    """

    in_flight: InFlightSteps

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: KVBlocks,
        shared: Shared | None = None,
        states: StateSnapshots | None = None,
        tier: Tier | None = None,
    ) -> None:
        """Make the policy of one replica.

        Args:
            states: the state snapshots of a recurrent model, else None.
            tier: the KV tier on the device's disk, or None.
        """
        super().__init__(config, InFlightSteps())
        self.blocks = blocks
        self._tier = tier
        self.states = states
        if states is not None:
            blocks.on_forget = states.rows.drop
        self.table = SequenceTable(config, blocks, shared, states, tier)
        # Without `turns`, prompts are computed in the order of arrival, and steps are limited by the token budget only.
        self.turns: PromptTurns | None = None
        if config.max_step_ms != 0:
            max_num_running = min(config.max_num_seqs, config.max_num_active_seqs)
            self.turns = PromptTurns(config, self.table, max_num_running)
        self.timing = self.turns
        self._planner = StepPlanner(config, self.table, self.turns, self._num_stages)
        self._bisection = FaultBisection()
        self._quarantine = Quarantine(config.num_speculative_tokens)

    def __repr__(self) -> str:
        return (
            f"<Policy {len(self.table.running)} running, {self.table.num_waiting} waiting, "
            f"{len(self.in_flight)} in flight, pause={self.pause.value}, {self.blocks!r}>"
        )

    @property
    def num_started(self) -> int:
        """Count the unfinished sequences that may continue under `Pause.NO_NEW_REQUESTS`.

        That pause takes full effect at 0.  Requests that never ran may remain queued.
        """
        return self.table.num_started

    @property
    def holds_blocks(self) -> bool:
        """Whether a sequence holds KV blocks.

        The prefix cache can be reset only while no sequence uses it.
        """
        return len(self.table.running) > 0

    def state(self, id: SequenceId) -> State:
        """Return the state of a sequence for tests and simulations.  Finished sequences are forgotten, so an unknown id means FINISHED."""
        sequence = self.table.sequences.get(id)
        return State.FINISHED if sequence is None else sequence.state

    @property
    def num_tokens(self) -> int:
        """Count the prompt tokens computed and the tokens sampled so far.

        The counter never decreases, so the difference of two readings is the work done between them.
        """
        return self._num_prompt_tokens + self.table.num_generation_tokens

    @property
    def num_preemptions(self) -> int:
        return self.table.running.num_preemptions

    @property
    def num_lost_tokens(self) -> int:
        return self.table.running.num_lost_tokens

    def _counts(self) -> dict[str, Any]:
        tier = {} if self._tier is None else self._tier.statistics()
        return self.table.statistics() | self._planner.lookahead.statistics() | tier

    @property
    def is_searching(self) -> bool:
        """Whether the policy is searching for the request that made a step raise or killed the device."""
        return bool(self._bisection or self._quarantine)

    @property
    def _has_suspects(self) -> bool:
        return bool(self._quarantine)

    @property
    def _requests_in_question(self) -> frozenset[RequestId]:
        return self._quarantine.requests

    @property
    def _suspect_ids(self) -> tuple[SequenceId, ...]:
        return (*self._bisection.suspect_ids, *self._quarantine.suspect_ids)

    def _ids_by_state(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return self.table.ids_by_state()

    # Events

    def open_request(self, admit: Admit | AdmitPooling) -> Request:
        """Create a request that any replica may `enter`.

        It receives its arrival number here, so the order of arrival is the same on all replicas.
        """
        assert isinstance(admit, Admit)
        return self.table.open_request(admit)

    def demand(self, request: Request) -> Demand:
        """Describe a request for the router's choice of a replica.

        With prefix caching the description contains the hashes of the prompt's blocks.
        """
        return request.demand(self.blocks.block_size if self.config.enable_prefix_caching else 0)

    def enter(self, request: Request, replica: int = 0, num_expected: int = 0) -> None:
        """Queue a new request, or one that another replica has started, together with its outputs so far.

        Tokens that the other replica has computed are recomputed, because KV blocks are not moved between replicas.
        """
        request.replica, request.num_expected = replica, num_expected
        if self.turns is not None:
            self.turns.budget.quiet_s = 0.0
        self.table.enter(request)
        if self._tier is not None:
            self._seek(request.sequences[0])

    def work(self) -> tuple[int, int]:
        """Return the numbers of known uncomputed tokens and of unfinished sequences, by which the router compares replicas."""
        return self.table.work()

    def evacuate(self, *, only_fresh: bool = False) -> list[Request]:
        """Remove and return the requests without state on the device, so that other replicas can continue them.

        Suspects of having killed the device stay, because they might kill the next one, too.
        """
        return self.table.take_out(self._quarantine.requests, only_fresh=only_fresh)

    def predict_first_token(self, id: RequestId, elapsed_s: float) -> Expected | None:
        """Predict when a request's first token is due.  Returns None if it has one, if step times are unknown, or while nothing is planned.

        Args:
            elapsed_s: seconds since the oldest plan in flight became the oldest.
        """
        sequence = self.table.sequences.get(SequenceId(id))
        if self.turns is None or sequence is None or sequence.output:
            return None
        if self.is_device_lost or self.pause is not Pause.NONE or self.is_searching:
            return None
        self.turns.settle()
        found = predict_first_token(self.turns, sequence, self._flights_s(), elapsed_s)
        return None if found is None else Expected(sequence.id, *found)

    def expect(self, request: Request, num_cached: int, elapsed_s: float) -> float | None:
        """Estimate the seconds to first token for a request that entered now.

        Returns None if step times are unknown, or while nothing is planned.

        Args:
            num_cached: prompt tokens expected in the prefix cache.
            elapsed_s: seconds since the oldest plan in flight became the oldest.
        """
        turns, leader = self.turns, request.sequences[0]
        if turns is None or not self.is_available or self.pause is not Pause.NONE:
            return None
        turns.settle()
        return expect(turns, leader, num_cached, self._flights_s(), elapsed_s)

    def abort(self, id: RequestId) -> None:
        """End a request in any state.  Unknown and finished requests are ignored.

        A request that may have killed the device ends for its client, but is still tested as a suspect.
        """
        self.table.abort(id, frozenset(self._quarantine.suspect_ids))

    def stop(self, ids: tuple[SequenceId, ...]) -> None:
        """End sequences that the detokenizer has stopped at a stop string, without further output.

        Tokens after the stop string are dropped, and the blocks are freed.
        """
        suspects = self._quarantine.suspect_ids
        for id in ids:
            self.table.stop(id, is_suspect=id in suspects)

    def apply(self, done: StepDone | PoolDone) -> None:
        """Apply the device's answer to the oldest plan in flight.

        Outputs are collected until `take_outputs`.  The blocks of ended sequences are freed.
        """
        assert isinstance(done, StepDone)
        step, table = self.in_flight.complete(done.step), self.table
        self._note_speed(step, done.seconds)
        self._planner.token_budget.passed()
        if self._bisection.is_testing:
            self._bisection.passed()
        prompt_logprobs = dict(done.prompt_logprobs) if done.prompt_logprobs else {}
        failed = dict(done.failed) if done.failed else {}
        logprobs, token_ids = done.logprobs, done.token_ids
        # Looked up once, because this loop runs for every sequence of every step.
        append = table.append
        has_windows = table.running.windows is not None
        for i, (sequence, preemption_epoch, start, end, num_sampled) in enumerate(step.entries):
            if sequence.state is State.FINISHED or preemption_epoch < sequence.valid_from_epoch:
                continue
            if i in failed:
                table.fail(sequence, FAILURES[failed[i]])
                continue
            if preemption_epoch == sequence.preemption_epoch:
                self._land(sequence, start, end)
            if i in prompt_logprobs:
                sequence.take_prompt_logprobs(start, prompt_logprobs[i])
            if num_sampled:
                sequence.num_in_flight -= num_sampled
                append(sequence, token_ids[i], logprobs[i] if logprobs else ())
                if preemption_epoch == sequence.preemption_epoch:
                    # Accepted drafts.
                    num_more = len(token_ids[i]) - 1
                    sequence.num_computed += num_more
                    sequence.num_computed_on_device += num_more
                    # Usually the next answer registers their blocks.  With windows, blocks may be freed before that.
                    if num_more > 0 and has_windows and sequence.request_slot >= 0:
                        table.running.register(sequence)
        self._planner.lookahead.note(done)
        _note_encoded(step, done)

    def _note_speed(self, step: InFlightStep, seconds: float) -> None:
        """Update the estimates of step times with a measurement."""
        if self.turns is not None:
            self.turns.note_step(step, seconds)
        if self._tier is not None:
            num_tokens = sum([end - start for _, _, start, end, _ in step.entries])
            self._tier.note_computed(num_tokens, seconds)

    def _land(self, sequence: Sequence, start: int, end: int) -> None:
        """Note that positions start … end - 1 are computed, shifted by the drafts accepted since the plan was made."""
        if (more := sequence.num_computed_on_device - start) > 0:
            start, end = start + more, end + more
        sequence.num_computed_on_device = end
        sequence.has_landed = True
        if start < sequence.num_prompt:
            self._num_prompt_tokens += min(end, sequence.num_prompt) - start
        self.table.running.land(sequence, end)
        if sequence.request.deferred and end >= sequence.num_prompt:
            self.table.release_siblings(sequence.request)

    def _note_refused(self, plan: InFlightStep) -> None:
        """Do nothing: `_blame` has already rolled back the sequences of all cancelled plans."""

    def _blame(self, failed: InFlightStep, message: str, *, is_out_of_memory: bool) -> None:
        """Roll back this step and all later ones, so that their sequences continue from the last computed position.

        When the device is out of memory, later steps become smaller.  Preempting a sequence would not help, because freeing KV
        blocks does not return memory to the device.  In all other cases, and if steps cannot become smaller, a bisection searches
        for the culprit: the sequence that fails in a step without others.  It ends with `message`.

        A step may leave a recurrent state half updated, and unlike keys it cannot be overwritten in place.  So in a recurrent model
        the sequences of the failed step restart, and a quarantine that tracks their positions searches for the culprit.
        """
        suspects = self._undo(failed)
        undone = [sequence for later in self.in_flight for sequence in self._undo(later)]
        if self.states is not None:
            self._begin_again(self.states, suspects, undone)
        num_tokens = sum(end - start for _, _, start, end, _ in failed.entries)
        if is_out_of_memory and self._planner.token_budget.shrink(num_tokens):
            return
        if self.states is not None:
            ends = [(sequence, end) for sequence, _, _, end, _ in failed.entries]
            found = self._quarantine.lose(ends)
            if found is not None:
                self.table.fail_request(found[0], RequestError("execution_error", message))
            return
        if not self._bisection.is_testing:
            self._bisection.suspect(suspects)
            return
        culprit = self._bisection.failed()
        if culprit is not None and culprit.state is not State.FINISHED:
            self.table.fail(culprit, RequestError("execution_error", message))

    def _begin_again(
        self,
        states: StateSnapshots,
        torn: collections.abc.Sequence[Sequence],
        undone: collections.abc.Sequence[Sequence],
    ) -> None:
        """Preempt the sequences whose recurrent states are unusable after a failed step.

        Args:
            torn: sequences of the failed step.  Their states may be half updated.
            undone: sequences of later steps, which did not run.  A planned restore did not happen either, and its row may be
                reused by now.
        """
        for sequence in torn:
            name = states.distrust(sequence)
            if name is not None and self._tier is not None:
                self._tier.distrust(name)
            self.table.running.preempt(sequence)
        for sequence in undone:
            if sequence.request_slot >= 0 and sequence.marks.restore >= 0:
                self.table.running.preempt(sequence)

    def _lose_plans(
        self, plans: collections.abc.Sequence[InFlightStep], loss: DeviceLost, *, has_suspects: bool
    ) -> int:
        """Preempt all running sequences, and search for the culprit in the oldest plan.

        Tokens of answered steps are kept, so no token is output twice.  Whether cached prefixes survive is known only in
        `return_device`, and nothing is planned until then.
        """
        suspects = find_in_question(plans, self._num_stages) if has_suspects else {}
        for plan in plans:
            if not plan.is_cancelled:
                self._undo(plan)
        self._bisection.suspect(())
        self.table.running.lose_all()
        num_explained = 0
        if key := self.table.grammars.forget(is_their_doing=not loss.is_from_outside):
            self.table.fail_grammar(key, RequestError("poisoned_request", loss.message))
            num_explained = MAX_DEATHS
        # During a pause, sequences that have ended for their clients must not run as suspects.
        if self.pause is Pause.NONE:
            for sequence, _ in suspects.values():
                self.table.raise_ghost(sequence)
        found = self._quarantine.lose(suspects.values())
        if found is None:
            return num_explained
        culprit, num_losses = found
        self.table.fail_request(culprit, RequestError("poisoned_request", loss.message))
        return num_losses

    def lose_device(self, loss: DeviceLost) -> int:
        """Drop all plans in flight and all orders to the tier, because the device was lost.  See `PolicyBase.lose_device`."""
        if self._tier is not None:
            self._tier.lose()
            self._unpark()
        return super().lose_device(loss)

    def _forget_memory(self) -> None:
        self._reset_cache()

    def _fail_request(self, id: RequestId, error: RequestError) -> None:
        if (request := self.table.requests.get(id)) is not None:
            self.table.fail_request(request, error)

    def preempt_all(self) -> None:
        """Preempt all running sequences, which frees all KV blocks.  Results in flight still count.

        Used before the device releases its memory, and before a reset of the prefix cache.
        """
        self.table.running.preempt_all()

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Clear the prefix cache.  Returns False, and changes nothing, while a sequence holds a block.

        Args:
            reset_running: first preempt the running sequences and drop their results in flight, which are sampled again.
        """
        if reset_running:
            for sequence in self.table.running.snapshot():
                self.table.running.preempt(sequence, drop_results=True)
        return self._reset_cache()

    def _reset_cache(self) -> bool:
        if self._tier is not None and not self.table.running:
            self._tier.cancel()
            self._unpark()
        is_done = self.blocks.reset_cache()
        if is_done and self.states is not None:
            self.states.reset()
        return is_done

    # The tier on disk

    def _seek(self, sequence: Sequence) -> None:
        """Park a queued sequence while the tier fetches some of its blocks."""
        waiting = self.table.waiting
        is_queued = sequence.id in waiting.fresh or sequence.id in waiting.returning
        if is_queued and self.table.running.seek(sequence):
            waiting.park(sequence)

    def _unpark(self) -> None:
        if self._tier is not None:
            for sequence in self._tier.take_free():
                self.table.waiting.unpark_one(sequence)

    def note_tier(self, answer: TierAnswer) -> None:
        """Apply an answer of the tier.  When it lists its files for the first time, queued sequences look up their blocks."""
        if self._tier is None:
            return
        self._tier.note(answer)
        self._unpark()
        if answer.is_anew:
            for sequence in self.table.waiting.best(MAX_SOUGHT):
                self._seek(sequence)

    def clear_tier(self) -> None:
        """Remove the files of this model from the tier."""
        if self._tier is not None:
            self._tier.clear()
            self._unpark()

    def take_tier_orders(self, now: float) -> collections.abc.Sequence[TierOrder]:
        """Return the orders to the tier, to send before the next plan."""
        if self._tier is None or self.is_device_lost:
            return ()
        if self.pause is Pause.ALL:
            return self._tier.take_cancel()
        orders = self._tier.take_orders(now)
        self._unpark()
        return orders

    def take_tier_cancel(self) -> collections.abc.Sequence[TierOrder]:
        """Return the order that cancels earlier ones, if planning has taken back their blocks.  Send it before the plan."""
        if self._tier is None:
            return ()
        self._unpark()
        return self._tier.take_cancel()

    @property
    def tier_deadline_s(self) -> float | None:
        """The time at which `expire_tier` must be called, or None."""
        return None if self._tier is None else self._tier.deadline_s

    def expire_tier(self, now: float) -> None:
        """Unpark the sequences whose fetch has missed its deadline."""
        if self._tier is not None:
            self._tier.expire(now)
            self._unpark()

    def next_grammar(self) -> PrepareGrammar | None:
        """Return the next grammar for the device to prepare, or None.  During a search for a culprit, only grammars of suspects."""
        if self.is_device_lost:
            return None
        is_silent = not self.in_flight
        keys = self.table.grammar_keys(self._quarantine.requests) if self._quarantine else None
        return self.table.grammars.next_order(keys, is_silent=is_silent)

    def note_grammar(self, ready: GrammarReady) -> None:
        """Apply the device's answer to `next_grammar`.

        Requests parked for this grammar are queued, or end with the error if the device could not prepare it.
        """
        if self.table.grammars.note(ready):
            self.table.waiting.unpark(ready.key)
        else:
            self.table.fail_grammar(
                ready.key, RequestError("execution_error", f"the grammar: {ready.error}")
            )

    def take_outputs(self, answers: tuple[Promise[None], ...] = ()) -> StepTokens | None:
        """Return and clear the outputs since the last call, merged into one entry per sequence, together with `answers`.

        Merging bounds their number while the detokenizer is slow.  Returns None if there are neither.
        """
        return self.table.outputs.take(answers)

    # One scheduling pass

    def plan(self) -> StepPlan | None:
        """Make the next plan, which counts as in flight at once.  Returns None in the cases of law 6."""
        self.table.end_ghosts(self._quarantine.suspect_ids)
        if self._must_wait():
            return None
        if self.turns is not None and self.turns.has_prompts:
            self.turns.settle()
        only_returning = self.pause is Pause.NO_NEW_REQUESTS
        builder = self._planner.begin(self.in_flight)
        if self._bisection and (group := self._bisection.group()):
            if self.in_flight:
                return None
            self.table.running.schedule(builder, group)
            self._bisection.begin(builder.sequences)
            # The group has lost its blocks, so the bisection is abandoned: its sequences restart with the others.
            if not builder.sequences:
                self._bisection.suspect(())
                return self.plan()
        elif self._quarantine:
            if not self._planner.fill_with_suspects(builder, self._quarantine, self.in_flight):
                return None if self.in_flight or self._quarantine else self.plan()
        else:
            self._planner.fill(builder, self._step + 1, only_returning=only_returning)
            if not builder.sequences and not builder.encodes:
                return None
        return self._commit(builder)

    def _commit(self, builder: StepBuilder) -> StepPlan:
        self._step += 1
        has_prompts = self.turns is not None and self.turns.note_plan(builder)
        plan, record = builder.commit(self._step, self._epoch)
        if self.turns is not None:
            self.turns.estimate(plan, record, has_prompts=has_prompts)
        self.in_flight.append(record)
        return plan

    def _must_wait(self) -> bool:
        """Whether no plan may be made now, also because a suspect grammar must be prepared without other work on the device."""
        return super()._must_wait() or (not self._quarantine and self.table.grammars.needs_silence)

    # Bookkeeping

    def _undo(self, step: InFlightStep) -> list[Sequence]:
        """Roll back the sequences of a step to their last answered position.  Returns those that are still running."""
        still_running: list[Sequence] = []
        for sequence, preemption_epoch, _, _, num_sampled in step.entries:
            if sequence.state is State.FINISHED or preemption_epoch < sequence.valid_from_epoch:
                continue
            sequence.num_in_flight -= num_sampled
            if preemption_epoch == sequence.preemption_epoch:
                sequence.num_computed = sequence.num_computed_on_device
                # The device's copy of the slot may be ahead.
                sequence.is_slot_stale = True
                sequence.seen_until = 0
                if self.states is not None:
                    self.states.undo(sequence)
                if self.turns is not None:
                    self.turns.note_undone(sequence)
                still_running.append(sequence)
            elif num_sampled:
                self.table.requeue(sequence)
        return still_running


def _note_encoded(step: InFlightStep, done: StepDone) -> None:
    """Note which images the device has encoded.  The last entries of the step belong to the sequences with these images."""
    entries = step.entries[len(step.entries) - len(done.encoded) :]
    for (sequence, preemption_epoch, *_), position in zip(entries, done.encoded, strict=True):
        if preemption_epoch == sequence.preemption_epoch:
            sequence.seen_until = position
