"""The policy of a pipeline: turns of sequences that decode, chunks of a lone prompt, suspects of a loss."""

import pytest

from tests.simulation.stages.pipeline import CHUNKS, DEPTHS, Policy, decode_gain, prompt_gain
from trouper.actors.messages.steps import DeviceLost
from trouper.config.parallel import max_steps_in_flight

from .test_policy import Desk


def stage_desk(num_stages=2, **config):
    steps = max_steps_in_flight(num_stages, plans_ahead=True)
    return Desk(
        **{"num_stages": num_stages, "max_steps_in_flight": steps, "max_num_seqs": 16, **config}
    )


def decoding_desk(num_sequences, num_stages=2, **config):
    """All are past their prompts, and nothing is in flight."""
    desk = stage_desk(num_stages, **config)
    for id in range(num_sequences):
        desk.admit(id, max_tokens=50)
    desk.step()
    return desk


def plan_all(desk):
    plans = []
    while (plan := desk.plan()) is not None:
        plans.append(desk.owners(plan))
    return plans


def test_sequences_that_decode_are_shared_out_among_stages():
    desk = decoding_desk(5)
    assert plan_all(desk) == [[0, 1, 2], [3, 4], [0, 1, 2]]
    desk.land()
    assert plan_all(desk) == [[3, 4]]


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_plan_reads_no_token_that_its_stages_are_still_computing(num_stages):
    desk = decoding_desk(8, num_stages)
    plans = [desk.plan() for _ in range(num_stages + 1)]
    for _ in range(20):
        for plan in plans:
            assert plan.reads == 0 or plan.step - plan.reads >= num_stages
        desk.land()
        plans = [desk.plan()]
        assert plans[0] is not None


def test_lone_sequence_is_planned_once_before_its_token_is_due():
    desk = decoding_desk(1)
    first = desk.plan()
    early = desk.plan()
    assert (first.reads, early.reads) == (0, first.step)
    assert desk.plan() is None
    desk.land()
    assert desk.plan().reads == early.step


def test_one_step_in_flight_takes_all_sequences():
    desk = decoding_desk(5, max_steps_in_flight=1)
    assert plan_all(desk) == [[0, 1, 2, 3, 4]]


def test_no_sequence_is_forgotten_where_answers_come_one_by_one():
    desk = decoding_desk(6)
    for _ in range(30):
        desk.plan()
        desk.land()
    num_outputs = [sequence.num_output for sequence in desk.policy.table.running.snapshot()]
    assert len(num_outputs) == 6
    assert max(num_outputs) - min(num_outputs) <= 1


def test_lone_prompt_is_cut_so_that_all_stages_have_work():
    desk = stage_desk(num_usable=1000, max_num_scheduled_tokens=2048)
    desk.admit(0, prompt=range(2400))
    assert [plan.num_scheduled_tokens for plan in iter(desk.plan, None)] == [(300,)] * 3
    desk.admit(1, prompt=range(9000, 9040))
    desk.land()
    assert sum(desk.plan().num_scheduled_tokens) == 1500 + 40


def test_short_or_unchunked_prompt_is_not_cut():
    desk = stage_desk(num_usable=1000, max_num_scheduled_tokens=2048, enable_chunked_prefill=False)
    desk.admit(0, prompt=range(2000))
    assert desk.plan().num_scheduled_tokens == (2000,)
    desk = stage_desk(num_usable=1000, max_num_scheduled_tokens=2048)
    desk.admit(0, prompt=range(200))
    assert desk.plan().num_scheduled_tokens == (128,)


def test_abort_frees_blocks_of_chunks_in_flight():
    desk = stage_desk(num_usable=1000, max_num_scheduled_tokens=2048)
    desk.admit(0, prompt=range(2400))
    for _ in range(3):
        desk.plan()
    desk.policy.abort(0)
    assert desk.policy.blocks.num_free == 1000
    desk.admit(1, max_tokens=1)
    for _ in range(3):
        desk.land()
    desk.step()
    assert desk.ends() == {0: ("abort", None), 1: ("length", None)}
    desk.assert_idle()


def test_preempted_sequences_of_a_pipeline_all_end():
    desk = stage_desk(3, num_usable=12, watermark=0.0)
    for id in range(8):
        desk.admit(id, prompt=range(6), max_tokens=20)
    for _ in range(2000):
        while desk.plan() is not None:
            pass
        if not desk.flights:
            break
        desk.land()
    assert desk.policy.statistics().num_preemptions > 0
    desk.assert_idle()


def test_all_plans_in_flight_are_suspects_of_loss():
    desk = decoding_desk(4)
    plan_all(desk)
    desk.policy.lose_device(DeviceLost("it died", 2))
    desk.flights.clear()
    desk.policy.return_device()
    tested = plan_all(desk)
    assert tested
    assert {id for ids in tested for id in ids} == {0, 1}  # the first half of all four


@pytest.mark.parametrize("depth", DEPTHS)
def test_chunks_of_one_prompt_flow_and_do_not_with_stall(depth):
    for chunk in CHUNKS:
        num_chunks = 65_536 // chunk
        expected = 1.5 * num_chunks * depth / (1.5 * num_chunks + 2 * (depth - 1))
        assert prompt_gain(depth, chunk) == pytest.approx(expected, rel=0.01)
        assert prompt_gain(depth, chunk, stalls=True) == pytest.approx(1.0)
    assert prompt_gain(depth, CHUNKS[0], Policy) >= prompt_gain(depth, CHUNKS[0])
    assert prompt_gain(depth, 2048, max_steps_in_flight=2) < 2.0


@pytest.mark.parametrize(("depth", "gain"), [(2, 1.11), (4, 1.18), (8, 1.21)])
@pytest.mark.slow
def test_decoding_gains_by_turns_alone(depth, gain):
    assert decode_gain(depth) == pytest.approx(gain, rel=0.01)
    assert decode_gain(depth, shares_out=False) == pytest.approx(1.0, rel=0.01)
