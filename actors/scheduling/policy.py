"""What runs next.  Pure and synchronous: no waits, no clock, no channels.  Source: spec 5, 6, 7.1-7.2.

Feed it events (`admit`, `abort`, `stop`, `apply`, `fail_step`), ask it for plans (`plan`) and for what there
is to tell (`take_news`).  An event may come at any time, whatever is in flight.

Laws:
1. *In order.*  Plans run on the device in the order in which they were made, so a row or a block freed
   now may be given away by the next plan: the writes of the steps in flight land first.
2. *Only what has landed is shared.*  A block is offered as a prefix, and a prompt forked, when the step
   that computed it has been answered.  So a failed step has nothing to take back but itself.
3. A result is matched with the incarnation of its sequence: one that ended since drops it, one that was
   preempted since still appends it, and does not start again before it has come.
4. Exactly one terminal news for each sequence, but for those the Detokenizer itself stopped.
5. *Progress.*  The best running sequence is never a victim while another runs (the best is who has been
   evicted most often allowed, else the first in order), and alone it fits: `limit` caps a sequence at
   what all blocks together hold.  So each plan advances the best running one, or it waits for a sample
   in flight; sequences are finite, hence it ends, and the next best is the best.
   Nobody who queues behind the head overtakes it, so it starts at the latest when all who run have ended.
6. `plan()` is None only when paused, when enough steps are in flight, or when nothing is runnable; an
   answer from the device or a new event then asks again.
"""

from collections import deque

from trouper.actors.messages.controls import Pause
from trouper.actors.messages.identifiers import RequestId, SequenceId
from trouper.actors.messages.outputs import SequenceTokens, StepTokens
from trouper.actors.messages.plans import StepPlan
from trouper.actors.messages.promise import Promise
from trouper.actors.messages.requests import Admit
from trouper.actors.messages.results import EntryFailure, StepDone, TokenLogprobs
from trouper.actors.messages.stats import SchedulerStats
from trouper.actors.scheduling.bisection import Quarantine
from trouper.actors.scheduling.kv_blocks import Blocks
from trouper.actors.scheduling.outbox import News
from trouper.actors.scheduling.running import Running
from trouper.actors.scheduling.sequences import Request, Sequence, State, open_request
from trouper.actors.scheduling.step_builder import Draft, Flight
from trouper.actors.scheduling.token_budget import Throttle
from trouper.actors.scheduling.waiting import Waiting
from trouper.config.args import SchedulerConfig
from trouper.outputs import FinishReason

FAILURES: dict[EntryFailure, str] = {
    "not_finite": "numerical_error: the logits are not finite",
    "no_valid_token": "no_valid_token: what the request allows, it also forbids",
}


class Policy:
    """The state machine of all sequences."""

    def __init__(self, config: SchedulerConfig, blocks: Blocks) -> None:
        self._config = config
        self._blocks = blocks
        self._is_fcfs = config.policy == "fcfs"
        self._num_seats = min(config.max_num_seqs, config.max_num_active_seqs)
        self._pause = Pause.NONE
        self._requests: dict[RequestId, Request] = {}
        self._sequences: dict[SequenceId, Sequence] = {}
        self._waiting = Waiting(is_fcfs=self._is_fcfs)
        self._running = Running(config, blocks, self._waiting.returning)
        self._flights: deque[Flight] = deque()
        self._quarantine = Quarantine()
        self._throttle = Throttle(config.max_num_scheduled_tokens)
        self._news = News()
        self._num_admitted = 0
        self._step = 0
        self._epoch = 0
        self._num_deferred = 0
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0

    def __repr__(self) -> str:
        return (
            f"<Policy {len(self._running)} running, {self.statistics().num_waiting} waiting, "
            f"{len(self._flights)} in flight, pause={self._pause.value}, {self._blocks!r}>"
        )

    @property
    def num_unfinished(self) -> int:
        return len(self._sequences)

    @property
    def num_steps_in_flight(self) -> int:
        return len(self._flights)

    @property
    def num_started(self) -> int:
        """Unfinished sequences that `Pause.NO_NEW_REQUESTS` lets run on."""
        # The deferred siblings are not counted; a leader that was started is, for as long as they wait.
        return self.num_unfinished - len(self._waiting.fresh) - self._num_deferred

    @property
    def running_ids(self) -> tuple[SequenceId, ...]:
        """In the order of service; for tests and people."""
        return self._running.ids

    @property
    def waiting_ids(self) -> tuple[SequenceId, ...]:
        """In the order of service; for tests and people."""
        return self._waiting.ids

    def state(self, id: SequenceId) -> State:
        sequence = self._sequences.get(id)
        return State.FINISHED if sequence is None else sequence.state

    @property
    def num_tokens(self) -> int:
        """Of prompts computed, and sampled, so far."""
        return self._num_prompt_tokens + self._num_generation_tokens

    def statistics(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=self.num_unfinished - len(self._running) - self._num_deferred,
            num_deferred=self._num_deferred,
            num_steps_in_flight=len(self._flights),
            num_blocks_free=self._blocks.num_free,
            num_blocks_total=self._blocks.num_usable,
            kv_cache_usage=self._blocks.usage,
            num_steps=self._step,
            num_preemptions=self._running.num_preemptions,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generation_tokens=self._num_generation_tokens,
            prefix_cache_queries=self._running.num_queries,
            prefix_cache_hits=self._running.num_hits,
            recompute_cache_queries=self._running.num_recompute_queries,
            recompute_cache_hits=self._running.num_recompute_hits,
        )

    # Events

    def admit(self, admit: Admit) -> None:
        """A request enters, all its n sequences together.

        One that could never run ends at once: `length` without a token when the prompt fills the context,
        `error` (`kv_cache_exhausted`) when prompt and one token do not fit into all blocks together.
        """
        num_prompt = len(admit.prompt_token_ids)
        capacity = self._blocks.num_usable * self._blocks.block_size
        self._num_admitted += 1
        request = open_request(admit, self._num_admitted, self._config, capacity)
        self._requests[admit.id] = request
        self._sequences.update((sequence.id, sequence) for sequence in request.sequences)
        self._num_deferred += len(request.deferred)
        if num_prompt == 0:
            self._end_request(request, "error", "validation_error: the prompt has no token")
        elif num_prompt >= self._config.max_model_len:
            self._end_request(request, "length")
        elif num_prompt >= capacity:
            self._end_request(
                request, "error", f"kv_cache_exhausted: {num_prompt} + 1 tokens in {capacity} slots"
            )
        else:
            self._waiting.fresh.push(request.sequences[0])

    def abort(self, id: RequestId) -> None:
        """End the request, in whatever state.  Unknown and finished ones are ignored."""
        request = self._requests.get(id)
        if request is not None:
            self._end_request(request, "abort")

    def stop(self, ids: tuple[SequenceId, ...]) -> None:
        """A stop string ended these: they are dropped, and there is no more to tell about them."""
        for id in ids:
            self._news.withdraw(id)
            sequence = self._sequences.get(id)
            if sequence is not None:
                self._finish(sequence)

    def apply(self, done: StepDone) -> None:
        """The results of the eldest plan in flight."""
        flight = self._land(done.step)
        self._throttle.passed()
        if self._quarantine.is_testing:
            self._quarantine.passed()
        prompt_logprobs = dict(done.prompt_logprobs) if done.prompt_logprobs else {}
        failed = dict(done.failed) if done.failed else {}
        logprobs, token_ids = done.logprobs, done.token_ids
        for i, (sequence, incarnation, start, end, num_sampled) in enumerate(flight.columns):
            if sequence.state is State.FINISHED or incarnation < sequence.valid_from:
                continue
            if i in failed:
                self._blocks.forget(sequence.blocks)
                self._tell_end(sequence, "error", FAILURES[failed[i]])
                continue
            if incarnation == sequence.incarnation:
                sequence.num_landed = end
                if start < sequence.num_prompt:
                    self._num_prompt_tokens += min(end, sequence.num_prompt) - start
                self._running.register(sequence)
                if sequence.request.deferred and end >= sequence.num_prompt:
                    self._release_siblings(sequence.request)
            if i in prompt_logprobs:
                sequence.take_prompt_logprobs(start, prompt_logprobs[i])
            if num_sampled:
                sequence.num_in_flight -= num_sampled
                self._append(sequence, token_ids[i], logprobs[i] if logprobs else ())

    def fail_step(self, step: int, message: str, *, is_out_of_memory: bool = False) -> None:
        """The device raised in this step, or refused it because an earlier one did.

        At the first such answer this step and all later ones are undone: their sequences go back to what
        has landed.  Out of memory, steps become smaller; nobody is preempted for it, as a KV block that is
        free gives the device nothing back.  Otherwise, or if they cannot be smaller, the quarantine looks
        for the culprit; when found alone it ends with `message`.
        """
        flight = self._land(step)
        if flight.is_void:
            return
        self._epoch += 1
        suspects = self._undo(flight)
        for later in self._flights:
            self._undo(later)
            later.is_void = True
        num_tokens = sum(end - start for _, _, start, end, _ in flight.columns)
        if is_out_of_memory and self._throttle.shrink(num_tokens):
            return
        if not self._quarantine.is_testing:
            self._quarantine.accuse(suspects)
            return
        culprit = self._quarantine.failed()
        if culprit is not None and culprit.state is not State.FINISHED:
            self._blocks.forget(culprit.blocks)
            self._tell_end(culprit, "error", f"execution_error: {message}")

    def set_pause(self, pause: Pause) -> None:
        self._pause = pause

    def preempt_all(self) -> None:
        """The KV cache goes away: who runs is recomputed later.  Results in flight still count."""
        for sequence in self._running.snapshot():
            self._running.preempt(sequence)

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Forget all prefixes; False, and nothing changes, while any block is held.

        `reset_running` preempts who runs and drops its results in flight; they are sampled again.
        """
        if reset_running:
            for sequence in self._running.snapshot():
                self._running.preempt(sequence, drop_results=True)
        return self._blocks.reset_cache()

    def take_news(self, answers: tuple[Promise[None], ...] = ()) -> StepTokens | None:
        """What there is to tell since the last call: at most one entry for each sequence."""
        news = self._news.take()
        if news is None and not answers:
            return None
        news = news or StepTokens(())
        return StepTokens(news.sequences, news.started, answers)

    # One scheduling pass

    def plan(self) -> StepPlan | None:
        """The next step, or None; see law 6.  It counts as in flight from now on."""
        config, flights = self._config, self._flights
        if self._pause is Pause.ALL or len(flights) >= config.max_steps_in_flight:
            return None
        num_competing = len(self._running) + len(self._waiting)
        draft = Draft(config, num_competing, self._throttle.budget)
        if self._quarantine and (group := self._quarantine.group()):
            if flights:
                return None
            self._plan_running(draft, group)
            self._quarantine.begin(draft.sequences)
            if not draft.sequences:  # the group lost its blocks: it starts again with the others
                self._quarantine.accuse(())
                return self.plan()
        else:
            self._plan_running(draft, self._running.snapshot())
            if not draft.has_preempted:
                self._plan_waiting(draft)
            if not draft.sequences:
                return None
        self._step += 1
        plan, flight = draft.commit(self._step, self._epoch)
        flights.append(flight)
        return plan

    def _plan_running(self, draft: Draft, sequences: list[Sequence]) -> None:
        block_size, max_count = self._blocks.block_size, draft.max_count
        for sequence in sequences:
            if draft.budget <= 0:
                break
            known = sequence.num_tokens + sequence.num_in_flight
            if sequence.row < 0 or known >= sequence.limit:
                continue  # preempted a moment ago; or sure to end with what is in flight
            count = min(known - sequence.num_computed, draft.budget, max_count)
            end = sequence.num_computed + count
            if end <= len(sequence.blocks) * block_size or self._running.grow(sequence, end, draft):
                draft.add(sequence, count)
            elif self._is_fcfs:
                break  # it was the last, and the victim itself

    def _plan_waiting(self, draft: Draft) -> None:
        while draft.budget > 0 and len(self._running) < self._num_seats:
            sequence = self._waiting.head(only_returning=self._pause is Pause.NO_NEW_REQUESTS)
            if sequence is None or not self._running.start(sequence, draft):
                break
            self._waiting.discard(sequence)
            self._news.tell_start(sequence.id)

    # Bookkeeping

    def _land(self, step: int) -> Flight:
        """The eldest plan in flight, which must be this one: answers come in order."""
        if not self._flights or self._flights[0].step != step:
            expected = [flight.step for flight in self._flights]
            raise RuntimeError(f"an answer to step {step}, in flight are {expected}")
        return self._flights.popleft()

    def _undo(self, flight: Flight) -> list[Sequence]:
        """Its sequences go back to what has landed; those that still run."""
        still_running: list[Sequence] = []
        for sequence, incarnation, _, _, num_sampled in flight.columns:
            if sequence.state is State.FINISHED or incarnation < sequence.valid_from:
                continue
            sequence.num_in_flight -= num_sampled
            if incarnation == sequence.incarnation:
                sequence.num_computed = sequence.num_landed
                sequence.is_row_stale = True  # the device's copy of the row may be ahead
                still_running.append(sequence)
            elif num_sampled:
                self._requeue(sequence)
        return still_running

    def _append(
        self, sequence: Sequence, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]
    ) -> None:
        """Commit sampled tokens; those behind one that ends the sequence are dropped."""
        end, num_taken = None, 0
        for token in token_ids:
            end = sequence.append(token)
            num_taken += 1
            if end is not None:
                break
        self._num_generation_tokens += num_taken
        self._news.tell_tokens(sequence, token_ids[:num_taken], end, logprobs[:num_taken])
        if end is not None:
            self._finish(sequence)
        elif sequence.row < 0:
            self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        """A preempted sequence waits for its turn when its last result in flight has come."""
        if sequence.num_in_flight == 0:
            self._waiting.returning.push(sequence)

    def _tell_end(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        count = sequence.num_preemptions
        self._news.tell(SequenceTokens(sequence.id, (), reason, error=error, num_preemptions=count))
        self._finish(sequence)

    def _end_request(
        self, request: Request, reason: FinishReason, error: str | None = None
    ) -> None:
        self._num_deferred -= len(request.deferred)
        request.deferred.clear()
        for sequence in tuple(request.sequences):
            if sequence.state is not State.FINISHED:
                self._tell_end(sequence, reason, error)

    def _finish(self, sequence: Sequence) -> None:
        """Nothing of it stays but what the prefix cache keeps."""
        request = sequence.request
        if sequence.row >= 0:
            self._running.leave(sequence)
        else:
            self._waiting.discard(sequence)
        sequence.state = State.FINISHED
        del self._sequences[sequence.id]
        if sequence.index == 0:
            self._release_siblings(request)
        request.num_unfinished -= 1
        if request.num_unfinished == 0:
            del self._requests[request.admit.id]
            request.sequences.clear()  # no cycle outlives it

    def _release_siblings(self, request: Request) -> None:
        """The leader's prompt has landed, or the leader is gone: they queue like everybody."""
        self._num_deferred -= len(request.deferred)
        for sibling in request.deferred:
            self._waiting.returning.push(sibling)
        request.deferred.clear()
