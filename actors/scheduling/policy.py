"""Decide which sequences compute how many tokens in the next step of an engine that generates.

The policy is a pure state machine without waits, clock or channels, so tests and the simulation can play any order of events.
Events enter (`admit`, `abort`, `stop`, `apply`, `fail_step`); plans (`plan`) and outputs (`take_outputs`) come out.
An event may come at any time, whatever is in flight.

Laws:
1. *In order.*  The device runs plans in the order in which they were made, so the next plan may reuse a request slot or a KV block
   that is freed now: the steps in flight write to it first.
2. *Only computed KV is shared.*  A block is offered as a prefix, and a prompt is forked, only after the device has answered the step
   that computed it.  So a failed step takes nothing back but itself.
3. *Preemption epochs.*  A result belongs to the preemption epoch in which it was planned.  A sequence that ended meanwhile drops it.
   A sequence that was preempted meanwhile appends it, and restarts only after receiving it.
4. *One end.*  Each sequence has exactly one finishing output, except those that the detokenizer has stopped itself.
5. *Progress.*  The best running sequence is never preempted while another one runs.  (The best is a sequence that was preempted the
   allowed number of times, else the first in the order.)  It always fits when it runs without others, because `limit` is at most what
   all blocks hold together.  So each plan advances the best running sequence or waits for its sample in flight.  Sequences are
   finite: it ends, and the next one becomes the best.
   While the head of the queue waits for an adapter slot, a bounded number of sequences may overtake it; otherwise none does
   (`start_waiting`).  So it starts at the latest when all sequences that were running at that time have ended.  With step times (`prompt_turns.py`) the
   head is the first in the fluid order, whose times are finite, and a bounded number passes it also while it finds no room.
6. *No idling.*  `plan()` returns None only while paused, while the device is lost, while enough steps (or one long step) are in flight,
   or if nothing is runnable.  An answer from the device or a new event calls it again.
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
    """The scheduling policy of an engine that generates.

    `blocks`, `table` and `in_flight` are the whole state.  Tests read them; only the policy writes them.
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
            states: the rows of recurrent states on its device; None if the model keeps only keys and values.
            tier: the blocks on the disk of its device; None without a tier.
        """
        super().__init__(config, InFlightSteps())
        self.blocks = blocks
        self._tier = tier
        self.states = states
        if states is not None:
            blocks.on_forget = states.rows.drop
        self.table = SequenceTable(config, blocks, shared, states, tier)
        # Without turns, prompts are computed in the order of arrival, in steps up to the token budget.
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
        """Count the unfinished sequences that may go on under `Pause.NO_NEW_REQUESTS`.

        A pause of that kind has taken full effect when it is 0. Fresh requests may remain queued.
        """
        return self.table.num_started

    @property
    def holds_blocks(self) -> bool:
        """Whether a sequence holds a block of KV memory.

        Prefixes can be forgotten only while no sequence uses them.
        """
        return len(self.table.running) > 0

    def state(self, id: SequenceId) -> State:
        """Return the state of a sequence; an unknown one has finished.

        Tests and simulations use it; the policy itself has the sequence at hand.
        """
        sequence = self.table.sequences.get(id)
        return State.FINISHED if sequence is None else sequence.state

    @property
    def num_tokens(self) -> int:
        """Count the prompt tokens computed and the tokens sampled so far.

        It only grows, so the difference of two readings is the work between them.
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
        """Whether a search for a culprit is on: the cause of a step that raised, or of a lost device."""
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
        """Make a request that any replica may take in.

        It has its number from then on, which keeps the order of arrival over all replicas.
        """
        assert isinstance(admit, Admit)
        return self.table.open_request(admit)

    def demand(self, request: Request) -> Demand:
        """Describe what a request asks of a replica.

        With prefix caching it contains the hashes of the prompt's blocks.
        """
        return request.demand(self.blocks.block_size if self.config.enable_prefix_caching else 0)

    def enter(self, request: Request, replica: int = 0, num_expected: int = 0) -> None:
        """Add a request, together with its outputs if another replica has begun it.

        Tokens that the other replica has computed are computed again, because KV blocks are not moved.
        """
        request.replica, request.num_expected = replica, num_expected
        if self.turns is not None:
            self.turns.budget.quiet_s = 0.0
        self.table.enter(request)
        if self._tier is not None:
            self._seek(request.sequences[0])

    def work(self) -> tuple[int, int]:
        """Count the known uncomputed tokens, and the unfinished sequences.

        The router compares replicas by these numbers.
        """
        return self.table.work()

    def evacuate(self, *, only_fresh: bool = False) -> list[Request]:
        """Give up the requests without state on the device, so that other replicas can continue them.

        Suspects of a search stay, because they might kill the next device, too.
        """
        return self.table.take_out(self._quarantine.requests, only_fresh=only_fresh)

    def predict_first_token(self, id: RequestId, elapsed_s: float) -> Expected | None:
        """Predict the first token of a request without one.  Returns None before the first fit, and when nothing is planned now.

        Args:
            elapsed_s: seconds since the eldest plan in flight became the eldest.
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
        """Estimate the seconds until the first token of a request that entered now.  Returns None before the first fit, and when nothing is planned now.

        Args:
            num_cached: tokens of its prompt that the prefix cache should have.
            elapsed_s: seconds since the eldest plan in flight became the eldest.
        """
        turns, leader = self.turns, request.sequences[0]
        if turns is None or not self.is_available or self.pause is not Pause.NONE:
            return None
        turns.settle()
        return expect(turns, leader, num_cached, self._flights_s(), elapsed_s)

    def abort(self, id: RequestId) -> None:
        """End a request, in whatever state; unknown and finished ones are ignored.

        A request that may have killed the device stays a suspect: it ends for its client, and is still tested.
        """
        self.table.abort(id, frozenset(self._quarantine.suspect_ids))

    def stop(self, ids: tuple[SequenceId, ...]) -> None:
        """Drop sequences that a stop string has ended; they have no further output.

        Tokens computed behind the stop string are dropped, and the blocks become free.
        """
        suspects = self._quarantine.suspect_ids
        for id in ids:
            self.table.stop(id, is_suspect=id in suspects)

    def apply(self, done: StepDone | PoolDone) -> None:
        """Take the results of the eldest plan in flight.

        Outputs are collected until `take_outputs`; ended sequences give up their blocks.
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
        append = table.append  # looked up once, not for each entry
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
                    # Those of drafts that were right.
                    num_more = len(token_ids[i]) - 1
                    sequence.num_computed += num_more
                    sequence.num_computed_on_device += num_more
                    # They are registered when the next step is answered, if there is one.  With windows it may need their blocks.
                    if num_more > 0 and has_windows and sequence.request_slot >= 0:
                        table.running.register(sequence)
        self._planner.lookahead.note(done)
        _note_encoded(step, done)

    def _note_speed(self, step: InFlightStep, seconds: float) -> None:
        """Learn from the time of a step."""
        if self.turns is not None:
            self.turns.note_step(step, seconds)
        if self._tier is not None:
            num_tokens = sum([end - start for _, _, start, end, _ in step.entries])
            self._tier.note_computed(num_tokens, seconds)

    def _land(self, sequence: Sequence, start: int, end: int) -> None:
        """Note that positions start … end - 1 are computed, moved on by drafts that were right since the plan was made."""
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
        """Do nothing: `_blame` has taken the sequences of a cancelled plan back."""

    def _blame(self, failed: InFlightStep, message: str, *, is_out_of_memory: bool) -> None:
        """Take this step and all later ones back, so that their sequences continue at the last computed position.

        When the device is out of memory, later steps become smaller.  Preempting a sequence would not help: a free KV block
        gives the device no memory back.  In all other cases, and if steps cannot become smaller, a bisection looks for the
        culprit.  The culprit ends with `message` when it fails in a step without other sequences.

        Recurrent states cannot be computed a second time in place, as keys can.  So the failed step's sequences begin again, and
        the search goes by their positions.
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
            torn: sequences of the failed step; their states may contain half of it.
            undone: sequences of later steps, which did not run.  If a state was to be restored for one, it was not, and its row may
                belong to another sequence by now.
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
        """Preempt each running sequence, and search for the culprit in the eldest plan.

        Sampled tokens of answered steps stay, so no token is put out twice. Whether cached prefixes stay is known when the device
        returns; until then nothing is planned.
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
        if self.pause is Pause.NONE:  # else no ended sequence may run
            for sequence, _ in suspects.values():
                self.table.raise_ghost(sequence)
        found = self._quarantine.lose(suspects.values())
        if found is None:
            return num_explained
        culprit, num_losses = found
        self.table.fail_request(culprit, RequestError("poisoned_request", loss.message))
        return num_losses

    def lose_device(self, loss: DeviceLost) -> int:
        """Take the end of the device, with all plans in flight and all orders to the tier."""
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
        """Free all KV blocks; running sequences are recomputed later, and results in flight count.

        Used before the device releases its memory, and for resetting the prefix cache.
        """
        self.table.running.preempt_all()

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Forget all prefixes; False, and nothing changes, while any block is held.

        `reset_running` preempts running sequences and drops their results in flight, to sample them again.
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
        """Park a queued sequence if the tier fetches some of its blocks."""
        waiting = self.table.waiting
        is_queued = sequence.id in waiting.fresh or sequence.id in waiting.returning
        if is_queued and self.table.running.seek(sequence):
            waiting.park(sequence)

    def _unpark(self) -> None:
        if self._tier is not None:
            for sequence in self._tier.take_free():
                self.table.waiting.unpark_one(sequence)

    def note_tier(self, answer: TierAnswer) -> None:
        """Take an answer of the tier.  When it has found its files, waiting sequences look for their blocks."""
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
        """Return the order to cancel earlier ones, which planning has made necessary."""
        if self._tier is None:
            return ()
        self._unpark()
        return self._tier.take_cancel()

    @property
    def tier_deadline_s(self) -> float | None:
        """The time at which `expire_tier` must be called, or None."""
        return None if self._tier is None else self._tier.deadline_s

    def expire_tier(self, now: float) -> None:
        """Let the sequences go whose fetch takes too long."""
        if self._tier is not None:
            self._tier.expire(now)
            self._unpark()

    def next_grammar(self) -> PrepareGrammar | None:
        """Return a grammar that the device shall prepare; while a culprit is looked for, only one of the requests in question."""
        if self.is_device_lost:
            return None
        is_silent = not self.in_flight
        keys = self.table.grammar_keys(self._quarantine.requests) if self._quarantine else None
        return self.table.grammars.next_order(keys, is_silent=is_silent)

    def note_grammar(self, ready: GrammarReady) -> None:
        """Take a grammar that the device has prepared, or cannot.

        Requests that wait for it are queued again, or end with the error. Other requests are not affected.
        """
        if self.table.grammars.note(ready):
            self.table.waiting.unpark(ready.key)
        else:
            self.table.fail_grammar(
                ready.key, RequestError("execution_error", f"the grammar: {ready.error}")
            )

    def take_outputs(self, answers: tuple[Promise[None], ...] = ()) -> StepTokens | None:
        """Take the outputs since the last call, at most one entry for each sequence, with `answers`.

        Merging bounds their number when the detokenizer is slow.
        """
        return self.table.outputs.take(answers)

    # One scheduling pass

    def plan(self) -> StepPlan | None:
        """Make the next plan; it is in flight from now on.  Returns None in the cases of law 6."""
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
            if not builder.sequences:  # the group lost its blocks: it starts again with the others
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
        """Whether no plan may be made, whatever is queued: also while a grammar is tried on a silent device."""
        return super()._must_wait() or (not self._quarantine and self.table.grammars.needs_silence)

    # Bookkeeping

    def _undo(self, step: InFlightStep) -> list[Sequence]:
        """Take its sequences back to what is computed on the device; return those that still run."""
        still_running: list[Sequence] = []
        for sequence, preemption_epoch, _, _, num_sampled in step.entries:
            if sequence.state is State.FINISHED or preemption_epoch < sequence.valid_from_epoch:
                continue
            sequence.num_in_flight -= num_sampled
            if preemption_epoch == sequence.preemption_epoch:
                sequence.num_computed = sequence.num_computed_on_device
                sequence.is_slot_stale = True  # the device's copy of the slot may be ahead
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
    """Note which images the device has encoded.  The last entries of the step are those of the sequences that see them."""
    entries = step.entries[len(step.entries) - len(done.encoded) :]
    for (sequence, preemption_epoch, *_), position in zip(entries, done.encoded, strict=True):
        if preemption_epoch == sequence.preemption_epoch:
            sequence.seen_until = position
