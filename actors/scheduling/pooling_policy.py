"""Scheduling of pooling: which prompts are computed together next.  Pure: no waits, clock or channels.

Laws.
1. A request is waiting, in flight in exactly one plan, or gone.  Its end is put out once.
2. A plan holds whole prompts, at most `max_num_seqs` of them and `max_num_scheduled_tokens` tokens; a longer
   prompt runs alone.  The shortest comes first.  One of more than `PASS_TOKENS` is no more than its part of the
   requests that are open, a half where two may be in flight: clients that have the answers of one ask again while the
   other is computed.  (One text a request, 32 clients: 1.03 times the texts.)
3. The best by priority and arrival is in the next plan, so none starves; the others of the plan are the
   ones nearest to it in length among the `WINDOW` best, because equal lengths share their attention.
4. A plan that raised is run again in halves, until the request that causes it is alone and fails alone.
5. An aborted request is dropped at once; what a plan in flight computes for it is thrown away.
"""

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

import msgspec

from trouper.actors.messages.controls import Pause
from trouper.actors.messages.identifiers import RequestId, SequenceId
from trouper.actors.messages.outputs import Pooled, PooledRequest
from trouper.actors.messages.plans import PoolEntry, PoolPlan
from trouper.actors.messages.promise import Promise
from trouper.actors.messages.requests import Admit, AdmitPooling
from trouper.actors.messages.results import DeviceLost, PoolDone, StepDone
from trouper.actors.messages.stats import SchedulerStats
from trouper.actors.scheduling.snapshot import PolicySnapshot
from trouper.config.resolve import SchedulerConfig

WINDOW = 256  # sorting them by length takes 0.1 ms
PASS_TOKENS = 512  # that a device computes in one pass, so it is not worth while to part them

Order = tuple[int, float, int]  # smaller runs first; the last is unique


class InFlightPoolStep(msgspec.Struct):
    """A plan that the device has not answered, and its requests in the order of its entries."""

    plan: PoolPlan
    group: list[AdmitPooling]


class PoolingPolicy:
    """The scheduling policy of an engine that pools.

    The public attributes are the whole state; tests read them, and only the policy writes.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._is_fcfs = config.policy == "fcfs"
        self._pause = Pause.NONE
        self.unfinished: dict[RequestId, AdmitPooling] = {}  # waiting or in flight
        self.waiting: list[tuple[Order, AdmitPooling]] = []  # a heap; orders are unique
        self.retries: deque[list[AdmitPooling]] = deque()  # each is one plan
        self.in_flight: deque[InFlightPoolStep] = deque()
        self.outputs: list[PooledRequest] = []
        self._num_admitted = 0
        self._step = 0
        self._epoch = 0
        self._num_prompt_tokens = 0
        self._is_lost = False  # the device; it is being started again
        self._has_failed = False  # it is not
        self._suspects: dict[RequestId, int] = {}  # losses that it was in the step of; unfinished

    def __repr__(self) -> str:
        return f"<PoolingPolicy {len(self.unfinished)} open, {len(self.in_flight)} plans in flight>"

    @property
    def num_steps_in_flight(self) -> int:
        """Plans that the device has not answered."""
        return len(self.in_flight)

    @property
    def num_started(self) -> int:
        """Unfinished requests that `Pause.NO_NEW_REQUESTS` lets run on: those in flight, and those to be retried."""
        return sum(len(flight.group) for flight in self.in_flight) + sum(map(len, self.retries))

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
            is_device_lost=self._is_lost,
            is_device_failed=self._has_failed,
        )

    def snapshot(self) -> PolicySnapshot:
        """Describe where each unfinished request is; those to be tried again wait in front of the others."""
        unfinished = self.unfinished
        groups = [[admit.id for admit in flight.group] for flight in self.in_flight]
        retries = [admit.id for group in self.retries for admit in group]
        waiting = [*retries, *(admit.id for _, admit in sorted(self.waiting, key=_order))]
        return PolicySnapshot(
            running=tuple(id for group in groups for id in group if id in unfinished),
            waiting=tuple(id for id in waiting if id in unfinished),
            other=(),
            in_flight=tuple(
                (flight.plan.step, tuple(group))
                for flight, group in zip(self.in_flight, groups, strict=True)
            ),
            suspects=tuple(self._suspects),
            pause=self._pause,
            is_device_lost=self._is_lost,
        )

    # Events

    def admit(self, admit: Admit | AdmitPooling) -> None:
        """Queue a new request."""
        assert isinstance(admit, AdmitPooling)
        self._num_admitted += 1
        self.unfinished[admit.id] = admit
        priority, arrival = (0, 0.0) if self._is_fcfs else (-admit.priority, admit.arrival_time)
        self._push((priority, arrival, self._num_admitted), admit)

    def abort(self, id: RequestId) -> None:
        """End a request, in whatever state; unknown and finished ones are ignored."""
        self._end(id, "aborted: the request was aborted")

    def stop(self, ids: tuple[SequenceId, ...]) -> None:
        """Fail: pooling has no stop strings."""
        raise AssertionError(f"stop strings end no pooling request: {ids}")

    def apply(self, done: StepDone | PoolDone) -> None:
        """Take the results of the eldest plan in flight."""
        assert isinstance(done, PoolDone)
        flight = self._complete_step(done.step)
        for admit, array in zip(flight.group, done.arrays, strict=True):
            self._suspects.pop(admit.id, None)
            if self.unfinished.pop(admit.id, None) is not None:
                self._num_prompt_tokens += len(admit.prompt_token_ids)
                self.outputs.append(PooledRequest(admit, array))

    def fail_step(self, step: int, message: str, *, is_out_of_memory: bool = False) -> None:
        """Take the failure of the eldest plan: the device raised, or refused it because an earlier one raised.

        Out of memory is no other case: halves are smaller steps.
        """
        flight = self._complete_step(step)
        group = [admit for admit in flight.group if admit.id in self.unfinished]
        if flight.plan.epoch < self._epoch:
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
        self._is_lost = True
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
        self._has_failed = True
        for id in tuple(self._suspects):
            self._end(id, f"device_failed: {message}")

    def return_device(self) -> None:
        """The device takes plans again."""
        self._is_lost = False

    def set_pause(self, pause: Pause) -> None:
        """Set what may be planned from now on."""
        self._pause = pause

    def preempt_all(self) -> None:
        """Do nothing: no memory is kept between plans."""

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Return True: there are no prefixes to forget."""
        return True

    def take_outputs(self, answers: tuple[Promise[None], ...] = ()) -> Pooled | None:
        """Take the outputs since the last call, with `answers`; None if there are neither."""
        if not self.outputs and not answers:
            return None
        outputs, self.outputs = tuple(self.outputs), []
        return Pooled(outputs, answers)

    # One scheduling pass

    def plan(self) -> PoolPlan | None:
        """Make the next plan, which is in flight from now on; None if there is none to make now."""
        if not (self.waiting or self.retries):  # most often: this is called after each answer
            return None
        if (
            self._is_lost
            or self._pause is Pause.ALL
            or len(self.in_flight) >= self.config.max_steps_in_flight
        ):
            return None
        group = self._retry() if self.retries else []
        if not group and self._pause is not Pause.NO_NEW_REQUESTS:
            group = self._next()
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
        self.in_flight.append(InFlightPoolStep(plan, group))
        return plan

    def _retry(self) -> list[AdmitPooling]:
        while self.retries:
            if group := [admit for admit in self.retries.popleft() if admit.id in self.unfinished]:
                return group
        return []

    def _next(self) -> list[AdmitPooling]:
        """Choose the requests of the next plan, as laws 2 and 3 say."""
        window: list[tuple[Order, AdmitPooling]] = []
        while self.waiting and len(window) < WINDOW:
            entry = heappop(self.waiting)
            if entry[1].id in self.unfinished:
                window.append(entry)
        if len(window) <= 1:
            return [admit for _, admit in window]
        head = _length(window[0][1])
        window.sort(key=lambda entry: (abs(_length(entry[1]) - head), entry[0]))
        lengths = [_length(admit) for _, admit in window]
        taken = _num_fitting(lengths, self.config)
        if sum(lengths[:taken]) > PASS_TOKENS:
            taken = min(taken, -(-len(self.unfinished) // self.config.max_steps_in_flight))
        for entry in window[taken:]:
            self._push(*entry)
        return [admit for _, admit in window[:taken]]

    def _end(self, id: RequestId, error: str) -> None:
        """End a request with an error; unknown and finished ones are ignored."""
        self._suspects.pop(id, None)
        admit = self.unfinished.pop(id, None)
        if admit is not None:
            self.outputs.append(PooledRequest(admit, error=error))

    def _push(self, order: Order, admit: AdmitPooling) -> None:
        heappush(self.waiting, (order, admit))  # pyright: ignore[reportArgumentType]  # orders decide

    def _complete_step(self, step: int) -> InFlightPoolStep:
        """Remove the eldest plan in flight, which must be this one: answers come in order."""
        if not self.in_flight or self.in_flight[0].plan.step != step:
            expected = [flight.plan.step for flight in self.in_flight]
            raise RuntimeError(f"an answer to step {step}, in flight are {expected}")
        return self.in_flight.popleft()


def _order(entry: tuple[Order, AdmitPooling]) -> Order:
    return entry[0]


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
