"""Replicas are chosen by the expected first token: in virtual time, against the choice by tokens ahead."""

import random
from functools import cache
from unittest.mock import patch

import pytest

from trouper.actors.scheduling.policy import Policy
from trouper.bench.virtual_time import (
    MACHINES,
    VirtualClient,
    VirtualRun,
    quantiles,
    replicas_of,
)

MACHINE = MACHINES["cpu-135m"]


def agents(num_replicas, load, num=160):
    """Make requests of five keys, of which few are very long, at a share of the machines' pace."""
    dice, arrival_s = random.Random(3), 0.0
    clients = []
    for _ in range(num):
        num_prompt = max(16, min(24_000, int(60 * dice.paretovariate(0.75))))
        kind = "short" if num_prompt < 500 else "long"
        num_output, key = dice.choice((16, 32, 64, 128)), f"k{dice.randrange(5)}"
        clients.append(VirtualClient(0.0, num_prompt, num_output, kind, key))
    work_s = sum(MACHINE.alone_s(client.num_prompt) for client in clients)
    for client in clients:
        arrival_s += dice.expovariate(num_replicas * load * num / work_s)
        client.arrival_s = arrival_s
    return clients


def play(clients, num_replicas, *, by_tokens, **settings):
    replicas = replicas_of(MACHINE, num_replicas, **settings)
    if by_tokens:
        with patch.object(Policy, "expect", lambda *request: None):
            return VirtualRun(clients, MACHINE, replicas).finish(), replicas
    return VirtualRun(clients, MACHINE, replicas).finish(), replicas


@cache
def figures(num_replicas, load, by_tokens):
    played, _ = play(agents(num_replicas, load), num_replicas, by_tokens=by_tokens)
    first = [c.first_token_s / MACHINE.alone_s(c.num_prompt) for c in played.clients]
    return quantiles(first), played.total_s


@pytest.mark.parametrize(("num_replicas", "load"), [(2, 0.7), (4, 0.85)])
def test_first_tokens_come_earlier_than_by_tokens(num_replicas, load):
    by_tokens, expected = (figures(num_replicas, load, each)[0] for each in (True, False))
    assert expected["p50"] <= 1.05 * by_tokens["p50"]
    assert expected["p95"] <= 0.75 * by_tokens["p95"]
    assert expected["p95"] <= 3.5


def test_the_total_time_stays():
    by_tokens, expected = (figures(2, 0.7, each)[1] for each in (True, False))
    assert expected <= 1.05 * by_tokens


def conversations(num, num_turns):
    """Make conversations whose every turn begins with the one before, beside two long prompts."""
    dice = random.Random(1)
    clients = [VirtualClient(0.1 * i, 15_000, 4, "long", "docs") for i in range(2)]
    for number in range(num):
        prompt, arrival_s = (), 1.0 + number
        for _ in range(num_turns):
            prompt += tuple(dice.randrange(8, 1000) for _ in range(400))
            clients.append(
                VirtualClient(arrival_s, len(prompt), 16, "turn", f"c{number}", prompt=prompt)
            )
            arrival_s += 8.0
    return clients


def test_a_conversation_stays_where_its_prefix_is():
    played, replicas = play(conversations(6, 4), 2, by_tokens=False, enable_prefix_caching=True)
    turns = [client for client in played.clients if client.kind == "turn"]
    num_repeated = sum(client.num_prompt - 400 for client in turns)
    hits = sum(each.prefix_cache_hits for each in replicas.replica_statistics())
    assert hits >= 0.9 * num_repeated
    assert quantiles(each.first_token_s for each in turns)["p95"] < 1.5


def test_short_request_joins_long_prompt_and_not_crowd():
    crowd = [VirtualClient(0.2, 500, 4, "crowd", "k") for _ in range(30)]
    clients = [VirtualClient(0.0, 20_000, 4, "long", "k"), *crowd, VirtualClient(0.3, 300, 4, "", "k")]  # fmt: skip
    played, _ = play(clients, 2, by_tokens=False)
    assert played.clients[-1].first_token_s < 2.0
    alone_s = MACHINE.alone_s(20_000) + 31 * MACHINE.alone_s(500)
    assert played.clients[0].first_token_s < 1.1 * alone_s


def test_in_order_of_arrival_tokens_decide():
    clients = [VirtualClient(0.01 * i, 5000 if i == 0 else 500, 4) for i in range(6)]
    played, replicas = play(clients, 2, by_tokens=False, max_step_ms=0)
    assert all(client.tokens_s for client in played.clients)
    assert [each.num_prompt_tokens for each in replicas.replica_statistics()] == [5000, 2500]
