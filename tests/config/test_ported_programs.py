"""Programs written for vLLM: their imports, their parsers, and engines without a block."""

import argparse
import asyncio
import importlib

import anyio
import pytest

import trouper
from trouper import AsyncLLM, EngineArgs, SamplingParams
from trouper.config.args import join_dotted
from trouper.errors import EngineDeadError, TrouperValidationError
from trouper.utils.argparse_utils import FlexibleArgumentParser

SMALL = {"max_model_len": 256, "max_num_seqs": 4, "num_gpu_blocks_override": 32, "dtype": "float32"}
NAMES = [
    ("engine.arg_utils", "AsyncEngineArgs"), ("engine.arg_utils", "EngineArgs"),
    ("engine.async_llm_engine", "AsyncLLMEngine"), ("engine.llm_engine", "LLMEngine"),
    ("entrypoints.llm", "LLM"), ("inputs", "TextPrompt"), ("inputs", "TokensPrompt"),
    ("outputs", "CompletionOutput"), ("outputs", "RequestOutput"),
    ("outputs", "EmbeddingRequestOutput"), ("outputs", "PoolingRequestOutput"),
    ("outputs", "ClassificationRequestOutput"), ("outputs", "ScoringRequestOutput"),
    ("pooling_params", "PoolingParams"), ("sampling_params", "BeamSearchParams"),
    ("sampling_params", "RequestOutputKind"), ("sampling_params", "SamplingParams"),
    ("sampling_params", "StructuredOutputsParams"), ("v1.engine.async_llm", "AsyncLLM"),
    ("v1.engine.llm_engine", "LLMEngine"), ("logprobs", "Logprob"),
]  # fmt: skip


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_name_of_vllms_modules_is_class_of_that_name(module, name):
    found = getattr(importlib.import_module(f"trouper.{module}"), name)
    if name in trouper.__all__:
        assert found is getattr(trouper, name)
    assert found.__name__ in (name, "AsyncLLMEngine")


def test_the_version_has_its_module():
    assert importlib.import_module("trouper.version").__version__ == trouper.__version__


# Parsers


@pytest.mark.parametrize("parser", [argparse.ArgumentParser(), FlexibleArgumentParser()])
def test_a_parser_takes_the_options_of_an_engine(parser):
    parser.add_argument("--my-own", type=int, default=3)
    parsed = EngineArgs.add_cli_args(parser).parse_args([
        "--model", "m", "--max-model-len", "512", "--no-enable-prefix-caching",
        "--served-model-name", "a", "b", "--override-generation-config", '{"top_k": 3}',
        "--watermark", "0.5",
    ])  # fmt: skip
    args = EngineArgs.from_cli_args(parsed)
    assert (args.model, str(args.max_model_len), args.watermark) == ("m", "512", 0.5)
    assert args.enable_prefix_caching is False
    assert args.served_model_name == ["a", "b"]
    assert args.override_generation_config == {"top_k": 3}
    assert args.dtype == "auto"
    assert parsed.my_own == 3


def test_a_flexible_parser_takes_underscores_and_dots():
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parsed = parser.parse_args(["--max_num_seqs=4", "--override_generation_config.top_k", "3"])
    assert parsed.max_num_seqs == 4
    assert parsed.override_generation_config == {"top_k": 3}


@pytest.mark.parametrize(
    ("given", "joined"),
    [
        (["serve", "m", "--a", "b.c"], ["serve", "m", "--a", "b.c"]),
        (["--a.b", "1", "m"], ["m", "--a", '{"b": 1}']),
        (["--a.b=x y", "--a.c.d", "null"], ["--a", '{"b": "x y", "c": {"d": null}}']),
        (["--a.b", "[1]", "--", "--c.d", "2"], ["--a", '{"b": [1]}', "--", "--c.d", "2"]),
        (["--a..b", "1", "./c.d"], ["--a..b", "1", "./c.d"]),
    ],
)
def test_dotted_options_become_one_option_of_json(given, joined):
    assert join_dotted(given) == joined


@pytest.mark.parametrize("given", [["--a.b"], ["--a.b", "1", "--a.b.c", "2"], ["--a.b.c", "1", "--a.b", "2"]])  # fmt: skip
def test_dotted_option_that_says_nothing_or_two_things_is_error(given):
    with pytest.raises(TrouperValidationError):
        join_dotted(given)


# Engines without a block


async def texts(engine, name):
    stream = engine.generate("def f(", SamplingParams(temperature=0, max_tokens=4), name)
    return [output.outputs[0].text async for output in stream][-1]


@pytest.mark.filterwarnings("error")
def test_engine_without_block_starts_on_first_request():
    async def main():
        engine = AsyncLLM.from_engine_args(EngineArgs(**SMALL))
        assert not engine.is_running
        first, second = await asyncio.gather(texts(engine, "a"), texts(engine, "b"))
        assert first == second
        assert engine.is_running
        engine.shutdown()
        await engine.close()
        assert not engine.is_running
        with pytest.raises(EngineDeadError):
            engine.generate("x")

    asyncio.run(main())


def test_engine_that_nothing_closes_ends_with_program():
    async def main():
        engine = AsyncLLM.from_engine_args(EngineArgs(**SMALL))
        async with engine.generate("def f(", SamplingParams(max_tokens=200)) as stream:
            await anext(stream)
        return engine

    assert not asyncio.run(main()).is_running


def test_engine_that_cannot_start_says_so_to_each_request():
    async def main():
        engine = AsyncLLM.from_engine_args(EngineArgs(model="/nowhere"))
        for _ in range(2):
            with pytest.raises(TrouperValidationError, match="nowhere"):
                await texts(engine, "a")

    asyncio.run(main())


def test_in_trio_an_engine_needs_its_block():
    async def main():
        with pytest.raises(EngineDeadError, match="async with"):
            AsyncLLM.from_engine_args(EngineArgs(**SMALL)).generate("x")

    anyio.run(main, backend="trio")
