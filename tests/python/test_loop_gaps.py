"""Nothing of a request that takes long runs on the event loop: a heartbeat goes on while a step is held up.

Each kind of work is blocked, inside its thread, until the loop has beaten `BEATS` times.
"""

import base64
import threading
from contextlib import asynccontextmanager

import anyio
import numpy as np
import pytest
import torch
from safetensors.torch import save

from tests.support.heartbeat import BEATS, WAIT_S, Heartbeat
from trouper.actors.engine import request_table
from trouper.actors.output import pooler as pooler_module
from trouper.actors.rendering.prompts.pooling import PoolingPrompts
from trouper.actors.rendering.prompts.prompts import Prompts
from trouper.config.args import EngineArgs
from trouper.errors import TrouperValidationError
from trouper.frontends.python import scoring as pooling_frontend
from trouper.frontends.python.async_engine import AsyncLLMEngine
from trouper.frontends.python.scoring import Scorer
from trouper.params import SamplingParams
from trouper.pooling import PoolingParams

pytestmark = pytest.mark.trio


@asynccontextmanager
async def beating_engine(**args):
    heart = Heartbeat()
    async with anyio.create_task_group() as tasks:
        async with AsyncLLMEngine(EngineArgs(max_model_len=512, **args)) as engine:
            await tasks.start(heart.run)
            yield engine, heart
        tasks.cancel_scope.cancel()


PROMPTS = {
    "text": "def f(" * 50,
    "ids": list(range(300)),
    "chat": {"messages": [{"role": "user", "content": "x" * 500}], "chat_template": "{{ messages[0].content }}"},
    "pair": {"prompt": "one " * 50, "text_pair": "two " * 50},
}  # fmt: skip


@pytest.mark.parametrize("kind", PROMPTS)
async def test_loop_beats_while_pooling_prompt_is_rendered(kind, monkeypatch):
    async with beating_engine(runner="pooling") as (engine, heart):
        monkeypatch.setattr(PoolingPrompts, "_encoded", heart.hold_up(PoolingPrompts._encoded))
        async for output in engine.encode(PROMPTS[kind], PoolingParams(task="embed")):
            assert output.outputs.array.shape == (engine.model_config.hf_config["hidden_size"],)
    assert heart.count > BEATS


ROWS = torch.zeros(40, 256)
EMBEDS = {
    "tensor": {"prompt_embeds": ROWS},
    "file": {"prompt_embeds": save({"x": ROWS})},
    "bytes": save({"x": ROWS}),
    "base64": {"prompt_embeds": base64.b64encode(save({"x": ROWS})).decode()},
    "part": {"messages": [{"role": "user", "content": [{"type": "prompt_embeds", "data": ROWS}]}]},
}


@pytest.mark.parametrize("kind", ["text", "ids", "chat", *EMBEDS])
async def test_loop_beats_while_generating_prompt_is_rendered(kind, monkeypatch):
    prompt = {**PROMPTS, **EMBEDS}[kind]
    async with beating_engine(enable_prompt_embeds=True) as (engine, heart):
        monkeypatch.setattr(Prompts, "_form", heart.hold_up(Prompts._form))
        async for output in engine.generate(prompt, SamplingParams(max_tokens=1)):
            assert output.finished
    assert heart.count > BEATS


async def test_loop_beats_while_multimodal_prompt_is_refused(monkeypatch):
    prompt = {"prompt": "see: ", "multi_modal_data": {"image": np.zeros((512, 512, 3))}}
    async with beating_engine() as (engine, heart):
        monkeypatch.setattr(Prompts, "_form", heart.hold_up(Prompts._form))
        with pytest.raises(TrouperValidationError, match="takes no images"):
            await engine.generate(prompt, SamplingParams(max_tokens=1)).__anext__()
    assert heart.count > BEATS


@pytest.mark.parametrize(
    ("task", "module", "name"),
    [("embed", pooling_frontend, "_cosines"), ("token_embed", pooler_module, "finish")],
)
async def test_the_loop_beats_while_pairs_are_scored(task, module, name, monkeypatch):
    """Cosines of embeddings, and late interaction: both end in a thread."""
    async with beating_engine(runner="pooling", pooler_config={"task": task}) as (engine, heart):
        monkeypatch.setattr(module, name, heart.hold_up(getattr(module, name)))
        scores = await Scorer(engine.encode, engine.config.pooler).score(
            ["query"] * 3, ["one", "two", "query"]
        )
        assert [output.outputs.array.size for output in scores] == [1] * 3
        assert max(scores, key=lambda output: output.outputs.array) is scores[2]
    assert heart.count > BEATS


@pytest.mark.parametrize("task", ["embed", "token_embed"])
async def test_the_loop_beats_while_a_result_is_finished(task, monkeypatch):
    async with beating_engine(runner="pooling") as (engine, heart):
        monkeypatch.setattr(
            pooler_module, "LARGE", 1000
        )  # of token_embed's result, but not of embed's
        monkeypatch.setattr(pooler_module, "finish", heart.hold_up(pooler_module.finish))
        async for output in engine.encode(list(range(50)), PoolingParams(task=task)):
            assert np.isfinite(output.outputs.array).all()
    assert heart.count > BEATS


async def test_short_prompt_passes_large_one_being_rendered(monkeypatch):
    """One worker: the large prompt waits in its own lane until the short one has its result."""
    async with beating_engine(runner="pooling", renderer_num_workers=1) as (engine, _):
        is_short_done = threading.Event()
        right = PoolingPrompts._encoded

        def held(self, message):
            if len(message.prompt) > 1000:
                assert is_short_done.wait(WAIT_S)
            return right(self, message)

        monkeypatch.setattr(PoolingPrompts, "_encoded", held)
        options = {"truncate_prompt_tokens": 10}
        large = engine.encode(
            "x" * 100_000, PoolingParams(task="embed"), tokenization_kwargs=options
        )
        async with large:
            async for output in engine.encode("short", PoolingParams(task="embed")):
                assert output.error is None
            is_short_done.set()
            async for output in large:
                assert len(output.prompt_token_ids) == 10


async def test_abort_ends_request_that_waits_for_renderer(monkeypatch):
    async with beating_engine(runner="pooling", renderer_num_workers=1) as (engine, _):
        may_go_on = threading.Event()
        right = PoolingPrompts._encoded

        def held(self, message):
            assert may_go_on.wait(WAIT_S)
            return right(self, message)

        monkeypatch.setattr(PoolingPrompts, "_encoded", held)
        first = engine.encode("first " * 50, PoolingParams(task="embed"), "1")
        second = engine.encode("second", PoolingParams(task="embed"), "2")
        async with first, second:
            await engine.abort("2")
            may_go_on.set()
            outputs = [await stream.__anext__() for stream in (first, second)]
        assert [output.error and output.error.code for output in outputs] == [None, "aborted"]
        assert outputs[1].outputs.array.size == 0
        assert engine.statistics().num_open_requests == 0


async def test_short_prompt_passes_large_embeddings_being_rendered(monkeypatch):
    monkeypatch.setattr(request_table, "LARGE_EMBEDS", 1000)
    async with beating_engine(enable_prompt_embeds=True, renderer_num_workers=1) as (engine, _):
        is_short_done = threading.Event()
        right = Prompts._decoded

        def held(self, *args):
            assert is_short_done.wait(WAIT_S)
            return right(self, *args)

        monkeypatch.setattr(Prompts, "_decoded", held)
        params = SamplingParams(max_tokens=1)
        for prompt in EMBEDS.values():
            is_short_done.clear()
            async with engine.generate(prompt, params) as large:
                async for output in engine.generate("short", params):
                    assert output.finished
                is_short_done.set()
                async for output in large:
                    assert output.finished
