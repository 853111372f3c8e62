"""Describe a model folder by its JSON files and the headers of its weight files.  torch is never imported.

The engine's decisions depend on the JSON files only.  `trouper show` and Ollama's API also show sizes, shapes and types, which are read
from the headers of weight files within milliseconds.
"""

import hashlib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, cast

import msgspec

from trouper.config.args import EngineArgs
from trouper.config.checkpoint.files import (
    MOST_POSITIONS,
    GenerationFields,
    HfFields,
    Rope,
    check_folder,
    checked,
    read_object,
)
from trouper.config.checkpoint.hf_config import (
    WHOLE,
    flattened,
    of_retriever,
    overridden,
    with_floats,
)
from trouper.config.checkpoint.model_path import DEMO_MODEL, GEOMETRIES, download, model_path
from trouper.config.checkpoint.pooler import (
    CLASSIFIERS,
    PoolerConfig,
    PoolerSpec,
    TokenClassifier,
    is_pooling,
    pooler_spec,
)
from trouper.config.checkpoint.recurrent import (
    MIXED,
    OPEN_POSITIONS,
    PURE,
    num_attention_layers,
)
from trouper.config.checks import human_int
from trouper.config.generation import (
    GENERATION,
    Frontend,
    check_override,
    default_sampling,
    read_generation_config,
    sampling_source,
)
from trouper.config.gguf.encoders import gguf_config
from trouper.config.gguf.header import Gguf, is_gguf, read_gguf
from trouper.config.gguf.names import gguf_models, gguf_names
from trouper.errors import TrouperValidationError, UnsupportedFeatureError, invalid

DTYPES = {
    "half": "float16", "float16": "float16", "fp16": "float16",
    "bfloat16": "bfloat16", "bf16": "bfloat16",
    "float": "float32", "float32": "float32", "fp32": "float32",
}  # fmt: skip
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_STRETCHED = ("gemma3", "gemma3_text")
# Families with a position table that begins after the index of the padding token.
_OFFSET_POSITIONS = (
    "roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "data2vec-text", "mpnet",
)  # fmt: skip


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a model folder by its JSON files.

    It contains everything that the engine needs before the weights are read: names, sizes, stop tokens
    and sampling defaults.  `load` creates it.
    """

    # A folder or GGUF file on disk, or the name of a geometry.
    path: str
    # Whether `path` is a GGUF file, determined once by `load`.
    is_gguf: bool = False
    # The name given by the user.
    name: str
    architecture: str
    # config.json, with a nested text_config lifted to the top.
    hf_config: dict[str, Any]
    # config.json, unchanged except for `hf_overrides`.
    source_config: dict[str, Any] = {}
    vocab_size: int
    max_position_embeddings: int
    # The stored dtype: float32, bfloat16 or float16.
    dtype: str
    eos_token_ids: tuple[int, ...]  # the first is the primary one
    # The defaults of requests, and their source for users.
    default_sampling: dict[str, Any]
    sampling_source: str = "vLLM's"
    hidden_size: int = 0  # 0 if the config lacks it

    @classmethod
    def load(cls, args: EngineArgs, frontend: Frontend = "library") -> Self:
        """Read the folder, GGUF file, hub snapshot, geometry or bundled demo that `args.model` names.

        Args:
            frontend: the interface in use; it determines the sampling of a model without its own defaults.

        Raises:
            TrouperValidationError: the folder or hub id does not exist, its config.json is unreadable, or a field has the wrong
                type or size; the message names the file and the field.
        """
        path = model_path(args)
        header = read_gguf(path) if is_gguf(path) else None
        if header is not None:
            raw = gguf_config(header)
        elif path.is_dir():
            check_folder(path)
            raw = read_object(path / "config.json")
            if raw is None:
                raise invalid("model", "no config.json in the model folder", str(path))
            raw = with_modelopt(raw, path)
        else:
            raw = GEOMETRIES[str(path)]
        overrides = cast("dict[str, Any]", args.hf_overrides or {})
        raw = overridden(of_retriever(with_floats(raw)), overrides)
        config = flattened(raw)
        fields = checked(config, HfFields, "config.json")
        if not fields.architectures:
            raise invalid("model", "config.json has no 'architectures'", str(path))
        override: dict[str, Any] = args.override_generation_config or {}
        check_override(override)
        own = read_generation_config(args.generation_config, path)
        generation = {**own, **override}
        source = sampling_source(args.generation_config, own, header, frontend)
        eos = checked(
            {"eos_token_id": _first(generation.get("eos_token_id"), config.get("eos_token_id"))},
            GenerationFields,
            "generation_config.json",
        ).eos_token_id
        return cls(
            path=str(path),
            is_gguf=header is not None,
            name=args.model or "trouper-demo",
            architecture=_whole_model(fields.architectures[0], raw),
            hf_config=config,
            source_config=raw,
            vocab_size=_needed(fields, "vocab_size", path),
            hidden_size=fields.hidden_size or 0,
            max_position_embeddings=_num_positions(fields, path, args.max_model_len),
            dtype=fields.dtype or "float32",
            eos_token_ids=tuple(eos if isinstance(eos, list) else [eos] if eos is not None else ()),
            default_sampling=default_sampling(
                source.fields | override, GENERATION if header is None else path.name
            ),
            sampling_source=f"{source.of}, with your overrides" if override else source.of,
        )

    def with_lengths_below(self, max_model_len: int) -> Self:
        """Return a copy with a default of max_tokens that fits the engine's context.

        A model's generation_config.json may set a larger default, with which every request without its own value would be
        refused.
        """
        wanted = self.default_sampling.get("max_tokens")
        if wanted is None or wanted <= max_model_len:
            return self
        sampling = {**self.default_sampling, "max_tokens": max_model_len}
        return msgspec.structs.replace(self, default_sampling=sampling)

    def pooler(self, runner: str, convert: str, wishes: Any) -> PoolerSpec | None:
        """Determine how the model pools, from the engine's options and the model's files.

        Returns None for a generative model.

        Raises:

            TrouperValidationError: an option is unknown, or the model does not support it.
        """
        folder = Path(self.path)
        wishes = PoolerConfig.of(wishes)
        if runner == "auto" and convert != "none" and "gguf_pooling" in self.hf_config:
            # A GGUF file with a pooling type is an embedding model.
            runner = "pooling"
        if runner != "generate" and convert == "auto" and TokenClassifier.of(self.hf_config):
            convert = "classify"
        if not is_pooling(runner, convert, folder, self.architecture):
            return None
        if self.is_gguf and TokenClassifier.of(self.hf_config) is not None:
            rule = "classifier_from_token needs a folder of safetensors, not a GGUF file"
            raise UnsupportedFeatureError(rule, parameter="hf_overrides")
        return pooler_spec(wishes, folder, self.architecture, self.hf_config, convert)


def _whole_model(architecture: str, config: dict[str, Any]) -> str:
    """Translate vLLM's name of a vision model's classifier to the model's own class, which has the same weights."""
    name = architecture.removesuffix(CLASSIFIERS)
    is_alias = name != architecture and {"classifier_from_token", "vision_config"} <= config.keys()
    return f"{name}ForConditionalGeneration" if is_alias else architecture


def with_modelopt(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Add the quantization of modelopt, stored in a file of its own, hf_quant_config.json."""
    if config.get("quantization_config"):
        return config
    own = read_object(folder / "hf_quant_config.json")
    if own is None:
        return config
    return {**config, "quantization_config": {"quant_method": "modelopt", **own}}


def _first(*values: Any) -> Any:
    """Return the first value other than None; 0 counts as a value."""
    return next((value for value in values if value is not None), None)


def _needed(fields: HfFields, name: str, path: Path) -> int:
    value = getattr(fields, name)
    if value is None:
        raise invalid("model", f"config.json has no {name!r}", str(path))
    return value


def _num_positions(fields: HfFields, path: Path, wanted: Any) -> int:
    """Return the number of tokens of the longest sequence.  Some encoders reserve the first rows for padding.

    Recurrent models may have no limit; then any length that the user gave is accepted.
    """
    if fields.max_position_embeddings is None and fields.model_type in (*PURE, *MIXED):
        is_open = wanted is None or str(wanted).strip().lower() in ("auto", "-1")
        given = 0 if is_open else human_int(wanted, "max_model_len")
        return min(max(OPEN_POSITIONS, given), MOST_POSITIONS)
    num_positions = max(_needed(fields, "max_position_embeddings", path), _stretched(fields))
    if fields.model_type in _OFFSET_POSITIONS:
        is_fixed = fields.model_type == "mpnet" or fields.pad_token_id is None
        num_positions -= 1 + (1 if is_fixed else fields.pad_token_id or 0)
    if num_positions < 1:
        raise invalid("model", "config.json: pad_token_id leaves no position", fields.pad_token_id)
    return num_positions


def _stretched(fields: HfFields) -> int:
    """Return the length to which YaRN or linear scaling extends the original one, like vLLM, or 0 without scaling.

    Dynamic scaling does not extend it: its frequencies depend on each sequence's length, which cached keys cannot follow.
    """
    found = fields.rope_parameters or fields.rope_scaling or {}
    rope = checked(found.get(WHOLE) or found, Rope, "config.json: rope_parameters")
    kind = rope.rope_type or rope.type
    # The positions in Gemma 3's config are already scaled.
    is_stretched = kind == "yarn" or (kind == "linear" and fields.model_type not in _STRETCHED)
    if not is_stretched or not rope.factor:
        return 0
    original = rope.original_max_position_embeddings or fields.original_max_position_embeddings
    return int(min((original or fields.max_position_embeddings or 0) * rope.factor, MOST_POSITIONS))


def code_folder(args: EngineArgs, model: ModelConfig) -> str | None:
    """Return the folder of the model's own code if it may run: a local folder, or the hub's at one full commit.

    A branch or tag is not enough, because it may point to other code tomorrow.
    """
    if not args.trust_remote_code or args.model is None or not model.source_config.get("auto_map"):
        return None
    if Path(args.model).expanduser().is_dir():
        return model.path
    if re.fullmatch(r"[0-9a-f]{40}", args.code_revision or ""):
        return str(download(args, args.model, args.code_revision, ["*.py", "config.json"]))
    return None


def tokenizer_path(args: EngineArgs, model: ModelConfig) -> str:
    """Return the tokenizer's folder or file.

    It is the option's, downloaded if necessary, or the model's own.  A model of dummy weights
    without a tokenizer borrows the demo model's.
    """
    if args.tokenizer is None:
        found = (any(Path(model.path).glob(name)) for name in ("tokenizer*", "vocab*"))
        return str(DEMO_MODEL) if args.load_format == "dummy" and not any(found) else model.path
    path = Path(args.tokenizer).expanduser()
    if path.is_dir() or (path.is_file() and is_gguf(path)):
        return str(path)
    return str(download(args, args.tokenizer, args.tokenizer_revision, parameter="tokenizer"))


def concrete_dtype(wanted: str, model: ModelConfig) -> str:
    """Return the dtype of computation.  `auto` is the stored dtype, or bfloat16 for integer weights, because their kernels need it."""
    stored = "bfloat16" if model.hf_config.get("quantization_config") else model.dtype
    name = str(stored if wanted == "auto" else wanted).removeprefix("torch.")
    if name not in DTYPES:
        raise TrouperValidationError(
            f"dtype must be auto or one of {', '.join(DTYPES)}", parameter="dtype", value=name
        )
    return DTYPES[name]


def kv_bytes_per_token(model: ModelConfig, dtype: str, num_ranks: int = 1) -> int | None:
    """Return the bytes of one token's keys and values on one rank, over all layers.

    Returns None if config.json does not determine them.  Used to estimate the context before the
    model is loaded.
    """
    config = model.hf_config
    try:
        num_heads = int(config["num_attention_heads"])
        num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
        head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // num_heads)
        num_kv_heads = -(-num_kv_heads // num_ranks)
        num_layers = num_attention_layers(config)
        return num_layers * 2 * num_kv_heads * head_dim * ITEM_BYTES[dtype]
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def lasting_share(config: Mapping[str, Any]) -> float:
    """Return the share of attention layers without a sliding window, or 1 if config.json does not list the layers with one."""
    kinds = [kind for kind in config.get("layer_types") or () if kind.endswith("_attention")]
    num_full = kinds.count("full_attention")
    if config.get("sliding_window") is None or not num_full:
        return 1.0
    return num_full / len(kinds)


# The largest size of a safetensors header in bytes; the largest known one is under 20 MiB.
MAX_HEADER = 2**27
STORED = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


class ModelFiles(msgspec.Struct, frozen=True):
    """Sizes and shapes of a model's weight files, from their headers.

    `digest` identifies the files by name, size and time of change; it is no hash of their contents,
    which would take minutes for a large model.
    """

    num_bytes: int
    num_parameters: int
    modified_s: float
    digest: str
    family: str
    level: str  # quantization level

    @property
    def parameters(self) -> str:
        """The number of parameters as a text: 135M, 8.0B."""
        for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
            if self.num_parameters >= size:
                digits = 0 if self.num_parameters >= 100 * size else 1
                return f"{self.num_parameters / size:.{digits}f}{unit}"
        return str(self.num_parameters)

    @classmethod
    def of(cls, model: ModelConfig) -> "ModelFiles":
        """Inspect the files of a model.  A geometry with dummy weights has no files and no bytes."""
        path = Path(model.path)
        files = weight_files(path)
        stats = [(file, file.stat()) for file in files]
        digest = hashlib.sha256()
        for file, stat in stats:
            digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
        header = read_gguf(path) if model.is_gguf else None
        family = model.hf_config.get("model_type")
        if header is not None:
            family = header.metadata.get("general.architecture") or family
        return cls(
            sum(stat.st_size for _, stat in stats),
            _num_parameters(files, header),
            max((stat.st_mtime for _, stat in stats), default=0.0),
            digest.hexdigest(),
            str(family or "unknown"),
            _level(model, header),
        )


def weight_files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(path.glob("*.safetensors"))
    if not path.is_file():
        return []
    for files in gguf_models(gguf_names(path.parent)).values():
        # The first file of a split model represents all of them.
        if files[0] == path.name:
            return [path.parent / file for file in files]
    return [path]


def _num_parameters(files: list[Path], header: Gguf | None) -> int:
    if header is not None:
        return sum(math.prod(tensor.shape) for tensor in header.tensors.values())
    return sum(_num_numbers(file) for file in files)


def _num_numbers(file: Path) -> int:
    """Count the numbers in a safetensors file by the shapes in its header."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = msgspec.json.decode(opened.read(min(size, MAX_HEADER)))
    return sum(math.prod(each["shape"]) for name, each in header.items() if name != "__metadata__")


def _level(model: ModelConfig, header: Gguf | None) -> str:
    if header is not None:
        types = [t.type.name for t in header.tensors.values() if len(t.shape) > 1]
        return max(set(types), key=types.count) if types else "F32"
    quantization: dict[str, Any] = model.hf_config.get("quantization_config") or {}
    method = quantization.get("quant_method")
    return str(method).upper() if method else STORED.get(model.dtype, model.dtype.upper())
