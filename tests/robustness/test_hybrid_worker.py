"""Sixteen streams of a recurrent model survive the death of its worker, with drafts and without."""

import signal
from functools import partial

import pytest

from tests.parity.test_hybrid_drafts import write_hybrid
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
        expected = await texts(engine, num=16)
        for at_token in (1, 20):
            kill = partial(workers.signal, signal.SIGKILL)
            assert await texts(engine, at_token=at_token, do=kill, num=16) == expected
        assert len(workers.peers) == 3
    drafting = {"speculative_config": {"method": "suffix"}, "max_num_seqs": 4}
    async with an_engine(model=model, **ENGINE | drafting) as (engine, workers):
        assert await texts(engine, num=16) == expected
        kill = partial(workers.signal, signal.SIGKILL)
        assert await texts(engine, at_token=9, do=kill, num=16) == expected
        assert engine.statistics().scheduler.num_accepted_tokens > 20
        assert len(workers.peers) == 2
