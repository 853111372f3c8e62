"""A thousand requests that are left, aborted and slept over, on the real CPU engine."""

import gc
import json
import random
import threading
from pathlib import Path

import anyio
import pytest

from trouper import AsyncLLMEngine, EngineArgs, SamplingParams

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_REQUESTS = 1500
WARM_UP = 500
MAX_GROWTH_MIB = 16  # a block a request would be 73 MiB


@pytest.fixture
def anyio_backend():
    return "trio"


def resident_mib():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


async def test_sleep_gives_weights_and_kv_memory_back_and_outputs_stay(tmp_path):
    config = {
        "architectures": ["Qwen3ForCausalLM"], "vocab_size": 32000, "hidden_size": 512,
        "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 8,
        "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "torch_dtype": "float32",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = EngineArgs(
        str(tmp_path), skip_tokenizer_init=True, load_format="dummy", max_num_batched_tokens=512
    )
    params = SamplingParams(temperature=0, max_tokens=4)
    prompt = [n % 1000 for n in range(1500)]  # 71 MiB of KV, and 291 MiB of weights
    async with AsyncLLMEngine.from_engine_args(args) as engine:

        async def answer(name):
            return [output async for output in engine.generate(prompt, params, name)][-1].outputs

        before = await answer("before")
        awake = resident_mib()
        await engine.sleep(1)
        assert resident_mib() < awake - 50
        await engine.wake_up()
        assert await answer("after level 1") == before
        await engine.sleep(2)
        assert resident_mib() < awake - 250
        await engine.wake_up()
        assert await answer("after level 2") == before


async def test_a_thousand_disconnects_aborts_and_sleeps_leave_nothing():
    dice = random.Random(1)
    args = EngineArgs(max_model_len=512, max_num_seqs=16, num_gpu_blocks_override=32)
    async with AsyncLLMEngine.from_engine_args(args) as engine:
        idle = engine.statistics()
        threads = threading.active_count()
        gate = anyio.Semaphore(32)

        async def client(number):
            params = SamplingParams(
                seed=number, max_tokens=dice.randint(1, 60), n=dice.choice([1, 1, 1, 3])
            )
            name, patience = f"r{number}", dice.randint(0, 12)
            async with gate, engine.generate("word " * dice.randint(1, 60), params, name) as stream:
                async for _ in stream:
                    patience -= 1
                    if patience == 0 and dice.random() < 0.5:
                        await engine.abort(name)
                    elif patience < 0 and dice.random() < 0.5:
                        return  # disconnects

        async def play(numbers):
            async with anyio.create_task_group() as tg:
                for number in numbers:
                    tg.start_soon(client, number)
                for _ in range(len(numbers) // 40):
                    level, mode = dice.choice([(0, "keep"), (0, "abort"), (1, "keep"), (2, "keep")])
                    await engine.sleep(level, mode)
                    assert await engine.wake_up()
            async with engine.paused("wait"):  # everything that was going on has ended
                return engine.statistics()

        await play(range(WARM_UP))
        before = resident_mib()
        after = await play(range(WARM_UP, NUM_REQUESTS))
        assert after.num_open_requests == after.num_rendering == after.num_tracked == 0
        assert after.scheduler.num_running == after.scheduler.num_waiting == 0
        assert after.scheduler.num_blocks_free == idle.scheduler.num_blocks_free
        assert threading.active_count() <= threads + 1  # an idle renderer thread
        assert resident_mib() - before < MAX_GROWTH_MIB
