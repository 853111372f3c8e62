"""Decide whether a model takes images or audio, and which URLs the engine may read, without torch.

A model takes images or recordings if trouper supports its family, its folder contains the configuration of a processor, and the
extra `vision` or `audio` is installed.  Otherwise only its text model is served, and a request with media is refused with the reason.

`data:` URLs are always read.  Other URLs must name one of the allowed hosts, or a file in the allowed folder.
"""

import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from trouper.config.args import EngineArgs
from trouper.config.checkpoint.pooler import TWO_TOWERS
from trouper.config.model import ModelConfig
from trouper.errors import UnsupportedFeatureError, invalid
from trouper.extras import install_hint

# A host name of at least two labels, optionally with a port.  A leading `*.` allows its subdomains.
DOMAIN = re.compile(
    r"(\*\.)?((?!-)[a-z0-9-]{1,63}(?<!-))(\.(?!-)[a-z0-9-]{1,63}(?<!-))*(:[0-9]{1,5})?\Z"
)
ANY = "*"


class MediaSources(msgspec.Struct, frozen=True):
    """The sources from which the media of requests may be read, besides `data:` URLs.

    Attributes:
        domains: host names; `*.x` allows the subdomains of x, `*` any host, and `x:8443` only this port.
        folder: `file:` URLs below this folder are allowed; empty allows none.
        allows_http: whether `http:` URLs are allowed, in addition to `https:`.
        allows_private: whether hosts may have addresses of private networks.
    """

    domains: tuple[str, ...] = ()
    folder: str = ""
    allows_http: bool = False
    allows_private: bool = False


def media_sources(args: EngineArgs) -> MediaSources:
    """Read the options about URLs.

    Raises:
        TrouperValidationError: a domain is not a host name, or the folder does not exist.
    """
    return MediaSources(
        domains=_domains(args.allowed_media_domains),
        folder=_folder(args.allowed_local_media_path),
        allows_http=bool(args.allow_http_media),
        allows_private=bool(args.allow_private_media_hosts),
    )


def _domains(given: Any) -> tuple[str, ...]:
    name = "allowed_media_domains"
    if given is None:
        return ()
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise invalid(name, "must be a list of host names", repr(cast("Any", given)))
    domains: list[str] = []
    for domain in cast("Sequence[Any]", given):
        if not isinstance(domain, str):
            raise invalid(name, "must be a list of host names", repr(domain))
        domain = domain.lower()
        if domain != ANY and not DOMAIN.match(domain):
            rule = "must be a host name such as images.example.org, *.example.org, images.example.org:8443 or *"
            raise invalid(name, rule, domain)
        domains.append(domain)
    return tuple(domains)


def _folder(given: Any) -> str:
    name = "allowed_local_media_path"
    if not given:
        return ""
    if not isinstance(given, str | Path):
        raise invalid(name, "must be the path of a folder", given)
    path = Path(given)
    if not path.is_dir():
        raise invalid(name, "must be the path of an existing folder", str(given))
    return str(path.resolve())


# Maximum number of items in a prompt.  vLLM allows 999, but each may take thousands of tokens.
MAX_ITEMS = 32
GIB = 2**30
NO_IMAGES = "this model takes no images"
IMAGE = "image"
AUDIO = "audio"
# Default of transformers for the number of tokens of an image, if a config.json of Gemma 3 lacks it.
GEMMA_IMAGE = 256
# Names of the items of a modality in errors.
ITEMS = {IMAGE: "images", AUDIO: "recordings"}
# Where images are decoded and processed.  A process can be stopped and its memory limited, a thread cannot.
WORKPLACES = ("process", "thread")
MODALITIES: tuple[str, ...] = (IMAGE, AUDIO, "video")
# Packages of the extras, by modality.
PACKAGES = {IMAGE: ("transformers", "PIL"), AUDIO: ("transformers", "soundfile", "soxr")}
EXTRAS = {IMAGE: "vision", AUDIO: "audio"}
# Each of these files may configure the processor of a folder.
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


class MediaFamily(NamedTuple):
    """The properties of a family of models in transformers.

    Attributes:
        processor: its class for prompts with images; unused for audio.
        inputs: the arguments of the tower, if the processor returns them.
        has_grids: whether rows have positions in time, height and width (M-RoPE).
        library: the folder of transformers with the processor, if it is not named like the family.
        modality: the kind of media that the model takes.
        spans: which tokens see each other: those of one `image`, or all of a `prompt` with images; empty for causal attention.
        placeholder: the field of config.json with the token that marks an image in a prompt, if it differs from the token of
            the image's rows.
    """

    processor: str
    inputs: tuple[str, ...]
    has_grids: bool = False
    library: str = ""
    modality: str = IMAGE
    spans: str = ""
    placeholder: str = ""


_TILED = ("pixel_values", "image_sizes")
_PIXELS = ("pixel_values",)
_GRIDS = ("pixel_values", "image_grid_thw")
_MASKED = ("pixel_values", "pixel_attention_mask")
_QWEN3 = MediaFamily("Qwen3VLProcessor", _GRIDS, has_grids=True, library="qwen3_vl")
# By the `model_type` of config.json.
FAMILIES = {
    "llava": MediaFamily("LlavaProcessor", _TILED),
    "vipllava": MediaFamily("LlavaProcessor", ("pixel_values",), library="llava"),
    "llava_next": MediaFamily("LlavaNextProcessor", _TILED),
    "llava_onevision": MediaFamily("LlavaOnevisionProcessor", (*_TILED, "batch_num_images")),
    "idefics3": MediaFamily("Idefics3Processor", _MASKED),
    "smolvlm": MediaFamily("SmolVLMProcessor", _MASKED),
    "internvl": MediaFamily("InternVLProcessor", ("pixel_values",)),
    "qwen2_vl": MediaFamily("Qwen2VLProcessor", _GRIDS, has_grids=True),
    "qwen2_5_vl": MediaFamily("Qwen2_5_VLProcessor", _GRIDS, has_grids=True),
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "glm4v": MediaFamily("Glm4vProcessor", _GRIDS, has_grids=True),
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    "mistral3": MediaFamily("PixtralProcessor", _TILED),
    "gemma3": MediaFamily("Gemma3Processor", _PIXELS, spans="image", placeholder="boi_token_index"),
    "paligemma": MediaFamily("PaliGemmaProcessor", _PIXELS, spans="prompt"),
    # Without grids: transformers does not pass the grid of an image on to these models.
    "colqwen2": MediaFamily("Qwen2VLProcessor", _GRIDS, library="qwen2_vl"),
    "colpali": MediaFamily("PaliGemmaProcessor", _PIXELS, library="paligemma"),
    # With two towers, an image is a prompt of its own, without text.
    "clip": MediaFamily("", _PIXELS),
    "siglip": MediaFamily("", _PIXELS),
    "siglip2": MediaFamily("", ("pixel_values", "pixel_attention_mask", "spatial_shapes")),
    "qwen2_audio": MediaFamily("", ("input_features", "feature_attention_mask"), modality=AUDIO),
    "voxtral": MediaFamily("", ("input_features",), modality=AUDIO),
    "qwen3_asr": MediaFamily("", ("input_features", "input_features_mask"), modality=AUDIO),
}
# A LLaVA with this tower has the image processor of Pixtral.
PIXTRAL = "pixtral"


class MediaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine reads images or recordings."""

    model_type: str
    folder: str
    # The token whose embedding is replaced by a row of the tower.
    row_token_id: int
    # The token that marks an image in a prompt.
    placeholder_id: int
    # The maximum number of images or recordings in one prompt.
    max_items: int
    processor_cache_bytes: int
    encoder_cache_bytes: int
    processor_kwargs: dict[str, Any]
    # Whether files are decoded in a separate process, instead of the renderers' threads.
    in_process: bool = True
    # The projector merges this number of patches, squared, into one row.
    merge_size: int = 1
    # Whether the tower is Pixtral's.
    is_pixtral: bool = False
    # The URLs from which files are read.
    sources: MediaSources = MediaSources()
    # Whether an image is a whole prompt, as one token.
    has_two_towers: bool = False
    # The number of tokens of an image, if they see each other and so must be computed in one step.  0 for other families.
    num_image_tokens: int = 0

    @property
    def family(self) -> MediaFamily:
        """Return the properties of the model's family."""
        return FAMILIES["mistral3" if self.is_pixtral else self.model_type]

    @property
    def modality(self) -> str:
        """Return the kind of media that the model takes: `image` or `audio`."""
        return self.family.modality


def media_config(
    args: EngineArgs, model: ModelConfig, device: str
) -> tuple[MediaConfig | None, str]:
    """Decide whether the model takes images or audio.

    Returns:
        The configuration, or None and the reason why a request with them is refused.

    Raises:
        TrouperValidationError: an option about media has an invalid value, or configures a processor that the model lacks.
        UnsupportedFeatureError: an option selects an unsupported feature.
    """
    limits = _limits(args)
    if args.media_processor not in WORKPLACES:
        rule = f"must be one of {', '.join(WORKPLACES)}"
        raise invalid("media_processor", rule, args.media_processor)
    kwargs = _mapping("mm_processor_kwargs", args.mm_processor_kwargs)
    sources = media_sources(args)
    sizes = [_bytes(args, name) for name in ("mm_processor_cache_gb", "encoder_cache_gb")]
    raw, folder = model.source_config, Path(model.path)
    kind = str(raw.get("model_type"))
    reason = _reason(args, model, kind, device)
    modality = modality_of(raw)
    if reason is None and limits[modality] == 0:
        verb = "is" if modality == AUDIO else "are"
        reason = (
            f"{_shown(modality)} {verb} turned off (limit_mm_per_prompt or language_model_only)"
        )
    if kwargs and reason is not None:
        rule = f"has no effect, because no processor is used: {reason}; leave it out"
        raise invalid("mm_processor_kwargs", rule, kwargs)
    if reason is not None:
        return None, reason
    has_two_towers = model.architecture in TWO_TOWERS
    name = f"{modality}_token_id"
    token_id = 0 if has_two_towers else raw.get(name, raw.get(f"{modality}_token_index"))
    if not isinstance(token_id, int) or not 0 <= token_id < model.vocab_size:
        return None, f"config.json has no {name} below vocab_size ({model.vocab_size})"
    vision: dict[str, Any] = raw.get("vision_config") or {}
    return MediaConfig(
        model_type=kind,
        folder=str(folder),
        row_token_id=token_id,
        placeholder_id=int(raw.get(FAMILIES[kind].placeholder, token_id)),
        max_items=limits[modality],
        processor_cache_bytes=sizes[0],
        encoder_cache_bytes=sizes[1],
        processor_kwargs=kwargs,
        merge_size=int(vision.get("spatial_merge_size") or 1),
        in_process=args.media_processor == "process" and hasattr(os, "memfd_create"),
        is_pixtral=kind == "mistral3" or vision.get("model_type") == PIXTRAL,
        sources=sources,
        has_two_towers=has_two_towers,
        num_image_tokens=int(raw.get("mm_tokens_per_image") or GEMMA_IMAGE)
        if FAMILIES[kind].spans == IMAGE
        else 0,
    ), ""


def modality_of(source_config: Mapping[str, Any]) -> str:
    """Return the modality of a model's tower, or `image` for a model without a tower."""
    family = FAMILIES.get(str(source_config.get("model_type")))
    if family is not None:
        return family.modality
    hears_only = "audio_config" in source_config and "vision_config" not in source_config
    return AUDIO if hears_only else IMAGE


def _shown(modality: str) -> str:
    return AUDIO if modality == AUDIO else "images"


def _reason(args: EngineArgs, model: ModelConfig, kind: str, device: str) -> str | None:
    """Return why this model takes no images, or no audio, or None."""
    modality = modality_of(model.source_config)
    what = "audio is" if modality == AUDIO else "images are"
    if kind not in FAMILIES:
        known = ", ".join(sorted(name for name, x in FAMILIES.items() if x.modality == modality))
        if {"vision_config", "audio_config"}.isdisjoint(model.source_config):
            return NO_IMAGES
        return f"{what} not supported for {kind!r}; supported: {known}"
    if device != "cpu":
        return f"{what} not supported on a GPU yet; use device='cpu'"
    if args.skip_tokenizer_init:
        return f"{what} not supported with skip_tokenizer_init, because placing them needs the tokenizer"
    if args.speculative_config and args.speculative_config.get("model"):
        return f"{what} not supported with a draft model"
    if args.pipeline_parallel_size > 1 or args.tensor_parallel_size > 1:
        return f"{what} not supported with pipeline_parallel_size or tensor_parallel_size above 1"
    if not any((Path(model.path) / name).is_file() for name in PROCESSOR_FILES):
        return f"the model folder has no {PROCESSOR_FILES[0]}, which describes the processor of {_shown(modality)}"
    if any(importlib.util.find_spec(name) is None for name in PACKAGES[modality]):
        return f"{what} not supported without optional packages: {install_hint(EXTRAS[modality])}"
    return None


def _limits(args: EngineArgs) -> dict[str, int]:
    """Read `limit_mm_per_prompt`: the most images and recordings of one prompt."""
    given: Any = args.limit_mm_per_prompt
    most = 0 if args.language_model_only else MAX_ITEMS
    counts: dict[str, int] = dict.fromkeys(MODALITIES, most)
    if given is None:
        return counts
    name = "limit_mm_per_prompt"
    for modality, limit in _mapping(name, given).items():
        if modality not in MODALITIES:
            raise invalid(name, f"{modality!r} is not one of {', '.join(MODALITIES)}", given)
        if isinstance(limit, Mapping):
            options = cast("Mapping[str, Any]", limit)
            if unknown := options.keys() - {"count", "width", "height", "num_frames", "length"}:
                raise invalid(name, f"unknown options {sorted(unknown)} of {modality}", given)
            limit = options.get("count", MAX_ITEMS)
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
            raise invalid(name, f"the count of {modality} must be an integer ≥ 0", given)
        counts[modality] = 0 if args.language_model_only else limit
    return counts


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


def no_media(modality: str, reason: str, model: str, parameter: str, own: str = IMAGE) -> Exception:
    """Return the error of a request with images or audio to a model that does not take them.

    Args:
        reason: why the model takes none of its `own` modality.
    """
    what = _shown(modality)
    if reason == NO_IMAGES or modality != own:
        rule = f"the model {model} takes no {what}; send text, or serve a model that takes {what}"
        return invalid(parameter, rule)
    text = f"{parameter}: the model {model} takes no {what} here: {reason}"
    return UnsupportedFeatureError(text, parameter=parameter)
