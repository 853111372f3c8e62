"""Sixteen streams of a model with states or windows survive the death of a worker, in one process and in two stages."""

import os
import signal
from functools import partial

import pytest

from tests.parity.test_hybrid_drafts import write_hybrid
from tests.parity.test_windows import GEMMA
from tests.robustness.test_stages import expected, staged_engine
from tests.robustness.test_worker import an_engine, texts

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120), pytest.mark.slow]
ENGINE = {
    "max_num_seqs": 16,
    "max_model_len": 128,
    "block_size": 16,
    "num_gpu_blocks_override": 140,
}


async def test_hybrid_streams_survive_a_kill(tmp_path):
    model = str(write_hybrid("qwen3-5", tmp_path))
    async with an_engine(model=model, **ENGINE) as (engine, workers):
        wanted = await texts(engine, num=16)
        for at_token in (1, 12):
            kill = partial(workers.signal, signal.SIGKILL)
            assert await texts(engine, at_token=at_token, do=kill, num=16) == wanted
        assert len(workers.peers) == 3
    drafting = {"speculative_config": {"method": "suffix"}, "max_num_seqs": 4}
    async with an_engine(model=model, **ENGINE | drafting) as (engine, workers):
        assert await texts(engine, num=16) == wanted
        kill = partial(workers.signal, signal.SIGKILL)
        assert await texts(engine, at_token=9, do=kill, num=16) == wanted
        assert engine.statistics().scheduler.num_accepted_tokens > 20
        assert len(workers.peers) == 2


@pytest.mark.parametrize("kind", ["states", "windows"])
async def test_streams_survive_the_kill_of_a_stage(kind, tmp_path, caplog):
    name, fields = GEMMA
    # A sequence of thirty tokens gives blocks back.
    windows = name, fields | {"sliding_window": 8}
    model = str(write_hybrid("qwen3-5" if kind == "states" else windows, tmp_path))
    options = ENGINE | {"model": model}
    if kind == "windows":
        options |= {"block_size": 4, "num_gpu_blocks_override": 500}
    wanted = await expected(num=16, **options)
    async with staged_engine(2, max_worker_restarts=3, **options) as (engine, workers):
        for rank in range(2):

            def kill(victim=workers.peers[-2 + rank].pid):
                os.kill(victim, signal.SIGKILL)

            assert await texts(engine, at_token=8 + rank, do=kill, num=16) == wanted
            assert f"worker {rank} died of SIGKILL in step" in caplog.text
        assert len(workers.peers) == 2 * 3
        blocks = engine.statistics().scheduler
        assert blocks.num_blocks_free == blocks.num_blocks_total
