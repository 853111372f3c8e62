"""The simulated device itself: does it notice what it is there to notice?"""

import anyio
import msgspec
import numpy as np
import pytest

from trouper.actors.messages.controls import Sleep, Wake
from trouper.actors.messages.requests import SequenceId
from trouper.actors.messages.steps import (
    NewSequence,
    PoolDone,
    PoolEntry,
    PoolPlan,
    Sampling,
    StepDone,
    StepFailed,
    StepPlan,
)
from trouper.config.kv_layout import KVLayout

from .simulated_device import Conditions, SimulatedDevice, StepError, simulated_tokens
from .simulated_encoder import SimulatedEncoder, simulated_result

VOCAB = 50
GREEDY = Sampling(temperature=0.0)
PROMPT = (3, 1, 4, 1, 5)

pytestmark = pytest.mark.trio


def new_row(row, blocks, tokens=PROMPT, sampling=GREEDY, num_prompt=None):
    return NewSequence(row, SequenceId(row), tokens, num_prompt or len(tokens), blocks, sampling)


def plan(step, row, start, count, *, samples=1, epoch=0, **more):
    return StepPlan(step, epoch, (row,), (start,), (count,), (samples,), **more)


async def answers_of(device, num=1):
    return [await device.receive() for _ in range(num)]


async def play(device, *plans):
    answers = []
    for one in plans:
        device.submit(one)
        answers += await answers_of(device)
    return answers


def device_of(conditions=None, num_blocks=8, credits=2):
    return SimulatedDevice(num_blocks, 2, VOCAB, credits, conditions or Conditions(step_s=0))


async def test_chunks_and_decodes_yield_tokens_of_oracle():
    answers = await play(
        device_of(),
        plan(1, 0, 0, 2, samples=0, new_sequences=(new_row(0, (5,)),)),
        plan(2, 0, 2, 3, new_blocks=((0, (2, 7)),)),
        plan(3, 0, 5, 1),
        plan(4, 0, 6, 1, new_blocks=((0, (1,)),)),
    )
    tokens = [answer.token_ids[0] for answer in answers]
    assert tokens == [(), *((token,) for token in simulated_tokens(PROMPT, GREEDY, 3, VOCAB))]


async def test_shared_prefix_is_read_and_wrong_one_changes_token():
    longer = (*PROMPT, 9)
    first = plan(1, 0, 0, 5, new_sequences=(new_row(0, (1, 2, 3)),))
    right = plan(2, 1, 4, 2, new_sequences=(new_row(1, (1, 2, 4), longer),))
    wrong = plan(2, 1, 4, 2, new_sequences=(new_row(1, (1, 3, 4), longer),))
    want = simulated_tokens(longer, GREEDY, 1, VOCAB)
    assert (await play(device_of(), first, right))[1].token_ids == (tuple(want),)
    assert (await play(device_of(), first, wrong))[1].token_ids != (tuple(want),)


@pytest.mark.parametrize("table", [(1, 0, 3, 4, 5, 7), (1, 2, 3, 2, 5, 7), (1, 2, 3, 0, 5, 7)])
async def test_wrong_block_inside_window_shows(table):
    """Blocks of two tokens, in two tables.  The second is of layers that see three tokens."""
    layout, is_right = KVLayout(2, (None, 3)), table[3] == 4
    device = SimulatedDevice(9, 2, VOCAB, 2, Conditions(step_s=0), layout=layout)
    first = plan(1, 0, 0, 5, new_sequences=(new_row(0, (1, 2, 3, 4, 5, 6)),))
    (done,) = await play(device, first)
    assert done.token_ids == (tuple(simulated_tokens(PROMPT, GREEDY, 1, VOCAB)),)
    second = plan(2, 1, 4, 1, new_sequences=(new_row(1, table),))
    if table[3]:
        (again,) = await play(device, second)
        assert (again.token_ids == done.token_ids) == is_right
    else:
        with pytest.raises(ValueError, match="no such block"):
            await play(device, second)


async def test_a_fork_needs_its_copy():
    first = plan(1, 0, 0, 5, new_sequences=(new_row(0, (1, 2, 3)),))
    second = new_row(1, (1, 2, 4), (*PROMPT, 8, 9)[:6], num_prompt=5)
    want = simulated_tokens((*PROMPT, 8), GREEDY, 1, VOCAB)
    copied = plan(2, 1, 5, 1, new_sequences=(second,), copies=((3, 4),))
    forgotten = plan(2, 1, 5, 1, new_sequences=(second,))
    assert (await play(device_of(), first, copied))[1].token_ids == (tuple(want),)
    assert (await play(device_of(), first, forgotten))[1].token_ids != (tuple(want),)


async def test_after_error_epoch_is_refused_and_next_one_runs():
    class OneError(Conditions):
        def error(self, plan, sequences):
            return StepError("oops") if plan.step == 1 else None

    device = device_of(OneError(step_s=0))
    row = new_row(0, (1, 2, 3))
    device.submit(plan(1, 0, 0, 5, new_sequences=(row,)))
    device.submit(plan(2, 0, 5, 1))
    first, second = await answers_of(device, 2)
    assert first == StepFailed(1, "oops")
    assert isinstance(second, StepFailed)
    (answer,) = await play(device, plan(3, 0, 0, 5, epoch=1, new_sequences=(row,)))
    assert answer.token_ids == (tuple(simulated_tokens(PROMPT, GREEDY, 1, VOCAB)),)


async def test_a_row_that_is_not_finite_fails_alone():
    class OneBadRow(Conditions):
        def is_finite(self, sequence, position):
            return sequence != 1

    both = StepPlan(
        1, 0, (0, 1), (0, 0), (5, 5), (1, 1),
        new_sequences=(new_row(0, (1, 2, 3)), new_row(1, (4, 5, 6))),
    )  # fmt: skip
    (answer,) = await play(device_of(OneBadRow(step_s=0)), both)
    want = simulated_tokens(PROMPT, GREEDY, 1, VOCAB)[0]
    assert msgspec.structs.replace(answer, seconds=0.0) == StepDone(
        1, ((want,), ()), failed=((1, "not_finite"),)
    )


async def test_steps_take_their_time_one_after_another(autojump_clock):
    device = device_of(Conditions(step_s=2.0))
    device.submit(plan(1, 0, 0, 5, new_sequences=(new_row(0, (1, 2, 3)),)))
    device.submit(plan(2, 0, 5, 1))
    times = []
    with anyio.move_on_after(5):
        while True:
            await device.receive()
            times.append(anyio.current_time())
    assert times == pytest.approx([2, 4])


@pytest.mark.parametrize(
    "bad",
    [
        plan(1, 3, 0, 1),
        plan(1, 0, 0, 0, new_sequences=(new_row(0, (1, 2, 3)),)),
        plan(1, 0, 0, 5, new_sequences=(new_row(0, (1, 2)),)),
        plan(1, 0, 0, 6, new_sequences=(new_row(0, (1, 2, 3)),)),
        plan(1, 0, 0, 5, new_sequences=(new_row(0, (0, 1, 2)),)),
        plan(1, 0, 0, 5, new_sequences=(new_row(0, (1, 2, 8)),)),
    ],
    ids=["no row", "no tokens", "no block", "no token", "null block", "unknown block"],
)
async def test_plan_that_breaks_protocol_is_error(bad):
    with pytest.raises(ValueError, match=r"step 1|position|no "):
        await play(device_of(), bad)


async def test_memory_that_sleeps_runs_no_step_and_forgets():
    device = device_of()
    first = plan(1, 0, 0, 5, new_sequences=(new_row(0, (1, 2, 3)),))
    await play(device, first)
    await device.call(Sleep(1))
    with pytest.raises(RuntimeError, match="absent"):
        device.submit(plan(2, 0, 5, 1))
    await device.call(Wake(frozenset({"weights", "kv_cache"})))
    longer = (*PROMPT, 9)
    (answer,) = await play(device, plan(2, 1, 4, 2, new_sequences=(new_row(1, (1, 2, 4), longer),)))
    assert answer.token_ids != tuple(simulated_tokens(longer, GREEDY, 1, VOCAB))


async def test_no_more_steps_than_agreed_and_none_after_end():
    device = device_of(credits=1)
    device.submit(plan(1, 0, 0, 5, new_sequences=(new_row(0, (1, 2, 3)),)))
    with pytest.raises(RuntimeError, match="in flight"):
        device.submit(plan(2, 0, 5, 1))
    await device.aclose()
    await device.aclose()
    with pytest.raises(RuntimeError, match="closed"):
        device.submit(plan(3, 0, 6, 1))


# Of one that pools

SHORT, LONG = PoolEntry((3, 1), None, "embed"), PoolEntry(PROMPT, None, "token_embed")


async def test_a_result_depends_on_its_own_column_alone():
    device = SimulatedEncoder(4, 2, Conditions(step_s=0))
    (alone,) = await play(device, PoolPlan(1, 0, (LONG,)))
    (both,) = await play(device, PoolPlan(2, 0, (SHORT, LONG)))
    assert [array.shape for array in both.arrays] == [(4,), (5, 4)]
    assert np.array_equal(alone.arrays[0], both.arrays[1])
    assert np.array_equal(both.arrays[0], simulated_result(SHORT, 4))


@pytest.mark.parametrize("other", [{"token_ids": (1, 3)}, {"token_type_ids": (0, 1)}])
async def test_another_column_has_another_result(other):
    facts = {"token_ids": SHORT.token_ids, "token_type_ids": None, "task": "embed"}
    result = simulated_result(PoolEntry(**facts | other), 4)
    assert not np.allclose(result, simulated_result(SHORT, 4))


async def test_plans_of_a_failed_epoch_are_not_pooled():
    class Stormy(Conditions):
        def error(self, plan, sequences):
            return StepError("rain") if plan.step == 1 else None

    device = SimulatedEncoder(4, 3, Stormy(step_s=0))
    for step, epoch in ((1, 0), (2, 0), (3, 1)):
        device.submit(PoolPlan(step, epoch, (SHORT,)))
    first, second, third = await answers_of(device, 3)
    assert first == StepFailed(1, "rain")
    assert isinstance(second, StepFailed)
    assert isinstance(third, PoolDone)


async def test_columns_out_of_order_break_the_protocol():
    with pytest.raises(ValueError, match="columns"):
        await play(SimulatedEncoder(4, 1), PoolPlan(1, 0, (LONG, SHORT)))
