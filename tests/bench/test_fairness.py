"""Fair steps in virtual time keep what the page on latency promises; a server is measured in a slow test."""

import json
import sys
from functools import cache

import pytest

from trouper.actors.messages.steps import StepDone
from trouper.bench.fairness import ORDERS, WORKLOADS, measure, measure_server
from trouper.bench.virtual_time import (
    MACHINES,
    Played,
    VirtualClient,
    VirtualRun,
    admission,
    policy_of,
    teach,
)

MACHINE = MACHINES["cpu-135m"]


@cache
def played(workload, order, noise=0.1):
    return measure(workload, MACHINE, order, noise=noise)


@pytest.mark.parametrize("workload", ["titles-1", "titles-3", "titles-10"])
def test_short_requests_beside_long_prompts_take_little_more_than_alone(workload):
    short = played(workload, "fair")["kinds"]["short"]
    step_s = 0.028 / 0.08 + 0.03
    assert short["over_alone"]["p50"] <= 2.5
    assert short["over_alone"]["p95"] <= max(3.5, 1 + 2 * step_s / MACHINE.alone_s(161))


def test_long_prompts_are_delayed_by_short_work_only():
    clients = WORKLOADS["titles-1"](MACHINE)
    work_s = sum(MACHINE.alone_s(client.num_prompt) for client in clients)
    assert played("titles-1", "fair")["kinds"]["long"]["first_token_s"]["max"] <= 1.1 * work_s


def test_gap_of_streams_beside_prompt_is_step():
    fair = played("stream-and-prompt", "fair")["kinds"]["stream"]["gap_s"]
    before = played("stream-and-prompt", "arrival")["kinds"]["stream"]["gap_s"]
    assert fair["p99"] <= before["p99"] / 2
    assert fair["p99"] <= 1.5 * (0.028 / 0.08 + 0.03)


def test_greedy_key_does_not_delay_long_prompt_of_another():
    assert played("greedy-key", "fair")["kinds"]["long"]["over_alone"]["max"] <= 2.2


@pytest.mark.parametrize(
    ("workload", "least"),
    [("long-batch", 0.98), ("titles-1", 0.92), ("titles-10", 0.92), ("streams", 0.92)],
)
def test_the_total_time_grows_little(workload, least):
    before, after = (played(workload, order)["total_s"] for order in ("arrival", "fair"))
    assert before / after >= least


def test_short_requests_alone_lose_nothing():
    first = [played("short-only", order)["kinds"]["short"]["first_token_s"] for order in ORDERS]
    arrival, _, fair = first
    assert fair["p99"] <= 1.05 * arrival["p99"]


@pytest.mark.parametrize("workload", ["titles-1", "titles-3", "titles-10", "short-only"])
def test_first_tokens_are_expected(workload):
    assert played(workload, "fair", 0.03)["kinds"]["short"]["predicted"] >= 0.9


def test_in_order_of_arrival_long_prompt_ahead_is_expected():
    policy = policy_of(MACHINE, policy="fcfs")
    teach(policy.turns.times, MACHINE)
    clients = [VirtualClient(0.0, 8000, 4), VirtualClient(0.5, 300, 4)]
    short = VirtualRun(clients, MACHINE, policy, noise=0.0).finish().clients[1]
    assert short.first_token_s > 5
    assert short.expected_s == pytest.approx(short.first_token_s, rel=0.2)


def instructions_a_step(order, num_steps=12):
    """Count the instructions of the interpreter that 64 decoding rows cost the policy: the same on every machine."""
    policy, num = policy_of(MACHINE, **ORDERS[order]), 0
    if policy.turns is not None:
        teach(policy.turns.times, MACHINE)
    for i in range(64):
        policy.admit(admission(i, VirtualClient(0.0, 20, 1000)))

    def step():
        plan = policy.plan()
        tokens = tuple((7,) * wanted for wanted in plan.num_sampled_tokens)
        policy.apply(StepDone(plan.step, tokens, seconds=0.03))
        policy.take_outputs()

    def trace(frame, event, arg):
        nonlocal num
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        num += event == "opcode"
        return trace

    for _ in range(20):
        step()
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for _ in range(num_steps):
            step()
    finally:
        sys.settrace(before)
    return num / num_steps


def test_decoding_costs_the_policy_no_more():
    arrival, _, fair = map(instructions_a_step, ORDERS)
    assert arrival > 10_000
    assert fair <= 1.02 * arrival


def test_steps_are_foreseen():
    policy = policy_of(MACHINE)
    teach(policy.turns.times, MACHINE)
    run: Played = VirtualRun(WORKLOADS["agents"](MACHINE), MACHINE, policy, noise=0.03).finish()
    errors = sorted(abs(estimate / seconds - 1) for estimate, seconds in run.steps)
    assert errors[int(0.9 * len(errors))] <= 0.2


def test_command_shows_each_workload_in_each_order(bench):
    printed = bench("fairness", "--workload", "titles-1", "--order", "fair", "--noise", 0, "--json")
    found = json.loads(printed.out)
    assert [result["workload"] for result in found["results"]] == ["titles-1"]
    table = bench("fairness", "--workload", "batch").out.splitlines()
    assert [line.split()[:2] for line in table[1:]] == [["batch", order] for order in ORDERS]


@pytest.mark.parametrize("option", ["workload", "order", "machine"])
def test_unknown_name_is_error_that_lists_known(bench, option):
    printed = bench("fairness", f"--{option}", "x", code=2)
    assert f"{option}: must be one of " in printed.err


@pytest.mark.slow
def test_server_answers_short_requests_beside_long_prompt():
    (found,) = measure_server(None, ["fair"], num_long=(1,), long_tokens=4000)
    beside = found["beside"][1]
    assert beside["num_short"] >= 1
    assert beside["over_alone"]["p50"] < 10  # on any machine, with any other work
    assert json.dumps(found)
