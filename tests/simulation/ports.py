"""What surrounds the engine in a simulation: threads without threads, and a device under observation."""

import hashlib
import random
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import anyio
import trio

from trouper.actors.executor.device import DeviceEvent
from trouper.actors.messages.requests import GrammarReady, PrepareGrammar, SequenceId
from trouper.actors.messages.steps import StepDone, StepFailed, StepPlan, TierAnswer
from trouper.actors.scheduling.step_time import StepWork

from .scenario import STEP_S, Scenario
from .simulated_device import Conditions, SimulatedDevice, StepError


class InjectedError(RuntimeError):
    """Raised on purpose."""


class DeviceCrashError(RuntimeError):
    """The device is gone."""


class TracedRun:
    """Draw the dice of one run from its seed, and record its events, so that two runs can be compared.

    Args:
        show: prints each event.
    """

    def __init__(self, seed: int, show: Callable[..., None] | None) -> None:
        self._seed, self._show = seed, show
        self._trace = hashlib.blake2b(digest_size=8)

    def _dice(self, port: str) -> random.Random:
        return random.Random(f"{self._seed}:run:{port}")

    def record(self, *event: object) -> None:
        self._trace.update(repr((anyio.current_time(), event)).encode())
        if self._show is not None:
            self._show(f"{anyio.current_time():8.4f}", *event)

    @property
    def digest(self) -> str:
        return self._trace.hexdigest()


class SimThreads:
    """`Threads` in virtual time: a call happens at its beginning, at its end, or in between.

    Like a worker thread it cannot be cancelled once it has begun: the awaiter stays until it is done.
    """

    def __init__(self, dice: random.Random, limit: int, delay_s: float) -> None:
        self._dice = dice
        self._delay_s = delay_s
        self._limiter = trio.CapacityLimiter(limit)
        self.num_begun = self.num_ended = 0

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        await trio.lowlevel.checkpoint_if_cancelled()
        async with self._limiter:
            return await self.run_at_once(function, *args)

    async def run_at_once(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a call for which the caller has a thread."""
        with anyio.CancelScope(shield=True):
            self.num_begun += 1
            before = self._delay_s * self._dice.random()
            after = (self._delay_s - before) * self._dice.random()
            try:
                await anyio.sleep(before)
                result = function(*args)
                await anyio.sleep(after)
            finally:
                self.num_ended += 1
        return result


class Trouble(Conditions):
    """The weather of one run.  `owners` says whose a sequence is: (client, length of its prompt)."""

    def __init__(
        self, dice: random.Random, scenario: Scenario, owners: Mapping[SequenceId, tuple[int, int]]
    ) -> None:
        super().__init__(STEP_S)
        self._dice = dice
        self._weather = scenario.weather
        self._scenario = scenario
        self._owners = owners
        self.failed_alone: set[SequenceId] = set()
        self.not_finite: dict[
            SequenceId, int
        ] = {}  # and the position of the token that could not be
        self.num_errors = 0
        self.has_crashed = False

    def duration_s(self, plan: StepPlan) -> float:
        is_slow = self._dice.random() < self._weather.slow_step_rate
        step_s = self.step_s
        if (coefficients := getattr(self._scenario, "coefficients", None)) is not None:
            work = StepWork.of(plan.num_scheduled_tokens, plan.num_computed_tokens)
            step_s = sum(a * b for a, b in zip(coefficients, (1, *work), strict=True))
        return step_s * (self._dice.choice((3, 10)) if is_slow else 1)

    def call_s(self, method: str) -> float:
        if self._dice.random() < self._weather.call_error_rate:
            raise InjectedError(method)
        return self.step_s * self._dice.choice((0.0, 1.0, 5.0))

    def prepare_s(self, order: PrepareGrammar) -> float:
        return self.step_s * (0.0, 0.5, 3.0, 20.0)[order.grammar.key[0] % 4]

    def error(self, plan: StepPlan, sequences: tuple[SequenceId, ...]) -> StepError | None:
        weather = self._weather
        if weather.crash_at_step is not None and plan.step >= weather.crash_at_step:
            self.has_crashed = True
            raise DeviceCrashError(f"in step {plan.step}")
        is_poisoned = any(self._owners[id][0] in weather.poison for id in sequences)
        if not is_poisoned and self._dice.random() >= weather.step_error_rate:
            return None
        self.num_errors += 1
        # With recurrent states, the search goes by requests.
        has_states = getattr(self._scenario, "num_snapshots", 0) > 0
        named = {self._owners[id][0] if has_states else id for id in sequences}
        if len(named) == 1:
            self.failed_alone.update(sequences)
        return StepError("poisoned" if is_poisoned else "a passing error", self._dice.randrange(4))

    def num_right(self, sequence: SequenceId, num_drafts: int) -> int:
        if (drafters := self._scenario.drafters) != "mixed":
            return num_drafts if drafters == "true" else 0
        return self._dice.choice((0, num_drafts, self._dice.randint(0, num_drafts)))

    def is_finite(self, sequence: SequenceId, position: int) -> bool:
        client, num_prompt = self._owners[sequence]
        if (client, position - num_prompt) in self._weather.not_finite:
            self.not_finite.setdefault(sequence, position)
            return False
        return True


class Watched:
    """What a run wants to know of either device."""

    _queue: deque[Any]
    _is_closed: bool
    record: Callable[..., None] = lambda *event: None
    is_up = True  # it takes plans

    @property
    def num_steps_out(self) -> int:
        return len(self._queue)

    @property
    def is_closed(self) -> bool:
        return self._is_closed


class WatchedDevice(Watched, SimulatedDevice):
    """Notes when each token was ready, and that nothing comes after the end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ready: dict[
            tuple[int, int], float
        ] = {}  # (sequence, position) -> when it was answered
        self.sampled: dict[SequenceId, list[int]] = {}

    async def receive(self) -> DeviceEvent:
        answer = await super().receive()
        if isinstance(answer, GrammarReady):
            self.record("prepared", answer.key[:4])
        elif isinstance(answer, TierAnswer):
            self.record("tier", answer.number, answer.num_done, answer.is_anew)
        elif isinstance(answer, StepFailed):
            self.record("failed", answer.step)
        else:
            self.record("done", answer.step, answer.token_ids, answer.failed)
        return answer

    def _run(self, plan: StepPlan) -> StepDone | StepFailed:
        answer = super()._run(plan)
        if isinstance(answer, StepDone):
            now = anyio.current_time()
            for i, slot in enumerate(plan.request_slots):
                if answer.token_ids[i]:
                    mine = self._rows[slot]
                    end = mine.end - len(answer.token_ids[i]) + 1
                    self.ready[mine.sequence, end] = now
                    self.sampled[mine.sequence] = mine.token_ids[mine.num_prompt :]
        return answer
