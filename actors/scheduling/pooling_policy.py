"""Decide which texts are computed together in the next step of an engine that pools.

Pooling computes each text once and as a whole, without a KV cache, so this policy is a queue of texts and the plans in flight.
Like the policy of generation it is a pure state machine.

Laws:
1. A request waits, or is in exactly one plan in flight, or has ended.  Its end is put out once.
2. A plan contains whole texts: at most `max_num_seqs` texts and `max_num_scheduled_tokens` tokens; a longer text gets a plan of its
   own.  Unless `max_step_ms` is 0, a plan also contains only the texts for which `PoolingTime` has seconds, and no plan is made while
   a long one is in flight.  The entries are sorted by length.  A plan of more than `PASS_TOKENS` takes only its share of the open
   requests, for example one half if two plans may be in flight: then clients with answers of one plan send new requests while the
   other plan runs.  (Measured with 32 clients and one text a request: 1.03 times the texts.)
3. The best text is in the next plan, so none starves.  The best is the first in the order of the `Fluid`, so a query does not wait for
   all documents in front of it, and many texts of one client count as one client.  Without step times the best is the first by
   priority and arrival.  The other texts of the plan are those of the most similar length among the `WINDOW` best, because texts of
   equal length share their attention.
4. A plan that raised is run again in halves, until the culprit fails in a plan of its own.
5. An aborted request is dropped at once, and its result in flight is ignored.
6. Texts that another replica has begun, and texts to be run again, go first.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import chain, count, islice
from typing import Any, NamedTuple

from trouper.actors.messages.controls import Pause
from trouper.actors.messages.outputs import Expected, Pooled, PooledRequest
from trouper.actors.messages.requests import (
    Admit,
    AdmitPooling,
    GrammarReady,
    PrepareGrammar,
    RequestId,
    SequenceId,
)
from trouper.actors.messages.sinks import Promise
from trouper.actors.messages.steps import DeviceLost, PoolDone, PoolEntry, PoolPlan, StepDone
from trouper.actors.scheduling.policy_base import PolicyBase
from trouper.actors.scheduling.routing import Demand
from trouper.actors.scheduling.state.fluid import GRAIN, Fluid
from trouper.actors.scheduling.state.step_builder import InFlight, InFlightPlan
from trouper.actors.scheduling.step_time import LONG_S, PoolingTime, StepWork
from trouper.config.engine_config import SchedulerConfig
from trouper.outputs import RequestError

# Sorting this many texts by length takes 0.1 ms.
WINDOW = 256
# A device computes this many tokens in one pass, so smaller plans are not divided.
PASS_TOKENS = 512

# Negative priority, arrival time and a unique number.  The smaller runs first.
Order = tuple[int, float, int]


class QueuedText(NamedTuple):
    """A queued request.  Comparisons use only its unique order.

    A tuple compares fast, and the heap compares entries often.
    """

    order: Order
    admit: AdmitPooling
    # It was on a lost device.
    has_begun: bool = False


class SharedPooling:
    """Keep the outputs and the numbering of requests, which all replicas of a model share.

    A request that moves to another replica keeps its place in the order, and its result appears in the common list.
    """

    def __init__(self) -> None:
        self.outputs: list[PooledRequest] = []
        self.numbers: Iterator[int] = count(1)


class InFlightPoolStep(InFlightPlan, eq=False, kw_only=True):
    """A plan of an engine that pools: its requests in the order of the entries.

    If the device is lost, they are computed again one by one or by halves.
    """

    group: list[AdmitPooling]
    work: StepWork

    @property
    def ids(self) -> tuple[RequestId, ...]:
        """List its requests in the order of the entries."""
        return tuple(admit.id for admit in self.group)


class PoolingPolicy(PolicyBase[InFlightPoolStep, QueuedText]):
    """The scheduling policy of an engine that pools.

    The public attributes are the whole state.  Tests read them; only the policy writes them.
    """

    def __init__(self, config: SchedulerConfig, shared: SharedPooling | None = None) -> None:
        super().__init__(config, InFlight())
        self._is_fcfs = config.policy == "fcfs"
        # Waiting or in flight, and the number of their tokens.
        self.unfinished: dict[RequestId, QueuedText] = {}
        self._num_open_tokens = 0
        # Two heaps: new requests, and requests that another replica has begun.
        self.waiting: list[QueuedText] = []
        self.returning: list[QueuedText] = []
        # The order of the waiting texts.  Without it they are served in the order of their arrival.
        self.fluid = None if config.max_step_ms == 0 or self._is_fcfs else Fluid()
        # Without it a step may take any time.
        self.time = None if config.max_step_ms == 0 else PoolingTime(config.max_step_ms)
        self.timing = self.time
        # Each group is one plan.
        self.retries: deque[list[AdmitPooling]] = deque()
        self._shared = shared or SharedPooling()
        self.outputs = self._shared.outputs
        # Unfinished requests in the step of a loss, and the number of these losses.
        self._suspects: dict[RequestId, int] = {}

    def __repr__(self) -> str:
        return f"<PoolingPolicy {len(self.unfinished)} open, {len(self.in_flight)} plans in flight>"

    @property
    def num_started(self) -> int:
        """Count the unfinished requests that may go on under `Pause.NO_NEW_REQUESTS`: in flight, to be retried, or begun elsewhere."""
        num_returning = sum(request.admit.id in self.unfinished for request in self.returning)
        num_in_flight = sum(len(flight.group) for flight in self.in_flight)
        return num_in_flight + sum(map(len, self.retries)) + num_returning

    @property
    def holds_blocks(self) -> bool:
        """Return False: pooling keeps no memory between plans.

        Each text is computed in one step, so nothing of it remains on the device. So a reset of the cache never
        waits.
        """
        return False

    @property
    def _has_suspects(self) -> bool:
        return bool(self._suspects)

    @property
    def _requests_in_question(self) -> tuple[RequestId, ...]:
        return tuple(self._suspects)

    @property
    def _suspect_ids(self) -> tuple[RequestId, ...]:
        return tuple(self._suspects)

    def _counts(self) -> dict[str, Any]:
        num_running = sum(a.id in self.unfinished for f in self.in_flight for a in f.group)
        return {
            "num_running": num_running,
            "num_waiting": len(self.unfinished) - num_running,
            "num_overdue_tokens": 0 if self.fluid is None else self.fluid.num_overdue_tokens,
        }

    def _ids_by_state(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return the requests in flight, then the waiting ones: requests to be retried are in front of all others."""
        running = (id for flight in self.in_flight for id in flight.ids)
        retries = (admit.id for group in self.retries for admit in group)
        queued = chain(sorted(self.returning), sorted(self.waiting))
        waiting = chain(retries, (request.admit.id for request in queued))
        is_open = self.unfinished.__contains__
        return tuple(filter(is_open, running)), tuple(filter(is_open, waiting)), ()

    # Events

    def open_request(self, admit: Admit | AdmitPooling) -> QueuedText:
        """Make a request that any replica may take in."""
        assert isinstance(admit, AdmitPooling)
        priority, arrival = (
            (0, 0.0) if self._is_fcfs else (-admit.options.priority, admit.arrival_time)
        )
        return QueuedText((priority, arrival, next(self._shared.numbers)), admit)

    def demand(self, request: QueuedText) -> Demand:
        """Describe the work of a request for the choice of a replica.  No cache has a prefix of it.

        Replicas are therefore chosen by their remaining work only.
        """
        admit = request.admit
        return Demand(len(admit.prompt_token_ids), 1, admit.options.data_parallel_rank)

    def enter(self, request: QueuedText, replica: int = 0, num_expected: int = 0) -> None:
        """Queue a request.  If another replica has begun it, it is computed again.

        Its tokens count as work of this replica until it ends.
        """
        self.unfinished[request.admit.id] = request
        self._num_open_tokens += _length(request.admit)
        if self.time is not None:
            self.time.budget.quiet_s = 0.0
        heappush(self.returning if request.has_begun else self.waiting, request)
        if self.fluid is not None and not request.has_begun:
            length = _length(request.admit)
            order = (*request.order, 0)
            self.fluid.enter(
                _job_id(request.admit), request.admit.options.key, order, length, max(length, GRAIN)
            )

    def evacuate(self, *, only_fresh: bool = False) -> list[QueuedText]:
        """Remove and return the requests outside of plans in flight, so that other replicas can compute them.

        Suspects stay, because they might kill the next device, too.
        """
        given, self.waiting = self.waiting, []
        if not only_fresh:
            given += self.returning
            kept: deque[list[AdmitPooling]] = deque()
            for group in self.retries:
                kept.append([admit for admit in group if admit.id in self._suspects])
                given += [
                    self.unfinished[admit.id]._replace(has_begun=True)
                    for admit in group
                    if admit.id in self.unfinished and admit.id not in self._suspects
                ]
            self.returning, self.retries = [], deque(filter(None, kept))
        return sorted(request for request in given if self._take(request.admit.id))

    def work(self) -> tuple[int, int]:
        """Count the tokens and the requests without a result.

        The router compares replicas by these numbers.
        """
        return self._num_open_tokens, len(self.unfinished)

    def predict_first_token(self, id: RequestId, elapsed_s: float) -> Expected | None:
        """Return None, because a text has one result and no first token."""
        return None

    def expect(self, request: QueuedText, num_cached: int, elapsed_s: float) -> float | None:
        """Estimate the seconds until the result of a text that entered now.  Returns None before the first fit, and when nothing is planned now."""
        fluid, time = self.fluid, self.time
        is_open = self.is_available and self.pause is Pause.NONE
        if fluid is None or time is None or not is_open or len(fluid.open) > WINDOW:
            return None
        length, admit = _length(request.admit), request.admit
        ahead = fluid.ahead_of(admit.options.key, (*request.order, 0), max(length, GRAIN))
        lengths = [length, *(job.num_tokens for job in ahead)]
        return time.expect(lengths, self._flights_s(), elapsed_s)

    def abort(self, id: RequestId) -> None:
        """End a request in any state.  Unknown and finished requests are ignored.

        A request in flight is still computed, and its result is dropped.
        """
        self._end(id, RequestError("aborted", "the request was aborted"))

    def stop(self, ids: tuple[SequenceId, ...]) -> None:
        """Raise AssertionError, because pooling has no stop strings."""
        raise AssertionError(f"stop strings end no pooling request: {ids}")

    def apply(self, done: StepDone | PoolDone) -> None:
        """Take the results of the eldest plan in flight.

        Results of aborted requests are ignored.  The measured time improves later estimates.
        """
        assert isinstance(done, PoolDone)
        flight = self.in_flight.complete(done.step)
        if self.time is not None:
            self.time.note_step(flight.work, flight.estimate_s, done.seconds)
        for admit, array in zip(flight.group, done.arrays, strict=True):
            self._suspects.pop(admit.id, None)
            if self._take(admit.id) is not None:
                self._num_prompt_tokens += len(admit.prompt_token_ids)
                self.outputs.append(PooledRequest(admit, array))

    def _note_refused(self, plan: InFlightPoolStep) -> None:
        """Run a cancelled plan again as it was."""
        self.retries.append(self._open_of(plan))

    def _blame(self, failed: InFlightPoolStep, message: str, *, is_out_of_memory: bool) -> None:
        """Run the requests of a step that raised again in halves.  One that raised without others ends.

        It is the same when the device was out of memory: halves need less of it.
        """
        group = self._open_of(failed)
        # A request is not the cause only because the others of its step have ended meanwhile.
        if len(failed.group) > 1:
            half = len(group) // 2
            self.retries.extend((group[:half], group[half:]))
        elif group:
            self._end(group[0].id, RequestError("execution_error", message))

    def _lose_plans(
        self, plans: Sequence[InFlightPoolStep], loss: DeviceLost, *, has_suspects: bool
    ) -> int:
        """Run all plans again, the eldest in halves, because its requests are suspects.

        A request ends if it was the only one in the eldest plan and was in the eldest plan of an earlier loss, too.
        """
        groups = [self._open_of(plan) for plan in plans]
        if not has_suspects:
            self.retries.extend(groups)
            return 0
        suspects = groups[0] if groups else []
        self.retries.extend(groups[1:])
        was_alone = bool(plans) and len(plans[0].group) == 1
        if was_alone and suspects and suspects[0].id in self._suspects:
            num_losses = self._suspects[suspects[0].id] + 1
            self._end(suspects[0].id, RequestError("poisoned_request", loss.message))
            return num_losses
        for admit in suspects:
            self._suspects[admit.id] = self._suspects.get(admit.id, 0) + 1
        half = len(suspects) // 2
        self.retries.extend((suspects[:half], suspects[half:]))
        return 0

    def _fail_request(self, id: RequestId, error: RequestError) -> None:
        self._end(id, error)

    def preempt_all(self) -> None:
        """Do nothing, because pooling keeps no memory between plans."""

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Return True, because there are no prefixes to forget."""
        return True

    def next_grammar(self) -> PrepareGrammar | None:
        """Return None, because pooling has no grammars."""
        return None

    def note_grammar(self, ready: GrammarReady) -> None:
        """Do nothing, because no grammar was ordered."""

    def take_outputs(self, answers: tuple[Promise[None], ...] = ()) -> Pooled | None:
        """Take the outputs since the last call, with `answers`.  Returns None if there are neither.

        Each output contains its request, because the pooler keeps no table.
        """
        if not self.outputs and not answers:
            return None
        outputs = tuple(self.outputs)
        self.outputs.clear()
        return Pooled(outputs, answers)

    # One scheduling pass

    def plan(self) -> PoolPlan | None:
        """Make the next plan; it is in flight from now on.  Returns None if there is no plan to make now."""
        # The most frequent case, because `plan` is called after each answer.
        if not (self.waiting or self.retries or self.returning):
            return None
        if self._must_wait():
            return None
        group = self._retry() if self.retries else []
        if not group and self.returning:
            group = self._next(self.returning)
        if not group and self.pause is not Pause.NO_NEW_REQUESTS:
            group = self._next(self.waiting) if self.fluid is None else self._in_turns(self.fluid)
        if not group:
            return None
        if len(group) > 1:
            group.sort(key=_length)
        self._step += 1
        entries = tuple(
            PoolEntry(
                a.prompt_token_ids, a.token_type_ids, a.params.task or "", a.num_keys, a.media
            )
            for a in group
        )
        plan = PoolPlan(self._step, self._epoch, entries)
        lengths = [_length(admit) for admit in group]
        work = StepWork.of_texts(lengths)
        estimate_s = 0.0 if self.time is None else self.time.estimate_s(work)
        self.in_flight.append(
            InFlightPoolStep(
                step=plan.step,
                estimate_s=estimate_s,
                is_long=estimate_s >= LONG_S,
                group=group,
                work=work,
            )
        )
        return plan

    def _open_of(self, plan: InFlightPoolStep) -> list[AdmitPooling]:
        """Return the unfinished requests of a plan."""
        return [admit for admit in plan.group if admit.id in self.unfinished]

    def _retry(self) -> list[AdmitPooling]:
        while self.retries:
            if group := [admit for admit in self.retries.popleft() if admit.id in self.unfinished]:
                return group
        return []

    def _next(self, line: list[QueuedText]) -> list[AdmitPooling]:
        """Choose the requests of the next plan from a heap, by laws 2 and 3."""
        window: list[QueuedText] = []
        while line and len(window) < WINDOW:
            request = heappop(line)
            if request.admit.id in self.unfinished:
                window.append(request)
        taken = self._num_taken(window)
        for request in window[taken:]:
            heappush(line, request)
        return [request.admit for request in window[:taken]]

    def _in_turns(self, fluid: Fluid) -> list[AdmitPooling]:
        """Choose the texts of the next plan in the fluid order, by laws 2 and 3."""
        # The open jobs are exactly the waiting texts: planned and ended ones have left.
        jobs = islice(fluid.order(), WINDOW)
        window = [self.unfinished[RequestId(job.id)] for job in jobs]
        group = [request.admit for request in window[: self._num_taken(window)]]
        fluid.plan({_job_id(admit): _length(admit) for admit in group})
        left = self.unfinished.keys() - {admit.id for admit in group}
        self.waiting = [request for request in self.waiting if request.admit.id in left]
        return group

    def _num_taken(self, window: list[QueuedText]) -> int:
        """Sort a window by its difference in length from the first text, and count how many texts the next plan takes."""
        if len(window) <= 1:
            return len(window)
        head = _length(window[0].admit)
        places = {request.admit.id: place for place, request in enumerate(window)}
        window.sort(key=lambda each: (abs(_length(each.admit) - head), places[each.admit.id]))
        lengths = [_length(request.admit) for request in window]
        taken = _num_fitting(lengths, self.config)
        if sum(lengths[:taken]) > PASS_TOKENS:
            taken = min(taken, -(-len(self.unfinished) // self.config.max_steps_in_flight))
        return taken if self.time is None else self.time.count_fitting(lengths[:taken])

    def _end(self, id: RequestId, error: RequestError) -> None:
        """End a request with an error.  Unknown and finished requests are ignored."""
        self._suspects.pop(id, None)
        if (request := self._take(id)) is not None:
            self.outputs.append(PooledRequest(request.admit, error=error))

    def _take(self, id: RequestId) -> QueuedText | None:
        """Remove an unfinished request.  Returns None for any other."""
        request = self.unfinished.pop(id, None)
        if request is not None:
            self._num_open_tokens -= _length(request.admit)
            if self.fluid is not None:
                self.fluid.leave(_job_id(request.admit))
        return request


def _job_id(admit: AdmitPooling) -> SequenceId:
    return SequenceId(admit.id)


def _length(admit: AdmitPooling) -> int:
    return len(admit.prompt_token_ids)


def _num_fitting(lengths: Sequence[int], config: SchedulerConfig) -> int:
    """Count how many of these texts fit into one plan.  The first one always does."""
    budget, taken = config.max_num_scheduled_tokens, 0
    for length in lengths[: config.max_num_active_seqs]:
        budget -= length
        if budget < 0 and taken:
            break
        taken += 1
    return taken
