"""The text models of architectures that also take images: on own code and by way of transformers, from their checkpoints."""

import inspect
import re

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from trouper.actors.executor.models.families.registry import SCALING_HEADS, is_text_part
from trouper.actors.executor.models.names import text_names
from trouper.actors.executor.runners.cpu.runner import CpuRunner
from trouper.actors.messages.steps import Sampling
from trouper.errors import UnsupportedFeatureError

from .driver import Driver, engine_config, hf_runner, random_prompts

VOCAB = 211
TEXT = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
SMALL_TOWER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
QWEN_TOWER = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 14}
QWEN_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
CLIP = SMALL_TOWER | {"model_type": "clip_vision_model", "projection_dim": 32}
SIGLIP = SMALL_TOWER | {"model_type": "siglip_vision_model"}
IDEFICS = {
    "text_config": TEXT | {"model_type": "llama"}, "vision_config": SMALL_TOWER, "scale_factor": 1,
}  # fmt: skip
CASES = {
    # The outer class decides about the head: whether it is the embedding, and whether it scales.
    "tied mistral3": (
        "Mistral3",
        {"text_config": TEXT | {"model_type": "mistral"}, "vision_config": SMALL_TOWER | {"model_type": "pixtral"}},
        CpuRunner,
    ),
    "untied mistral3": (
        "Mistral3",
        {"text_config": TEXT | {"model_type": "mistral"}, "vision_config": SMALL_TOWER | {"model_type": "pixtral"},
         "tie_word_embeddings": False},
        CpuRunner,
    ),
    "internvl": (
        "InternVL",
        {"text_config": TEXT | {"model_type": "qwen2"},
         "vision_config": SMALL_TOWER | {"image_size": [28, 28], "patch_size": [14, 14]}},
        CpuRunner,
    ),
    "aya vision": (
        "AyaVision",
        {"text_config": TEXT | {"model_type": "cohere2", "logit_scale": 0.0625, "sliding_window": 8},
         "vision_config": SIGLIP, "adapter_layer_norm_eps": 1e-6},
        hf_runner,
    ),
    "granite in llava-next": (
        "LlavaNext",
        {"text_config": TEXT | {"model_type": "granite", "logits_scaling": 4.0}, "vision_config": CLIP},
        hf_runner,
    ),
    "capped gemma3": (
        "Gemma3",
        {"text_config": TEXT | {"sliding_window": 8, "final_logit_softcapping": 2.0}, "vision_config": SMALL_TOWER,
         "mm_tokens_per_image": 4},
        CpuRunner,
    ),
    "smolvlm": ("SmolVLM", IDEFICS, CpuRunner),
    "idefics3": ("Idefics3", IDEFICS, CpuRunner),
    "gemma3": (
        "Gemma3",
        {"text_config": TEXT | {"sliding_window": 8}, "vision_config": SMALL_TOWER, "mm_tokens_per_image": 4},
        CpuRunner,
    ),
    "llava": (
        "Llava",
        {"text_config": TEXT | {"model_type": "llama"},
         "vision_config": CLIP},
        CpuRunner,
    ),
    "qwen2-vl": (
        "Qwen2VL",
        {"text_config": TEXT | {"rope_parameters": QWEN_ROPE}, "vision_config": QWEN_TOWER},
        CpuRunner,
    ),
    "qwen3-vl": (
        "Qwen3VL",
        {"text_config": TEXT | {"rope_parameters": QWEN_ROPE | {"mrope_section": [4, 2, 2]}},
         "vision_config": QWEN_TOWER | {
             "out_hidden_size": 64, "intermediate_size": 48, "deepstack_visual_indexes": [0],
             "num_position_embeddings": 16}},
        CpuRunner,
    ),
    "qwen3-vl moe": (
        "Qwen3VLMoe",
        {"text_config": TEXT | {
            "rope_parameters": QWEN_ROPE | {"mrope_section": [4, 2, 2]}, "num_experts": 6, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32},
         "vision_config": QWEN_TOWER | {
             "out_hidden_size": 64, "intermediate_size": 48, "deepstack_visual_indexes": [0],
             "num_position_embeddings": 16}},
        CpuRunner,
    ),
    "qwen3.5 moe": (
        "Qwen3_5Moe",
        {"text_config": TEXT | {
            "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4,
            "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 6,
            "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
         "vision_config": QWEN_TOWER | {"out_hidden_size": 64, "intermediate_size": 48, "num_position_embeddings": 16}},
        CpuRunner,
    ),
    "mixtral in llava": (
        "Llava",
        {"text_config": TEXT | {"model_type": "mixtral", "num_local_experts": 4},
         "vision_config": CLIP},
        hf_runner,
    ),
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_text_alone_equals_the_whole_model(case, tmp_path):
    name, fields, runner = CASES[case]
    config = getattr(transformers, f"{name}Config")(**fields)
    torch.manual_seed(0)
    cls = getattr(transformers, f"{name}ForConditionalGeneration")
    model = cls._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 1.2 / parameter.shape[-1] ** 0.5
    model.save_pretrained(tmp_path)
    driver = Driver(runner(engine_config(tmp_path, max_model_len=64)), chunk=7, stagger=1)
    sampling = Sampling(temperature=0.0, logprobs=-1)
    for s in driver.run(random_prompts((3, 21), VOCAB), 6, sampling):
        token_ids = [*s.prompt, *s.token_ids]
        logits = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
        expected = logits.log_softmax(-1)[len(s.prompt) - 1 : -1]
        assert s.token_ids == expected.argmax(-1).tolist()
        for found, row in zip(s.logprobs, expected, strict=True):
            wanted = row[list(found.token_ids)]
            torch.testing.assert_close(torch.tensor(found.logprobs), wanted, atol=1e-4, rtol=0)


def test_prompt_read_in_both_directions_is_refused(tmp_path):
    config = transformers.PaliGemmaConfig(
        text_config=TEXT | {"model_type": "gemma"}, vision_config=SIGLIP
    )
    transformers.PaliGemmaForConditionalGeneration._from_config(config).save_pretrained(tmp_path)
    for runner in (CpuRunner, hf_runner):
        with pytest.raises(UnsupportedFeatureError, match="bidirectional attention"):
            runner(engine_config(tmp_path, max_model_len=64)).load()


# Older releases of transformers lack some of them.
@pytest.mark.parametrize("name", sorted(n for n in SCALING_HEADS if hasattr(transformers, n)))
def test_outer_heads_that_scale_are_those_of_transformers(name):
    source = inspect.getsource(getattr(transformers, name).forward)
    assert re.search("logit_scale|logits_scaling|softcap|output_multiplier", source)


def test_no_other_outer_head_scales():
    for name in set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()) - SCALING_HEADS:
        if is_text_part(name):
            source = inspect.getsource(getattr(transformers, name).forward)
            assert not re.search("logit_scale|logits_scaling|softcap|output_multiplier", source)


@pytest.mark.parametrize(
    ("stored", "found"),
    [
        (["model.language_model.norm.weight", "model.visual.norm.weight", "lm_head.weight"], 2),
        (
            ["language_model.model.norm.weight", "vision_tower.x", "language_model.lm_head.weight"],
            2,
        ),
        (["model.norm.weight", "model.layers.0.x", "visual.blocks.0.x", "lm_head.weight"], 3),
        (["encoder.x"], 0),
    ],
)
def test_names_of_text_part_are_those_of_text_model_alone(stored, found):
    names = text_names(stored)
    assert len(names) == found
    assert {name.partition(".")[0] for name in names} <= {"model", "lm_head"}
    assert set(names.values()) <= set(stored)
