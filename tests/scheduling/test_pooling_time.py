"""Pooling steps bounded in seconds, in virtual time: the real policy, and a machine whose steps take what a formula says."""

import math
import random

import pytest

from trouper.actors.messages.requests import AdmitPooling, RequestId, RequestOptions
from trouper.actors.messages.steps import PoolDone
from trouper.actors.scheduling.pooling_policy import PoolingPolicy
from trouper.actors.scheduling.step_time import EXPLORE, LOSS, NO_ROWS, QUIET_S, StepWork
from trouper.config.engine_config import SchedulerConfig
from trouper.pooling import PoolingParams

FIXED_S, TOKEN_S, PAIR_S = 0.008, 0.0002, 0.1e-6  # a small encoder on two cores


def policy(max_step_ms=None, **options):
    config = {"max_num_scheduled_tokens": 8192, "max_steps_in_flight": 2}
    return PoolingPolicy(SchedulerConfig(**config | options, max_step_ms=max_step_ms))


def text(id, length, key="", arrival=0.0):
    return AdmitPooling(
        id=RequestId(id), prompt_token_ids=(1,) * length, params=PoolingParams(task="embed"),
        slot=None, arrival_time=arrival, options=RequestOptions(key=key),
    )  # fmt: skip


def seconds(lengths):
    return FIXED_S + TOKEN_S * sum(lengths) + PAIR_S * sum(n * n / 2 for n in lengths)


class Machine:
    """Computes plans in virtual seconds, and notes when each text was done."""

    def __init__(self, policy, *, noise=0.05):
        self.policy, self.noise, self.dice = policy, noise, random.Random(0)
        self.now = self.free_at = 0.0
        self.out, self.steps, self.done_s = [], [], {}  # steps: lengths, seconds and budget

    def plan(self):
        while (plan := self.policy.plan()) is not None:
            lengths = [len(entry.token_ids) for entry in plan.entries]
            took = seconds(lengths) * math.exp(self.dice.gauss(0, self.noise))
            begin = max(self.now, self.free_at)
            self.free_at = begin + took
            self.out.append((plan, self.free_at, took))
            time = self.policy.time
            self.steps.append((lengths, took, time and time.budget.last_s))

    def answer(self):
        plan, self.now, took = self.out.pop(0)
        ids = [admit.id for admit in self.policy.in_flight[0].group]
        self.policy.apply(PoolDone(plan.step, (None,) * len(ids), seconds=took))
        self.done_s.update(dict.fromkeys(ids, self.now))

    def play(self, arrivals):
        """Play texts of (moment, length, key), which are numbered; return the time each took."""
        coming = sorted(enumerate(arrivals), key=lambda pair: pair[1][0])
        while coming or self.out:
            if coming and (not self.out or coming[0][1][0] <= self.out[0][1]):
                id, (self.now, length, key) = coming.pop(0)
                self.policy.admit(text(id, length, key, self.now))
            else:
                self.answer()
            self.plan()
        return [self.done_s[id] - arrivals[id][0] for id in range(len(arrivals))]


def documents(num=800, length=400):
    return [(0.0, length, "documents") for _ in range(num)]


def queries(num=60):
    return [(1.0 + 0.4 * i, 30, "queries") for i in range(num)]


def p95(values):
    return sorted(values)[int(0.95 * len(values))]


def test_queries_beside_documents_wait_for_a_short_step():
    arrivals = [*documents(), *queries()]
    waits = [Machine(policy(limit)).play(arrivals)[-60:] for limit in (None, 0)]
    step_s = FIXED_S / LOSS + FIXED_S
    assert p95(waits[0]) <= 2 * step_s + seconds([400])
    assert p95(waits[0]) <= p95(waits[1]) / 10


def test_steps_of_several_texts_keep_to_the_budget():
    machine = Machine(policy())
    dice = random.Random(1)
    machine.play([(0.03 * i, dice.randrange(20, 300), "") for i in range(600)])
    steps = machine.steps[20:]
    over = [took for _, took, budget_s in steps if took > 1.3 * (budget_s + FIXED_S)]
    assert sum(len(lengths) > 1 for lengths, _, _ in steps) > 100
    assert len(over) <= len(steps) / EXPLORE
    assert all(took <= 2.5 * (budget_s + FIXED_S) for _, took, budget_s in steps)


@pytest.mark.parametrize("limit", [50, 200])
def test_a_given_limit_is_what_a_step_takes(limit):
    machine = Machine(policy(limit), noise=0.0)
    machine.play([*documents(), *queries()])
    several = [took for lengths, took, _ in machine.steps[8:] if len(lengths) > 1]
    assert all(1000 * took <= 1.1 * limit for took in several)
    assert 1000 * max(took for _, took, _ in machine.steps[8:]) >= 0.7 * limit


def test_text_longer_than_budget_is_computed_alone():
    machine = Machine(policy(20), noise=0.0)
    machine.play([(0.0, length, "") for length in (100, 100, 100, 100, 100, 100, 4000, 90)])
    assert [4000] in [lengths for lengths, _, _ in machine.steps]


def test_behind_long_step_nothing_is_planned_until_its_answer():
    machine = Machine(policy())
    machine.play(documents(40))
    p = machine.policy
    for id in range(100, 200):
        p.admit(text(id, 400))
    assert p.plan() is not None
    assert p.in_flight[0].estimate_s > 0.05
    assert p.plan() is None


def test_short_steps_are_two_in_flight():
    machine = Machine(policy())
    machine.play(documents(40))
    p = machine.policy
    p.admit(text(100, 20))
    assert p.plan() is not None
    p.admit(text(101, 20))
    assert p.plan() is not None


@pytest.mark.parametrize(("arrivals", "least"), [(documents(4000), 0.98), (None, 0.92)])
def test_the_total_time_grows_little(arrivals, least):
    if arrivals is None:  # two clients of many texts at once, who ask again and again
        arrivals = [(5.0 * (i // 64), 300, f"k{i % 2}") for i in range(64 * 12)]
    totals = []
    for limit in (0, None):
        machine = Machine(policy(limit))
        machine.play(arrivals)
        totals.append(machine.now)
    assert totals[0] / totals[1] >= least


def test_steps_grow_when_no_text_has_come_for_long():
    machine = Machine(policy(), noise=0.0)
    machine.play(documents(1500))
    time = machine.policy.time
    assert time.budget.quiet_s > QUIET_S
    quiet_s = time.budget.prompt_s(NO_ROWS, has_streams=False)
    machine.policy.admit(text(9999, 10))
    assert time.budget.prompt_s(NO_ROWS, has_streams=False) < quiet_s / 4


def test_in_order_of_arrival_steps_have_same_length():
    p = policy(policy="fcfs")
    assert p.fluid is None
    machine = Machine(p)
    waits = machine.play([*documents(60), (1.0, 30, "queries")])
    assert waits[-1] > max(waits[:50]) - 1.0
    assert all(took < 0.25 for _, took, _ in machine.steps)


def test_the_ratios_of_estimates_are_given_once():
    machine = Machine(policy(), noise=0.0)
    machine.play(documents(60))
    ratios = machine.policy.take_ratios()
    assert len(ratios) > 4
    assert sorted(ratios)[len(ratios) // 2] == pytest.approx(1, abs=0.1)
    assert machine.policy.take_ratios() == ()


def test_a_device_without_a_clock_gets_small_steps():
    p = policy()
    for id in range(100):
        p.admit(text(id, 60))
    sizes = []
    while (plan := p.plan()) is not None:
        sizes.append(sum(len(entry.token_ids) for entry in plan.entries))
        p.apply(PoolDone(plan.step, (None,) * len(plan.entries)))
    assert max(sizes) <= 512


def test_a_step_that_raised_is_not_learnt_from():
    machine = Machine(policy())
    machine.play(documents(40))
    p = machine.policy
    before = p.time.times.num_chunks
    p.admit(text(100, 20))
    plan = p.plan()
    p.fail_step(plan.step, "out of memory")
    assert p.time.times.num_chunks == before


def test_work_of_texts_counts_their_own_pairs():
    assert StepWork.of_texts([2, 4]) == (1, 6, 0, 10.0, 0)
