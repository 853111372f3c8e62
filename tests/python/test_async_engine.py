"""`AsyncLLMEngine` in somebody else's program, on asyncio and on trio, with the bundled model."""

import gc
import json
import random

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from tests.support.engines import simulated_engine
from trouper import AsyncLLMEngine, EngineArgs, RequestOutputKind, SamplingParams
from trouper.errors import (
    EngineDeadError,
    ProfilerAlreadyActiveError,
    TrouperValidationError,
)

pytestmark = pytest.mark.anyio

SMALL = {
    "max_model_len": 512,
    "max_num_seqs": 16,
    "num_gpu_blocks_override": 64,
    "dtype": "float32",
}


def args(**options):
    return EngineArgs(**{**SMALL, **options})


def greedy(max_tokens=8, **options):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **options)


async def last(stream):
    return [output async for output in stream][-1]


async def test_it_streams_with_bare_loop_and_inside_block():
    async with AsyncLLMEngine.from_engine_args(args()) as engine:
        with anyio.fail_after(30):
            lengths = [
                len(output.outputs[0].token_ids)
                async for output in engine.generate("def f(", greedy(ignore_eos=True), "a")
            ]
            async with engine.generate("def f(", greedy(ignore_eos=True), "b") as stream:
                whole = await last(stream)
    assert lengths == sorted(lengths)
    assert lengths[-1] == len(whole.outputs[0].token_ids) == 8


async def test_deltas_equal_the_whole():
    async with AsyncLLMEngine.from_engine_args(args()) as engine:
        whole = await last(engine.generate("import os", greedy(40), "a"))
        delta = greedy(40, output_kind=RequestOutputKind.DELTA)
        parts = [output.outputs[0] async for output in engine.generate("import os", delta, "b")]
    assert "".join(part.text for part in parts) == whole.outputs[0].text
    assert [id for part in parts for id in part.token_ids] == whole.outputs[0].token_ids


async def test_leaving_a_stream_early_frees_everything():
    async with AsyncLLMEngine.from_engine_args(args()) as engine:
        async with engine.generate("x", greedy(400, ignore_eos=True), "a") as stream:
            await anext(stream)
        async with engine.paused("wait"):  # everything that was going on has ended
            stats = engine.statistics()
        assert stats.num_tracked == 0
        assert stats.num_open_requests == 0
        assert stats.scheduler.num_blocks_free == stats.scheduler.num_blocks_total


async def test_abort_gives_the_reader_its_final_output():
    async with AsyncLLMEngine.from_engine_args(args()) as engine:
        stream = engine.generate("x", greedy(400, ignore_eos=True), "a")
        await anext(stream)
        await engine.abort(["a"])
        output = await last(stream)
        assert output.outputs[0].finish_reason == "abort"


async def test_validation_errors_come_out_unchanged():
    async with AsyncLLMEngine.from_engine_args(args()) as engine:
        with pytest.raises(TrouperValidationError, match="empty"):
            await anext(engine.generate("", greedy(), "a"))
        with pytest.raises(TrouperValidationError, match="512"):
            await anext(engine.generate("x " * 5000, greedy(), "b"))


async def test_errors_of_block_come_out_as_they_are():
    with pytest.raises(KeyError, match="mine"):
        async with AsyncLLMEngine.from_engine_args(args()):
            raise KeyError("mine")


async def test_a_model_that_is_not_there_is_named():
    with pytest.raises(TrouperValidationError, match="no such model folder"):
        async with AsyncLLMEngine.from_engine_args(args(model="./nowhere")):
            pass


async def test_it_can_be_used_several_times_and_twice_at_once():
    async with (
        AsyncLLMEngine.from_engine_args(args()) as one,
        AsyncLLMEngine.from_engine_args(args()) as two,
    ):
        first = await last(one.generate("x", greedy(), "a"))
        second = await last(two.generate("x", greedy(), "a"))
        assert first.outputs == second.outputs


async def test_start_and_close_do_what_the_block_does():
    engine = AsyncLLMEngine.from_engine_args(args())
    with pytest.raises(EngineDeadError):
        engine.statistics()
    await engine.start()
    assert engine.is_running
    assert (await last(engine.generate("x", greedy(), "a"))).finished
    await engine.close()
    await engine.close()
    assert not engine.is_running


@pytest.mark.parametrize("level", [0, 1, 2])
async def test_outputs_after_waking_are_those_of_before(level):
    async with AsyncLLMEngine.from_engine_args(args()) as engine:
        seeded = SamplingParams(seed=3, max_tokens=24, logprobs=2)
        before = await last(engine.generate("def f(", seeded, "a"))
        stream = engine.generate("import os", greedy(60, ignore_eos=True), "frozen")
        await anext(stream)
        await engine.sleep(level, "keep")
        assert await engine.is_sleeping()
        assert await engine.wake_up()
        frozen = await last(stream)
        whole = await last(engine.generate("import os", greedy(60, ignore_eos=True), "whole"))
        after = await last(engine.generate("def f(", seeded, "b"))
    assert frozen.outputs[0].token_ids == whole.outputs[0].token_ids
    assert after.outputs == before.outputs


async def test_the_profiler_leaves_a_trace(tmp_path):
    config = {"profiler": "torch", "torch_profiler_dir": str(tmp_path)}
    async with AsyncLLMEngine.from_engine_args(args(profiler_config=config)) as engine:
        await engine.start_profile()
        with pytest.raises(ProfilerAlreadyActiveError):
            await engine.start_profile()
        await last(engine.generate("x", greedy(2), "a"))
        await engine.stop_profile()
        with pytest.warns(UserWarning, match="without start"):
            await engine.stop_profile()
    (trace,) = tmp_path.iterdir()
    assert json.loads(trace.read_text())["traceEvents"]


async def test_the_profiler_needs_a_folder():
    async with AsyncLLMEngine.from_engine_args(args()) as engine:
        for order in (engine.start_profile, engine.stop_profile):
            with pytest.raises(TrouperValidationError, match="profiler_config"):
                await order()


async def test_a_storm_of_aborts_and_sleeps_leaves_nothing():
    dice = random.Random(5)
    async with AsyncLLMEngine.from_engine_args(args(num_gpu_blocks_override=8)) as engine:
        idle = engine.statistics().scheduler

        async def client(number):
            params = SamplingParams(
                seed=number, max_tokens=dice.randint(1, 60), n=dice.choice([1, 1, 2])
            )
            async with engine.generate(
                "word " * dice.randint(1, 40), params, f"r{number}"
            ) as stream:
                for _ in range(dice.randint(0, 20)):
                    try:
                        await anext(stream)
                    except StopAsyncIteration:
                        return

        with anyio.fail_after(55):
            async with anyio.create_task_group() as tg:
                for number in range(60):
                    tg.start_soon(client, number)
                    if number % 10 == 9:
                        await engine.sleep(dice.choice([0, 1]), "keep")
                        await engine.wake_up()
            async with engine.paused("wait"):
                stats = engine.statistics()
        assert stats.num_tracked == 0
        assert stats.num_open_requests == 0
        assert stats.scheduler.num_blocks_free == idle.num_blocks_free


@pytest.mark.parametrize("is_elsewhere", [False, True], ids=["on the loop", "in a thread"])
async def test_a_stream_that_is_dropped_leaves_nothing_open(is_elsewhere):
    async with simulated_engine() as engine:
        stream = engine.generate({"prompt_token_ids": [1, 2]}, greedy(100), "a")
        await anext(stream)
        cycle = [stream]
        cycle.append(cycle)
        with pytest.warns(ResourceWarning, match="dropped while open"):
            del stream, cycle
            await (anyio.to_thread.run_sync(gc.collect) if is_elsewhere else collect())
        with anyio.fail_after(30):
            await last(engine.generate({"prompt_token_ids": [3]}, greedy(), "b"))
        assert engine.statistics().num_open_requests == 0


async def collect():
    gc.collect()
    await anyio.lowlevel.checkpoint()


async def test_request_is_opened_in_thread_of_loop_only():
    async with simulated_engine() as engine:
        stream = engine.generate({"prompt_token_ids": [1, 2]}, greedy(100), "a")
        with pytest.raises(RuntimeError, match="in the loop and thread that started it"):
            await anyio.to_thread.run_sync(stream.open)
        assert engine.statistics().num_open_requests == 0
