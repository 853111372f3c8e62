"""Which models take images, and the options about them.  Without torch.

A model takes images if trouper knows its family, if its folder contains the configuration of an image processor, and if the extra
`vision` is installed.  Otherwise only its text model is served, and a request with an image is refused with the reason.
"""

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from trouper.config.args import EngineArgs
from trouper.config.checkpoint.pooler import TWO_TOWERS
from trouper.config.media_sources import MediaSources, media_sources
from trouper.config.model import ModelConfig
from trouper.errors import UnsupportedFeatureError, invalid
from trouper.extras import install_hint

# vLLM allows 999, each of which may have thousands of tokens.
MAX_ITEMS = 32
GIB = 2**30
NO_IMAGES = "this model takes no images"
# Where images are decoded and processed: a thread cannot be stopped, and its memory is the engine's.
WORKPLACES = ("process", "thread")
MODALITIES = ("image", "audio", "video")
# Each of these files may configure the image processor of a folder.
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


class VisionFamily(NamedTuple):
    """How transformers computes one family of models.

    Attributes:
        processor: its class for prompts with images.
        inputs: the arguments of `get_image_features`, as far as the image processor returns them.
        has_grids: rows have positions in time, height and width (M-RoPE).
        library: the folder of the library that contains the processor, if it is not named like the family.
    """

    processor: str
    inputs: tuple[str, ...]
    has_grids: bool = False
    library: str = ""


_TILED = ("pixel_values", "image_sizes")
_PIXELS = ("pixel_values",)
_GRIDS = ("pixel_values", "image_grid_thw")
_MASKED = ("pixel_values", "pixel_attention_mask")
_QWEN3 = VisionFamily("Qwen3VLProcessor", _GRIDS, has_grids=True, library="qwen3_vl")
# By the `model_type` of config.json.  In all of them a row sees only what precedes it.
FAMILIES = {
    "llava": VisionFamily("LlavaProcessor", _TILED),
    "vipllava": VisionFamily("LlavaProcessor", ("pixel_values",), library="llava"),
    "llava_next": VisionFamily("LlavaNextProcessor", _TILED),
    "llava_onevision": VisionFamily("LlavaOnevisionProcessor", (*_TILED, "batch_num_images")),
    "idefics3": VisionFamily("Idefics3Processor", _MASKED),
    "smolvlm": VisionFamily("SmolVLMProcessor", _MASKED),
    "internvl": VisionFamily("InternVLProcessor", ("pixel_values",)),
    "qwen2_vl": VisionFamily("Qwen2VLProcessor", _GRIDS, has_grids=True),
    "qwen2_5_vl": VisionFamily("Qwen2_5_VLProcessor", _GRIDS, has_grids=True),
    "qwen3_vl": _QWEN3,
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    "mistral3": VisionFamily("PixtralProcessor", _TILED),
    # With two towers an image is a prompt of its own, without a text in its place.
    "clip": VisionFamily("", _PIXELS),
    "siglip": VisionFamily("", _PIXELS),
    "siglip2": VisionFamily("", ("pixel_values", "pixel_attention_mask", "spatial_shapes")),
}
# A LLaVA with this tower has the image processor of Pixtral.
PIXTRAL = "pixtral"


class MediaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The images that an engine takes."""

    model_type: str
    folder: str
    # The token in whose place a row of the tower is used.
    row_token_id: int
    # The most images of one prompt.
    max_images: int
    processor_cache_bytes: int
    encoder_cache_bytes: int
    processor_kwargs: dict[str, Any]
    # Whether images are decoded in a process of their own, or else in the threads of renderers.
    in_process: bool = True
    # Patches of a side that the projector merges into one row.
    merge_size: int = 1
    # Whether the tower is Pixtral's.
    is_pixtral: bool = False
    # The URLs from which files are read.
    sources: MediaSources = MediaSources()
    # Whether an image is a whole prompt, as one token.
    has_two_towers: bool = False

    @property
    def family(self) -> VisionFamily:
        """Return what distinguishes the family of the model."""
        return FAMILIES["mistral3" if self.is_pixtral else self.model_type]


def media_config(
    args: EngineArgs, model: ModelConfig, device: str
) -> tuple[MediaConfig | None, str]:
    """Decide whether the model takes images.

    Returns:
        The configuration, or None and the reason why a request with images is refused.

    Raises:
        TrouperValidationError: an option about images has a wrong value.
        UnsupportedFeatureError: an option asks for what is not built.
    """
    max_images = _max_images(args)
    if args.media_processor not in WORKPLACES:
        rule = f"must be one of {', '.join(WORKPLACES)}"
        raise invalid("media_processor", rule, args.media_processor)
    kwargs = _mapping("mm_processor_kwargs", args.mm_processor_kwargs)
    sources = media_sources(args)
    sizes = [_bytes(args, name) for name in ("mm_processor_cache_gb", "encoder_cache_gb")]
    raw, folder = model.source_config, Path(model.path)
    kind = str(raw.get("model_type"))
    reason = _reason(args, model, kind, device)
    if reason is None and max_images == 0:
        reason = "images are turned off (limit_mm_per_prompt or language_model_only)"
    if reason is not None:
        return None, reason
    has_two_towers = model.architecture in TWO_TOWERS
    token_id = 0 if has_two_towers else raw.get("image_token_id", raw.get("image_token_index"))
    if not isinstance(token_id, int) or not 0 <= token_id < model.vocab_size:
        return None, f"config.json has no image_token_id below vocab_size, {model.vocab_size}"
    vision: dict[str, Any] = raw.get("vision_config") or {}
    return MediaConfig(
        model_type=kind,
        folder=str(folder),
        row_token_id=token_id,
        max_images=max_images,
        processor_cache_bytes=sizes[0],
        encoder_cache_bytes=sizes[1],
        processor_kwargs=kwargs,
        merge_size=int(vision.get("spatial_merge_size") or 1),
        in_process=args.media_processor == "process" and hasattr(os, "memfd_create"),
        is_pixtral=kind == "mistral3" or vision.get("model_type") == PIXTRAL,
        sources=sources,
        has_two_towers=has_two_towers,
    ), ""


def _reason(args: EngineArgs, model: ModelConfig, kind: str, device: str) -> str | None:
    """Return why this model takes no images, or None."""
    if kind not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        if "vision_config" not in model.source_config:
            return NO_IMAGES
        return f"images are not supported for {kind!r}; supported: {known}"
    if device != "cpu":
        return "images are not supported on a GPU yet; device='cpu' has them"
    if args.skip_tokenizer_init:
        return "images need the tokenizer, which skip_tokenizer_init leaves out"
    if args.speculative_config and args.speculative_config.get("model"):
        return "images are not supported with a draft model"
    if args.pipeline_parallel_size > 1 or args.tensor_parallel_size > 1:
        return (
            "images are not supported with pipeline_parallel_size or tensor_parallel_size above 1"
        )
    if not any((Path(model.path) / name).is_file() for name in PROCESSOR_FILES):
        return f"the model folder has no {PROCESSOR_FILES[0]}, which describes the image processor"
    if any(importlib.util.find_spec(name) is None for name in ("transformers", "PIL")):
        return f"images need transformers and Pillow: {install_hint('vision')}"
    return None


def _max_images(args: EngineArgs) -> int:
    """Read `limit_mm_per_prompt`: the most images of one prompt."""
    given: Any = args.limit_mm_per_prompt
    if given is None:
        return 0 if args.language_model_only else MAX_ITEMS
    name = "limit_mm_per_prompt"
    limits = _mapping(name, given)
    counts = dict[str, int]()
    for modality, limit in limits.items():
        if modality not in MODALITIES:
            raise invalid(name, f"{modality!r} is none of {', '.join(MODALITIES)}", given)
        if isinstance(limit, Mapping):
            options = cast("Mapping[str, Any]", limit)
            if unknown := options.keys() - {"count", "width", "height", "num_frames", "length"}:
                raise invalid(name, f"unknown options {sorted(unknown)} of {modality}", given)
            limit = options.get("count", MAX_ITEMS)
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
            raise invalid(name, f"the count of {modality} must be an integer ≥ 0", given)
        counts[modality] = limit
    return 0 if args.language_model_only else counts.get("image", MAX_ITEMS)


def _bytes(args: EngineArgs, name: str) -> int:
    given: Any = getattr(args, name)
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if not is_number or not 0 <= given < 2**20:
        raise invalid(name, "must be a number of GiB ≥ 0", given)
    return int(given * GIB)


def _mapping(name: str, given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise invalid(name, "must be a dict", type(given).__name__)
    return dict(cast("Mapping[str, Any]", given))


def no_images(reason: str, model: str, parameter: str) -> Exception:
    """Return the error of a request with images to a model that takes none."""
    if reason == NO_IMAGES:
        rule = f"the model {model} takes no images; send text, or start a model that sees"
        return invalid(parameter, rule)
    text = f"{parameter}: the model {model} takes no images here: {reason}"
    return UnsupportedFeatureError(text, parameter=parameter)
