"""Schedules for the theorem of the fluid: requests that all find room, on machines whose steps take what nobody foresees.

python -m tests.simulation.fair_scenario --schedules 1000
"""

import argparse
import random
import time
from statistics import median
from typing import Any

import msgspec

from trouper.actors.messages.requests import RequestId, SequenceId
from trouper.actors.messages.steps import StepPlan
from trouper.actors.scheduling.policy import Policy
from trouper.actors.scheduling.step_time import StepWork
from trouper.bench.virtual_time import (
    BLOCK_SIZE,
    MACHINES,
    VirtualClient,
    VirtualDevice,
    VirtualMachine,
    VirtualRun,
    policy_of,
    teach,
)

from .clients import Broken
from .fluid_oracle import FluidOracle
from .oracles import check_overtaking, check_turns, require

LENGTHS = (5, 40, 161, 300, 586, 1500, 4000, 9000)


class Judged:
    """A policy whose plans are judged as they are made."""

    def __init__(self, policy: Policy, *, knows_rests: bool = True) -> None:
        self._policy, self._knows_rests = policy, knows_rests
        self._plan = policy.plan
        policy.plan = self.plan  # type: ignore[method-assign]

    def plan(self) -> StepPlan | None:
        policy = self._policy
        before = set(policy.table.running.ids)
        plan = self._plan()
        if plan is not None:
            check_overtaking(policy, before)
            if not policy.is_searching:
                check_turns(policy, plan)
                self._check_rests()
                self._check_costs()
        return plan

    def _check_rests(self) -> None:
        """What the fluid believes to be left of each prompt is what is left of it: nothing is cached here."""
        turns, sequences = self._policy.turns, self._policy.table.sequences
        assert turns is not None
        entering = {sequence.id for sequence in turns._arrivals}  # preempted in this very plan
        for job in turns.fluid.open.values():
            if job.id in entering:
                continue
            sequence = sequences[job.id]
            known = sequence.num_tokens + sequence.num_in_flight
            left = known - sequence.num_computed
            require(job.num_tokens == left, "the rest of a prompt", job.num_tokens, left)

    def _check_costs(self) -> None:
        """What a part of a prompt costs is what it adds to a step."""
        assert self._policy.turns is not None
        times, start, count = self._policy.turns.times, 1000, 256
        pairs = count * (start + count / 2)
        seconds = [times.seconds(StepWork(1, n, 0, p, 0)) for n, p in ((count, pairs), (0, 0.0))]
        added_s, cost_s = seconds[0] - seconds[1], times.cost(start, count)
        require(abs(added_s - cost_s) <= 1e-9 + 1e-6 * cost_s, "the cost of a part", cost_s)


class CrampedRun(VirtualRun):
    """A run in which clients leave, steps raise, and the machine has little memory and other work."""

    def __init__(self, *args: Any, dice: random.Random, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._weather = dice
        self._error_rate = dice.choice((0.0, 0.1, 0.25))
        self._leaving_rate = dice.choice((0.0, 0.1))

    def _answer(self, device: VirtualDevice) -> None:
        if self._weather.random() < self._leaving_rate:
            self._policy.abort(RequestId(SequenceId(self._weather.randrange(len(self._clients)))))
        if self._weather.random() >= self._error_rate:
            super()._answer(device)
            return
        known = _num_measured(device.policy)
        plan, _, _ = device.out.popleft()  # those behind it are refused unrun
        device.policy.fail_step(plan.step, "a passing error")
        while device.out and device.out[0][0].epoch <= plan.epoch:
            device.policy.fail_step(device.out.popleft()[0].step, "an earlier step failed")
        require(_num_measured(device.policy) == known, "a step that raised is learnt from", known)

    def _take_outputs(self) -> None:
        news = self._policy.take_outputs()
        for entry in news.sequences if news else ():
            self._clients[entry.id].tokens_s += [self._now] * len(entry.token_ids)


def _num_measured(policy: Policy) -> int:
    assert policy.turns is not None
    return policy.turns.times.num_chunks + len(policy.turns._steps_of_rows)


def play_fairly(seed: int) -> int:
    """Play one drawn schedule under the oracles.

    Returns the number of prompts that were late because a prompt of another key had been computed ahead.

    Raises:
        Broken: a prompt is late, or a step is not as it should be.
    """
    dice = random.Random(seed)
    machine = MACHINES[dice.choice(sorted(MACHINES))]
    limit_ms = dice.choice((None, None, None, 50, 400))
    if limit_ms is not None and dice.random() < 0.8:
        # Most slow machines compute at least 64 tokens in a step.  Steps of 16 make schedules very long.
        limit_ms = max(limit_ms, int(1000 * machine.seconds(StepWork(1, 64, 0, 0.0, 0))))
    settings = {"max_step_ms": limit_ms}
    if seed % 4 == 3:
        play_cramped(dice, machine, settings, seed)
        return 0
    unit = machine.alone_s(500)
    clients = draw_flood(dice, machine.alone_s(300)) if seed % 3 == 0 else draw_clients(dice, unit)
    # All requests find room at the same time.
    num_tokens = sum(client.num_prompt + client.num_output + BLOCK_SIZE for client in clients)
    policy = policy_of(machine, num_tokens // BLOCK_SIZE + 2, **settings)
    if dice.random() < 0.8:
        assert policy.turns is not None
        teach(policy.turns.times, machine)
    oracle = FluidOracle(policy)
    Judged(policy)
    VirtualRun(clients, machine, policy, noise=dice.choice((0, 0.1, 0.3)), seed=seed).finish()
    require(not oracle.late, "a prompt is late", oracle.late)
    require(not oracle.overdue, "a prompt is overdue", oracle.overdue)
    return oracle.num_excused


def play_cramped(
    dice: random.Random, machine: VirtualMachine, settings: dict[str, Any], seed: int
) -> None:
    """Play one in which room is missing, clients leave and steps raise."""
    clients = draw_clients(dice, machine.alone_s(100), (0, 0, 1, 2), (6, 10, 20))
    longest = max(client.num_prompt + client.num_output for client in clients)
    num_blocks = -(-longest // BLOCK_SIZE) + dice.choice((2, 2, 20, 60, 200))
    policy = policy_of(machine, num_blocks, **settings)
    assert policy.turns is not None
    # One that is slower than what was learnt, in all its parts.
    slower = msgspec.structs.replace(
        machine, coefficients=tuple(3 * each for each in machine.coefficients)
    )
    teach(policy.turns.times, machine)
    Judged(policy)
    played = CrampedRun(clients, slower, policy, noise=0.0, seed=seed, dice=dice).finish()
    errors = [abs(estimate / seconds - 1) for estimate, seconds in played.steps[20:]]
    if len(errors) >= 24:
        require(median(errors) < 0.5, "estimates of steps", median(errors))


def draw_clients(
    dice: random.Random,
    unit: float,
    priorities: tuple[int, ...] = (0,),
    nums: tuple[int, ...] = (2, 3, 4, 6, 10, 20),
) -> list[VirtualClient]:
    """Draw a few requests of any length and priority."""
    num_keys, arrival_s = dice.choice((1, 2, 4)), 0.0
    priorities = dice.choice((priorities, (0,), (0, 0, 1)))
    clients: list[VirtualClient] = []
    for _ in range(dice.choice(nums)):
        arrival_s += dice.choice((0.0, 0.0, dice.expovariate(1 / unit)))
        clients.append(
            VirtualClient(
                arrival_s,
                dice.choice(LENGTHS),
                dice.choice((1, 4, 16)),
                key=f"k{dice.randrange(num_keys)}",
                priority=dice.choice(priorities),
                is_stream=dice.random() < 0.5,
            )
        )
    return clients


def draw_flood(dice: random.Random, unit: float) -> list[VirtualClient]:
    """Draw short requests that come about as fast as they are computed, beside one or two long ones."""
    load, num_keys, arrival_s = dice.choice((0.9, 1.0, 1.1)), dice.choice((1, 2)), 0.0
    clients = [
        VirtualClient(0.0, dice.choice((1500, 3000)), 1, key="k0", is_stream=False)
        for _ in range(dice.choice((1, 2)))
    ]
    for _ in range(dice.choice((10, 30))):
        arrival_s += dice.expovariate(load / unit)
        key = f"k{dice.randrange(num_keys)}"
        clients.append(
            VirtualClient(arrival_s, dice.choice((260, 300, 340)), 1, key=key, is_stream=False)
        )
    return clients


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    options = parser.parse_args()
    began, num_broken, num_played, num_excused = time.process_time(), 0, 0, 0
    try:
        for seed in range(options.seed, options.seed + options.schedules):
            try:
                num_excused += play_fairly(seed)
            except Broken as error:
                num_broken += 1
                print(f"seed {seed}: {str(error)[:200]}", flush=True)
            num_played += 1
    except KeyboardInterrupt:
        print("interrupted")
    rate = num_played / (time.process_time() - began)
    print(f"{num_played} schedules, {rate:.0f} a CPU second, {num_broken} broken")
    print(f"{num_excused} prompts late by at most what another key had computed ahead")


if __name__ == "__main__":
    main()
