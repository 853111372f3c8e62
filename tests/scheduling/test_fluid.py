"""The fluid order, case by case; `tests/simulation/fluid_oracle.py` has it a second time."""

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from trouper.actors.scheduling.state.fluid import GRAIN, Fluid


class Desk:
    """A fluid whose jobs have the orders of their entry."""

    def __init__(self, *jobs, rank=0):
        self.fluid = Fluid()
        self.num_entered = 0
        for key, num_tokens in jobs:
            self.enter(key, num_tokens, rank)

    def enter(self, key, num_tokens, rank=0):
        id, self.num_entered = self.num_entered, self.num_entered + 1
        self.fluid.enter(id, key, (rank, 0.0, id, 0), num_tokens, max(num_tokens, GRAIN))
        return id

    @property
    def order(self):
        return [job.id for job in self.fluid.order()]


def test_a_short_prompt_comes_before_long_ones():
    assert Desk(("a", 20_000), ("a", 600), ("a", 20_000)).order == [1, 0, 2]


def test_prompts_below_grain_are_equals_and_first_comes_first():
    assert Desk(("a", 240), ("a", 60), ("a", 5)).order == [0, 1, 2]


def test_a_key_with_many_prompts_is_one_key():
    desk = Desk(*[("many", 1000)] * 5, ("one", 3000))
    assert desk.order == [5, 0, 1, 2, 3, 4]  # the others are finished together, at 5,000
    assert Desk(*[("many", 1000)] * 5, ("one", 900)).order[0] == 5


def test_new_prompts_move_their_key_behind_another_one():
    desk = Desk(("a", 2000), ("b", 2048))
    assert desk.order == [0, 1]
    desk.fluid.plan({0: 2000})  # 1,000 of each in the fluid
    small = desk.enter("a", 500)
    assert desk.order == [small, 1]  # it needs 1,000 tokens of its key, and the other 1,048
    # The fluid ends the small one after 2,000 tokens, and prompt 1 after 2,096.  The two have 2,548 to compute: one must be late,
    # because prompt 0 was computed ahead of the fluid.
    desk.fluid.plan({small: 500})
    desk.fluid.plan({1: 1596})
    assert desk.fluid.num_overdue_tokens == 452


def test_a_long_prompt_is_not_passed_for_ever():
    desk = Desk(("a", 1000))
    for _ in range(10):  # as fast as they are computed
        short = desk.enter("a", 300)
        if desk.order[0] != short:
            break
        desk.fluid.plan({short: 300})
    assert desk.order[0] == 0


def test_a_higher_priority_comes_first_whatever_its_length():
    desk = Desk(("a", 300))
    assert desk.order == [0]
    high = desk.enter("b", 20_000, rank=-5)
    assert desk.order == [high, 0]


def test_whom_fluid_has_finished_comes_before_all_others():
    desk = Desk(("a", 300), ("b", 300))
    desk.fluid.plan({0: 300})  # 150 of each
    desk.enter("c", 256)
    desk.fluid.correct(1, 5000)  # it takes longer than it said
    assert desk.order[0] == 2


def test_planned_work_of_aborted_prompt_is_dropped():
    desk = Desk(("a", 1000), ("a", 2000))
    desk.fluid.plan({0: 400})  # 200 of each in the fluid
    desk.fluid.leave(0)
    assert [(job.id, job.num_tokens) for job in desk.fluid.order()] == [(1, 2000)]
    desk.fluid.plan({1: 300})  # 200 of them end what the first has left there
    (job,) = desk.fluid.order()
    assert job.num_tokens == 1700
    assert desk.fluid.num_overdue_tokens == 0


def test_a_busy_period_ends_when_all_is_planned():
    desk = Desk(("a", 10), ("b", 20))
    desk.fluid.plan({0: 10, 1: 20})
    assert not desk.fluid.open
    assert desk.order == []
    desk.fluid.leave(0)  # unknown by now


def test_one_that_enters_again_begins_anew():
    desk = Desk(("a", 1000), ("a", 900))
    desk.fluid.plan({1: 900})
    desk.fluid.enter(1, "a", (0, 0.0, 1, 0), 950, 950)
    assert [(job.id, job.num_tokens) for job in desk.fluid.order()] == [(0, 1000), (1, 950)]


ENTRIES = st.tuples(st.sampled_from("abc"), st.integers(1, 3000), st.integers(0, 1))
STEPS = st.lists(st.one_of(ENTRIES, st.integers(1, 2000)), min_size=1, max_size=40)


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_no_job_is_planned_later_than_exact_fractions_finish_it(steps):
    desk, rests, owners = Desk(), {}, {}
    for step in steps:
        if isinstance(step, tuple):
            id = desk.enter(*step)
            rests[id], owners[id] = Fraction(max(step[1], GRAIN)), (step[2], step[0])
            continue
        counts = _plan(desk.fluid, step)
        desk.fluid.plan(counts)
        _flow(rests, owners, Fraction(sum(counts.values())))
        if not desk.fluid.open:
            rests.clear()
        assert not [id for id, rest in rests.items() if rest == 0 and id in desk.fluid.open]


@settings(max_examples=300, deadline=None)
@given(STEPS, ENTRIES)
def test_jobs_ahead_match_entered_order(steps, new):
    desk = Desk()
    for step in steps:
        if isinstance(step, tuple):
            desk.enter(*step)
        else:
            desk.fluid.plan(_plan(desk.fluid, step))
    key, num_tokens, rank = new
    order, size = (rank, 0.0, desk.num_entered, 0), max(num_tokens, GRAIN)
    ahead = {job.id for job in desk.fluid.ahead_of(key, order, size)}
    id = desk.enter(*new)
    in_order = desk.order
    assert ahead == set(in_order[: in_order.index(id)])


def _plan(fluid, num_tokens):
    """Spend tokens on the jobs in their order."""
    counts = {}
    for job in fluid.order():
        if num_tokens <= 0:
            break
        counts[job.id] = min(num_tokens, job.num_tokens)
        num_tokens -= counts[job.id]
    return counts


def _flow(rests, owners, num_tokens):
    while num_tokens > 0 and (flowing := [id for id, rest in rests.items() if rest > 0]):
        rank = min(owners[id][0] for id in flowing)
        keys = {}
        for id in flowing:
            if owners[id][0] == rank:
                keys.setdefault(owners[id][1], []).append(id)
        part = min(len(ids) * min(rests[id] for id in ids) for ids in keys.values())
        part = min(part, num_tokens / len(keys))
        for ids in keys.values():
            for id in ids:
                rests[id] -= part / len(ids)
        num_tokens -= part * len(keys)
