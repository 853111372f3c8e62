"""What the Python faces tell about themselves: metrics, the log line, tasks, draining."""

import logging

import anyio
import pytest

from tests.support.engines import STEP_S, simulated_engine
from trouper import LLM, AsyncLLMEngine, EngineArgs, LLMEngine, SamplingParams
from trouper.errors import EngineDeadError, QueueOverflowError, TrouperValidationError
from trouper.metrics import Counter, Gauge, Histogram

SMALL = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 16,
    "num_gpu_blocks_override": 32,
}


def greedy(max_tokens=6):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def test_stepped_engine_has_metrics_and_log_line(caplog):
    caplog.set_level(logging.DEBUG, "trouper")
    with LLMEngine.from_engine_args(EngineArgs(**SMALL, max_num_queued_reqs=1)) as engine:
        for request_id in "ab":  # an offline engine ignores the limit
            engine.add_request(request_id, "def f(", greedy())
        while engine.has_unfinished_requests():
            outputs = engine.step()
        assert outputs[0].metrics.num_generation_tokens == 6
        found = {m.name: m for m in engine.get_metrics()}
        engine.do_log_stats()
        assert engine.get_supported_tasks() == ("generate",)
    assert found["trouper:generation_tokens"].value == 12
    assert isinstance(found["trouper:generation_tokens"], Counter)
    assert isinstance(found["trouper:num_requests_running"], Gauge)
    assert isinstance(found["trouper:e2e_request_latency_seconds"], Histogram)
    assert "generation throughput" in caplog.text


def test_offline_statistics_are_off_unless_asked_for():
    with LLM(**SMALL) as llm:
        (output,) = llm.generate("def f(", greedy(2), use_tqdm=False)
        assert output.metrics is None
        with pytest.raises(TrouperValidationError, match="set disable_log_stats=False"):
            llm.get_metrics()
    with LLM(**SMALL, disable_log_stats=False) as llm:
        llm.generate(["def f(", "x"], greedy(2), use_tqdm=False)
        found = {m.name: m for m in llm.get_metrics()}
        assert found["trouper:request_prompt_tokens"].count == 2


@pytest.mark.anyio
async def test_an_embedded_engine_tells_its_state_and_drains():
    engine = AsyncLLMEngine.from_engine_args(EngineArgs(**SMALL, max_num_queued_reqs=2))
    assert engine.is_stopped
    async with engine:
        assert engine.is_running
        assert not engine.is_stopped
        assert not await engine.is_tracing_enabled()
        assert await engine.get_supported_tasks() == ("generate",)
        await engine.wait_for_requests_to_drain(timeout=0.001)
        async with engine.generate("def f(", greedy(200), "long") as stream:
            await anext(stream)
            with pytest.raises(TimeoutError):
                await engine.wait_for_requests_to_drain(timeout=0.001)
            await engine.check_admission(1)
            with pytest.raises(QueueOverflowError):
                await engine.check_admission(2)
            with pytest.raises(ValueError, match="in flight"):
                await engine.check_admission(request_id="long")
        assert {m.name for m in await engine.get_metrics()} > {"trouper:kv_cache_usage_perc"}
        await engine.do_log_stats()
    assert engine.is_stopped
    with pytest.raises(EngineDeadError):
        await engine.get_metrics()


@pytest.mark.trio
async def test_draining_waits_for_requests_that_come_meanwhile(autojump_clock):
    async with simulated_engine() as engine, anyio.create_task_group() as tg:

        async def client(number):
            await anyio.sleep(number * 5 * STEP_S)
            async for _ in engine.generate([1, 2, 3], greedy(8), f"r{number}"):
                pass

        for number in range(3):
            tg.start_soon(client, number)
        await anyio.sleep(STEP_S)
        await engine.wait_idle()
        assert anyio.current_time() > (10 + 8) * STEP_S  # the last came at 10
        assert engine.statistics().scheduler.num_running == 0
