"""Load a model folder as a causal language model of the transformers library, and check it against the library.

Laws:
  * Only safetensors are read, and only the library's own code runs.
  * A model is accepted if its class declares support, if its layers receive supported masks (`models/hf_attention.py`), and if
    a check at each load succeeds: random tokens in chunks, batched with another sequence, give the same logits with this
    engine's attention as with the library's own eager attention.
  * Every other model is refused, with the reason, before the engine is ready.
"""

import logging
import sys
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from torch import nn

from trouper.actors.executor.models.families.registry import (
    SCALING_HEADS,
    SEES_AHEAD,
    check_text_part,
    is_text_part,
    own_refusal,
)
from trouper.actors.executor.models.hf_attention import NAME, HfAttention
from trouper.actors.executor.models.hf_decoder import HfDecoder
from trouper.actors.executor.models.hf_states import (
    SINCE,
    UNKNOWN_STATE,
    check_mixer,
    keeper_near,
    mixers_near,
)
from trouper.actors.executor.models.names import is_of_other_uses, key_mapping, text_names
from trouper.actors.executor.models.parameters import Parameter
from trouper.actors.executor.weights.checkpoint import Checkpoint, RandomWeights
from trouper.actors.executor.weights.decoder import UNUSED_TENSORS, Wrap
from trouper.actors.executor.weights.hf_check import (
    ROW_COUNTS,
    TRIAL_TOKENS,
    check_logits,
    eager_logits,
    exchange,
    linear_layers,
    observed,
    own_code,
)
from trouper.actors.executor.weights.schemes import read_scheme
from trouper.config.engine_config import EngineConfig
from trouper.config.model import ModelConfig
from trouper.errors import TrouperError, TrouperValidationError, UnsupportedFeatureError
from trouper.extras import install_hint
from trouper.kernels.linear import LinearMethod

logger = logging.getLogger(__name__)
KNOWN_LAYERS = frozenset(
    {"full_attention", "sliding_attention", "chunked_attention", "attention"}
    | {"dense", "sparse", "moe", "mlp"}  # kinds of MLP
)
# Kinds of layers that keep a state, if a mixer of the class has the library's protocol for states.
RECURRENT_LAYERS = frozenset({"linear_attention", "mamba", "conv", "hybrid"})
# Fields by which text models scale or cap their logits, and the values that leave them as they are.
PLAIN_HEAD = {"logit_scale": 1.0, "logits_scaling": 1.0, "final_logit_softcapping": None}
# Rotary embeddings with frequencies that depend on the longest sequence of a batch.
GROWING_ROPES = ("dynamic", "longrope")


def load_hf_decoder(config: EngineConfig, wrap: Wrap | None = None) -> HfDecoder:
    """Build the decoder of the config's model from the library's class for it.

    Args:
        wrap: adds something, such as adapters, to each linear layer that computes every token.

    Raises:
        UnsupportedFeatureError: the model cannot be served this way; the message gives the reason.
        TrouperValidationError: the checkpoint does not fit the class; the message names tensors.
    """
    try:
        return _load(config, wrap)
    except UnsupportedFeatureError as error:
        rule = f"{config.model.architecture} cannot be served by way of transformers: {error}"
        # A field that keeps the model from trouper's own code is what a reader can change.
        own = own_refusal(config.model.hf_config, config.model.architecture)
        field = own.parameter if own is not None else None
        if config.model_impl == "auto" and field not in (None, "model"):
            raise UnsupportedFeatureError(
                f"{rule}; nor by trouper's own code: {own}", parameter=field
            ) from error
        raise UnsupportedFeatureError(rule, parameter="model") from error


def _load(config: EngineConfig, wrap: Wrap | None) -> HfDecoder:
    dtype: torch.dtype = getattr(torch, config.dtype)
    cls, hf_config = admit(config.model, config.code_path)
    if config.enable_prompt_embeds and getattr(hf_config, "hidden_size_per_layer_input", 0):
        raise UnsupportedFeatureError(
            "enable_prompt_embeds: its layers look up each token by its id"
        )
    model = _with_weights(cls, hf_config, config, dtype)
    longest = _longest(model)
    if longest < config.max_model_len:
        if not config.is_length_open:
            raise UnsupportedFeatureError(
                f"its positions are stretched beyond {longest} tokens by the length of each sequence; "
                f"set max_model_len to {longest} or less, or to 'auto'"
            )
        config = msgspec.structs.replace(config, max_model_len=longest)
    try:
        decoder = _checked(model, config, dtype)
    except TrouperError:
        raise
    except Exception as error:  # A model's own code may raise anything.
        line = str(error).strip().partition("\n")[0]
        raise UnsupportedFeatureError(
            f"its code fails in a trial ({type(error).__name__}: {line})"
        ) from error

    def wrapped(name: str, method: LinearMethod) -> LinearMethod:
        return (
            wrap(Parameter(name, ((f"{name}.weight", method.shape),)), method) if wrap else method
        )

    decoder.wrap_linears(wrapped, ROW_COUNTS)
    return decoder


def _checked(model: nn.Module, config: EngineConfig, dtype: torch.dtype) -> HfDecoder:
    """Replace a model's products and attention by this engine's, and compare its logits with those before."""
    expected, layers = observed(
        linear_layers(model, config.quantization),
        lambda: eager_logits(model, config.model.vocab_size),
    )
    exchange(layers, config, dtype)
    attention = HfAttention(dtype, config.block_size, config.max_model_len)
    attention.attach(model)
    cast("Any", model).set_attn_implementation(NAME)
    decoder = HfDecoder(model, attention, dtype)
    decoder.learn(TRIAL_TOKENS)
    check_logits(decoder, expected, config.block_size)
    return decoder


def admit(model: ModelConfig, code_path: str | None = None) -> tuple[Any, Any]:
    """Return the library's class and config of a model, if they declare that it can be served.

    Args:
        code_path: a folder of Python code that may be run if the library does not contain the model's class.

    Raises:
        UnsupportedFeatureError: the class or the config shows that the model cannot be served.
    """
    if model.source_config.get("auto_map") and not _is_known(model):
        cls, hf_config = own_code(model, code_path)
    else:
        hf_config = _hf_config(model)
        cls = _class_of(model, hf_config)
    check_class(cls, hf_config)
    if hasattr(hf_config, "quantization_config"):
        del hf_config.quantization_config  # the weights are plain when the library gets them
    return cls, hf_config


def _is_known(model: ModelConfig) -> bool:
    try:
        _class_of(model, _hf_config(model))
    except UnsupportedFeatureError:
        return False
    return True


def _class_of(model: ModelConfig, hf_config: Any) -> Any:
    """Find the class of the model, or of the text model of a multimodal one."""
    architecture = model.architecture
    if is_text_part(architecture):
        check_text_part(architecture)
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        kind = hf_config.model_type
        names: Any = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if kind not in names or is_text_part(names[kind]):
            raise UnsupportedFeatureError(f"its text model, {kind!r}, has no class of its own")
        architecture = names[kind]
    return causal_class(architecture)


def causal_class(architecture: str) -> Any:
    """Find the library's class of an architecture.

    Raises:
        UnsupportedFeatureError: it has none, or its class is no causal language model.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    if architecture not in names:
        version = cast("Any", transformers).__version__
        raise UnsupportedFeatureError(
            f"it is none of the causal language models of transformers {version}"
        )
    return getattr(transformers, architecture)


def check_class(cls: Any, hf_config: Any) -> None:
    """Check what a class and its config declare about the model.

    Raises:
        UnsupportedFeatureError: its attention cannot be replaced, or it keeps a state other than keys and values.
    """
    has_mixers = _check_mixers(cls)
    if not getattr(cls, "_supports_attention_backend", False) and not has_mixers:
        raise UnsupportedFeatureError(
            "its class has an attention of its own that cannot be exchanged"
        )
    if getattr(hf_config, "is_encoder_decoder", False):
        raise UnsupportedFeatureError("it is the decoder of an encoder")
    text = hf_config.get_text_config()
    can_be_both = hasattr(text, "is_decoder") and hasattr(text, "add_cross_attention")
    if can_be_both and not text.is_decoder:
        raise UnsupportedFeatureError(
            "its config says is_decoder=false: tokens see those behind them"
        )
    if getattr(text, "is_causal", True) is False:
        raise UnsupportedFeatureError(SEES_AHEAD)
    for kind in getattr(text, "layer_types", None) or ():
        if kind not in KNOWN_LAYERS and not (has_mixers and kind in RECURRENT_LAYERS):
            raise UnsupportedFeatureError(
                f"its layers of type {kind!r} keep another state than keys and values"
            )


def _check_mixers(cls: Any) -> bool:
    """Return whether a class has recurrent mixers, after checking that the engine can keep their states.

    Raises:
        UnsupportedFeatureError: it keeps a state that the engine does not know.
    """
    mixers = mixers_near(cls)
    for mixer in mixers:
        check_mixer(*mixer)
    if mixers or not getattr(cls, "_is_stateful", False):
        return bool(mixers)
    import transformers

    version = cast("Any", transformers).__version__
    if tuple(int(part) for part in version.split(".")[:2]) < SINCE:
        needed = ".".join(map(str, SINCE))
        raise UnsupportedFeatureError(
            f"it needs transformers {needed} or newer; {version} is installed"
        )
    raise UnsupportedFeatureError(UNKNOWN_STATE.format(keeper_near(cls)))


def _hf_config(model: ModelConfig) -> Any:
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError:
        hint = install_hint("transformers")
        raise UnsupportedFeatureError(f"it needs transformers: {hint}") from None
    fields = model.source_config
    kind = str(fields.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise UnsupportedFeatureError(f"transformers does not know its model_type {kind!r}")
    try:
        found: Any = cast("Any", CONFIG_MAPPING[kind]).from_dict(dict(fields))
        return _text_config(found, model) if is_text_part(model.architecture) else found
    except Exception as error:  # whatever the library raises for a config that it does not like
        line = str(error).strip().partition("\n")[0]
        raise UnsupportedFeatureError(f"transformers cannot read its config: {line}") from error


def _text_config(whole: Any, model: ModelConfig) -> Any:
    """Return the config of the text model, with the fields of the multimodal model's head."""
    text = whole.get_text_config(decoder=True)
    text.tie_word_embeddings = model.hf_config["tie_word_embeddings"]
    if model.architecture not in SCALING_HEADS:
        for name, neutral in PLAIN_HEAD.items():
            if hasattr(text, name):
                setattr(text, name, neutral)
    return text


def _with_weights(cls: Any, hf_config: Any, config: EngineConfig, dtype: torch.dtype) -> nn.Module:
    if config.load_format == "dummy":
        return _dummy(cls, hf_config, config.seed, dtype)
    is_part = is_text_part(config.model.architecture)
    scheme = read_scheme(config.model.hf_config)
    plain = None
    if scheme is not None:
        checkpoint = Checkpoint(Path(config.model.path), scheme=scheme)
        plain = {name: tensor.to(dtype) for name, tensor in checkpoint.plain()}
    try:
        model, info = cls.from_pretrained(
            config.model.path if plain is None else None,
            config=hf_config,
            state_dict=plain,
            dtype=dtype,
            attn_implementation="eager",
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            key_mapping=key_mapping() if is_part else None,
        )
    except (TrouperError, MemoryError):
        raise
    except Exception as error:  # whatever the library raises for a folder that it does not like
        line = str(error).strip().partition("\n")[0]
        raise TrouperValidationError(
            f"transformers cannot load it ({type(error).__name__}: {line})",
            parameter="model",
            value=config.model.path,
        ) from error
    for problem, key in (
        ("lacks", "missing_keys"),
        ("has unexpected", "unexpected_keys"),
        ("has misshapen", "mismatched_keys"),
    ):
        names = sorted(map(str, info.get(key) or ()))
        if is_part:  # the rest of a larger model is not read
            names = sorted(text_names(names) if key == "unexpected_keys" else names)
        if key == "unexpected_keys":
            num_layers = int(getattr(model.config, "num_hidden_layers", 1 << 30))
            unused = [name for name in names if is_of_other_uses(name, num_layers)]
            if unused:
                logger.info(UNUSED_TENSORS, len(unused), ", ".join(unused[:4]))
            names = [name for name in names if name not in unused]
        if names:
            shown = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
            raise TrouperValidationError(
                f"the checkpoint {problem} {len(names)} tensors: {shown}",
                parameter="model",
                value=config.model.path,
            )
    return model.eval()


def _dummy(cls: Any, hf_config: Any, seed: int, dtype: torch.dtype) -> nn.Module:
    """Build the class with random weights, and with the buffers that its constructor computes."""
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = cls._from_config(hf_config, dtype=dtype, attn_implementation="eager")
    source = RandomWeights(seed, dtype)
    for name, parameter in model.named_parameters():
        parameter.data = source.read(name, tuple(parameter.shape))
    model.tie_weights()
    return model.eval()


def _longest(model: nn.Module) -> int:
    """Return the length beyond which the keys of a sequence would depend on the lengths of others in its batch."""
    found = sys.maxsize
    for module in model.modules():
        kind: Any = getattr(module, "rope_type", None)
        kinds: set[Any] = (
            set(cast("dict[Any, Any]", kind).values()) if isinstance(kind, dict) else {kind}
        )
        longest = getattr(module, "original_max_seq_len", None)
        if kinds & set(GROWING_ROPES) and longest is not None:
            found = min(found, int(longest))
    return found
