"""Each field of a config.json is honoured as transformers honours it, or refused: none is passed over in silence.

Every field of every family with own code is changed, one at a time, in the saved folder.  If the engine loads what is
left, its numbers must equal those of transformers, which reads the same folder.
"""

import json

import numpy as np
import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import AutoModel, AutoModelForCausalLM

from trouper.actors.executor.runners.cpu.runner import CpuRunner
from trouper.actors.messages.steps import Sampling
from trouper.errors import TrouperError

from .driver import Driver, engine_config, random_prompts
from .test_architectures import CASES, CPU_ONLY, VOCAB, tiny_model
from .test_encoders import ENCODERS, run, save_tiny

QUICK = ("gemma3", "phi3-longrope", "roberta", "modernbert")
PROMPTS = random_prompts((40,), VOCAB)
TEXT = tuple(np.random.default_rng(1).integers(0, 97, 20).tolist())
# Fields that decide what a token sees, also where the saved config leaves them out.
UNSAID = {
    "is_decoder", "is_causal", "use_bidirectional_attention", "add_cross_attention", "is_encoder_decoder", "rope_theta",
    "partial_rotary_factor", "attention_bias", "tie_word_embeddings", "original_max_position_embeddings",
}  # fmt: skip


def variants(name, value):
    if isinstance(value, bool):
        return [not value]
    if value is None:
        return [True, False, 3, 0.5]
    if isinstance(value, int):
        return [value + 1, value // 2, 0]
    if isinstance(value, float):
        return [value * 1.7 + 0.1, 0.0]
    if isinstance(value, str) and "act" in name:
        return ["gelu", "relu", "silu"]
    return ["relative_key"] if name == "position_embedding_type" else []


def changed_configs(folder):
    """Write one changed config after another into the folder; yield what was changed."""
    path = folder / "config.json"
    saved = json.loads(path.read_text())
    for name, value in (dict.fromkeys(UNSAID) | saved).items():
        # Another vocabulary is another shape of the answer, which nothing here compares.
        for variant in variants(name, value) if name != "vocab_size" else ():
            path.write_text(json.dumps(saved | {name: variant}))
            yield f"{name}={variant!r}"


class WrongTypeError(Exception):
    """transformers refuses the type of a value, whatever it would mean."""


@torch.no_grad()
def by_transformers(auto, folder, ids):
    try:
        model, info = auto.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        if info["missing_keys"] or info["mismatched_keys"]:
            return None
        output = model.eval()(torch.tensor([ids]))
    except StrictDataclassFieldValidationError as error:
        raise WrongTypeError from error
    except Exception:  # whatever the library raises for a config
        return None
    if auto is not AutoModelForCausalLM:
        return output.last_hidden_state[0]
    return output.logits[0, -1].log_softmax(-1)


def logprobs_of(folder):
    driver = Driver(CpuRunner(engine_config(folder)), chunk=13)
    (s,) = driver.run(PROMPTS, 1, Sampling(temperature=0.0, logprobs=-1))
    found = torch.full((VOCAB,), torch.nan)
    # A request whose logits are not finite ends without logprobs.
    if s.logprobs:
        found[list(s.logprobs[0].token_ids)] = torch.tensor(s.logprobs[0].logprobs)
    return found


def silent_fields(folder, auto, ids, compute):
    plain = compute()
    silent = []
    for change in changed_configs(folder):
        try:
            found = compute()
        except TrouperError:
            continue
        try:
            expected = by_transformers(auto, folder, ids)
        except WrongTypeError:
            continue
        if expected is None:
            # transformers refuses it, so it must not have changed a number here.
            if found.shape != plain.shape or not torch.allclose(found, plain, atol=1e-4):
                silent.append(f"{change} (transformers refuses it)")
        elif not torch.allclose(found, expected, atol=1e-4, equal_nan=True):
            silent.append(f"{change} (differs by {float((found - expected).abs().max()):.2g})")
    return silent


def cases(names):
    return [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in names]


@pytest.mark.parametrize("case", cases(CASES | CPU_ONLY))
def test_no_field_of_a_decoder_is_silent(case, tmp_path):
    tiny_model(*(CASES | CPU_ONLY)[case], tmp_path)
    found = silent_fields(tmp_path, AutoModelForCausalLM, PROMPTS[0], lambda: logprobs_of(tmp_path))
    assert found == []


@pytest.mark.parametrize("kind", cases(ENCODERS))
def test_no_field_of_an_encoder_is_silent(kind, tmp_path):
    save_tiny(kind, AutoModel, tmp_path)

    def states():
        return torch.tensor(run(tmp_path, "token_embed", texts=[TEXT])[0])

    # T5's config is of both halves, and the checkpoint only of the encoder.
    auto = getattr(transformers, f"{ENCODERS[kind][0]}EncoderModel", AutoModel)
    assert silent_fields(tmp_path, auto, TEXT, states) == []


# Two fields that say the same thing: which one counts, transformers decides.
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
PLAIN = {"rope_type": "default", "rope_theta": 500.0}
PAIRS = {
    "old and new ropes": ("llama", {"rope_parameters": PLAIN, "rope_scaling": YARN}),
    "an empty old rope": ("llama", {"rope_parameters": YARN | {"rope_theta": 300.0}, "rope_scaling": {}}),
    "a null new rope": ("llama", {"rope_parameters": None, "rope_scaling": LLAMA3, "rope_theta": 700.0}),
    "theta inside and outside": ("llama", {"rope_parameters": PLAIN, "rope_theta": 90_000.0}),
    "trained length outside": ("llama", {"rope_parameters": LLAMA3 | {"rope_theta": 1e4}, "original_max_position_embeddings": 16}),
    "trained length of phi3": ("phi3-longrope", {"original_max_position_embeddings": 16}),
    "share inside and outside": ("phi3", {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}, "partial_rotary_factor": 1.0}),
    "groups and an old rope": ("gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
    "dtype twice": ("llama", {"dtype": "float32", "torch_dtype": "bfloat16"}),
    "layer types and a pattern": ("gemma3", {"sliding_window_pattern": 1}),
}  # fmt: skip


@pytest.mark.parametrize("pair", PAIRS)
def test_twin_fields_count_as_in_transformers(pair, tmp_path):
    case, change = PAIRS[pair]
    tiny_model(*(CASES | CPU_ONLY)[case], tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    expected = by_transformers(AutoModelForCausalLM, tmp_path, PROMPTS[0])
    assert expected is not None
    torch.testing.assert_close(logprobs_of(tmp_path), expected, atol=1e-4, rtol=0)


def test_a_contradiction_without_a_rule_is_refused(tmp_path):
    tiny_model(*CASES["smollm3"], tmp_path)
    path = tmp_path / "config.json"
    ropes = {"full_attention": PLAIN, "sliding_attention": YARN}
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"rope_parameters": ropes, "rope_scaling": YARN})
    )
    with pytest.raises(TrouperError, match="keep only one"):
        logprobs_of(tmp_path)
