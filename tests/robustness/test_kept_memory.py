"""The KV cache outlives a worker that is killed or hangs, and is dropped after a worker that may have written anywhere."""

import signal
from functools import partial

import pytest

from tests.robustness.test_worker import PROMPTS, an_engine, texts

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]
BLOCK = 8
# A worker has two steps in flight, and each stream has a block that is not full.
MOST_RECOMPUTED = len(PROMPTS) * (BLOCK + 2)


def num_recomputed(engine):
    return sum(replica.num_lost_tokens for replica in engine.statistics().replicas)


@pytest.mark.slow
async def test_what_a_worker_leaves_depends_on_its_end():
    """Each stream has 20 tokens or more when the worker ends, so less than a block is little."""
    async with an_engine(block_size=BLOCK, step_timeout=3.0) as (engine, workers):
        expected = await texts(engine)
        costs = []
        for end in (signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP):
            await engine.controls.reset_prefix_cache()
            before = num_recomputed(engine)
            assert await texts(engine, at_token=20, do=partial(workers.signal, end)) == expected
            costs.append(num_recomputed(engine) - before)
    killed, wild, hung = costs
    assert 0 < killed <= MOST_RECOMPUTED
    assert wild > 2 * MOST_RECOMPUTED
    assert 0 < hung <= MOST_RECOMPUTED


@pytest.mark.slow
async def test_stages_keep_their_memory_together():
    options = {"block_size": BLOCK, "pipeline_parallel_size": 2}
    async with an_engine(**options) as (engine, workers):
        expected = await texts(engine)
        before = num_recomputed(engine)
        await engine.controls.reset_prefix_cache()
        assert (
            await texts(engine, at_token=20, do=partial(workers.signal, signal.SIGKILL)) == expected
        )
        assert 0 < num_recomputed(engine) - before <= 2 * MOST_RECOMPUTED


@pytest.mark.slow
async def test_windows_outlive_their_worker():
    windows = {
        "use_sliding_window": True,
        "sliding_window": 12,
        "max_window_layers": 2,
        "layer_types": None,
    }
    options = {
        "block_size": BLOCK,
        "hf_overrides": windows,
        "max_model_len": 256,
        "max_num_batched_tokens": 64,
    }
    async with an_engine(**options) as (engine, workers):
        expected = await texts(engine)
        assert engine.info.kv_layout.has_windows
        before = num_recomputed(engine)
        await engine.controls.reset_prefix_cache()
        do = partial(workers.signal, signal.SIGKILL)
        assert await texts(engine, at_token=20, do=do) == expected
        assert 0 < num_recomputed(engine) - before <= MOST_RECOMPUTED
