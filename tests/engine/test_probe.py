"""A probe goes to the scheduler, through the executor to the device, and back."""

import anyio
import pytest

from tests.support.engines import STEP_S, simulated_engine
from trouper.errors import EngineDeadError
from trouper.params import SamplingParams

pytestmark = pytest.mark.trio


async def test_it_waits_for_steps_before_it_and_for_nothing_else(autojump_clock):
    async with simulated_engine() as engine:
        await engine.controls.probe()
        async with engine.generate([1, 2, 3], SamplingParams(max_tokens=50), "a") as stream:
            await anext(stream)
            begin = anyio.current_time()
            await engine.controls.probe()
            assert anyio.current_time() - begin < 3.5 * STEP_S  # in flight, and in the inbox


async def test_executor_inbox_never_fills(autojump_clock):
    async with simulated_engine() as engine, anyio.create_task_group() as tg:
        async with engine.generate([1, 2, 3], SamplingParams(max_tokens=50), "a") as stream:
            await anext(stream)
            for _ in range(10):
                tg.start_soon(engine.controls.probe)
                with anyio.move_on_after(STEP_S / 3):
                    await engine.controls.probe()
            await engine.controls.sleep(0)
            await engine.controls.wake()
            async for output in stream:
                last = output
    assert last.outputs[0].finish_reason == "abort"


async def test_it_ends_with_the_engine(autojump_clock):
    async with simulated_engine() as engine:
        with anyio.move_on_after(0):
            await engine.controls.probe()
    with pytest.raises(EngineDeadError):
        await engine.controls.probe()
