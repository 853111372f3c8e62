"""Checkpoints of gpt-oss: experts of e2m1 and plain ones have the same answers, and whatever shares their steps changes none."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from trouper import LLM, SamplingParams
from trouper.actors.executor.models.families.registry import decoder_traits
from trouper.actors.executor.runners.cpu.runner import CpuRunner
from trouper.actors.executor.weights.checkpoint import Checkpoint
from trouper.actors.executor.weights.layouts import views_of
from trouper.actors.executor.weights.schemes import read_scheme
from trouper.errors import TrouperValidationError
from trouper.inputs import TokensPrompt
from trouper.kernels.codegen import units

from .driver import engine_config, random_prompts
from .ranks import ranks_in_threads
from .test_architectures import SPARSE, VOCAB, tiny_model
from .test_fallback import e2m1
from .test_integer_checkpoints import FILE, run
from .test_rank_weights import check_parts
from .test_ranks import compare, outputs

NAME, FIELDS = SPARSE["gpt-oss"]
EXPERTS = "model.layers.1.mlp.experts."


def write(tmp_path, changes=None, **fields):
    """Write a plain folder, and one whose experts are two values to a byte, of the same weights."""
    plain, narrow = tmp_path / "plain", tmp_path / "narrow"
    tiny_model(NAME, FIELDS | fields, plain)
    narrow.mkdir()
    torch.manual_seed(1)
    stored = {}
    for name, tensor in load_file(plain / FILE).items():
        if tensor.ndim == 3:
            stored[f"{name}_blocks"], stored[f"{name}_scales"] = e2m1(tensor.shape)
        else:
            stored[name] = tensor
    if changes is not None:
        changes(stored)
    save_file(stored, narrow / FILE, metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (narrow / "config.json").write_text(json.dumps(config))
    if changes is None:
        source = Checkpoint(narrow, scheme=read_scheme(config))
        dense = {name: x.contiguous() for name, x in source.plain()}
        save_file(dense, plain / FILE, metadata={"format": "pt"})
    return plain, narrow


def test_experts_of_four_bits_have_answers_of_plain_ones(tmp_path):
    plain, narrow = write(tmp_path)
    (_, ids, logprobs), (runner, found_ids, found) = run(plain), run(narrow)
    assert isinstance(runner, CpuRunner)
    assert found_ids == ids
    assert torch.equal(found, logprobs)


@pytest.mark.skipif(not units.is_available(), reason="no compiled kernels here")
def test_beside_bfloat16_experts_stay_integers(tmp_path):
    plain, narrow = write(tmp_path)
    (wide, _, logprobs), (runner, _, found) = run(plain, "bfloat16"), run(narrow, "auto")
    torch.testing.assert_close(found, logprobs, atol=0.25, rtol=0)
    assert (found - logprobs).abs().mean() < 0.03
    assert runner.load().num_weight_bytes < wide.load().num_weight_bytes


def test_two_ranks_share_out_experts_of_four_bits(tmp_path):
    """Of 128 inputs each rank has two groups."""
    _, narrow = write(tmp_path, intermediate_size=128)
    config = engine_config(narrow)
    hf_config = config.model.hf_config
    traits = decoder_traits(hf_config, config.model.architecture)
    views = views_of(traits)
    source = Checkpoint(narrow, scheme=read_scheme(hf_config), views=views)
    assert check_parts(source, config) == 2 * 2 * traits.experts.count
    expected = outputs(CpuRunner(config))
    with ranks_in_threads(config, 2) as runner:
        compare(outputs(runner), expected)


def test_the_prefix_cache_and_preemption_change_nothing(tmp_path):
    tiny_model(NAME, FIELDS, tmp_path)
    options = {
        "dtype": "float32", "max_model_len": 72, "max_num_batched_tokens": 16, "max_num_seqs": 4,
        "block_size": 4, "skip_tokenizer_init": True, "disable_log_stats": False,
    }  # fmt: skip
    prompts = [TokensPrompt(prompt_token_ids=p) for p in random_prompts((33, 40, 35, 37), VOCAB)]
    wishes = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)

    def answers(llm, given):
        outputs = llm.generate(given, wishes, use_tqdm=False)
        return [o.outputs[0].token_ids for o in outputs], [o.num_cached_tokens for o in outputs]

    with LLM(str(tmp_path), **options, num_gpu_blocks_override=120) as roomy:
        alone = [answers(roomy, [prompt])[0][0] for prompt in prompts]
        again, cached = answers(roomy, prompts)
        assert again == alone
        assert all(cached)
    # 25 blocks of 4 tokens for four sequences of 33 tokens and more, which start only with room for their prompts
    with LLM(str(tmp_path), **options, num_gpu_blocks_override=25) as tight:
        assert answers(tight, prompts)[0] == alone
        metrics = {metric.name: metric for metric in tight.get_metrics()}
        assert metrics["trouper:num_preemptions"].value > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lambda t: t.pop(EXPERTS + "down_proj_scales"), r"lacks 1 .*down_proj_scales"),
        (lambda t: t.pop(EXPERTS + "gate_up_proj_bias"), r"lacks 1 .*gate_up_proj_bias"),
        (lambda t: t.pop("model.layers.0.self_attn.sinks"), r"lacks 1 .*layers\.0\.self_attn\.sinks"),
        (
            lambda t: t.update({EXPERTS + "down_proj_bias": torch.ones(6, 3)}),
            r"misshapen 1 .*down_proj_bias \[6, 3\] instead of \[6, 64\]",
        ),
        (
            lambda t: t[EXPERTS + "gate_up_proj_scales"].view(-1)[-1:].fill_(255),
            r"gate_up_proj_scales: .*not finite",
        ),
        (
            lambda t: t.update({EXPERTS + "down_proj_blocks": t[EXPERTS + "down_proj_blocks"].int()}),
            r"mistyped 1 .*down_proj_blocks I32 instead of U8",
        ),
    ],
)  # fmt: skip
def test_a_malformed_tensor_is_named(tmp_path, changes, message):
    _, narrow = write(tmp_path, changes)
    with pytest.raises(TrouperValidationError, match=message):
        CpuRunner(engine_config(narrow)).load()
