"""Measure fairness: how long short requests, streams and other keys wait for long prompts.

By default the real policy runs in virtual time, on a model of a machine fitted to measured step times. Figures are
ratios to the same request on an idle machine, or to the same workload in order of arrival.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

from trouper.bench.virtual_time import (
    Played,
    VirtualClient,
    VirtualMachine,
    VirtualRun,
    policy_of,
    quantiles,
    teach,
)

# The tokens of a long prompt.
LONG = 20_000
# Tokens of the small requests that an agent sends during a long one.
TITLES = 161, 586
SATISFIED = 3.0  # times alone


def titles(machine: VirtualMachine, num_long: int) -> list[VirtualClient]:
    """Return short requests spread over the computation of long prompts, all with one key.

    It models a chat program that asks for short titles while documents are summarised.
    """
    dice, unit = random.Random(5), machine.alone_s(LONG) * num_long
    clients = [VirtualClient(0.001 * i, LONG, 64, "long", "a") for i in range(num_long)]
    for i in range(24):
        arrival_s = unit * (i + dice.random()) / 24 * 0.95 + 0.01
        clients.append(VirtualClient(arrival_s, dice.choice(TITLES), 24, "short", "a"))
    return clients


def streams(machine: VirtualMachine) -> list[VirtualClient]:
    """Return 16 streams and ten documents that arrive while they run.

    It models a server with chats and a batch of documents at the same time.
    """
    chats = [VirtualClient(0.001 * i, 40, 600, "stream", f"u{i % 4}") for i in range(16)]
    return [*chats, *(VirtualClient(2.0 + 0.01 * i, 10_000, 16, "long", "docs") for i in range(10))]


def stream_and_prompt(machine: VirtualMachine) -> list[VirtualClient]:
    """Return 16 streams and one prompt of 20,000 tokens.

    The pauses of the streams show how long one prompt can block them. Nothing else competes with them.
    """
    chats = [VirtualClient(0.001 * i, 40, 600, "stream", f"u{i % 4}") for i in range(16)]
    return [*chats, VirtualClient(1.0, LONG, 16, "long", "docs")]


def agents(machine: VirtualMachine) -> list[VirtualClient]:
    """Return requests with five keys, a few of them very long, at 70 % of the machine's capacity.

    Their lengths follow a heavy-tailed distribution, like the requests of coding agents.
    """
    dice, arrival_s = random.Random(3), 0.0
    clients: list[VirtualClient] = []
    for _ in range(250):
        num_prompt = max(16, min(24_000, int(60 * dice.paretovariate(0.75))))
        kind = "short" if num_prompt < 500 else "middle" if num_prompt < 4000 else "long"
        num_output, key = dice.choice((16, 32, 64, 128)), f"k{dice.randrange(5)}"
        clients.append(VirtualClient(0.0, num_prompt, num_output, kind, key))
    work_s = sum(machine.alone_s(client.num_prompt) for client in clients)
    for client in clients:
        arrival_s += dice.expovariate(0.7 * len(clients) / work_s)
        client.arrival_s = arrival_s
    return clients


def greedy_key(machine: VirtualMachine) -> list[VirtualClient]:
    """Make twelve long prompts of one key, short requests of another and one long prompt of a third.

    It shows whether one client can take the share of the others.
    """
    dice, unit, arrival_s = random.Random(4), machine.alone_s(LONG), 1.0
    clients = [VirtualClient(0.01 * i, LONG, 8, "greedy", "mallory") for i in range(12)]
    while arrival_s < 10 * unit:
        clients.append(
            VirtualClient(arrival_s, dice.choice((100, 161, 300, 586)), 24, "short", "alice")
        )
        arrival_s += dice.expovariate(6 / unit)
    return [*clients, VirtualClient(unit / 2, LONG, 24, "long", "bob")]


def short_only(machine: VirtualMachine) -> list[VirtualClient]:
    """Return short requests at 56 % of the machine's capacity. Fairness must not make the ordinary case slower."""
    dice, arrival_s = random.Random(6), 0.0
    clients: list[VirtualClient] = []
    for _ in range(300):
        arrival_s += dice.expovariate(0.148 / 0.45 / machine.alone_s(150))
        clients.append(VirtualClient(arrival_s, dice.randrange(60, 240), 32, "short", "k"))
    return clients


def overload(machine: VirtualMachine) -> list[VirtualClient]:
    """Make short requests faster than the machine computes them."""
    dice, unit = random.Random(6), machine.alone_s(150)
    return [
        VirtualClient(
            i * unit * 0.9 * dice.uniform(0.5, 1.5), dice.randrange(60, 240), 32, "short", "k"
        )
        for i in range(200)
    ]


def batch(machine: VirtualMachine) -> list[VirtualClient]:
    """Return twelve prompts of 8,000 tokens without streaming."""
    return [
        VirtualClient(0.001 * i, 8000, 64, "long", f"k{i % 2}", is_stream=False) for i in range(12)
    ]


def long_batch(machine: VirtualMachine) -> list[VirtualClient]:
    """Return a batch of about five minutes without streaming."""
    num_prompts = max(12, int(300 / machine.alone_s(8000)))
    return [
        VirtualClient(0.001 * i, 8000, 64, "long", f"k{i % 2}", is_stream=False)
        for i in range(num_prompts)
    ]


def flood(machine: VirtualMachine) -> list[VirtualClient]:
    """Return short requests at 90 % of the machine's capacity, and a long prompt with the same key.

    An order by remaining work would starve the long prompt.
    """
    dice, unit, arrival_s = random.Random(7), machine.alone_s(300), 0.0
    clients = [VirtualClient(0.5, LONG, 8, "long", "a")]
    for _ in range(400):
        arrival_s += dice.expovariate(0.9 / unit)
        clients.append(VirtualClient(arrival_s, 300, 4, "short", "a"))
    return clients


WORKLOADS: dict[str, Callable[[VirtualMachine], list[VirtualClient]]] = {
    "titles-1": lambda machine: titles(machine, 1),
    "titles-3": lambda machine: titles(machine, 3),
    "titles-10": lambda machine: titles(machine, 10),
    "streams": streams,
    "stream-and-prompt": stream_and_prompt,
    "agents": agents,
    "greedy-key": greedy_key,
    "short-only": short_only,
    "overload": overload,
    "batch": batch,
    "long-batch": long_batch,
    "flood": flood,
}
ORDERS: dict[str, dict[str, Any]] = {
    "arrival": {"max_step_ms": 0},
    "threshold": {"max_step_ms": 0, "long_prefill_token_threshold": 256},
    "fair": {"max_step_ms": None},
}


def measure(
    workload: str, machine: VirtualMachine, order: str, *, noise: float = 0.1
) -> dict[str, Any]:
    """Run a workload in one order of prompts, in virtual time.

    Returns the first-token times, pauses and shares of its clients.  `noise` is the relative random error of step
    times.
    """
    policy = policy_of(machine, **ORDERS[order])
    if policy.turns is not None:
        teach(policy.turns.times, machine)
    played = VirtualRun(WORKLOADS[workload](machine), machine, policy, noise=noise).finish()
    return {
        "workload": workload,
        "machine": machine.name,
        "order": order,
        **describe(played, machine),
    }


def describe(played: Played, machine: VirtualMachine) -> dict[str, Any]:
    """Return figures of all clients together, and of each kind of client.

    Slowdowns are ratios to the time of the same request on an idle machine.
    """
    clients = played.clients
    slowdowns = [c.first_token_s / machine.alone_s(c.num_prompt) for c in clients]
    shares = [1 / slowdown for slowdown in slowdowns]
    kinds = {
        kind: _describe_kind([c for c in clients if c.kind == kind], machine)
        for kind in dict.fromkeys(c.kind for c in clients)
    }
    return {
        "total_s": played.total_s,
        "jain_index": sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares)),
        "satisfied": sum(slowdown <= SATISFIED for slowdown in slowdowns) / len(slowdowns),
        "kinds": kinds,
    }


def _describe_kind(clients: Sequence[VirtualClient], machine: VirtualMachine) -> dict[str, Any]:
    slowdowns = [c.first_token_s / machine.alone_s(c.num_prompt) for c in clients]
    gaps = [gap for client in clients for gap in client.gaps_s]
    return {
        "num": len(clients),
        "first_token_s": quantiles(client.first_token_s for client in clients),
        "over_alone": quantiles(slowdowns),
        "gap_s": quantiles(gaps),
        "predicted": _num_expected(clients),
        "end_s": max(client.tokens_s[-1] for client in clients),
    }


def _num_expected(clients: Sequence[VirtualClient]) -> float | None:
    """Return the share of first tokens within 20 % of their predicted time, or None without exact predictions."""
    ratios = [c.expected_s / c.first_token_s for c in clients if c.expected_s and not c.is_least]
    return sum(abs(ratio - 1) <= 0.2 for ratio in ratios) / len(ratios) if ratios else None
