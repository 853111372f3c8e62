"""Pipelines in virtual time, planned by the real policy: how much faster several stages are than one device.

    python -m tests.simulation.stages.pipeline

A stage takes a step when it is free, its plan is made and its inputs are there; of hidden states a ring has room for two.
With the stall, the first stage waits for the tokens of every step before, even where nobody reads them.
"""

import argparse
from collections import deque
from collections.abc import Callable

from trouper.actors.executor.worker_links import HIDDEN_ENTRIES
from trouper.actors.messages.requests import Admit
from trouper.actors.messages.steps import StepDone, StepPlan
from trouper.actors.scheduling.policy import Policy
from trouper.actors.scheduling.state.kv_blocks import KVBlocks
from trouper.actors.scheduling.step_planner import StepPlanner
from trouper.config.engine_config import SchedulerConfig
from trouper.config.parallel import max_steps_in_flight
from trouper.params import SamplingParams

PROMPT = 65_536
CHUNKS = (8192, 4096, 2048)
DEPTHS = (2, 4, 8)
NUM_DECODING, NUM_TOKENS = 64, 1024
FIXED_SHARE = 0.8  # of a decode step's cost, whatever its rows
Cost = Callable[[StepPlan], float]  # of a step on one device


class Pipeline:
    """Stages as times alone: each step's passage through them follows from those before it."""

    def __init__(
        self,
        num_stages: int,
        cost: Cost,
        *,
        stalls: bool = False,
        hidden_entries: int = HIDDEN_ENTRIES,
    ) -> None:
        self._num_stages, self._cost, self._stalls = num_stages, cost, stalls
        self._hidden_entries = hidden_entries
        self._is_free_at = [0.0] * num_stages
        self._begins: list[list[float]] = [[] for _ in range(num_stages)]  # of each step
        self._answered_at: dict[int, float] = {0: 0.0}

    def run(self, plan: StepPlan, planned_at: float) -> float:
        """Take a plan through all stages; returns when the last has answered."""
        reads = plan.step - 1 if self._stalls else plan.reads
        arrived_at = max(planned_at, self._answered_at[reads])
        for stage in range(self._num_stages):
            begin = max(arrived_at, self._is_free_at[stage])
            end = begin + self._cost(plan) / self._num_stages
            later = self._begins[stage + 1] if stage + 1 < self._num_stages else []
            if len(later) >= self._hidden_entries:  # the sender waits for room
                end = max(end, later[-self._hidden_entries])
            self._begins[stage].append(begin)
            self._is_free_at[stage] = arrived_at = end
        self._answered_at[plan.step] = arrived_at
        return arrived_at


def spend(policy: Policy, pipeline: Pipeline) -> float:
    """Run everything that is admitted; returns when the last step is answered."""
    answers: deque[tuple[float, StepPlan]] = deque()
    now = 0.0
    while True:
        while (plan := policy.plan()) is not None:
            answers.append((pipeline.run(plan, now), plan))
        if not answers:
            return now
        now, plan = answers.popleft()
        policy.apply(StepDone(plan.step, tuple((7,) * n for n in plan.num_sampled_tokens)))
        policy.take_outputs()


class UncutPlanner(StepPlanner):
    """Give a lone prompt whole steps, as large as they may be."""

    def _longest_lone_chunk(self) -> int:
        return self._config.max_num_scheduled_tokens


class UncutPolicy(Policy):
    """A policy whose planner never cuts a lone prompt for the stages."""

    def __init__(self, config: SchedulerConfig, blocks: KVBlocks) -> None:
        super().__init__(config, blocks)
        self._planner = UncutPlanner(config, self.table, self.turns, self._num_stages)


def make_policy(num_stages: int, kind: type[Policy] = Policy, **config: int) -> Policy:
    settings = {
        "max_model_len": 2 * PROMPT, "max_num_seqs": NUM_DECODING, "num_stages": num_stages,
        "max_steps_in_flight": max_steps_in_flight(num_stages, plans_ahead=True), **config,
    }  # fmt: skip
    return kind(SchedulerConfig(**settings), KVBlocks(2 * PROMPT // 128, 128, False))


def admit(policy: Policy, id: int, num_prompt: int, max_tokens: int) -> None:
    policy.admit(
        Admit(
            id=id,
            prompt_token_ids=(5,) * num_prompt,
            params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            eos_token_id=None,
            stop_token_ids=(),
            arrival_time=float(id),
        )
    )


def prompt_cost(plan: StepPlan) -> float:
    """A token costs twice as much in the prompt's last chunk as in its first."""
    ((start,), (count,)) = plan.num_computed_tokens, plan.num_scheduled_tokens
    return count * (1 + start / max(1, PROMPT - count))


def decode_cost(plan: StepPlan) -> float:
    rows = sum(plan.num_scheduled_tokens)
    return FIXED_SHARE + (1 - FIXED_SHARE) * rows / NUM_DECODING


def prompt_gain(
    num_stages: int,
    chunk: int,
    kind: type[Policy] = UncutPolicy,
    *,
    stalls: bool = False,
    **config: int,
) -> float:
    """One prompt alone: how many times as fast as on one device."""

    def seconds(depth: int, **settings: int) -> float:
        policy = make_policy(depth, kind, max_num_scheduled_tokens=chunk, **settings)
        admit(policy, 0, PROMPT, 1)
        return spend(policy, Pipeline(depth, prompt_cost, stalls=stalls))

    return seconds(1) / seconds(num_stages, **config)


def decode_gain(num_stages: int, *, shares_out: bool = True) -> float:
    """Sequences that decode together, over all of them in one step of one device."""
    depth = num_stages if shares_out else 1
    policy = make_policy(depth, max_num_scheduled_tokens=NUM_DECODING)
    for id in range(NUM_DECODING):
        admit(policy, id, 1, NUM_TOKENS)
    return NUM_TOKENS / spend(policy, Pipeline(num_stages, decode_cost))


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    heads = "".join(f"{f'PP {depth}':>8}" for depth in DEPTHS)
    print(f"one prompt of {PROMPT} tokens, times as fast as one device\n{'chunk':>24}{heads}")

    def row(name: str, gains: list[float]) -> None:
        print(f"{name:>24}{''.join(f'{gain:8.2f}' for gain in gains)}")

    for chunk in CHUNKS:
        row(str(chunk), [prompt_gain(depth, chunk) for depth in DEPTHS])
        row("stalled", [prompt_gain(depth, chunk, stalls=True) for depth in DEPTHS])
        row("cut by the policy", [prompt_gain(depth, chunk, Policy) for depth in DEPTHS])
        two = [prompt_gain(depth, chunk, max_steps_in_flight=2) for depth in DEPTHS]
        row("two steps in flight", two)
    print(f"{NUM_DECODING} sequences that decode\n{'shared out':>24}", end="")
    print("".join(f"{decode_gain(depth):8.2f}" for depth in DEPTHS))
    row("all in one step", [decode_gain(depth, shares_out=False) for depth in DEPTHS])


if __name__ == "__main__":
    main()
