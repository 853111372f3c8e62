"""Check the messages of pipeline stages over all interleavings: no deadlock, no token of the wrong step.

    python -m tests.simulation.stages.stage_protocol            # 2 to 4 stages, every mask of samples
    python -m tests.simulation.stages.stage_protocol --faults   # and that known mistakes are found

Breadth first over the states of a front, its stages and their rings, driven by `stages.py`. A state is left
by every step that any one of them can take next; a state that is not the end and that none can leave is a deadlock.
"""

import argparse
import itertools
import time
from collections import deque
from typing import NamedTuple

from trouper.actors import stages
from trouper.config.parallel import max_steps_in_flight


class Protocol(NamedTuple):
    """The rules under test; the defaults are those of `stages.py`."""

    num_stages: int
    hidden_entries: int  # of each ring of hidden states
    token_entries: int
    drains_only_to_read: bool = False  # a mistake: tokens that no plan reads stay in the ring
    waits_every_step: bool = (
        False  # a mistake: the first stage waits for tokens that are never sent
    )

    @classmethod
    def of(cls, num_stages: int, hidden_entries: int | None = None) -> "Protocol":
        entries = stages.num_ring_entries(num_stages)
        return cls(num_stages, hidden_entries or entries, entries)


class Step(NamedTuple):
    samples: bool
    reads: int  # the newest step whose token this one needs; 0: none.  Steps count from 1


class State(NamedTuple):
    """Who has done how much; all that the future depends on."""

    num_planned: int
    num_answered: int
    taken: tuple[int, ...]  # plans begun, by stage
    is_computing: tuple[bool, ...]  # begun and not passed on
    hidden: tuple[int, ...]  # steps in the ring into stage 1, 2, ...
    tokens: tuple[int, ...]  # steps in the token ring
    num_read: int  # newest step whose tokens the first stage has


class Deadlock(Exception):
    pass


class WrongOrder(Exception):
    pass


def check(protocol: Protocol, plan: tuple[Step, ...]) -> int:
    """Visit every state; returns how many there are.

    Raises:
        Deadlock: a state that is not the end, and none can leave.
        WrongOrder: a step runs before a token that it reads.
    """
    n = protocol.num_stages
    start = State(0, 0, (0,) * n, (False,) * n, (0,) * (n - 1), (), 0)
    seen, queue = {start}, deque([start])
    while queue:
        state = queue.popleft()
        following = list(moves(protocol, plan, state))
        if not following and state.num_answered < len(plan):
            raise Deadlock(f"{protocol}, {plan}: {state}")
        for after in following:
            if after not in seen:
                seen.add(after)
                queue.append(after)
    return len(seen)


def moves(protocol: Protocol, plan: tuple[Step, ...], state: State):
    credits = max_steps_in_flight(protocol.num_stages, plans_ahead=True)
    in_flight = state.num_planned - state.num_answered
    if state.num_planned < len(plan) and in_flight < credits:
        yield state._replace(num_planned=state.num_planned + 1)
    for stage in range(protocol.num_stages):
        if state.is_computing[stage]:
            yield from pass_on(protocol, plan, state, stage)
        elif state.taken[stage] < state.num_planned:
            yield from begin(protocol, plan, state, stage)


def begin(protocol: Protocol, plan: tuple[Step, ...], state: State, stage: int):
    """A stage takes its next plan, if it has what that needs."""
    step = plan[state.taken[stage]]
    taken = replaced(state.taken, stage, state.taken[stage] + 1)
    computing = replaced(state.is_computing, stage, True)
    if stage > 0:
        if state.hidden[stage - 1]:
            hidden = replaced(state.hidden, stage - 1, state.hidden[stage - 1] - 1)
            yield state._replace(taken=taken, is_computing=computing, hidden=hidden)
        return
    tokens, num_read = state.tokens, state.num_read
    reads = state.taken[0] if protocol.waits_every_step and state.taken[0] else step.reads
    if not protocol.drains_only_to_read:
        num_read, tokens = (tokens[-1], ()) if tokens else (num_read, tokens)
    while tokens and num_read < reads:
        num_read, tokens = tokens[0], tokens[1:]
    newest = max(
        (k + 1 for k in range(reads) if protocol.waits_every_step or plan[k].samples), default=0
    )
    if num_read >= newest:
        if num_read < step.reads:
            raise WrongOrder(f"{protocol}, {plan}: {state}")
        yield state._replace(taken=taken, is_computing=computing, tokens=tokens, num_read=num_read)
    elif tokens != state.tokens:  # some have come, the one that is read has not
        yield state._replace(tokens=tokens, num_read=num_read)


def pass_on(protocol: Protocol, plan: tuple[Step, ...], state: State, stage: int):
    """A stage has computed its step, and hands it on if there is room."""
    computing = replaced(state.is_computing, stage, False)
    if stage < protocol.num_stages - 1:
        if state.hidden[stage] < protocol.hidden_entries:
            hidden = replaced(state.hidden, stage, state.hidden[stage] + 1)
            yield state._replace(is_computing=computing, hidden=hidden)
        return
    tokens = state.tokens
    if stages.sends_tokens([plan[state.taken[stage] - 1].samples]):
        if len(tokens) == protocol.token_entries:
            return
        tokens = (*tokens, state.taken[stage])
    yield state._replace(is_computing=computing, tokens=tokens, num_answered=state.num_answered + 1)


def replaced(items: tuple, index: int, item: object) -> tuple:
    return (*items[:index], item, *items[index + 1 :])


def plans(num_stages: int, num_steps: int):
    """Every mask of samples; a step reads the newest sample that is due (`stages.is_due`), or nothing."""
    for samples in itertools.product((False, True), repeat=num_steps):
        for distance in {
            num_stages - 1,
            num_stages,
            1,
        }:  # 1: early, since nothing else was runnable
            steps = []
            for k in range(1, num_steps + 1):
                due = [j for j in range(1, k) if samples[j - 1] and k - j >= distance]
                steps.append(Step(samples[k - 1], max(due, default=0)))
            yield tuple(steps)
        yield tuple(
            Step(sample, 0) for sample in samples
        )  # every request ends with its first token


def check_all(max_stages: int, extra_steps: int) -> tuple[int, int]:
    """Returns (runs, states)."""
    num_runs = num_states = 0
    for num_stages in range(2, max_stages + 1):
        for hidden_entries in (1, 2, stages.num_ring_entries(num_stages)):
            for plan in dict.fromkeys(plans(num_stages, num_stages + extra_steps)):
                num_states += check(Protocol.of(num_stages, hidden_entries), plan)
                num_runs += 1
    return num_runs, num_states


FAULTS = {  # what is wrong with each; all are found
    "a token ring one entry short": lambda n: Protocol.of(n)._replace(token_entries=n),
    "a token ring that is drained only to read": lambda n: Protocol.of(n)._replace(
        drains_only_to_read=True
    ),
    "a first stage that waits for tokens of every step": lambda n: Protocol.of(n)._replace(
        waits_every_step=True
    ),
}


def find(name: str, num_stages: int = 3) -> str:
    """The first deadlock of a fault; "" if none is found."""
    for plan in plans(num_stages, 2 * num_stages + 2):
        try:
            check(FAULTS[name](num_stages), plan)
        except (Deadlock, WrongOrder) as error:
            return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-stages", type=int, default=4)
    parser.add_argument(
        "--extra-steps", type=int, default=3, help="steps beyond one for each stage"
    )
    parser.add_argument(
        "--faults", action="store_true", help="look for the deadlocks of known mistakes"
    )
    args = parser.parse_args()
    started = time.perf_counter()
    num_runs, num_states = check_all(args.max_stages, args.extra_steps)
    print(
        f"{num_runs} runs, {num_states} states, no deadlock ({time.perf_counter() - started:.0f} s)"
    )
    for name in FAULTS if args.faults else ():
        print(f"{name}: {find(name) or 'NOT FOUND'}")


if __name__ == "__main__":
    main()
