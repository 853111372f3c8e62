"""Models of the transformers library through this engine's attention equal those of its own eager attention."""

import pytest
import torch

from trouper.actors.executor.cpu.hf_runner import HfRunner
from trouper.actors.messages.plans import Sampling
from trouper.errors import UnsupportedFeatureError

from .driver import Driver, engine_config, random_prompts
from .hf_families import FAMILIES, REFUSED, VOCAB, architecture_of, tiny_model

# One of each kind: experts; learned positions and turned weights; sinks and windows; keys and values of other widths;
# layers of other shapes.
QUICK = ("mixtral", "gpt2", "gpt_oss", "deepseek_v3", "gemma4_text")
ALL_LOGPROBS = Sampling(temperature=0.0, logprobs=-1)


def families(chosen, quick=()):
    slow = [] if quick is None else [pytest.mark.slow]
    return [pytest.param(f, marks=() if f in (quick or chosen) else slow) for f in chosen]


@torch.no_grad()
def check(model, sequences):
    """Logprobs of 211 tokens, whose magnitudes are about ten, to 1e-5 of that."""
    for s in sequences:
        token_ids = [*s.prompt, *s.token_ids]
        positions = torch.arange(len(token_ids))[None]
        logits = model(torch.tensor([token_ids]), position_ids=positions, use_cache=False).logits[0]
        logprobs = logits.log_softmax(-1)[len(s.prompt) - 1 : -1]
        assert s.token_ids == logprobs.argmax(-1).tolist()
        found = torch.full_like(logprobs, torch.nan)
        for i, position in enumerate(s.logprobs):
            found[i, list(position.token_ids)] = torch.tensor(position.logprobs)
        torch.testing.assert_close(found, logprobs, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("family", families(FAMILIES, QUICK))
def test_chunks_and_batches_equal_eager_attention(family, tmp_path):
    model = tiny_model(family, tmp_path)
    runner = HfRunner(engine_config(tmp_path, model_impl="transformers", max_model_len=128))
    driver = Driver(runner, chunk=11, shuffle=1, stagger=2)
    sequences = driver.run(random_prompts((1, 7, 40, 23), VOCAB), 12, ALL_LOGPROBS)
    assert all(len(s.token_ids) == 12 for s in sequences)
    check(model, sequences)


@pytest.mark.parametrize("family", families(REFUSED, ("bert", "falcon", "lfm2_moe")))
def test_other_families_are_refused_by_name(family, tmp_path):
    tiny_model(family, tmp_path)
    runner = HfRunner(engine_config(tmp_path, max_model_len=64, runner="generate"))
    with pytest.raises(UnsupportedFeatureError, match=REFUSED[family]) as caught:
        runner.load()
    assert architecture_of(family) in str(caught.value)
