"""The worked cases of spec 5.5, numbers exact.  N16 belongs to pooling."""

import pytest

from trouper.actors.messages.requests import Admit, RequestOptions
from trouper.actors.messages.steps import StepDone
from trouper.actors.scheduling.policy import Policy
from trouper.actors.scheduling.state.kv_blocks import KVBlocks
from trouper.actors.scheduling.state.sequence import State
from trouper.config.engine_config import SchedulerConfig
from trouper.params import SamplingParams


class Desk:
    """A policy, and a device that always says 7.  Ids count from 0 in the order of admission."""

    def __init__(self, *, num_usable=10_000, **config):
        config.setdefault("max_num_scheduled_tokens", 1024)
        seats = config.setdefault("max_num_seqs", 16)
        config.setdefault("max_num_active_seqs", seats)
        self.policy = Policy(SchedulerConfig(**config), KVBlocks(num_usable + 1, 16, False))
        self.num_admitted = 0
        self.news = {}
        self.row_owner = {}

    def admit(self, num_prompt, priority=0, arrival=None, max_tokens=100):
        id = self.num_admitted
        self.num_admitted += 1
        self.policy.admit(
            Admit(
                id=id,
                prompt_token_ids=(id + 1,) * num_prompt,
                params=SamplingParams(max_tokens=max_tokens),
                eos_token_id=None,
                stop_token_ids=(),
                options=RequestOptions(priority=priority),
                arrival_time=id if arrival is None else arrival,
            )
        )

    def plan(self):
        """The plan, and what it gives to whom: {sequence: tokens} in the order of its columns."""
        plan = self.policy.plan()
        if plan is None:
            return None, {}
        self.row_owner.update({new.request_slot: new.sequence for new in plan.new_sequences})
        return plan, dict(
            zip(
                [self.row_owner[r] for r in plan.request_slots],
                plan.num_scheduled_tokens,
                strict=True,
            )
        )

    def land(self, plan):
        self.policy.apply(StepDone(plan.step, tuple((7,) * num for num in plan.num_sampled_tokens)))
        news = self.policy.take_outputs()
        for entry in news.sequences if news else ():
            self.news.setdefault(entry.id, []).extend(entry.token_ids)

    def step(self):
        plan, counts = self.plan()
        self.land(plan)
        return counts


def test_n1_prompt_is_split_to_fill_budget():
    desk = Desk(max_num_seqs=3)
    for length in (800, 800, 10, 10):
        desk.admit(length)
    assert desk.step() == {0: 800, 1: 224}
    assert desk.policy.table.waiting.ids == (2, 3)


def test_n2_unchunked_prompt_is_not_overtaken():
    desk = Desk(max_num_seqs=3, enable_chunked_prefill=False)
    for length in (800, 800, 10, 10):
        desk.admit(length)
    assert desk.step() == {0: 800}
    assert desk.policy.table.waiting.ids == (1, 2, 3)


def test_n3_the_threshold_caps_each_chunk():
    desk = Desk(long_prefill_token_threshold=400)
    for _ in range(3):
        desk.admit(800)
    assert [desk.step() for _ in range(3)] == [
        {0: 400, 1: 400, 2: 224},
        {0: 400, 1: 400, 2: 224},
        {0: 1, 1: 1, 2: 352},
    ]


def test_n4_threshold_does_not_bind_prompt_alone():
    desk = Desk(long_prefill_token_threshold=400)
    desk.admit(2000)
    assert desk.step() == {0: 1024}


def test_n5_threshold_binds_as_soon_as_company():
    desk = Desk(long_prefill_token_threshold=400)
    desk.admit(2000)
    desk.admit(10)
    assert desk.step() == {0: 400, 1: 10}


def test_n6_adaptive_threshold_shares_budget_among_all_requests():
    desk = Desk(long_prefill_token_threshold=100, long_prefill_token_threshold_adaptive=True)
    desk.admit(2000)
    desk.admit(10)
    assert desk.step() == {0: 512, 1: 10}


def test_n7_active_seats_cap_who_runs():
    desk = Desk(max_num_seqs=16, max_num_active_seqs=3)
    for _ in range(10):
        desk.admit(10)
    desk.step()
    stats = desk.policy.statistics()
    assert (stats.num_running, stats.num_waiting) == (3, 7)


@pytest.mark.parametrize(
    ("priorities", "arrivals", "order"),
    [
        pytest.param((0, 2, 1), (1, 2, 3), [1, 2, 0], id="n8 by priority"),
        pytest.param((0, 1, 1, 2), (1, 3, 2, 4), [3, 2, 1, 0], id="n9 ties by arrival"),
    ],
)
def test_n8_n9_priority_then_arrival(priorities, arrivals, order):
    desk = Desk()
    for priority, arrival in zip(priorities, arrivals, strict=True):
        desk.admit(10, priority, arrival)
    assert list(desk.step()) == order


def test_n10_one_slot_serves_best_first():
    desk = Desk(max_num_seqs=1)
    for priority in (0, 1, 3):
        desk.admit(10, priority)
    assert desk.step() == {2: 10}
    assert desk.policy.table.waiting.ids == (1, 0)


def test_n11_fcfs_ignores_priority():
    desk = Desk(policy="fcfs")
    desk.admit(10, priority=0)
    desk.admit(10, priority=5)
    assert list(desk.step()) == [0, 1]


def test_n12_late_high_priority_is_planned_first():
    desk = Desk()
    for _ in range(5):
        desk.admit(10)
    desk.admit(10, priority=10)
    assert list(desk.step()) == [5, 0, 1, 2, 3, 4]


def low_then_high(high_priority):
    """Block 16, 5 usable: low runs and decodes one, high arrives, both fill the pool."""
    desk = Desk(num_usable=5)
    desk.admit(32)
    assert desk.step() == {0: 32}
    desk.admit(32, priority=high_priority)
    assert desk.step() == {0: 1, 1: 32}
    assert desk.policy.statistics().kv_cache_usage == 1.0
    return desk


def test_n13_planned_lowest_priority_is_preempted():
    desk = low_then_high(high_priority=5)
    desk.admit(1, priority=9)
    assert desk.step() == {1: 1}  # and nothing new is admitted in this step
    assert desk.policy.state(0) is State.PREEMPTED
    assert desk.policy.statistics().num_preemptions == 1
    assert desk.policy.table.waiting.ids == (2, 0)


def test_n14_among_equals_the_later_arrival_is_preempted():
    desk = low_then_high(high_priority=0)
    assert desk.step() == {0: 1}
    assert desk.policy.state(1) is State.PREEMPTED


def test_n15_token_of_request_preempted_in_flight_is_appended():
    """With async scheduling the first needs its 6th block as soon as its token is under way."""
    desk = Desk(num_usable=10, max_steps_in_flight=2)
    desk.admit(80)
    desk.admit(80)
    first, counts = desk.plan()
    assert counts == {0: 80, 1: 80}
    second, counts = desk.plan()
    assert counts == {0: 1}
    assert desk.policy.state(1) is State.PREEMPTED
    assert desk.policy.table.waiting.ids == ()  # not before its token is here
    desk.land(first)
    assert desk.news == {0: [7], 1: [7]}
    assert desk.policy.state(1) is State.PREEMPTED
    assert desk.policy.table.waiting.ids == (1,)
    desk.land(second)
    assert desk.news == {0: [7, 7], 1: [7]}


@pytest.mark.parametrize("num_usable", [4, 7, 100])
@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_n17_any_load_drained_to_end_leaves_nothing(num_usable, max_steps_in_flight):
    desk = Desk(num_usable=num_usable, max_steps_in_flight=max_steps_in_flight, max_num_seqs=4)
    for i in range(12):
        desk.admit(10 + 3 * i, priority=i % 3, max_tokens=5 + i)
    flights = []
    while desk.policy.table.sequences:
        while (plan := desk.plan()[0]) is not None:
            flights.append(plan)
        desk.land(flights.pop(0))
    while flights:
        desk.land(flights.pop(0))
    assert {id: len(tokens) for id, tokens in desk.news.items()} == {i: 5 + i for i in range(12)}
    stats = desk.policy.statistics()
    assert (stats.num_running, stats.num_waiting, stats.num_steps_in_flight) == (0, 0, 0)
    assert stats.num_blocks_free == stats.num_blocks_total
    assert desk.policy.table.requests == desk.policy.table.sequences == {}
