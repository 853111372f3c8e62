"""A model that ranks share out says what it says alone: fp32, every architecture, every way in which weights are stored."""

import pytest
import torch

from trouper.actors.executor.cpu.runner import CpuRunner
from trouper.actors.messages.plans import Sampling

from .driver import Driver, engine_config, random_prompts
from .ranks import ranks_in_threads
from .test_architectures import CASES, SPARSE, VOCAB, tiny_model

PROMPTS = random_prompts((1, 7, 40, 33), VOCAB)
ALL_LOGPROBS = Sampling(temperature=0.0, logprobs=-1)
# Changes without which two ranks could not share out the tiny model.
CHANGES = {"qwen2-moe": {"shared_expert_intermediate_size": 64}}


def outputs(runner, num_outputs=12):
    return Driver(runner, chunk=13, shuffle=1, stagger=2).run(PROMPTS, num_outputs, ALL_LOGPROBS)


def compare(found, expected, atol=1e-5):
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
    name, own = (CASES | SPARSE)[case]
    tiny_model(name, {**own, **CHANGES.get(case, {}), **changes}, folder)


@pytest.mark.parametrize("case", CASES | SPARSE)
def test_two_ranks_give_the_tokens_and_logprobs_of_one(case, tmp_path):
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
