"""Tiny random vision-language models with image processors and chat templates, and transformers' own answers about them."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

BOS, EOS, PAD = 257, 258, 256
TEXT: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "tie_word_embeddings": False,
}  # fmt: skip
TOWER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 7,
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for p in m['content'] %}{% if p['type'] == 'image' %}IMAGE"
    "{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
FAMILIES = (
    "llava", "llava_next", "llava_onevision", "idefics3", "smolvlm", "internvl", "mistral3", "pixtral",
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "gemma3", "paligemma", "paligemma2",
)  # fmt: skip


def tokenizer(special: list[str], image: str) -> Any:
    """Make a tokenizer of single bytes and of two line ends, with special tokens behind them."""
    # No text has the byte 255, so its id is free.
    alphabet = [c if c != "ÿ" else "ĊĊ" for c in sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab = {c: i for i, c in enumerate(alphabet)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[("Ċ", "Ċ")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    fast.add_special_tokens({"additional_special_tokens": special})
    fast.chat_template = TEMPLATE.replace("IMAGE", image)
    return fast


def _clip(kind: str) -> tuple[Any, Any, dict[str, Any], list[str], str]:
    t, clip = transformers, transformers.CLIPVisionConfig(**TOWER, projection_dim=32)
    square = {"height": 28, "width": 28}
    own = {"patch_size": 7, "vision_feature_select_strategy": "default"}
    if kind == "llava":
        config = t.LlavaConfig(
            vision_config=clip, text_config=t.LlamaConfig(**TEXT), vision_feature_layer=-1
        )
        images = t.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=square)
        return (
            config,
            images,
            {**own, "num_additional_image_tokens": 1},
            ["<image>"],
            "<image>\n",
        )
    pins = [[28, 56], [56, 28], [56, 56]]
    if kind == "llava_next":
        config = t.LlavaNextConfig(
            vision_config=clip,
            text_config=t.MistralConfig(**TEXT),
            image_grid_pinpoints=pins,
            vision_feature_layer=-1,
        )
        images = t.LlavaNextImageProcessorPil(
            size={"shortest_edge": 28}, crop_size=square, image_grid_pinpoints=pins
        )
        return (
            config,
            images,
            {**own, "num_additional_image_tokens": 1},
            ["<image>"],
            "<image>\n",
        )
    siglip = t.SiglipVisionConfig(**TOWER, vision_use_head=False)
    config = t.LlavaOnevisionConfig(
        vision_config=siglip, text_config=t.Qwen2Config(**TEXT), image_grid_pinpoints=pins, vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )  # fmt: skip
    images = t.LlavaOnevisionImageProcessorPil(size=square, image_grid_pinpoints=pins)
    fields = {"num_image_tokens": 16, "vision_feature_select_strategy": "full"}
    return config, images, fields, ["<image>", "<video>"], "<image>\n"


def _idefics(kind: str) -> tuple[Any, Any, dict[str, Any], list[str], str]:
    t = transformers
    tiles = [f"<row_{r}_col_{c}>" for r in (1, 2) for c in (1, 2)]
    names = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *tiles]
    cls, pil = (
        (t.Idefics3Config, t.Idefics3ImageProcessorPil)
        if kind == "idefics3"
        else (t.SmolVLMConfig, t.SmolVLMImageProcessorPil)
    )
    config = cls(vision_config=dict(TOWER), text_config=t.LlamaConfig(**TEXT), scale_factor=2)
    images = pil(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})
    return config, images, {"image_seq_len": 4}, names, "<image>"


def _internvl() -> tuple[Any, Any, dict[str, Any], list[str], str]:
    t = transformers
    tower = {**TOWER, "image_size": [28, 28], "patch_size": [7, 7]}
    config = t.InternVLConfig(
        vision_config=tower, text_config=t.Qwen3Config(**TEXT, head_dim=16), downsample_ratio=0.5
    )
    images = t.GotOcr2ImageProcessorPil(
        size={"height": 28, "width": 28}, crop_to_patches=True, max_patches=4
    )
    names = ["<IMG_CONTEXT>", "<img>", "</img>", "<video>"]
    return config, images, {"image_seq_length": 4}, names, "<IMG_CONTEXT>\n"


def _pixtral(kind: str) -> tuple[Any, Any, dict[str, Any], list[str], str]:
    t = transformers
    tower = t.PixtralVisionConfig(**{**TOWER, "image_size": 56})
    text = t.MistralConfig(**TEXT, head_dim=16, sliding_window=None)
    if kind == "mistral3":
        config = t.Mistral3Config(
            vision_config=tower, text_config=text, spatial_merge_size=2, vision_feature_layer=-1
        )
    else:
        config = t.LlavaConfig(
            vision_config=tower,
            text_config=text,
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
        )
    images = t.PixtralImageProcessorPil(
        size={"longest_edge": 56}, patch_size=14 if kind == "mistral3" else 7
    )
    fields = {"patch_size": 7, "spatial_merge_size": 2 if kind == "mistral3" else 1}
    return config, images, fields, ["[IMG]", "[IMG_BREAK]", "[IMG_END]"], "[IMG]"


def _qwen(kind: str) -> tuple[Any, Any, dict[str, Any], list[str], str]:
    t = transformers
    names = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    images = t.Qwen2VLImageProcessorPil(
        patch_size=7, temporal_patch_size=2, merge_size=2,
        size={"shortest_edge": 14 * 14, "longest_edge": 84 * 84},
    )  # fmt: skip
    tower: dict[str, Any] = {
        "depth": 3, "num_heads": 2, "patch_size": 7, "spatial_merge_size": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    own: dict[str, dict[str, Any]] = {
        "qwen2_vl": {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
        "qwen2_5_vl": {
            "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 64, "window_size": 28,
            "fullatt_block_indexes": [1],
        },
        "qwen3_vl": {
            "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 64,
            "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1],
        },
    }  # fmt: skip
    own["qwen3_vl_moe"] = own["qwen3_vl"]
    own["qwen3_5"] = own["qwen3_5_moe"] = {
        name: value for name, value in own["qwen3_vl"].items() if name != "deepstack_visual_indexes"
    }
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    if kind.startswith("qwen3"):
        rope |= {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
    recurrent: dict[str, Any] = {}
    if kind.startswith("qwen3_5"):
        rope |= {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
        recurrent = {
            "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        }  # fmt: skip
    if kind.endswith("_moe"):
        recurrent |= {
            "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        }  # fmt: skip
    cls = {
        "qwen2_vl": t.Qwen2VLConfig, "qwen2_5_vl": t.Qwen2_5_VLConfig,
        "qwen3_vl_moe": t.Qwen3VLMoeConfig, "qwen3_5": t.Qwen3_5Config, "qwen3_5_moe": t.Qwen3_5MoeConfig,
    }.get(kind, t.Qwen3VLConfig)  # fmt: skip
    # The last special tokens in the order of `names`, behind 256 bytes and three others.
    ids = dict(zip(("image", "video", "vision_start", "vision_end"), range(259, 263), strict=True))
    config = cls(
        text_config={**TEXT, "head_dim": 16, "rope_parameters": rope, **recurrent},
        vision_config={**tower, **own[kind]},
        **{f"{name}_token_id": id for name, id in ids.items()},
    )
    return config, images, {}, names, "<|vision_start|><|image_pad|><|vision_end|>"


def _glm() -> tuple[Any, Any, dict[str, Any], list[str], str]:
    t = transformers
    names = ["<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>"]
    images = t.Glm4vImageProcessorPil(
        patch_size=7, temporal_patch_size=2, merge_size=2,
        size={"shortest_edge": 14 * 14 * 2, "longest_edge": 84 * 84 * 2},
    )  # fmt: skip
    rope = {
        "rope_type": "default",
        "mrope_section": [1, 2, 1],
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    }
    ids = dict(zip(("image", "video", "image_start", "image_end"), range(259, 263), strict=True))
    config = t.Glm4vConfig(
        text_config={**TEXT, "head_dim": 16, "rope_parameters": rope},
        vision_config={
            "depth": 2, "hidden_size": 32, "num_heads": 2, "image_size": 56, "patch_size": 7, "out_hidden_size": 64,
            "intermediate_size": 48, "spatial_merge_size": 2, "temporal_patch_size": 2,
        },
        **{f"{name}_token_id": id for name, id in ids.items()},
    )  # fmt: skip
    return config, images, {}, names, "<|begin_of_image|><|image|><|end_of_image|>"


def _gemma(kind: str) -> tuple[Any, Any, dict[str, Any], list[str], str]:
    t, square = transformers, {"height": 28, "width": 28}
    tower = t.SiglipVisionConfig(**TOWER, vision_use_head=False)
    if kind == "gemma3":
        # The window of the first layers is shorter than an image.
        text = t.Gemma3TextConfig(
            **TEXT, head_dim=16, sliding_window=3, query_pre_attn_scalar=16,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        )  # fmt: skip
        config = t.Gemma3Config(
            vision_config=tower, text_config=text, mm_tokens_per_image=4, boi_token_index=260, eoi_token_index=261
        )  # fmt: skip
        fields = {
            "image_seq_length": 4,
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        }
        names = ["<image_soft_token>", "<start_of_image>", "<end_of_image>"]
        images = t.Gemma3ImageProcessorPil(
            size=square, pan_and_scan_min_crop_size=14, pan_and_scan_max_num_crops=2
        )
        return config, images, fields, names, "<start_of_image>"
    own = {"head_dim": 16, "num_key_value_heads": 1}
    text = t.GemmaConfig(**TEXT | own)
    if kind == "paligemma2":
        text = t.Gemma2Config(**TEXT | own, sliding_window=5, query_pre_attn_scalar=16)
    config = t.PaliGemmaConfig(vision_config=tower, text_config=text, projection_dim=64)
    images = t.SiglipImageProcessorPil(size=square)
    images.image_seq_length = 16
    return config, images, {}, ["<image>"], "<image>"


def _parts(kind: str) -> tuple[Any, Any, dict[str, Any], list[str], str]:
    if kind.startswith("llava"):
        return _clip(kind)
    if kind in ("idefics3", "smolvlm"):
        return _idefics(kind)
    if kind.startswith("qwen"):
        return _qwen(kind)
    if kind == "glm4v":
        return _glm()
    if "gemma" in kind:
        return _gemma(kind)
    return _internvl() if kind == "internvl" else _pixtral(kind)


class VisionModel:
    """A saved tiny model, and the reference that answers for it."""

    def __init__(self, kind: str, folder: Path) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        config, images, fields, names, image = _parts(kind)
        tokens = tokenizer(names, image)
        config.image_token_id = config.image_token_index = tokens.convert_tokens_to_ids(names[0])
        config.tie_word_embeddings = False
        torch.manual_seed(11)
        classes: Any = transformers.AutoModelForImageTextToText._model_mapping
        self.model: Any = classes[type(config)](config).eval().float()
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.dim() >= 2 and not parameter.any():
                    parameter.normal_(std=0.2)
                if parameter.dim() >= 2:
                    parameter.mul_(3.0)
                elif not parameter.any():
                    parameter.normal_(std=0.1)
        generation = self.model.generation_config
        generation.eos_token_id, generation.pad_token_id, generation.bos_token_id = EOS, PAD, BOS
        self.folder, self.kind = folder, kind
        self.row_id, self.image_token = config.image_token_id, names[0]
        self.names, self.placeholder = names, names[1] if kind == "gemma3" else names[0]
        self.model.save_pretrained(folder)
        images.save_pretrained(folder)
        tokens.save_pretrained(folder)
        (folder / "processor_config.json").write_text(json.dumps(fields))
        self.tokens, self.images = tokens, images

    def logprobs(
        self, ids: list[int], inputs: list[dict[str, np.ndarray]], num_prompt: int = 0
    ) -> torch.Tensor:
        """Return the logprobs [T, vocabulary] that the whole model of transformers gives to a prompt with images.

        Args:
            num_prompt: tokens of the prompt, for a model whose prompts see all of themselves.
        """
        rows = self.joined(ids, inputs)
        if self.kind.startswith("paligemma"):
            rows["token_type_ids"] = (torch.arange(len(ids))[None] >= num_prompt).long()
        with torch.no_grad():
            found = self.model(input_ids=torch.tensor([ids]), **rows).logits[0]
        return torch.log_softmax(found.float(), -1)

    def joined(self, ids: list[int], inputs: list[dict[str, np.ndarray]]) -> dict[str, Any]:
        """Return the model's arguments for the images of a prompt."""
        rows = dict[str, Any]()
        for name in inputs[0] if inputs else ():
            values = [torch.from_numpy(np.array(each[name])) for each in inputs]
            rows[name] = _joined(values)
        if "image_grid_thw" in rows:
            rows["mm_token_type_ids"] = (torch.tensor([ids]) == self.row_id).long()
        if self.kind == "gemma3":
            rows["token_type_ids"] = (torch.tensor([ids]) == self.row_id).long()
        return rows


def _joined(values: list[torch.Tensor]) -> torch.Tensor:
    """Join the arrays of several images as the library's processor does: images of different sizes are padded."""
    if values[0].dim() < 3:
        return torch.cat(values)
    most = [max(v.shape[i] for v in values) for i in range(1, values[0].dim())]
    padded = list[torch.Tensor]()
    for value in values:
        whole = value.new_zeros((value.shape[0], *most))
        whole[tuple(slice(0, size) for size in value.shape)] = value
        padded.append(whole)
    return torch.cat(padded)


def picture(seed: int, width: int = 40, height: int = 28) -> Image.Image:
    """Make a picture of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def image(seed: int, width: int = 40, height: int = 28) -> dict[str, Any]:
    return {"type": "image", "image": picture(seed, width, height)}
