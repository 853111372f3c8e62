"""Which prompts a pooling engine runs together, and how their ends are told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trouper.actors.messages.controls import Pause
from trouper.actors.messages.requests import AdmitPooling, RequestId, RequestOptions
from trouper.actors.messages.steps import DeviceLost, PoolDone
from trouper.actors.scheduling.pooling_policy import PASS_TOKENS, PoolingPolicy
from trouper.config.engine_config import SchedulerConfig
from trouper.pooling import PoolingParams


def policy(**options):
    return PoolingPolicy(SchedulerConfig(**{"max_num_scheduled_tokens": 10, **options}))


def admit(id, length, priority=0, key=""):
    return AdmitPooling(
        id=RequestId(id),
        prompt_token_ids=(id,) * length,
        params=PoolingParams(task="embed"),
        slot=None,  # only passed on
        arrival_time=float(id),
        options=RequestOptions(priority=priority, key=key),
    )


def ids(plan):
    return [column.token_ids[0] for column in plan.entries]


def done(plan):
    return PoolDone(plan.step, tuple(column.token_ids[0] for column in plan.entries))


def told(policy):
    news = policy.take_outputs()
    return (
        {}
        if news is None
        else {r.admit.id: str(r.error) if r.error else r.array for r in news.requests}
    )


def test_plan_holds_whole_prompts_within_budget_shortest_first():
    p = policy()
    for id, length in ((1, 4), (2, 3), (3, 8), (4, 2)):
        p.admit(admit(id, length))
    assert ids(p.plan()) == [4, 2, 1]  # 1 is first in line, 2 and 4 are nearest to it in length


def test_a_prompt_beyond_the_budget_runs_alone():
    p = policy(max_steps_in_flight=2)
    p.admit(admit(1, 30))
    p.admit(admit(2, 2))
    assert ids(p.plan()) == [1]
    assert ids(p.plan()) == [2]


@pytest.mark.parametrize(
    ("num_flights", "length", "sizes"),
    [
        (2, PASS_TOKENS // 4, [4, 3]),
        (1, PASS_TOKENS // 4, [7]),
        (2, PASS_TOKENS // 7, [7]),  # one pass
        (2, PASS_TOKENS + 1, [4, 3]),
    ],
)
def test_plan_of_passes_takes_its_share(num_flights, length, sizes):
    p = policy(max_steps_in_flight=num_flights, max_num_scheduled_tokens=100 * PASS_TOKENS)
    for id in range(1, 8):
        p.admit(admit(id, length))
    plans = [plan for _ in range(num_flights) if (plan := p.plan()) is not None]
    assert [len(ids(plan)) for plan in plans] == sizes


def test_the_first_in_line_is_never_passed_over():
    p = policy()
    p.admit(admit(1, 9))
    for id in range(2, 40):
        p.admit(admit(id, 1))
    assert 1 in ids(p.plan())


def test_priority_goes_before_arrival_unless_policy_is_fcfs():
    for name, first in (("priority", 2), ("fcfs", 1)):
        p = policy(policy=name)
        p.admit(admit(1, 9, priority=0))
        p.admit(admit(2, 9, priority=5))
        assert ids(p.plan()) == [first]


def in_turns(**options):
    return policy(max_step_ms=None, max_num_scheduled_tokens=1000, **options)


def test_query_does_not_wait_for_all_documents():
    p = in_turns()
    for id in range(1, 40):
        p.admit(admit(id, 900))
    p.admit(admit(40, 30))
    assert 40 in ids(p.plan())


def test_in_turns_key_with_many_texts_is_one_key():
    p = in_turns()
    for id in range(1, 40):
        p.admit(admit(id, 600, key="many"))
    p.admit(admit(40, 900, key="one"))
    plans = [ids(p.plan())]
    while 40 not in plans[-1]:
        p.apply(PoolDone(p.in_flight[0].step, (None,)))
        plans.append(ids(p.plan()))
    assert len(plans) <= 3


def test_equal_texts_follow_priority_then_arrival():
    p = in_turns(max_num_active_seqs=2)
    for id in range(1, 5):
        p.admit(admit(id, 10 + id))
    p.admit(admit(5, 1000, priority=1))
    assert ids(p.plan()) == [5]
    p.apply(PoolDone(1, (None,)))
    assert sorted(ids(p.plan())) == [1, 2]


def test_in_turns_who_is_aborted_leaves_the_order():
    p = in_turns()
    for id in (1, 2):
        p.admit(admit(id, 900))
    p.abort(RequestId(1))
    assert ids(p.plan()) == [2]
    assert not p.fluid.open
    assert not p.waiting


def test_results_are_told_once_and_to_right_request():
    p = policy()
    p.admit(admit(1, 2))
    p.admit(admit(2, 2))
    p.apply(done(p.plan()))
    assert told(p) == {1: 1, 2: 2}
    assert told(p) == {}
    assert p.statistics().num_waiting == p.statistics().num_running == 0


def test_who_is_aborted_is_dropped_waiting_or_in_flight():
    p = policy(max_num_active_seqs=1)
    p.admit(admit(1, 2))
    p.admit(admit(2, 2))
    plan = p.plan()
    p.abort(RequestId(1))
    p.abort(RequestId(2))
    p.abort(RequestId(2))
    p.abort(RequestId(7))
    assert told(p) == dict.fromkeys((1, 2), "aborted: the request was aborted")
    p.apply(done(plan))
    assert told(p) == {}
    assert p.plan() is None


def test_a_pause_stops_new_plans():
    p = policy()
    p.admit(admit(1, 2))
    for pause in (Pause.NO_NEW_REQUESTS, Pause.ALL):
        p.set_pause(pause)
        assert p.plan() is None
    p.set_pause(Pause.NONE)
    assert ids(p.plan()) == [1]


@given(st.sets(st.integers(1, 9)), st.integers(1, 2))
def test_of_plan_that_raises_exactly_culprits_fail(culprits, num_flights):
    p = policy(max_steps_in_flight=num_flights, max_num_active_seqs=4)
    for id in range(1, 10):
        p.admit(admit(id, 1))
    flights, found, refused_epoch = [], {}, -1
    for _ in range(200):
        while (plan := p.plan()) is not None:
            flights.append(plan)
        if not flights:
            break
        plan = flights.pop(0)
        if plan.epoch <= refused_epoch:
            p.fail_step(plan.step, "refused")
        elif culprits & set(ids(plan)):
            refused_epoch = plan.epoch
            p.fail_step(plan.step, "bad")
        else:
            p.apply(done(plan))
        found |= told(p)
    assert found == {id: "execution_error: bad" if id in culprits else id for id in range(1, 10)}


def test_suspect_of_departed_pair_is_retried_separately():
    p = policy()
    p.admit(admit(1, 2))
    p.admit(admit(2, 2))
    plan = p.plan()
    p.abort(RequestId(1))
    told(p)
    p.fail_step(plan.step, "bad")
    assert told(p) == {}
    p.apply(done(p.plan()))
    assert told(p) == {2: 2}


def run_until_done(p, is_deadly):
    """Lose the device at each plan that is deadly; the number of losses, and of those that were explained."""
    num_losses = num_explained = 0
    flights = []
    while True:
        while (plan := p.plan()) is not None:
            flights.append(plan)
        if not flights:
            return num_losses, num_explained
        if is_deadly(ids(flights[0])):
            loss = DeviceLost("it died", flights[0].step)
            flights.clear()
            num_losses += 1
            num_explained += p.lose_device(loss)
            assert p.plan() is None
            p.return_device()
        else:
            p.apply(done(flights.pop(0)))


@pytest.mark.parametrize("num_flights", [1, 2])
def test_a_text_that_kills_the_device_ends_alone(num_flights):
    p = policy(max_steps_in_flight=num_flights)
    for id in range(1, 7):
        p.admit(admit(id, 3))
    num_losses, num_explained = run_until_done(p, lambda group: 5 in group)
    assert told(p) == {1: 1, 2: 2, 3: 3, 4: 4, 5: "poisoned_request: it died", 6: 6}
    assert num_explained == num_losses <= 4


def test_text_whose_plan_device_never_had_is_no_suspect():
    p = policy()
    p.admit(admit(1, 3))
    for _ in range(3):
        assert p.plan() is not None
        assert p.lose_device(DeviceLost("it died while it was idle", step=None)) == 0
        p.return_device()
    p.apply(done(p.plan()))
    assert told(p) == {1: 1}


def test_a_passing_loss_ends_no_text():
    p = policy()
    for id in range(1, 4):
        p.admit(admit(id, 3))
    dies = iter([True])
    assert run_until_done(p, lambda group: next(dies, False)) == (1, 0)
    assert told(p) == {1: 1, 2: 2, 3: 3}
