"""Read the files of a model folder, which may come from an untrusted source, and the fields of its JSON files that trouper uses.

Sizes are bounded, and reading never waits for a writer.

Readers of fields handle absent fields and null.  A value of another type, or one so large that loading would take hours or all memory,
is refused when the folder is opened.  Fields with other names are ignored.
"""

import json
import os
import stat
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import msgspec
from msgspec import Meta, Struct

from trouper.errors import invalid

# Ten times the size of the largest known tokenizer_config.json; parsing this much takes about a second.
MAX_TEXT_BYTES = 32 * 2**20
T = TypeVar("T")


def check_folder(folder: Path, parameter: str = "model") -> None:
    """Check that a folder contains no pipes, sockets or devices, because opening one may block forever.

    Raises:
        TrouperValidationError: the message names the file.
    """
    if not folder.is_dir():
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                mode = entry.stat().st_mode
            except OSError:
                # A broken link; readers do not find it either.
                continue
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise invalid(parameter, f"{entry.name} is not a regular file", entry.path)


def read_text(path: Path, parameter: str = "model") -> str:
    """Read a small text file.

    Raises:
        FileNotFoundError: the file does not exist.
        TrouperValidationError: it is not a regular file, too large, or unreadable; the message names it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise invalid(parameter, f"{path.name} is not a regular file", str(path))
            content = file.read(MAX_TEXT_BYTES + 1)
        if len(content) > MAX_TEXT_BYTES:
            rule = f"{path.name} is larger than {MAX_TEXT_BYTES // 2**20} MiB"
            raise invalid(parameter, rule, str(path))
        return content.decode()
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(path) from None
    except (OSError, UnicodeDecodeError) as error:
        raise invalid(parameter, f"{path.name} cannot be read: {error}", str(path)) from None


def read_json(path: Path, parameter: str = "model") -> Any:
    """Parse a JSON file of a model folder.

    Returns None if it does not exist. `parameter` is the option to name in errors.

    Raises:

        TrouperValidationError: the file is not readable, too large, or not JSON.
    """
    try:
        text = read_text(path, parameter)
    except FileNotFoundError:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(parameter, f"{path.name} cannot be read: {error}", str(path)) from None


def read_object(path: Path, parameter: str = "model") -> dict[str, Any] | None:
    """Parse a JSON file that must contain an object.  Returns None if it does not exist.

    Raises:
        TrouperValidationError: the errors of `read_json`, or the file contains something else.
    """
    value = read_json(path, parameter)
    if value is not None and not isinstance(value, dict):
        raise invalid(parameter, f"{path.name} is not an object", str(path))
    return cast("dict[str, Any] | None", value)


def checked(value: Any, kind: type[T], file: str, parameter: str = "model") -> T:
    """Convert parsed JSON to a type, with its bounds.

    Args:

        file: the name to show in errors.
        parameter: the option that selected the file.

    Raises:

        TrouperValidationError: the message names the file and the field and shows its value.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        rule, _, where = str(error).partition(" - at `")
        field = where.rpartition("$")[2].removesuffix("`").removeprefix(".")
        found = _at(value, field)
        place = f"{file}: {field}" if field else file
        raise invalid(parameter, f"{place}: {rule[:1].lower()}{rule[1:]}", found) from None


def _at(value: Any, field: str) -> Any:
    """Return the value at a path such as `a.b[1]`, or the innermost existing value on the path."""
    for name in field.replace("[", ".[").split("."):
        try:
            value = value[int(name[1:-1])] if name.startswith("[") else value[name]
        except (LookupError, TypeError, ValueError):
            break
    return value


# Each bound is about ten times the largest value of a published model.
Vocabulary = Annotated[int, Meta(ge=1, le=2**24)]
Width = Annotated[int, Meta(ge=1, le=2**20)]
Count = Annotated[int, Meta(ge=1, le=4096)]  # for example of layers or heads
MOST_POSITIONS = 2**24
Positions = Annotated[int, Meta(ge=1, le=MOST_POSITIONS)]
Index = Annotated[int, Meta(ge=-1, le=2**31)]
Positive = Annotated[float, Meta(gt=0, le=1e12)]
Length = Annotated[float, Meta(ge=1, le=1e12)]
Number = Annotated[float, Meta(ge=-1e12, le=1e12)]
Share = Annotated[float, Meta(gt=0, le=1)]


class Rope(Struct):
    """`rope_scaling`, `rope_parameters`, or one of the groups in the latter.

    The fields are the parameters of all supported methods of scaling rotary positions.  `rope_type`
    (formerly `type`) names the method, and each method reads only its own fields.
    """

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Positive | None = None
    factor: Positive | None = None
    original_max_position_embeddings: Length | None = None
    partial_rotary_factor: Share | None = None
    attention_factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    mscale: Number | None = None
    mscale_all_dim: Number | None = None
    truncate: bool | None = None
    llama_4_scaling_beta: Number | None = None
    alpha: Positive | None = None
    short_factor: list[Positive] | None = None
    long_factor: list[Positive] | None = None


class HfFields(Struct):
    """The fields of config.json in one flat shape.

    `flattened` has lifted the fields of `text_config` to the top and replaced the names of other families, so
    readers need only one name for each quantity.  None means that the file lacks the field.
    """

    architectures: list[str] | None = None
    model_type: str | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    eos_token_id: Index | list[Index] | None = None
    pad_token_id: Index | None = None
    # sizes
    vocab_size: Vocabulary | None = None
    type_vocab_size: Annotated[int, Meta(ge=0, le=2**20)] | None = None
    hidden_size: Width | None = None
    dim: Width | None = None
    intermediate_size: Width | list[Width] | None = None  # Gemma 3n: for each layer
    num_hidden_layers: Count | None = None
    num_attention_heads: Count | None = None
    num_key_value_heads: Count | None = None
    head_dim: Annotated[int, Meta(ge=1, le=2**14)] | None = None
    max_position_embeddings: Positions | None = None
    # attention
    sliding_window: Annotated[int, Meta(ge=0, le=2**24)] | None = None  # 0 is none
    sliding_window_pattern: Annotated[int, Meta(ge=0, le=4096)] | str | None = (
        None  # EXAONE: "LLLG"
    )
    use_sliding_window: bool | None = None
    max_window_layers: Annotated[int, Meta(ge=0, le=2**31)] | None = None
    layer_types: list[str] | None = None
    attention_bias: bool | None = None
    use_qkv_bias: bool | None = None
    use_qk_norm: bool | None = None
    qk_layernorm: bool | None = None
    multi_query: bool | None = None
    alibi: bool | None = None
    scale_attn_weights: bool | None = None
    query_pre_attn_scalar: Positive | None = None
    attention_multiplier: Number | None = None
    attn_logit_softcapping: Positive | None = None
    local_attention: Positions | None = None
    global_attn_every_n_layers: Count | None = None
    relative_attention_num_buckets: Count | None = None
    # positions
    position_embedding_type: str | None = None
    rope_theta: Positive | None = None
    rope_local_base_freq: Positive | None = None
    global_rope_theta: Positive | None = None
    local_rope_theta: Positive | None = None
    rotary_emb_base: Positive | None = None
    rotary_emb_fraction: Share | None = None
    partial_rotary_factor: Share | None = None
    original_max_position_embeddings: Length | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: Count | None = None
    # MLP, norms, embeddings
    hidden_act: str | None = None
    hidden_activation: str | None = None
    activation: str | None = None
    activation_function: str | None = None
    classifier_activation: str | None = None
    mlp_bias: bool | None = None
    rms_norm_eps: Positive | None = None
    norm_eps: Positive | None = None
    layer_norm_eps: Positive | None = None
    layer_norm_epsilon: Positive | None = None
    norm_epsilon: Positive | None = None
    layer_norm_elementwise_affine: bool | None = None
    do_layer_norm_before: bool | None = None
    use_parallel_residual: bool | None = None
    parallel_attn: bool | None = None
    new_decoder_architecture: bool | None = None
    enable_bias: bool | None = None
    use_bias: bool | None = None
    tie_word_embeddings: bool | None = None
    embedding_multiplier: Number | None = None
    residual_multiplier: Number | None = None
    logits_scaling: Positive | None = None
    final_logit_softcapping: Positive | None = None
    # pooling
    id2label: dict[Annotated[str, Meta(pattern="^[0-9]{1,9}$")], Any] | None = None
    num_labels: Annotated[int, Meta(ge=1, le=2**20)] | None = None
    problem_type: str | None = None
    classifier_pooling: str | None = None
    matryoshka_dimensions: list[Width] | None = None
    is_matryoshka: bool | None = None
    sbert_ce_default_activation_function: str | None = None
    sentence_transformers: dict[str, Any] | None = None
    quantization_config: dict[str, Any] | None = None


class GenerationFields(Struct):
    """generation_config.json.  `SamplingParams` checks its sampling defaults."""

    eos_token_id: Index | list[Index] | None = None


class Module(Struct):
    """An entry of modules.json."""

    type: str = ""
    path: str = ""


class DenseFields(Struct):
    """config.json of a sentence-transformers Dense module.

    The module computes y = act(x Wᵀ + b).  The activation is given by the import path of its torch
    class; the default is sentence-transformers' own.
    """

    in_features: Width
    out_features: Width
    bias: bool = True
    activation_function: str | None = "torch.nn.modules.activation.Tanh"
    module_input_name: str | None = None
    module_output_name: str | None = None
    use_residual: bool = False


class PoolingFields(Struct):
    """config.json of a sentence-transformers Pooling module.  Its older flags are read one by one."""

    pooling_mode: str | list[str] | None = None


class TransformerFields(Struct):
    """sentence_…_config.json, except for the fields of late interaction."""

    max_seq_length: Annotated[int, Meta(ge=1, le=2**31)] | None = None
    do_lower_case: bool | None = None
