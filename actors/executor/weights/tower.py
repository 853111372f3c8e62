"""Load the vision or audio tower and the projector of a model, without its text model, which trouper's own code computes.

Towers of usual families are trouper's own, too (`media/vision.py`).  For the others the library's class is built with a text model
of no layers, so that only the tensors of the tower are read, whatever their names in older checkpoints are.
"""

import importlib.util
import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from trouper.actors.executor.media.tower import (
    ADVICE,
    MediaTower,
    SlicedLinear,
    Slices,
    slice_layers,
)
from trouper.actors.executor.media.vision import VisionTower, own_tower, plain_name
from trouper.actors.executor.models.hf_decoder import HfLinear
from trouper.actors.executor.weights.checkpoint import Checkpoint, RandomWeights
from trouper.actors.executor.weights.hf_check import Layer, exchange, observed
from trouper.config.checkpoint.hf_config import outer_fields
from trouper.config.engine_config import EngineConfig
from trouper.config.media import MediaConfig
from trouper.errors import TrouperError, TrouperValidationError, UnsupportedFeatureError, invalid
from trouper.extras import install_hint

# The text model is built without layers and with a vocabulary of this size, and dropped at once.
SMALL_VOCABULARY = 8
FLOATS = ("F32", "F16", "BF16", "F64")
TEXT_MODELS = ("language_model", "text_model")


def load_tower(config: EngineConfig, media: MediaConfig) -> MediaTower:
    """Read the tower and the projector of the config's model, and try them.

    Raises:
        TrouperValidationError: the checkpoint lacks tensors of the tower, or config.json does not describe one.
        UnsupportedFeatureError: the tower cannot be computed.
    """
    dtype: torch.dtype = getattr(torch, config.dtype)
    slices, row_size = Slices(), config.model.hidden_size
    try:
        # Without memory for weights, which are assigned.
        with torch.device("meta"):
            own = own_tower(config.model.source_config, row_size)
    except Exception as error:  # config.json may contain anything
        raise _undescribed(config, error) from error
    model = _library_tower(config, media, dtype) if own is None else _filled(own, config, dtype)
    tower = MediaTower(model.eval(), media, dtype, row_size, slices)
    layers = [
        Layer(parent, name, module, None)
        for parent in model.modules()
        for name, module in parent.named_children()
        if type(module) is nn.Linear
    ]
    with torch.inference_mode():
        if own is None:
            # The only trial, since it takes as long as an image.
            _, layers = observed(layers, lambda: [tower.check()])
        exchange(layers, config, dtype)
    for parent, name, _, _ in layers:
        linear = cast("HfLinear", getattr(parent, name))
        tower.num_packed_bytes += linear.method.num_bytes
        setattr(parent, name, SlicedLinear(linear.method, linear.weight, slices))
    slice_layers(model, slices)
    if own is not None:
        with torch.inference_mode():
            tower.check()
    return tower


def _undescribed(config: EngineConfig, error: Exception) -> TrouperValidationError:
    line = " ".join(str(error).split())
    rule = f"its config.json does not describe a tower ({type(error).__name__}: {line}); {ADVICE}"
    return invalid("model", rule, config.model.path)


def _filled(model: VisionTower, config: EngineConfig, dtype: torch.dtype) -> VisionTower:
    """Read the weights of an own tower.

    Raises:
        TrouperValidationError: the checkpoint lacks tensors of the tower, has one under two names, or has them in another shape or
            quantized.
    """
    wanted = {name: tuple(found.shape) for name, found in model.named_parameters()}
    if config.load_format == "dummy":
        source = RandomWeights(config.seed, dtype)
        state = {name: source.read(name, shape) for name, shape in wanted.items()}
        model.load_state_dict(state, assign=True)
        return model
    folder = config.model.path
    checkpoint = Checkpoint(Path(folder))
    shapes = checkpoint.shapes
    names: dict[str, list[str]] = {}
    for name in shapes:
        if not _is_of_text(name):
            names.setdefault(plain_name(name), []).append(name)
    places = {name: names.get(plain_name(name), []) for name in wanted}
    _refuse("lacks", [name for name, stored in places.items() if not stored], folder)
    _refuse("has duplicates among", [n for s in places.values() if len(s) > 1 for n in s], folder)
    found = [(name, stored[0]) for name, stored in places.items()]
    misshapen = [place for name, place in found if wanted[name] not in _flat(shapes[place])]
    _refuse("has misshapen", misshapen, folder)
    mistyped = [place for _, place in found if checkpoint.dtype(place) not in FLOATS]
    _refuse("has quantized", mistyped, folder)
    state = {
        name: checkpoint.read(place, shapes[place]).to(dtype).view(wanted[name])
        for name, place in found
    }
    model.load_state_dict(state, assign=True)
    return model


def _flat(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the shapes in which a stored tensor is used: patches as rows of a product, and vectors in one dimension."""
    leading = next((i for i, size in enumerate(shape) if size != 1), 0)
    return shape, shape[leading:], (shape[0], prod(shape[1:]))


def _refuse(problem: str, names: Sequence[str], folder: str) -> None:
    """Raise TrouperValidationError if there are tensors with this problem."""
    if names:
        shown = ", ".join(sorted(names)[:4]) + (", …" if len(names) > 4 else "")
        raise TrouperValidationError(
            f"model: the checkpoint {problem} {len(names)} tensors of the tower: {shown}; {ADVICE}",
            parameter="model",
            value=folder,
        )


def _library_tower(config: EngineConfig, media: MediaConfig, dtype: torch.dtype) -> nn.Module:
    """Read the tower of a family that only the library computes."""
    with _quiet():
        cls, hf_config = _class_of(config)
        if config.load_format == "dummy":
            whole = _random(cls, hf_config, config.seed, dtype)
        else:
            whole = _read(cls, hf_config, media.folder, dtype)
    # ColQwen2 has a projection beside it.
    model = whole.vlm if hasattr(whole, "vlm") else whole.model
    for name in TEXT_MODELS:
        if hasattr(model, name):
            setattr(model, name, None)
    return model


def load_whole(config: EngineConfig) -> Any:
    """Read a model that the library computes as a whole.

    Raises:
        TrouperValidationError: the checkpoint lacks tensors.
        UnsupportedFeatureError: transformers is not installed, or has no such class.
    """
    if importlib.util.find_spec("transformers") is None:
        text = f"{config.model.architecture} needs transformers: {install_hint('vision')}"
        raise UnsupportedFeatureError(text, parameter="model")
    dtype: torch.dtype = getattr(torch, config.dtype)
    with _quiet():
        cls, hf_config = _library_class(config)
        if config.load_format == "dummy":
            return _random(cls, hf_config, config.seed, dtype).eval()
        return _read(cls, hf_config, config.model.path, dtype, is_whole=True).eval()


def _class_of(config: EngineConfig) -> tuple[Any, Any]:
    """Return the library's class and its config, with a text model without layers."""
    try:
        cls, hf_config = _library_class(config)
    except TrouperError:
        raise
    except Exception as error:  # config.json may contain anything
        raise _undescribed(config, error) from error
    text = hf_config.get_text_config(decoder=True)
    text.num_hidden_layers, text.vocab_size = 0, SMALL_VOCABULARY
    # Within the small vocabulary; not every class accepts None.
    text.pad_token_id = hf_config.pad_token_id = 0
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = []
    return cls, hf_config


def _library_class(config: EngineConfig) -> tuple[Any, Any]:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    raw, name = config.model.source_config, config.model.architecture
    cls = getattr(transformers, name, None)
    if cls is None:
        version = cast("Any", transformers).__version__
        raise UnsupportedFeatureError(
            f"transformers {version} has no {name}; {ADVICE}", parameter="model"
        )
    config_class: Any = CONFIG_MAPPING[str(raw["model_type"])]
    hf_config: Any = config_class.from_dict(dict(outer_fields(raw)))
    if hasattr(hf_config, "quantization_config"):
        del hf_config.quantization_config
    return cls, hf_config


def _read(
    cls: Any, hf_config: Any, folder: str, dtype: torch.dtype, *, is_whole: bool = False
) -> Any:
    try:
        model, info = cls.from_pretrained(
            folder,
            config=hf_config,
            dtype=dtype,
            attn_implementation=_attention(hf_config),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            # The embedding and the head have fewer rows here.
            ignore_mismatched_sizes=True,
        )
    except MemoryError:
        raise
    except Exception as error:  # whatever the library raises for a folder that it does not like
        line = str(error).strip().partition("\n")[0]
        rule = f"transformers cannot load its tower ({type(error).__name__}: {line}); {ADVICE}"
        raise invalid("model", rule, folder) from error
    for problem, key in (("lacks", "missing_keys"), ("has misshapen", "mismatched_keys")):
        names = sorted(_name(found) for found in info.get(key) or ())
        _refuse(problem, [name for name in names if is_whole or not _is_of_text(name)], folder)
    return model


def _random(cls: Any, hf_config: Any, seed: int, dtype: torch.dtype) -> Any:
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = cls._from_config(hf_config, dtype=dtype, attn_implementation=_attention(hf_config))
    source = RandomWeights(seed, dtype)
    for name, parameter in model.named_parameters():
        parameter.data = source.read(name, tuple(parameter.shape))
    return model


def _attention(hf_config: Any) -> dict[str, str]:
    """Choose the attention of a model's parts: the library's fastest, except for a text model, which may not support it.

    The text models here have no layers, or few short inputs.
    """
    return {
        name: "eager" if name == "text_config" else "sdpa" for name in ("", *hf_config.sub_configs)
    }


def _name(found: Any) -> str:
    """Return the name of a tensor; for one of a wrong shape the library gives the shapes, too."""
    return str(cast("tuple[Any, ...]", found)[0]) if isinstance(found, tuple) else str(found)


def _is_of_text(name: str) -> bool:
    parts = name.split(".")
    return parts[0] == "lm_head" or not set(parts).isdisjoint(TEXT_MODELS)


@contextmanager
def _quiet() -> Generator[None]:
    """Hide the library's reports about the text model, omitted on purpose."""
    from transformers.utils import logging as library

    told: Any = library
    logger = logging.getLogger("transformers")
    level, shows_progress = logger.level, told.is_progress_bar_enabled()
    logger.setLevel(logging.ERROR)
    told.disable_progress_bar()
    try:
        yield
    finally:
        logger.setLevel(level)
        if shows_progress:
            told.enable_progress_bar()
