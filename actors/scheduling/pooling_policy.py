"""What a pooling engine runs next.  Pure: neither channels nor clocks nor torch.

Laws.
1. A request is waiting, in flight in exactly one plan, or gone.  Its end is told once.
2. A plan holds whole prompts, at most `max_num_seqs` of them and `max_num_scheduled_tokens` tokens; a longer
   prompt runs alone.  The shortest comes first.  One of more than `PASS_TOKENS` is no more than its part of the
   requests that are open, a half where two may be in flight: clients who have the answers of one ask again while the
   other is computed.  (One text a request, 32 clients: 1.03 times the texts.)
3. The best by priority and arrival is in the next plan, so nobody starves; the others of the plan are the
   ones nearest to it in length among the `WINDOW` best, because equal lengths share their attention.
4. A plan that raised is run again in halves, until the request that causes it is alone and fails alone.
5. Whoever is aborted is dropped at once; what a plan in flight computes for it is thrown away.
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
from trouper.actors.messages.results import PoolDone, StepDone
from trouper.actors.messages.stats import SchedulerStats
from trouper.config.args import SchedulerConfig

WINDOW = 256  # sorting them by length takes 0.1 ms
PASS_TOKENS = 512  # that a device computes in one pass, so it is not worth while to part them

Order = tuple[int, float, int]  # smaller runs first; the last is unique


class _Flight(msgspec.Struct):
    plan: PoolPlan
    group: list[AdmitPooling]


class PoolingPolicy:
    """The requests of one pooling engine: the counterpart of `Policy`, for the same Scheduler."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._is_fcfs = config.policy == "fcfs"
        self._pause = Pause.NONE
        self._open: dict[RequestId, AdmitPooling] = {}  # waiting or in flight
        self._waiting: list[tuple[Order, AdmitPooling]] = []  # a heap; orders are unique
        self._retries: deque[list[AdmitPooling]] = deque()  # each is one plan
        self._flights: deque[_Flight] = deque()
        self._news: list[PooledRequest] = []
        self._num_admitted = 0
        self._step = 0
        self._epoch = 0
        self._num_prompt_tokens = 0

    def __repr__(self) -> str:
        return f"<PoolingPolicy {len(self._open)} open, {len(self._flights)} plans in flight>"

    @property
    def num_steps_in_flight(self) -> int:
        return len(self._flights)

    @property
    def num_started(self) -> int:
        """Unfinished requests that `Pause.NO_NEW_REQUESTS` lets run on: those in flight, and those to be retried."""
        return sum(len(flight.group) for flight in self._flights) + sum(map(len, self._retries))

    @property
    def num_tokens(self) -> int:
        """Computed so far."""
        return self._num_prompt_tokens

    def statistics(self) -> SchedulerStats:
        num_running = sum(a.id in self._open for f in self._flights for a in f.group)
        return SchedulerStats(
            num_running=num_running,
            num_waiting=len(self._open) - num_running,
            num_deferred=0,
            num_steps_in_flight=len(self._flights),
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
        )

    # Events

    def admit(self, admit: Admit | AdmitPooling) -> None:
        assert isinstance(admit, AdmitPooling)
        self._num_admitted += 1
        self._open[admit.id] = admit
        priority, arrival = (0, 0.0) if self._is_fcfs else (-admit.priority, admit.arrival_time)
        self._push((priority, arrival, self._num_admitted), admit)

    def abort(self, id: RequestId) -> None:
        """End the request, in whatever state.  Unknown and finished ones are ignored."""
        admit = self._open.pop(id, None)
        if admit is not None:
            self._news.append(PooledRequest(admit, error="aborted: the request was aborted"))

    def stop(self, ids: tuple[SequenceId, ...]) -> None:
        raise AssertionError(f"stop strings end no pooling request: {ids}")

    def apply(self, done: StepDone | PoolDone) -> None:
        """The results of the eldest plan in flight."""
        assert isinstance(done, PoolDone)
        flight = self._land(done.step)
        for admit, array in zip(flight.group, done.arrays, strict=True):
            if self._open.pop(admit.id, None) is not None:
                self._num_prompt_tokens += len(admit.prompt_token_ids)
                self._news.append(PooledRequest(admit, array))

    def fail_step(self, step: int, message: str, *, is_out_of_memory: bool = False) -> None:
        """The device raised in this plan, or refused it because an earlier one of its epoch did.

        Out of memory is no other case: halves are smaller steps.
        """
        flight = self._land(step)
        group = [admit for admit in flight.group if admit.id in self._open]
        if flight.plan.epoch < self._epoch:
            self._retries.append(group)
            return
        self._epoch += 1
        if len(flight.group) > 1:  # one whose company is gone is not therefore the cause
            half = len(group) // 2
            self._retries.extend((group[:half], group[half:]))
        elif group:
            del self._open[group[0].id]
            self._news.append(PooledRequest(group[0], error=f"execution_error: {message}"))

    def set_pause(self, pause: Pause) -> None:
        self._pause = pause

    def preempt_all(self) -> None:
        """Nothing is kept between plans, so there is nothing to preempt."""

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """There is none."""
        return True

    def take_news(self, answers: tuple[Promise[None], ...] = ()) -> Pooled | None:
        """What there is to tell since the last call."""
        if not self._news and not answers:
            return None
        news, self._news = tuple(self._news), []
        return Pooled(news, answers)

    # One scheduling pass

    def plan(self) -> PoolPlan | None:
        """The next step, or None.  It counts as in flight from now on."""
        if not (self._waiting or self._retries):  # mostly: it is asked after each answer
            return None
        if self._pause is Pause.ALL or len(self._flights) >= self._config.max_steps_in_flight:
            return None
        group = self._retry() if self._retries else []
        if not group and self._pause is not Pause.NO_NEW_REQUESTS:
            group = self._next()
        if not group:
            return None
        if len(group) > 1:
            group.sort(key=_length)
        self._step += 1
        columns = tuple(
            PoolEntry(a.prompt_token_ids, a.token_type_ids, a.params.task or "", a.num_keys)
            for a in group
        )
        plan = PoolPlan(self._step, self._epoch, columns)
        self._flights.append(_Flight(plan, group))
        return plan

    def _retry(self) -> list[AdmitPooling]:
        while self._retries:
            if group := [admit for admit in self._retries.popleft() if admit.id in self._open]:
                return group
        return []

    def _next(self) -> list[AdmitPooling]:
        """Law 3."""
        window: list[tuple[Order, AdmitPooling]] = []
        while self._waiting and len(window) < WINDOW:
            entry = heappop(self._waiting)
            if entry[1].id in self._open:
                window.append(entry)
        if len(window) <= 1:
            return [admit for _, admit in window]
        head = _length(window[0][1])
        window.sort(key=lambda entry: (abs(_length(entry[1]) - head), entry[0]))
        lengths = [_length(admit) for _, admit in window]
        taken = _num_fitting(lengths, self._config)
        if sum(lengths[:taken]) > PASS_TOKENS:
            taken = min(taken, -(-len(self._open) // self._config.max_steps_in_flight))
        for entry in window[taken:]:
            self._push(*entry)
        return [admit for _, admit in window[:taken]]

    def _push(self, order: Order, admit: AdmitPooling) -> None:
        heappush(self._waiting, (order, admit))  # pyright: ignore[reportArgumentType]  # orders decide

    def _land(self, step: int) -> _Flight:
        """The eldest plan in flight, which must be this one: answers come in order."""
        if not self._flights or self._flights[0].plan.step != step:
            expected = [flight.plan.step for flight in self._flights]
            raise RuntimeError(f"an answer to step {step}, in flight are {expected}")
        return self._flights.popleft()


def _length(admit: AdmitPooling) -> int:
    return len(admit.prompt_token_ids)


def _num_fitting(lengths: Sequence[int], config: SchedulerConfig) -> int:
    """How many of these one plan takes; always the first."""
    budget, taken = config.max_num_scheduled_tokens, 0
    for length in lengths[: config.max_num_active_seqs]:
        budget -= length
        if budget < 0 and taken:
            break
        taken += 1
    return taken
