"""A model that ranks share out says what it says alone: fp32, every architecture, every way in which weights are stored."""

import pytest
import torch

from trouper.actors.executor.runners.cpu.runner import CpuRunner
from trouper.actors.messages.steps import Sampling
from trouper.kernels.codegen import units

from .driver import GREEDY, Driver, engine_config, random_prompts
from .ranks import ranks_in_threads
from .test_architectures import CASES, CPU_ONLY, VOCAB, each_case, tiny_model

PROMPTS = random_prompts((1, 7, 40, 33), VOCAB)
ALL_LOGPROBS = Sampling(temperature=0.0, logprobs=-1)
needs_native = pytest.mark.skipif(not units.is_available(), reason="needs native kernels")
# Changes without which two ranks could not share out the tiny model.
CHANGES = {"qwen2-moe": {"shared_expert_intermediate_size": 64}}


def outputs(runner, sampling=ALL_LOGPROBS, num_outputs=8):
    return Driver(runner, chunk=13, shuffle=1, stagger=2).run(PROMPTS, num_outputs, sampling)


def compare(found, expected, atol=2e-5):
    """Tokens, and the logprobs of the whole vocabulary."""
    for mine, other in zip(found, expected, strict=True):
        assert mine.token_ids == other.token_ids
        for here, there in zip(mine.logprobs, other.logprobs, strict=True):
            torch.testing.assert_close(by_token(here), by_token(there), atol=atol, rtol=0)


def by_token(position):
    logprobs_V = torch.full((VOCAB,), torch.nan)
    logprobs_V[list(position.token_ids)] = torch.tensor(position.logprobs)
    return logprobs_V


def make_model(case, folder, **changes):
    name, own = (CASES | CPU_ONLY)[case]
    tiny_model(name, {**own, **CHANGES.get(case, {}), **changes}, folder)


@pytest.mark.parametrize("case", each_case())
def test_two_ranks_give_tokens_and_logprobs_of_one(case, tmp_path):
    make_model(case, tmp_path)
    config = engine_config(tmp_path)
    expected = outputs(CpuRunner(config))
    with ranks_in_threads(config, 2) as runner:
        compare(outputs(runner), expected)


@pytest.mark.parametrize("case", ["llama", "olmo2", "phi3"])
def test_four_ranks_share_two_kv_heads(case, tmp_path):
    """Each head is kept by two of them, also where all heads have one norm."""
    make_model(case, tmp_path, intermediate_size=128)
    config = engine_config(tmp_path)
    expected = outputs(CpuRunner(config))
    with ranks_in_threads(config, 4) as runner:
        compare(outputs(runner), expected)


def test_recorded_steps_of_ranks_give_what_eager_ones_do(tmp_path):
    """With a vocabulary of whole registers the logits, and the draw, are part of the recording."""
    make_model("qwen3-tied", tmp_path, vocab_size=224)
    eager = engine_config(tmp_path, enforce_eager=True)
    expected = outputs(CpuRunner(eager), GREEDY)
    with ranks_in_threads(eager, 2) as runner:
        found = outputs(runner, GREEDY)
    with ranks_in_threads(engine_config(tmp_path), 2) as runner:
        recorded = outputs(runner, GREEDY)
        for each in runner.runners:
            assert any(is_drawn for _, is_drawn in each.steps.recorded._steps)
    assert tokens(recorded) == tokens(found) == tokens(expected)


@needs_native
@pytest.mark.parametrize(
    "options",
    [{"compress_weights": True}, {"compress_weights": False}, {"quantization": "int4"}, {"quantization": "int8"}],
)  # fmt: skip
def test_beside_bfloat16_ranks_are_as_near_as_its_rounding(tmp_path, options):
    """A sum of two rounded parts is not the rounded sum."""
    make_model("llama", tmp_path, intermediate_size=256, head_dim=32)
    config = engine_config(tmp_path, dtype="bfloat16", **options)
    wish = Sampling(temperature=0.0, prompt_logprobs=0)
    expected = prompt_logprobs(CpuRunner(config), wish)
    with ranks_in_threads(config, 2) as runner:
        found = prompt_logprobs(runner, wish)
    torch.testing.assert_close(found, expected, atol=0.25, rtol=0)
    assert (found - expected).abs().mean() < 0.03


@needs_native
@pytest.mark.parametrize("quantization", [None, "int4", "int8"])
def test_rounded_ranks_follow_the_order_of_their_rows(quantization, tmp_path):
    """Rows of q and k are put into halves where they are stored in pairs."""
    make_model("ernie4-5-biased", tmp_path, intermediate_size=256)
    config = engine_config(tmp_path, dtype="bfloat16", quantization=quantization)
    wish = Sampling(temperature=0.0, prompt_logprobs=0)
    exact = prompt_logprobs(CpuRunner(engine_config(tmp_path)), wish)
    expected = prompt_logprobs(CpuRunner(config), wish)
    with ranks_in_threads(config, 2) as runner:
        found = prompt_logprobs(runner, wish)
    assert (found - expected).abs().mean() < 0.03
    assert (expected - exact).abs().mean() < {None: 0.03, "int8": 0.06, "int4": 0.4}[quantization]


def prompt_logprobs(runner, wish):
    sequences = outputs(runner, wish, 2)
    return torch.tensor([x.logprobs[0] for s in sequences for x in s.prompt_logprobs])


def tokens(sequences):
    return [s.token_ids for s in sequences]
