"""asyncio's own cancellation, `Task.cancel`, which no shield of anyio keeps out: at every turn of what changes the engine."""

import asyncio
import itertools

import pytest

from tests.simulation.simulated_device import MEMORY, Conditions
from tests.support.engines import expected, simulated_engine
from trouper import SamplingParams
from trouper.actors.engine import controls
from trouper.actors.engine.lifecycle import EngineState

pytestmark = pytest.mark.anyio
PROMPT = [1, 2, 3]


@pytest.fixture
def anyio_backend():
    return "asyncio"


class Watched(Conditions):
    def __init__(self):
        super().__init__(step_s=0)
        self.calls = []

    def call_s(self, method):
        self.calls.append(method)
        return 0.0


def engine_of(conditions=None):
    return simulated_engine(conditions=conditions or Watched())


async def cancelled_after(num_turns, coroutine):
    """Whether it had ended before."""
    task = asyncio.create_task(coroutine)
    for _ in range(num_turns):
        await asyncio.sleep(0)
    was_done = task.done()
    task.cancel()
    await asyncio.wait([task])
    return was_done


async def check_alive(engine):
    prompt, params = {"prompt_token_ids": PROMPT}, SamplingParams(temperature=0, max_tokens=5)
    async with asyncio.timeout(30):
        outputs = [output async for output in engine.generate(prompt, params, "a")]
    assert outputs[-1].outputs[0].token_ids == expected(PROMPT, 5)


@pytest.mark.parametrize("is_wake", [False, True], ids=["sleep", "wake"])
async def test_engine_and_device_agree_about_memory_wherever_change_was_cut(is_wake):
    for num_turns in itertools.count(1):
        async with engine_of() as engine:
            if is_wake:
                await engine.controls.sleep(1)
            was_done = await cancelled_after(
                num_turns, engine.controls.wake() if is_wake else engine.controls.sleep(1)
            )
            assert MEMORY - engine.device._absent == engine.lifecycle.resident
            assert engine.lifecycle.state in (
                EngineState.AWAKE, EngineState.PAUSED, EngineState.ASLEEP
            )  # fmt: skip
            assert await engine.controls.wake()
            await check_alive(engine)
        if was_done:
            break
    assert num_turns > 5


async def test_paused_block_cut_leaves_engine_unchanged():
    async def block(engine):
        async with engine.controls.paused():
            await asyncio.sleep(0)

    for num_turns in itertools.count(1):
        async with engine_of() as engine:
            was_done = await cancelled_after(num_turns, block(engine))
            assert engine.lifecycle.state is EngineState.AWAKE
            await check_alive(engine)
        if was_done:
            break
    assert num_turns > 5


async def test_block_cut_while_another_change_takes_too_long_holds_nothing(monkeypatch):
    monkeypatch.setattr(controls, "RESTORE_GRACE_S", 1e-3)

    async def block(engine, entered, leave):
        async with engine.controls.paused():
            entered.set()
            await leave.wait()

    async with engine_of() as engine:
        entered, leave = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(block(engine, entered, leave))
        await entered.wait()
        async with engine.controls._transition:
            leave.set()
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        assert not engine.lifecycle._holds
        await engine.controls.resume()
        await check_alive(engine)


async def test_profile_can_end_after_cancelled_start():
    for num_turns in itertools.count(1):
        conditions = Watched()
        async with engine_of(conditions) as engine:
            was_done = await cancelled_after(
                num_turns, engine.controls.start_profile("folder", "x")
            )
            if "start_profile" in conditions.calls:
                await engine.controls.stop_profile()
                assert conditions.calls == ["start_profile", "stop_profile"]
        if was_done:
            break
    assert num_turns > 3


async def test_changes_given_up_leave_room_for_next_question():
    async with engine_of() as engine:
        await engine.controls.sleep(1)
        for _ in range(9):
            await cancelled_after(2, engine.controls.wake())
        await engine.controls.probe()
        assert await engine.controls.wake()
        await check_alive(engine)
