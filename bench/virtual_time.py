"""Play requests against the real scheduling policy, on a device that takes virtual time.

What a step takes is what a model of a machine says, times noise.  So the latencies of minutes of load are known in a second,
and they do not depend on what else this machine does.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from trouper.actors.messages.identifiers import RequestId, SequenceId
from trouper.actors.messages.plans import StepPlan
from trouper.actors.messages.requests import Admit
from trouper.actors.messages.results import StepDone
from trouper.actors.scheduling.kv_blocks import KVBlocks
from trouper.actors.scheduling.policy import Policy
from trouper.actors.scheduling.step_time import StepTimes, StepWork
from trouper.config.resolve import SchedulerConfig
from trouper.params import RequestOutputKind, SamplingParams

BLOCK_SIZE = 16
NUM_BLOCKS = 200_000  # memory is no matter here
ROUND_TRIP_S = 0.0005  # from an answer to the next step, where none was waiting
NUM_LEARNT = 32  # steps that a server has seen before
TOKEN = 7


class VirtualMachine(msgspec.Struct, frozen=True):
    """A device: seconds of a step as `StepTimes` has them, and the token budget of a step."""

    name: str
    coefficients: tuple[float, float, float, float, float, float]
    step_tokens: int

    def seconds(self, work: StepWork) -> float:
        """Return what a step takes without noise."""
        base, chunk, token, row, pair, context = self.coefficients
        has_chunk, num_tokens, num_rows, num_pairs, num_context = work
        return (
            base + chunk * has_chunk + token * num_tokens + row * num_rows + pair * num_pairs
        ) + context * num_context

    def alone_s(self, num_tokens: int) -> float:
        """Return the time to the first token of a prompt that has the machine for itself, in steps of the token budget."""
        starts = range(0, num_tokens, self.step_tokens)
        counts = [min(self.step_tokens, num_tokens - start) for start in starts]
        works = (
            # A prompt of one token is a chunk all the same.
            StepWork(1, count, 0, count * (start + count / 2), 0)
            for count, start in zip(counts, starts, strict=True)
        )
        return sum(self.seconds(work) for work in works)


MACHINES = {
    # SmolLM2-135M in Q4_1 on two cores, as measured; a model of 7 B on a CPU and on a GPU.
    "cpu-135m": VirtualMachine("cpu-135m", (0.004, 0.024, 0.0008, 0.001, 0.2e-6, 0.65e-6), 1024),
    "cpu-7b": VirtualMachine("cpu-7b", (0.150, 0.050, 0.018, 0.004, 1.0e-6, 1.0e-6), 1024),
    "gpu-7b": VirtualMachine("gpu-7b", (0.008, 0.001, 36e-6, 25e-6, 1.7e-9, 40e-9), 2048),
}


class VirtualClient(msgspec.Struct):
    """One request, and what became of it; times are virtual seconds."""

    arrival_s: float
    num_prompt: int
    num_output: int
    kind: str = ""
    key: str = ""
    priority: int = 0
    is_stream: bool = True
    tokens_s: list[float] = []
    expected_s: float = 0.0  # to its first token, as foretold; 0: it was not
    is_least: bool = False  # a lower bound

    @property
    def first_token_s(self) -> float:
        """Return the time from its arrival to its first token."""
        return self.tokens_s[0] - self.arrival_s

    @property
    def gaps_s(self) -> list[float]:
        """List the times between its tokens."""
        return [
            after - before for before, after in zip(self.tokens_s, self.tokens_s[1:], strict=False)
        ]


class Played(msgspec.Struct):
    """The result of a run."""

    total_s: float
    clients: Sequence[VirtualClient]
    steps: list[tuple[float, float]]  # estimate, which is 0 before it is known, and seconds


def policy_of(machine: VirtualMachine, num_blocks: int = NUM_BLOCKS, **settings: Any) -> Policy:
    """Make a policy as a server on this machine has it; `settings` win."""
    config = {
        "max_model_len": 200_000,
        "max_num_scheduled_tokens": machine.step_tokens,
        "max_steps_in_flight": 2,
        "enable_prefix_caching": False,
        "max_step_ms": None,
    }
    blocks = KVBlocks(num_blocks, BLOCK_SIZE, False)
    return Policy(SchedulerConfig(**(config | settings)), blocks)  # type: ignore[arg-type]


def teach(times: StepTimes, machine: VirtualMachine, seed: int = 1, noise: float = 0.1) -> None:
    """Let the model of steps see some, as one of a server that has been running has."""
    dice = random.Random(seed)
    for i in range(2 * NUM_LEARNT):
        if i % 2:
            work = StepWork.of([dice.choice((64, 128, 256, 512))], [dice.randrange(8000)])
        else:
            num_rows = dice.randrange(1, 17)
            work = StepWork.of([1] * num_rows, [dice.randrange(4000)] * num_rows)
        times.note(work, machine.seconds(work) * math.exp(dice.gauss(0, noise)))
    times.refresh()


class VirtualRun:
    """One run: the clients' requests, the policy, and the machine's clock."""

    def __init__(
        self,
        clients: Sequence[VirtualClient],
        machine: VirtualMachine,
        policy: Policy,
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
        self._out: deque[tuple[StepPlan, float, float]] = deque()  # with its end and its seconds
        self._now = self._free_at = self._eldest_s = 0.0
        self._steps: list[tuple[float, float]] = []
        for client in clients:
            client.tokens_s = []

    def finish(self) -> Played:
        """Play to the end."""
        coming = deque(sorted(enumerate(self._clients), key=lambda pair: pair[1].arrival_s))
        while coming or self._out:
            arrival_s = coming[0][1].arrival_s if coming else math.inf
            answer_s = self._out[0][1] if self._out else math.inf
            self._now = min(arrival_s, answer_s)
            newcomer: int | None = None
            if arrival_s <= answer_s:
                newcomer, client = coming.popleft()
                self._policy.admit(admission(newcomer, client))
            else:
                self._answer()
            self._plan()
            if newcomer is not None:
                self._foretell(newcomer)
            self._take_outputs()
        return Played(self._now, self._clients, self._steps)

    def _plan(self) -> None:
        while (plan := self._policy.plan()) is not None:
            self._on_plan(plan)
            work = StepWork.of(plan.num_scheduled_tokens, plan.num_computed_tokens)
            seconds = self._machine.seconds(work) * math.exp(self._dice.gauss(0, self._noise))
            begin = max(self._now, self._free_at)
            if begin > self._free_at:
                begin += ROUND_TRIP_S
            if not self._out:
                self._eldest_s = self._now
            self._free_at = begin + seconds
            self._out.append((plan, self._free_at, seconds))

    def _answer(self) -> None:
        plan, _, seconds = self._out.popleft()
        self._eldest_s = self._now
        self._steps.append((self._policy.in_flight[0].estimate_s, seconds))
        tokens = tuple((TOKEN,) * wanted for wanted in plan.num_sampled_tokens)
        self._policy.apply(StepDone(plan.step, tokens, seconds=seconds))

    def _foretell(self, number: int) -> None:
        id = RequestId(SequenceId(number))
        expected = self._policy.foretell(id, self._now - self._eldest_s)
        if expected is not None:
            client = self._clients[number]
            client.expected_s, client.is_least = expected.seconds, expected.is_least

    def _take_outputs(self) -> None:
        news = self._policy.take_outputs()
        for entry in news.sequences if news else ():
            if entry.finish_reason in ("error", "abort"):
                raise RuntimeError(f"request {entry.id} ended with {entry.error}")
            self._clients[entry.id].tokens_s += [self._now] * len(entry.token_ids)


def admission(number: int, client: VirtualClient) -> Admit:
    """Make a client's request."""
    kind = RequestOutputKind.DELTA if client.is_stream else RequestOutputKind.FINAL_ONLY
    return Admit(
        id=RequestId(SequenceId(number)),
        prompt_token_ids=(1,) * client.num_prompt,
        params=SamplingParams(max_tokens=client.num_output, ignore_eos=True, output_kind=kind),
        eos_token_id=None,
        stop_token_ids=(),
        priority=client.priority,
        arrival_time=client.arrival_s,
        key=client.key,
    )
