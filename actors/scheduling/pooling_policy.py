"""Scheduling of pooling: which prompts are computed together next.  Pure: no waits, clock or channels.

Laws.
1. A request is waiting, in flight in exactly one plan, or gone.  Its end is put out once.
2. A plan holds whole prompts, at most `max_num_seqs` of them and `max_num_scheduled_tokens` tokens; a longer
   prompt runs alone.  Unless `max_step_ms` is 0, it also has no more of them than `PoolingTime` has seconds for, and no plan is
   made while a long one is in flight.  The shortest comes first.  One of more than `PASS_TOKENS` is no more than its part of the
   requests that are open, a half where two may be in flight: clients that have the answers of one ask again while the
   other is computed.  (One text a request, 32 clients: 1.03 times the texts.)
3. The best by priority and arrival is in the next plan, so none starves; the others of the plan are the
   ones nearest to it in length among the `WINDOW` best, because equal lengths share their attention.
   In turns (`max_step_ms` is not 0) the best is the first in the order of the `Fluid`, so a query does not wait for all the documents
   that came before it, and a key with many texts is one key.
4. A plan that raised is run again in halves, until the request that causes it is alone and fails alone.
5. An aborted request is dropped at once; what a plan in flight computes for it is thrown away.
6. What another replica had begun goes first, as what is run again does.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import chain, count, islice
from typing import NamedTuple

import msgspec

from trouper.actors.messages.controls import Pause
from trouper.actors.messages.outputs import Expected, Pooled, PooledRequest, SchedulerStats
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
from trouper.actors.scheduling.routing import Demand
from trouper.actors.scheduling.scheduling_policy import PolicySnapshot
from trouper.actors.scheduling.state.fluid import GRAIN, Fluid
from trouper.actors.scheduling.state.step_builder import InFlight
from trouper.actors.scheduling.step_budget import PoolingTime
from trouper.actors.scheduling.step_time import StepWork
from trouper.config.resolve import SchedulerConfig

WINDOW = 256  # sorting them by length takes 0.1 ms
PASS_TOKENS = 512  # that a device computes in one pass, so it is not worth while to part them

Order = tuple[int, float, int]  # smaller runs first; the last is unique


class QueuedText(NamedTuple):
    """A request in its place in line: compared by its order alone, which is unique."""

    order: Order
    admit: AdmitPooling
    has_begun: bool = False  # a device had it, and was lost


class SharedPooling:
    """Keeps what the replicas of a model have in common: outputs, and the numbers of requests."""

    def __init__(self) -> None:
        self.outputs: list[PooledRequest] = []
        self.numbers: Iterator[int] = count(1)


class InFlightPoolStep(msgspec.Struct):
    """A plan that the device has not answered, and its requests in the order of its entries."""

    step: int
    epoch: int
    group: list[AdmitPooling]
    work: StepWork
    estimate_s: float = 0.0  # 0 while step times are unknown


class PoolingPolicy:
    """The scheduling policy of an engine that pools.

    The public attributes are the whole state; tests read them, and only the policy writes.
    """

    def __init__(self, config: SchedulerConfig, shared: SharedPooling | None = None) -> None:
        self.config = config
        self._is_fcfs = config.policy == "fcfs"
        self._pause = Pause.NONE
        self.unfinished: dict[RequestId, QueuedText] = {}  # waiting or in flight
        self._num_open_tokens = 0  # of these
        self.waiting: list[QueuedText] = []  # a heap, as the next
        self.returning: list[QueuedText] = []  # begun elsewhere
        # The order of the waiting ones.  Without it they are served in the order of their arrival.
        self.fluid = None if config.max_step_ms == 0 or self._is_fcfs else Fluid()
        # Without it a step may take any time.
        self.time: PoolingTime | None = None
        if config.max_step_ms != 0:
            num_stages = min(config.num_stages, config.max_steps_in_flight)
            self.time = PoolingTime(config.max_step_ms, has_one_stage=num_stages == 1)
        self.retries: deque[list[AdmitPooling]] = deque()  # each is one plan
        self.in_flight: InFlight[InFlightPoolStep] = InFlight()
        self._shared = shared or SharedPooling()
        self.outputs = self._shared.outputs
        self._step = 0
        self._epoch = 0
        self._num_prompt_tokens = 0
        self.is_device_lost = False  # it is being started again, or has failed
        self.has_device_failed = False  # it is not started again
        self._suspects: dict[RequestId, int] = {}  # losses that it was in the step of; unfinished

    def __repr__(self) -> str:
        return f"<PoolingPolicy {len(self.unfinished)} open, {len(self.in_flight)} plans in flight>"

    @property
    def num_steps_in_flight(self) -> int:
        """Plans that the device has not answered."""
        return len(self.in_flight)

    @property
    def num_started(self) -> int:
        """Unfinished requests that `Pause.NO_NEW_REQUESTS` lets run on: in flight, to be retried, or begun elsewhere."""
        num_returning = sum(request.admit.id in self.unfinished for request in self.returning)
        num_in_flight = sum(len(flight.group) for flight in self.in_flight)
        return num_in_flight + sum(map(len, self.retries)) + num_returning

    @property
    def is_available(self) -> bool:
        """Whether a new request is welcome: the device is there, and no search for a culprit goes on."""
        return not (self.is_device_lost or self._suspects)

    @property
    def holds_blocks(self) -> bool:
        """False: no memory is kept between plans."""
        return False

    @property
    def num_tokens(self) -> int:
        """Prompt tokens computed so far."""
        return self._num_prompt_tokens

    def statistics(self) -> SchedulerStats:
        """Describe the state in numbers."""
        num_running = sum(a.id in self.unfinished for f in self.in_flight for a in f.group)
        return SchedulerStats(
            num_running=num_running,
            num_waiting=len(self.unfinished) - num_running,
            num_deferred=0,
            num_steps_in_flight=len(self.in_flight),
            num_blocks_free=0,
            num_blocks_total=0,
            kv_cache_usage=0.0,
            num_steps=self._step,
            num_preemptions=0,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generation_tokens=0,
            prefix_cache_queries=0,
            prefix_cache_hits=0,
            recompute_cache_queries=0,
            recompute_cache_hits=0,
            step_prompt_budget_s=0.0 if self.time is None else self.time.budget.last_s,
            num_overdue_tokens=0 if self.fluid is None else self.fluid.num_overdue_tokens,
            is_device_lost=self.is_device_lost,
            is_device_failed=self.has_device_failed,
            is_available=self.is_available,
        )

    def snapshot(self) -> PolicySnapshot:
        """Describe where each unfinished request is; those to be tried again wait in front of the others."""
        unfinished = self.unfinished
        groups = [[admit.id for admit in flight.group] for flight in self.in_flight]
        retries = [admit.id for group in self.retries for admit in group]
        in_line = chain(sorted(self.returning), sorted(self.waiting))
        waiting = [*retries, *(request.admit.id for request in in_line)]
        return PolicySnapshot(
            running=tuple(id for group in groups for id in group if id in unfinished),
            waiting=tuple(id for id in waiting if id in unfinished),
            other=(),
            in_flight=tuple(
                (flight.step, tuple(group))
                for flight, group in zip(self.in_flight, groups, strict=True)
            ),
            suspects=tuple(self._suspects),
            pause=self._pause,
            is_device_lost=self.is_device_lost,
        )

    # Events

    def admit(self, admit: Admit | AdmitPooling) -> None:
        """Queue a new request."""
        self.enter(self.open_request(admit))

    def open_request(self, admit: Admit | AdmitPooling) -> QueuedText:
        """Make a request that any replica may take in."""
        assert isinstance(admit, AdmitPooling)
        priority, arrival = (0, 0.0) if self._is_fcfs else (-admit.priority, admit.arrival_time)
        return QueuedText((priority, arrival, next(self._shared.numbers)), admit)

    def demand(self, request: QueuedText) -> Demand:
        """Describe what a request asks of a replica: there is no prefix that one may have."""
        admit = request.admit
        return Demand(len(admit.prompt_token_ids), 1, admit.data_parallel_rank)

    def enter(self, request: QueuedText, replica: int = 0, num_expected: int = 0) -> None:
        """Take a request in; what another replica has computed of it is computed again."""
        self.unfinished[request.admit.id] = request
        self._num_open_tokens += _length(request.admit)
        if self.time is not None:
            self.time.budget.quiet_s = 0.0
        heappush(self.returning if request.has_begun else self.waiting, request)
        if self.fluid is not None and not request.has_begun:
            length = _length(request.admit)
            order = (*request.order, 0)
            self.fluid.enter(
                _job_id(request.admit), request.admit.key, order, length, max(length, GRAIN)
            )

    def evacuate(self, *, only_fresh: bool = False) -> list[QueuedText]:
        """Give up the requests that no plan in flight has, for other replicas; those in question stay."""
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
        """Count the tokens that are not computed, and the unfinished requests."""
        return self._num_open_tokens, len(self.unfinished)

    def foretell(self, id: RequestId, elapsed_s: float) -> Expected | None:
        """Return None: a text has one result and no first token."""
        return None

    def expect(self, request: QueuedText, num_cached: int, elapsed_s: float) -> float | None:
        """Estimate the seconds until the result of a text that entered now.  Returns None before the first fit, and when nothing is planned now."""
        fluid, time = self.fluid, self.time
        is_open = self.is_available and self._pause is Pause.NONE
        if fluid is None or time is None or not is_open or len(fluid.open) > WINDOW:
            return None
        length, admit = _length(request.admit), request.admit
        ahead = fluid.ahead_of(admit.key, (*request.order, 0), max(length, GRAIN))
        lengths = [length, *(job.num_tokens for job in ahead)]
        flights_s = [flight.estimate_s for flight in self.in_flight]
        return time.expect(lengths, flights_s, elapsed_s)

    def take_ratios(self) -> tuple[float, ...]:
        """Take the ratios of estimated to measured time of the steps since the last call."""
        return () if self.time is None else self.time.take_ratios()

    def abort(self, id: RequestId) -> None:
        """End a request, in whatever state; unknown and finished ones are ignored."""
        self._end(id, "aborted: the request was aborted")

    def stop(self, ids: tuple[SequenceId, ...]) -> None:
        """Fail: pooling has no stop strings."""
        raise AssertionError(f"stop strings end no pooling request: {ids}")

    def apply(self, done: StepDone | PoolDone) -> None:
        """Take the results of the eldest plan in flight."""
        assert isinstance(done, PoolDone)
        flight = self.in_flight.complete(done.step)
        if self.time is not None:
            self.time.note_step(flight.work, flight.estimate_s, done.seconds)
        for admit, array in zip(flight.group, done.arrays, strict=True):
            self._suspects.pop(admit.id, None)
            if self._take(admit.id) is not None:
                self._num_prompt_tokens += len(admit.prompt_token_ids)
                self.outputs.append(PooledRequest(admit, array))

    def fail_step(self, step: int, message: str, *, is_out_of_memory: bool = False) -> None:
        """Take the failure of the eldest plan: the device raised, or refused it because an earlier one raised.

        Out of memory is no other case: halves are smaller steps.
        """
        flight = self.in_flight.complete(step)
        group = [admit for admit in flight.group if admit.id in self.unfinished]
        if flight.epoch < self._epoch:
            self.retries.append(group)
            return
        self._epoch += 1
        if len(flight.group) > 1:  # one whose company is gone is not therefore the cause
            half = len(group) // 2
            self.retries.extend((group[:half], group[half:]))
        elif group:
            self._end(group[0].id, f"execution_error: {message}")

    def lose_device(self, loss: DeviceLost) -> int:
        """Take the end of the device, with all plans in flight.

        The eldest plan is what it ran: that one is run again in halves. A request ends if it was alone in it and had
        been in such a plan before.
        """
        self.is_device_lost = True
        self._epoch += 1
        groups = [
            [admit for admit in flight.group if admit.id in self.unfinished]
            for flight in self.in_flight
        ]
        was_alone = bool(self.in_flight) and len(self.in_flight[0].group) == 1
        if loss.is_from_outside or loss.step is None:
            self.in_flight.clear()
            self.retries.extend(groups)
            return 0
        suspects = groups[0] if groups else []
        self.in_flight.clear()
        self.retries.extend(groups[1:])
        if was_alone and suspects and suspects[0].id in self._suspects:
            num_losses = self._suspects[suspects[0].id] + 1
            self._end(suspects[0].id, f"poisoned_request: {loss.message}")
            return num_losses
        for admit in suspects:
            self._suspects[admit.id] = self._suspects.get(admit.id, 0) + 1
        half = len(suspects) // 2
        self.retries.extend((suspects[:half], suspects[half:]))
        return 0

    def fail_device(self, message: str) -> None:
        """The device, lost before, is not started again: requests in question end, so that they kill no other."""
        self.has_device_failed = True
        for id in tuple(self._suspects):
            self._end(id, f"device_failed: {message}")

    def return_device(self) -> None:
        """The device takes plans again."""
        self.is_device_lost = False

    def set_pause(self, pause: Pause) -> None:
        """Set what may be planned from now on."""
        self._pause = pause

    def preempt_all(self) -> None:
        """Do nothing: no memory is kept between plans."""

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Return True: there are no prefixes to forget."""
        return True

    def next_grammar(self) -> PrepareGrammar | None:
        """Return None: nothing that is pooled has a grammar."""
        return None

    def note_grammar(self, ready: GrammarReady) -> None:
        """Do nothing: there was no order."""

    def take_outputs(self, answers: tuple[Promise[None], ...] = ()) -> Pooled | None:
        """Take the outputs since the last call, with `answers`; None if there are neither."""
        if not self.outputs and not answers:
            return None
        outputs = tuple(self.outputs)
        self.outputs.clear()
        return Pooled(outputs, answers)

    # One scheduling pass

    def plan(self) -> PoolPlan | None:
        """Make the next plan, which is in flight from now on; None if there is none to make now."""
        # Most often: this is called after each answer.
        if not (self.waiting or self.retries or self.returning):
            return None
        if (
            self.is_device_lost
            or self._pause is Pause.ALL
            or len(self.in_flight) >= self.config.max_steps_in_flight
            or self._waits_for_answer()
        ):
            return None
        group = self._retry() if self.retries else []
        if not group and self.returning:
            group = self._next(self.returning)
        if not group and self._pause is not Pause.NO_NEW_REQUESTS:
            group = self._next(self.waiting) if self.fluid is None else self._in_turns(self.fluid)
        if not group:
            return None
        if len(group) > 1:
            group.sort(key=_length)
        self._step += 1
        entries = tuple(
            PoolEntry(a.prompt_token_ids, a.token_type_ids, a.params.task or "", a.num_keys)
            for a in group
        )
        plan = PoolPlan(self._step, self._epoch, entries)
        lengths = [_length(admit) for admit in group]
        work = StepWork.of_texts(lengths)
        estimate_s = 0.0 if self.time is None else self.time.estimate_s(work)
        self.in_flight.append(InFlightPoolStep(plan.step, plan.epoch, group, work, estimate_s))
        return plan

    def _waits_for_answer(self) -> bool:
        time = self.time
        return time is not None and any(time.is_long(each.estimate_s) for each in self.in_flight)

    def _retry(self) -> list[AdmitPooling]:
        while self.retries:
            if group := [admit for admit in self.retries.popleft() if admit.id in self.unfinished]:
                return group
        return []

    def _next(self, line: list[QueuedText]) -> list[AdmitPooling]:
        """Choose the requests of the next plan, as laws 2 and 3 say."""
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
        """Choose the texts of the next plan among those whose turn it is, as laws 2 and 3 say."""
        # The open jobs are the waiting texts: what is planned is no more in there, and what ends leaves.
        jobs = islice(fluid.order(), WINDOW)
        window = [self.unfinished[RequestId(job.id)] for job in jobs]
        group = [request.admit for request in window[: self._num_taken(window)]]
        fluid.plan({_job_id(admit): _length(admit) for admit in group})
        left = self.unfinished.keys() - {admit.id for admit in group}
        self.waiting = [request for request in self.waiting if request.admit.id in left]
        return group

    def _num_taken(self, window: list[QueuedText]) -> int:
        """Sort a window by likeness to its first, and count how many of it the next plan takes."""
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

    def _end(self, id: RequestId, error: str) -> None:
        """End a request with an error; unknown and finished ones are ignored."""
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
    """Count how many of these one plan takes; always the first."""
    budget, taken = config.max_num_scheduled_tokens, 0
    for length in lengths[: config.max_num_active_seqs]:
        budget -= length
        if budget < 0 and taken:
            break
        taken += 1
    return taken
