"""Scheduling of generation: which sequences compute how many tokens next.  Pure: no waits, clock or channels.

Events go in (`admit`, `abort`, `stop`, `apply`, `fail_step`), plans (`plan`) and outputs (`take_outputs`)
come out.  An event may come at any time, whatever is in flight.

Laws:
1. *In order.*  Plans run on the device in the order in which they were made, so a request slot or a block
   freed now may be given away by the next plan: the writes of the steps in flight come first.
2. *Only computed KV is shared.*  A block is offered as a prefix, and a prompt forked, when the step
   that computed it has been answered.  So a failed step has nothing to take back but itself.
3. A result is matched with the preemption epoch of its sequence: one that ended since drops it, one that
   was preempted since still appends it, and does not start again before it has come.
4. Each sequence has exactly one finishing output, but for those the Detokenizer itself stopped.
5. *Progress.*  The best running sequence is never a victim while another runs (the best is one that has
   been evicted most often allowed, else the first in order), and alone it fits: `limit` caps a sequence
   at what all blocks together hold.  So each plan advances the best running one, or it waits for a sample
   in flight; sequences are finite, hence it ends, and the next best is the best.
   No sequence behind the head of the queue overtakes it, but a bounded number of them while its adapter must wait
   (`start_waiting`): so it starts at the latest when all that were running have ended then.  In turns (`prompt_turns.py`) the head
   is the first in the fluid order, whose times are finite, and a bounded number passes it also while it finds no room.
6. `plan()` is None only when paused, while the device is lost, when enough steps are in flight or, in turns, a long one, or when nothing is
   runnable; an answer from the device or a new event then calls it again.
"""

from trouper.actors.messages.controls import Pause
from trouper.actors.messages.outputs import Expected, SchedulerStats, StepTokens
from trouper.actors.messages.requests import (
    Admit,
    AdmitPooling,
    GrammarReady,
    PrepareGrammar,
    RequestId,
    SequenceId,
)
from trouper.actors.messages.sinks import Promise
from trouper.actors.messages.steps import DeviceLost, EntryFailure, PoolDone, StepDone, StepPlan
from trouper.actors.scheduling.culprit_search import FaultBisection, Quarantine
from trouper.actors.scheduling.first_token import expect, foretell
from trouper.actors.scheduling.prompt_turns import PromptTurns
from trouper.actors.scheduling.routing import Demand
from trouper.actors.scheduling.scheduling_policy import PolicySnapshot
from trouper.actors.scheduling.state.grammar_ledger import MAX_DEATHS
from trouper.actors.scheduling.state.kv_blocks import KVBlocks
from trouper.actors.scheduling.state.sequence import Request, Sequence, State
from trouper.actors.scheduling.state.sequence_table import SequenceTable, Shared, start_waiting
from trouper.actors.scheduling.state.step_builder import (
    InFlightStep,
    InFlightSteps,
    Lookahead,
    StepBuilder,
    take_turns,
)
from trouper.actors.scheduling.step_budget import LONG_S, TokenBudget
from trouper.actors.stages import max_chunk
from trouper.config.resolve import SchedulerConfig

FAILURES: dict[EntryFailure, str] = {
    "not_finite": "numerical_error: the logits are not finite",
    "no_valid_token": "no_valid_token: what the request allows, it also forbids",
    "grammar_error": "grammar_error: the grammar took more steps than it may at this token",
}


class Policy:
    """The scheduling policy of an engine that generates.

    `blocks`, `table` and `in_flight` are the whole state; tests read them, and only the policy writes.
    """

    def __init__(
        self, config: SchedulerConfig, blocks: KVBlocks, shared: Shared | None = None
    ) -> None:
        self.config = config
        self.blocks = blocks
        self.table = SequenceTable(config, blocks, shared)
        self.in_flight = InFlightSteps()
        self.pause = Pause.NONE
        # With one step in flight, only one stage of a pipeline works at a time.
        self._num_stages = min(config.num_stages, config.max_steps_in_flight)
        self._max_num_running = min(config.max_num_seqs, config.max_num_active_seqs)
        self._bisection = FaultBisection()
        self._quarantine = Quarantine(config.num_speculative_tokens)
        self._token_budget = TokenBudget(config.max_num_scheduled_tokens)
        self._step = 0
        self._epoch = 0
        self._num_prompt_tokens = 0
        self._lookahead = Lookahead(config.num_speculative_tokens)
        # Without turns prompts are computed in the order of arrival, in steps up to the token budget.
        self.turns: PromptTurns | None = None
        if config.max_step_ms != 0:
            self.turns = PromptTurns(config, self.table, self._max_num_running)
        self.is_device_lost = False  # it is being started again, or has failed
        self.has_device_failed = False  # it is not started again

    def __repr__(self) -> str:
        return (
            f"<Policy {len(self.table.running)} running, {self.table.num_waiting} waiting, "
            f"{len(self.in_flight)} in flight, pause={self.pause.value}, {self.blocks!r}>"
        )

    @property
    def num_steps_in_flight(self) -> int:
        """Plans that the device has not answered."""
        return len(self.in_flight)

    @property
    def num_started(self) -> int:
        """Unfinished sequences that `Pause.NO_NEW_REQUESTS` lets run on."""
        return self.table.num_started

    @property
    def is_available(self) -> bool:
        """Whether a new request would be planned: the device is there, and no search for a culprit goes first."""
        return not (self.is_device_lost or self._quarantine)

    @property
    def holds_blocks(self) -> bool:
        """Whether a block of KV memory is held."""
        return self.blocks.num_free < self.blocks.num_usable

    def state(self, id: SequenceId) -> State:
        """Return the state of a sequence; an unknown one has finished."""
        sequence = self.table.sequences.get(id)
        return State.FINISHED if sequence is None else sequence.state

    @property
    def num_tokens(self) -> int:
        """Prompt tokens computed and tokens sampled, so far."""
        return self._num_prompt_tokens + self.table.num_generation_tokens

    def statistics(self) -> SchedulerStats:
        """Describe the state in numbers."""
        table, running, blocks = self.table, self.table.running, self.blocks
        return SchedulerStats(
            num_running=len(running),
            num_waiting=table.num_waiting,
            num_deferred=table.num_deferred,
            num_steps_in_flight=len(self.in_flight),
            num_blocks_free=blocks.num_free,
            num_blocks_total=blocks.num_usable,
            kv_cache_usage=blocks.usage,
            num_steps=self._step,
            num_preemptions=running.num_preemptions,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generation_tokens=table.num_generation_tokens,
            prefix_cache_queries=running.num_queries,
            prefix_cache_hits=running.num_hits,
            recompute_cache_queries=running.num_recompute_queries,
            recompute_cache_hits=running.num_recompute_hits,
            num_drafts=self._lookahead.num_drafts,
            num_draft_tokens=self._lookahead.num_draft_tokens,
            num_accepted_tokens=self._lookahead.num_accepted_tokens,
            num_lost_tokens=running.num_lost_tokens,
            **({} if self.turns is None else self.turns.statistics()),
            is_device_lost=self.is_device_lost,
            is_device_failed=self.has_device_failed,
            is_available=self.is_available,
            adapters=None if self.config.max_loras is None else table.adapter_stats(),
        )

    @property
    def is_searching(self) -> bool:
        """Whether a culprit is looked for: of a step that raised, or of a device that was lost."""
        return bool(self._bisection or self._quarantine)

    def snapshot(self) -> PolicySnapshot:
        """Describe where each unfinished sequence is: O(n log n), for tests and debugging."""
        running, waiting, other = self.table.ids_by_place()
        return PolicySnapshot(
            running=running,
            waiting=waiting,
            other=other,
            in_flight=self.in_flight.ids(),
            suspects=(*self._bisection.suspect_ids, *self._quarantine.suspect_ids),
            pause=self.pause,
            is_device_lost=self.is_device_lost,
        )

    # Events

    def admit(self, admit: Admit | AdmitPooling) -> None:
        """Take a request in, all its n sequences together.

        One that could never run ends at once: `length` without a token when the prompt fills the context,
        `error` (`kv_cache_exhausted`) when prompt and one token do not fit into all blocks together.
        """
        self.enter(self.open_request(admit))

    def open_request(self, admit: Admit | AdmitPooling) -> Request:
        """Make a request that any replica may take in."""
        assert isinstance(admit, Admit)
        return self.table.open_request(admit)

    def demand(self, request: Request) -> Demand:
        """Describe what a request asks of a replica."""
        return request.demand(self.blocks.block_size if self.config.enable_prefix_caching else 0)

    def enter(self, request: Request, replica: int = 0, num_expected: int = 0) -> None:
        """Take in a request with its outputs.  Tokens that another replica has computed are computed again."""
        request.replica, request.num_expected = replica, num_expected
        if self.turns is not None:
            self.turns.budget.quiet_s = 0.0
        self.table.enter(request)

    def work(self) -> tuple[int, int]:
        """Count the tokens that are known and not computed, and the unfinished sequences."""
        return self.table.work()

    def evacuate(self, *, only_fresh: bool = False) -> list[Request]:
        """Give up the requests that have nothing on the device, for other replicas; those in question stay."""
        return self.table.take_out(self._quarantine.requests, only_fresh=only_fresh)

    def foretell(self, id: RequestId, elapsed_s: float) -> Expected | None:
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
        found = foretell(self.turns, sequence, self._flights_s(), elapsed_s)
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

    def _flights_s(self) -> list[float]:
        return [step.estimate_s for step in self.in_flight if not step.is_cancelled]

    def take_ratios(self) -> tuple[float, ...]:
        """Take the ratios of estimated to measured time of the steps since the last call."""
        return () if self.turns is None else self.turns.take_ratios()

    def abort(self, id: RequestId) -> None:
        """End a request, in whatever state; unknown and finished ones are ignored.

        A request that may have killed the device stays a suspect: it ends for its client, and is still tested.
        """
        self.table.abort(id, frozenset(self._quarantine.suspect_ids))

    def stop(self, ids: tuple[SequenceId, ...]) -> None:
        """Drop sequences that a stop string has ended; they have no further output."""
        suspects = self._quarantine.suspect_ids
        for id in ids:
            self.table.stop(id, is_suspect=id in suspects)

    def apply(self, done: StepDone | PoolDone) -> None:
        """Take the results of the eldest plan in flight."""
        assert isinstance(done, StepDone)
        step, table = self.in_flight.complete(done.step), self.table
        if self.turns is not None:
            self.turns.note_step(step, done.seconds)
        self._token_budget.passed()
        if self._bisection.is_testing:
            self._bisection.passed()
        prompt_logprobs = dict(done.prompt_logprobs) if done.prompt_logprobs else {}
        failed = dict(done.failed) if done.failed else {}
        logprobs, token_ids = done.logprobs, done.token_ids
        append = table.append  # looked up once, not for each entry
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
                    # Those of drafts that were right; registered when the next step is answered, if there is one.
                    num_more = len(token_ids[i]) - 1
                    sequence.num_computed += num_more
                    sequence.num_computed_on_device += num_more
        self._lookahead.note(done)

    def _land(self, sequence: Sequence, start: int, end: int) -> None:
        """Note that positions start … end - 1 are computed, moved on by drafts that were right since the plan was made."""
        if (more := sequence.num_computed_on_device - start) > 0:
            start, end = start + more, end + more
        sequence.num_computed_on_device = end
        sequence.has_landed = True
        if start < sequence.num_prompt:
            self._num_prompt_tokens += min(end, sequence.num_prompt) - start
        self.table.running.register(sequence)
        if sequence.request.deferred and end >= sequence.num_prompt:
            self.table.release_siblings(sequence.request)

    def fail_step(self, step: int, message: str, *, is_out_of_memory: bool = False) -> None:
        """Take the failure of the eldest plan: the device raised, or refused it because an earlier one raised.

        At the first such answer this step and all later ones are undone: their sequences go back to what
        is computed.  Out of memory, steps become smaller; no sequence is preempted for it, as a KV block
        that is free gives the device nothing back.  Otherwise, or if they cannot be smaller, a bisection
        looks for the culprit; when found alone it ends with `message`.
        """
        failed = self.in_flight.complete(step)
        if failed.is_cancelled:
            return
        self._epoch += 1
        suspects = self._undo(failed)
        for later in self.in_flight:
            self._undo(later)
            later.is_cancelled = True
        num_tokens = sum(end - start for _, _, start, end, _ in failed.entries)
        if is_out_of_memory and self._token_budget.shrink(num_tokens):
            return
        if not self._bisection.is_testing:
            self._bisection.suspect(suspects)
            return
        culprit = self._bisection.failed()
        if culprit is not None and culprit.state is not State.FINISHED:
            self.table.fail(culprit, f"execution_error: {message}")

    def lose_device(self, loss: DeviceLost) -> int:
        """Take the end of the device, with its KV cache and all plans in flight.

        Each running sequence is computed again as after a preemption: what has been sampled and answered stays, so no
        token is put out twice.  Among those of the eldest plan that the device had, a quarantine looks for the culprit.

        Returns:
            How many losses the culprit has cost, if it is found now; it has ended.
        """
        has_suspects = loss.step is not None and not loss.is_from_outside
        suspects = self.in_flight.in_question(self._num_stages) if has_suspects else {}
        for step in self.in_flight:
            if not step.is_cancelled:
                self._undo(step)
        self.in_flight.clear()
        self._epoch += 1
        self.is_device_lost = True
        self._bisection.suspect(())
        self.table.running.lose_all()
        self.blocks.reset_cache()
        num_explained = 0
        if key := self.table.grammars.forget(is_their_doing=not loss.is_from_outside):
            self._fail_grammar(key, f"poisoned_request: {loss.message}")
            num_explained = MAX_DEATHS
        if self.pause is Pause.NONE:  # else nothing may run that has ended
            for sequence, _ in suspects.values():
                self.table.raise_ghost(sequence)
        found = self._quarantine.lose(suspects.values())
        if found is None:
            return num_explained
        culprit, num_losses = found
        self.table.fail_request(culprit, f"poisoned_request: {loss.message}")
        return num_losses

    def fail_device(self, message: str) -> None:
        """The device, lost before, is not started again: requests in question end, so that they kill no other."""
        self.has_device_failed = True
        for id in self._quarantine.requests:
            if (request := self.table.requests.get(id)) is not None:
                self.table.fail_request(request, f"device_failed: {message}")

    def return_device(self) -> None:
        """The device takes plans again."""
        self.is_device_lost = False

    def set_pause(self, pause: Pause) -> None:
        """Set what may be planned from now on."""
        self.pause = pause

    def preempt_all(self) -> None:
        """Free all KV blocks; running sequences are recomputed later, and results in flight count."""
        self.table.running.preempt_all()

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Forget all prefixes; False, and nothing changes, while any block is held.

        `reset_running` preempts running sequences and drops their results in flight, to sample them again.
        """
        if reset_running:
            for sequence in self.table.running.snapshot():
                self.table.running.preempt(sequence, drop_results=True)
        return self.blocks.reset_cache()

    def next_grammar(self) -> PrepareGrammar | None:
        """Return a grammar that the device shall prepare; while a culprit is looked for, only one of the requests in question."""
        if self.is_device_lost:
            return None
        is_silent = not self.in_flight
        if not self._quarantine:
            return self.table.grammars.next_order(is_silent=is_silent)
        admits = [
            self.table.requests[id].admit
            for id in self._quarantine.requests
            if id in self.table.requests
        ]
        keys = {admit.grammar.key for admit in admits if admit.grammar is not None}
        return self.table.grammars.next_order(keys, is_silent=is_silent)

    def note_grammar(self, ready: GrammarReady) -> None:
        """Take a grammar that the device has prepared, or cannot."""
        if self.table.grammars.note(ready):
            self.table.waiting.unpark(ready.key)
        else:
            self._fail_grammar(ready.key, f"execution_error: the grammar: {ready.error}")

    def _fail_grammar(self, key: bytes, error: str) -> None:
        for request in list(self.table.requests.values()):
            grammar = request.admit.grammar
            if grammar is not None and grammar.key == key:
                self.table.fail_request(request, error)

    def take_outputs(self, answers: tuple[Promise[None], ...] = ()) -> StepTokens | None:
        """Take the outputs since the last call, at most one entry for each sequence, with `answers`."""
        return self.table.outputs.take(answers)

    # One scheduling pass

    def plan(self) -> StepPlan | None:
        """Make the next plan, which is in flight from now on.  Returns None under law 6."""
        self.table.end_ghosts(self._quarantine.suspect_ids)
        if self._must_wait():
            return None
        if self.turns is not None and self.turns.has_prompts:
            self.turns.settle()
        running = self.table.running
        num_competing = len(running) + len(self.table.waiting)
        builder = StepBuilder(self.config, num_competing, self._token_budget.num_tokens)
        builder.unknown = self.in_flight.unknown_tokens()
        if num_competing == 1:
            builder.max_count = min(builder.max_count, self._longest_lone_chunk())
        if self._bisection and (group := self._bisection.group()):
            if self.in_flight:
                return None
            running.schedule(builder, group)
            self._bisection.begin(builder.sequences)
            if not builder.sequences:  # the group lost its blocks: it starts again with the others
                self._bisection.suspect(())
                return self.plan()
        elif self._quarantine:
            if not self._test_suspects(builder):
                return None if self.in_flight or self._quarantine else self.plan()
        else:
            self._schedule(builder)
            if not builder.sequences:
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
        """Whether no plan may be made, whatever there is to plan."""
        return (
            self.is_device_lost
            or self.pause is Pause.ALL
            or len(self.in_flight) >= self.config.max_steps_in_flight
            or self._waits_for_answer()
            or (not self._quarantine and self.table.grammars.needs_silence)
        )

    def _waits_for_answer(self) -> bool:
        """Whether a long plan is in flight.  The next one is made after its answer, with the requests that arrive until then."""
        if self.turns is None or self._num_stages > 1:
            return False
        for step in self.in_flight:  # noqa: SIM110  # in each turn: a generator takes a microsecond
            if step.estimate_s >= LONG_S:
                return True
        return False

    def _schedule(self, builder: StepBuilder) -> None:
        """Plan for running sequences, then for waiting ones."""
        running, step, num_stages = self.table.running, self._step + 1, self._num_stages
        if self.turns is not None and self.turns.has_prompts:
            self._schedule_in_turns(builder, self.turns)
            return
        if num_stages == 1:
            builder.max_lookahead = self._lookahead.per_sequence(
                len(running), self._token_budget.num_tokens
            )
            running.schedule(builder, running.snapshot())
            if not builder.has_preempted:
                self._start_waiting(builder)
            return
        running.schedule(builder, take_turns(running.snapshot(), step, num_stages))
        if not builder.has_preempted:
            self._start_waiting(builder)
        num_before = len(running) + 1
        while not builder.sequences and len(running) < num_before:  # again if one made room
            num_before = len(running)
            running.schedule(
                builder, take_turns(running.snapshot(), step, num_stages, is_early=True)
            )

    def _schedule_in_turns(self, builder: StepBuilder, turns: PromptTurns) -> None:
        """Plan for decoding rows, then for running and waiting prompts."""
        running, step, num_stages = self.table.running, self._step + 1, self._num_stages
        rows = turns.rows()
        if num_stages == 1:
            builder.max_lookahead = self._lookahead.per_sequence(
                len(running), self._token_budget.num_tokens
            )
            turns.limit_drafts(builder, len(rows))
        else:
            rows = take_turns(rows, step, num_stages)
        only_returning = self.pause is Pause.NO_NEW_REQUESTS
        running.schedule(builder, rows)
        turns.fill(builder, only_returning=only_returning)
        num_before = len(running) + 1
        while num_stages > 1 and not builder.sequences and len(running) < num_before:
            num_before = len(running)  # again if one made room
            early = take_turns(turns.rows(), step, num_stages, is_early=True)
            running.schedule(builder, early)

    def _longest_lone_chunk(self) -> int:
        """Return the tokens that a prompt without company may take of a step: few enough to keep all stages busy."""
        budget, table = self._token_budget.num_tokens, self.table
        if self._num_stages == 1 or not self.config.enable_chunked_prefill:
            return budget
        alone = [
            *table.running.snapshot(),
            *filter(None, (table.waiting.head(only_returning=False),)),
        ]
        if len(alone) != 1:
            return budget
        return max_chunk(alone[0].num_tokens, self._num_stages, budget)

    def _test_suspects(self, builder: StepBuilder) -> bool:
        """Plan for the suspects under test alone; False if there is nothing to plan for them now."""
        running = self.table.running
        in_flight = self.in_flight.sequence_ids()
        while self._quarantine:
            group = self._quarantine.group(in_flight)
            due = [suspect.sequence for suspect in group if suspect.is_due]
            running.schedule(builder, [sequence for sequence in due if sequence.request_slot >= 0])
            for sequence in due:
                # Preempted with a sample in flight it does not wait yet: law 3.
                is_waiting = sequence.request_slot < 0 and sequence.num_in_flight == 0
                is_ready = self.table.grammars.is_ready(sequence.request.admit)
                may_start = is_waiting and is_ready and not builder.has_preempted
                if may_start and builder.budget > 0 and len(running) < self._max_num_running:
                    if not running.start(sequence, builder):
                        break
                    self.table.waiting.take(sequence)
                    if not sequence.is_ghost:
                        self.table.outputs.add_start(sequence.id)
            if builder.sequences:
                return True
            if self.in_flight or not all(
                self.table.grammars.is_ready(s.sequence.request.admit) for s in group
            ):
                return False
            self.preempt_all()  # those that have passed make room
            builder.has_preempted = False
            if not group:
                self._quarantine.advance()
        return False

    def _start_waiting(self, builder: StepBuilder) -> None:
        only_returning = self.pause is Pause.NO_NEW_REQUESTS
        start_waiting(self.table, builder, self._max_num_running, only_returning=only_returning)

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
                if self.turns is not None:
                    self.turns.note_undone(sequence)
                still_running.append(sequence)
            elif num_sampled:
                self.table.requeue(sequence)
        return still_running
