"""Run requests through the real scheduling policy on a device in virtual time.

A model of a machine determines the duration of each step, with noise. Minutes of load are simulated in a second, and other work
on this machine does not affect the figures.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import msgspec

from trouper.actors.messages.outputs import StepTokens
from trouper.actors.messages.requests import Admit, RequestId, RequestOptions, SequenceId
from trouper.actors.messages.steps import StepDone, StepPlan
from trouper.actors.scheduling.policy import Policy
from trouper.actors.scheduling.replicas import Replicas
from trouper.actors.scheduling.state.kv_blocks import KVBlocks
from trouper.actors.scheduling.state.sequence import Request
from trouper.actors.scheduling.state.sequence_table import Shared
from trouper.actors.scheduling.step_time import StepTimes, StepWork
from trouper.config.engine_config import SchedulerConfig
from trouper.params import RequestOutputKind, SamplingParams

BLOCK_SIZE = 16
# Enough blocks for every workload, because memory is not studied here.
NUM_BLOCKS = 200_000
# Seconds from the result of a step to the start of the next one, if its plan was not already queued.
ROUND_TRIP_S = 0.0005
# Number of steps from which the model of step times is trained.
NUM_LEARNT = 32
TOKEN = 7


class VirtualMachine(msgspec.Struct, frozen=True):
    """A model of a device: the coefficients of a step's duration, as in `StepTimes`, and the token budget of a step.

    It is exact; the run adds noise.
    """

    name: str
    coefficients: tuple[float, float, float, float, float, float]
    step_tokens: int

    def seconds(self, work: StepWork) -> float:
        """Return the duration of a step in seconds, without noise."""
        base, chunk, token, row, pair, context = self.coefficients
        has_chunk, num_tokens, num_rows, num_pairs, num_context = work
        return (
            base + chunk * has_chunk + token * num_tokens + row * num_rows + pair * num_pairs
        ) + context * num_context

    def alone_s(self, num_tokens: int) -> float:
        """Return the time to the first token of a prompt on an idle machine, in steps of the token budget.

        Slowdowns are ratios to this time.
        """
        starts = range(0, num_tokens, self.step_tokens)
        counts = [min(self.step_tokens, num_tokens - start) for start in starts]
        works = (
            # Even a prompt of one token counts as a chunk of a prompt, not as a decoding sequence.
            StepWork(1, count, 0, count * (start + count / 2), 0)
            for count, start in zip(counts, starts, strict=True)
        )
        return sum(self.seconds(work) for work in works)


MACHINES = {
    # As measured on two cores: a model of 1 M parameters, and SmolLM2-135M in Q4_1.  Then a model of 7 B on a CPU and on a GPU.
    "cpu-1m": VirtualMachine("cpu-1m", (0.0001, 0.0027, 11e-6, 0.2e-3, 13e-9, 80e-9), 1024),
    "cpu-135m": VirtualMachine("cpu-135m", (0.004, 0.024, 0.0008, 0.001, 0.2e-6, 0.65e-6), 1024),
    "cpu-7b": VirtualMachine("cpu-7b", (0.150, 0.050, 0.018, 0.004, 1.0e-6, 1.0e-6), 1024),
    "gpu-7b": VirtualMachine("gpu-7b", (0.008, 0.001, 36e-6, 25e-6, 1.7e-9, 40e-9), 2048),
}


class VirtualClient(msgspec.Struct):
    """One request and its measurements; times are virtual seconds."""

    arrival_s: float
    num_prompt: int
    num_output: int
    kind: str = ""
    key: str = ""
    priority: int = 0
    is_stream: bool = True
    # The prompt's token ids, or empty if only their number matters.
    prompt: tuple[int, ...] = ()
    tokens_s: list[float] = []
    # The predicted time to its first token, or 0 without a prediction.
    expected_s: float = 0.0
    # Whether `expected_s` is only a lower bound.
    is_least: bool = False

    @property
    def first_token_s(self) -> float:
        """The time from the request's arrival to its first token."""
        return self.tokens_s[0] - self.arrival_s

    @property
    def gaps_s(self) -> list[float]:
        """The times between the request's tokens."""
        return [
            after - before for before, after in zip(self.tokens_s, self.tokens_s[1:], strict=False)
        ]


class Played(msgspec.Struct):
    """The result of a run."""

    total_s: float
    clients: Sequence[VirtualClient]
    # For each step its estimated seconds (0 without an estimate) and its actual ones.
    steps: list[tuple[float, float]]


def policy_of(
    machine: VirtualMachine,
    num_blocks: int = NUM_BLOCKS,
    shared: Shared | None = None,
    **settings: Any,
) -> Policy:
    """Create a policy with the settings of a server on this machine, overridden by `settings`."""
    config = {
        "max_model_len": 200_000,
        "max_num_scheduled_tokens": machine.step_tokens,
        "max_steps_in_flight": 2,
        "enable_prefix_caching": False,
        "max_step_ms": None,
    }
    config |= settings
    blocks = KVBlocks(num_blocks, BLOCK_SIZE, bool(config["enable_prefix_caching"]))
    return Policy(SchedulerConfig(**config), blocks, shared)  # type: ignore[arg-type]


def replicas_of(
    machine: VirtualMachine, num: int, **settings: Any
) -> Replicas[StepTokens, Request]:
    """Create the policies of several replicas with learned step times."""
    shared = Shared()
    policies = [policy_of(machine, shared=shared, **settings) for _ in range(num)]
    for seed, policy in enumerate(policies, 1):
        if policy.turns is not None:
            teach(policy.turns.times, machine, seed)
    return Replicas(policies, machine.step_tokens, BLOCK_SIZE)


def teach(times: StepTimes, machine: VirtualMachine, seed: int = 1, noise: float = 0.1) -> None:
    """Train a model of step times with simulated steps, like that of a running server."""
    dice = random.Random(seed)
    for i in range(2 * NUM_LEARNT):
        if i % 2:
            work = StepWork.of([dice.choice((64, 128, 256, 512))], [dice.randrange(8000)])
        else:
            num_rows = dice.randrange(1, 17)
            work = StepWork.of([1] * num_rows, [dice.randrange(4000)] * num_rows)
        times.note(work, machine.seconds(work) * math.exp(dice.gauss(0, noise)))
    times.refresh()


class VirtualDevice:
    """A policy, and the clock of the virtual machine that computes its plans."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        # Plans in flight, each with the time of its end and its duration.
        self.out: deque[tuple[StepPlan, float, float]] = deque()
        self.free_at = self.eldest_s = 0.0

    @property
    def answer_s(self) -> float:
        """The time of the next result of a step."""
        return self.out[0][1] if self.out else math.inf


class VirtualRun:
    """One run: the clients' requests, the policy or the replicas' policies, and a clock for each machine."""

    def __init__(
        self,
        clients: Sequence[VirtualClient],
        machine: VirtualMachine,
        policy: Policy | Replicas[StepTokens, Any],
        *,
        noise: float = 0.1,
        seed: int = 0,
        on_plan: Callable[[StepPlan], None] = lambda plan: None,
    ) -> None:
        self._clients = clients
        self._machine = machine
        self._policy = policy
        self._noise, self._dice = noise, random.Random(seed)
        self._on_plan = on_plan
        policies = policy.policies if isinstance(policy, Replicas) else (policy,)
        self._devices = [VirtualDevice(cast("Policy", each)) for each in policies]
        self._now = 0.0
        self._steps: list[tuple[float, float]] = []
        for client in clients:
            client.tokens_s = []

    def finish(self) -> Played:
        """Simulate until all requests have ended."""
        coming = deque(sorted(enumerate(self._clients), key=lambda pair: pair[1].arrival_s))
        while coming or any(device.out for device in self._devices):
            arrival_s = coming[0][1].arrival_s if coming else math.inf
            device = min(self._devices, key=lambda device: device.answer_s)
            self._now = min(arrival_s, device.answer_s)
            newcomer: int | None = None
            if arrival_s <= device.answer_s:
                newcomer, client = coming.popleft()
                self._admit(admission(newcomer, client))
            else:
                self._answer(device)
            for each in self._devices:
                self._plan(each)
            if newcomer is not None:
                self._predict(newcomer)
            self._take_outputs()
        return Played(self._now, self._clients, self._steps)

    def _admit(self, admit: Admit) -> None:
        if isinstance(self._policy, Replicas):
            self._policy.elapsed_s = [self._now - device.eldest_s for device in self._devices]
        self._policy.admit(admit)

    def _plan(self, device: VirtualDevice) -> None:
        while (plan := device.policy.plan()) is not None:
            self._on_plan(plan)
            work = StepWork.of(plan.num_scheduled_tokens, plan.num_computed_tokens)
            seconds = self._machine.seconds(work) * math.exp(self._dice.gauss(0, self._noise))
            begin = max(self._now, device.free_at)
            if begin > device.free_at:
                begin += ROUND_TRIP_S
            if not device.out:
                device.eldest_s = self._now
            device.free_at = begin + seconds
            device.out.append((plan, device.free_at, seconds))

    def _answer(self, device: VirtualDevice) -> None:
        plan, _, seconds = device.out.popleft()
        device.eldest_s = self._now
        self._steps.append((device.policy.in_flight[0].estimate_s, seconds))
        tokens = tuple((TOKEN,) * wanted for wanted in plan.num_sampled_tokens)
        device.policy.apply(StepDone(plan.step, tokens, seconds=seconds))
        if isinstance(self._policy, Replicas):
            self._policy.note_change(self._devices.index(device))

    def _predict(self, number: int) -> None:
        id = RequestId(SequenceId(number))
        for device in self._devices:
            expected = device.policy.predict_first_token(id, self._now - device.eldest_s)
            if expected is not None:
                client = self._clients[number]
                client.expected_s, client.is_least = expected.seconds, expected.is_least

    def _take_outputs(self) -> None:
        news = self._policy.take_outputs()
        for entry in news.sequences if news else ():
            if entry.finish_reason in ("error", "abort"):
                raise RuntimeError(f"request {entry.id} failed: {entry.error}")
            self._clients[entry.id].tokens_s += [self._now] * len(entry.token_ids)


def admission(number: int, client: VirtualClient) -> Admit:
    """Return the message that admits a client's request to the policy."""
    kind = RequestOutputKind.DELTA if client.is_stream else RequestOutputKind.FINAL_ONLY
    return Admit(
        id=RequestId(SequenceId(number)),
        prompt_token_ids=client.prompt or (1,) * client.num_prompt,
        params=SamplingParams(max_tokens=client.num_output, ignore_eos=True, output_kind=kind),
        eos_token_id=None,
        stop_token_ids=(),
        arrival_time=client.arrival_s,
        options=RequestOptions(priority=client.priority, key=client.key),
    )


def quantiles(values: Iterable[float]) -> dict[str, float]:
    """Return percentiles and the maximum of the values; empty without values."""
    ordered = sorted(values)
    if not ordered:
        return {}
    last = len(ordered) - 1
    ranks = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    return {name: ordered[min(last, int(rank * len(ordered)))] for name, rank in ranks.items()}
