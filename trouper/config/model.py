"""A model folder as its json files describe it.  Only json files are read here; torch is never imported.

Source: spec section 2.6.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import msgspec

from trouper.config.pooler import PoolerConfig, PoolerSpec, is_pooling, pooler_spec
from trouper.config.presets import GEOMETRIES
from trouper.errors import TrouperValidationError

if TYPE_CHECKING:
    from trouper.config.args import EngineArgs

DEMO_MODEL = Path(__file__).parents[1] / "demo"
DTYPES = {
    "half": "float16", "float16": "float16", "fp16": "float16",
    "bfloat16": "bfloat16", "bf16": "bfloat16",
    "float": "float32", "float32": "float32", "fp32": "float32",
}  # fmt: skip
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Names of some encoder families for what nearly all others call so.
_OTHER_NAMES = {
    "hidden_size": ("dim", "n_embd"),
    "num_attention_heads": ("n_heads", "n_head"),
    "num_hidden_layers": ("n_layers", "n_layer"),
    "intermediate_size": ("hidden_dim", "n_inner"),
    "max_position_embeddings": ("n_positions",),
}
# Their position table begins behind the padding token's index.
_OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert", "mpnet")
_SAMPLING_DEFAULTS = (
    "repetition_penalty",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "max_new_tokens",
)


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A model folder as its json files describe it."""

    path: str  # a folder on disk, or the name of a geometry
    name: str  # what the caller asked for
    architecture: str
    hf_config: dict[str, Any]  # config.json, with a nested text_config lifted to the top
    vocab_size: int
    max_position_embeddings: int
    dtype: str  # as stored: float32, bfloat16 or float16
    eos_token_ids: tuple[int, ...]  # the first is the primary one
    default_sampling: dict[str, Any]  # from generation_config.json
    hidden_size: int = 0  # 0: the config does not say

    @classmethod
    def load(cls, args: "EngineArgs") -> Self:
        """Read the folder, the hub snapshot, the geometry or the bundled demo that `args.model` names.

        Raises:
            TrouperValidationError: no such folder or hub id, or no readable config.json in it.
        """
        path = _model_path(args)
        is_folder = path.is_dir()
        raw = (
            _read_json(path / "config.json", required=True) if is_folder else GEOMETRIES[str(path)]
        )
        config: dict[str, Any] = {**raw, **(raw.get("text_config") or {})}
        architectures: list[str] = raw.get("architectures") or config.get("architectures") or []
        config["architectures"] = architectures
        _use_common_names(config)
        generation = _generation_config(args, path)
        eos: int | list[int] | None = generation.get("eos_token_id", config.get("eos_token_id"))
        try:
            return cls(
                path=str(path),
                name=args.model or "trouper-demo",
                architecture=architectures[0],
                hf_config=config,
                vocab_size=int(config["vocab_size"]),
                hidden_size=int(config.get("hidden_size", 0)),
                max_position_embeddings=_num_positions(config),
                dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
                eos_token_ids=tuple(
                    eos if isinstance(eos, list) else [eos] if eos is not None else ()
                ),
                default_sampling=_default_sampling(generation),
            )
        except (IndexError, KeyError) as error:
            missing = error.args[0] if isinstance(error, KeyError) else "architectures"
            raise TrouperValidationError(
                f"config.json of {args.model or 'the demo model'} has no {missing!r}",
                parameter="model",
            ) from None
        except (TypeError, ValueError) as error:
            raise TrouperValidationError(
                f"config.json has a wrong value: {error}", parameter="model", value=str(path)
            ) from None

    def pooler(self, runner: str, convert: str, wishes: Any) -> PoolerSpec | None:
        """How the model pools; None when it generates."""
        folder = Path(self.path)
        wishes = PoolerConfig.of(wishes)
        if not is_pooling(runner, convert, folder, self.architecture):
            return None
        return pooler_spec(wishes, folder, self.architecture, self.hf_config, convert)


def _use_common_names(config: dict[str, Any]) -> None:
    for name, others in _OTHER_NAMES.items():
        for other in others:
            if config.get(name) is None and config.get(other) is not None:
                config[name] = config[other]


def _num_positions(config: dict[str, Any]) -> int:
    num_positions = int(config["max_position_embeddings"])
    if config.get("model_type") in _OFFSET_POSITIONS:
        num_positions -= int(config.get("pad_token_id") or 1) + 1
    return num_positions


def _model_path(args: "EngineArgs") -> Path:
    if args.model is None:
        return DEMO_MODEL
    path = Path(args.model).expanduser()
    if args.model and path.is_dir():
        return path
    is_dummy, is_geometry = args.load_format == "dummy", args.model in GEOMETRIES
    if is_dummy and is_geometry:
        return path
    if path.is_absolute() or args.model.startswith((".", "~")) or args.model.count("/") != 1:
        hint = f"; load_format='dummy' knows {', '.join(GEOMETRIES)}"
        raise TrouperValidationError(
            "no such model folder" + hint * (is_dummy or is_geometry),
            parameter="model",
            value=args.model,
        )
    return _download(args, args.model, args.revision)


def _download(args: "EngineArgs", repo_id: str, revision: str | None) -> Path:
    """Fetch a hub snapshot (huggingface_hub shows the progress bar), safetensors and json only."""
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]  # untyped dicts in it
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "artifact.metadata"]
    try:
        return Path(
            snapshot_download(
                repo_id,
                revision=revision,
                cache_dir=args.download_dir,
                token=args.hf_token,
                allow_patterns=patterns,
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise TrouperValidationError(
            f"neither a folder nor a hub model that can be fetched ({type(error).__name__})",
            parameter="model",
            value=repo_id,
        ) from error


def tokenizer_path(args: "EngineArgs", model: ModelConfig) -> str:
    """The model's own; the bundled demo's where dummy weights come without one."""
    if args.tokenizer is None:
        found = (any(Path(model.path).glob(name)) for name in ("tokenizer*", "vocab*"))
        return str(DEMO_MODEL) if args.load_format == "dummy" and not any(found) else model.path
    path = Path(args.tokenizer).expanduser()
    if path.is_dir():
        return str(path)
    return str(_download(args, args.tokenizer, args.tokenizer_revision))


def _read_json(path: Path, *, required: bool = False, parameter: str = "model") -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        if not required:
            return {}
        raise TrouperValidationError(
            f"no {path.name} in the {parameter} folder", parameter=parameter, value=str(path.parent)
        ) from None
    except (OSError, ValueError) as error:
        raise TrouperValidationError(
            f"{path.name} cannot be read: {error}", parameter=parameter, value=str(path.parent)
        ) from None
    if not isinstance(value, dict):
        raise TrouperValidationError(
            f"{path.name} is not an object", parameter=parameter, value=str(path.parent)
        )
    return cast("dict[str, Any]", value)


def _generation_config(args: "EngineArgs", path: Path) -> dict[str, Any]:
    source = args.generation_config
    own = _read_json(path / "generation_config.json")
    if source in ("trouper", "vllm"):
        own = {name: value for name, value in own.items() if name not in _SAMPLING_DEFAULTS}
    elif source != "auto":
        path = Path(source).expanduser() / "generation_config.json"
        own = _read_json(path, required=True, parameter="generation_config")
    return {**own, **(args.override_generation_config or {})}


def _default_sampling(generation: dict[str, Any]) -> dict[str, Any]:
    found = {n: generation[n] for n in _SAMPLING_DEFAULTS if generation.get(n) is not None}
    if "max_new_tokens" in found:
        found["max_tokens"] = found.pop("max_new_tokens")
    return found


def concrete_dtype(wanted: str, model: ModelConfig) -> str:
    """Of `auto`, as stored; bfloat16 beside integers, which the kernels multiply with nothing else."""
    stored = "bfloat16" if model.hf_config.get("quantization_config") else model.dtype
    name = str(stored if wanted == "auto" else wanted).removeprefix("torch.")
    if name not in DTYPES:
        raise TrouperValidationError(
            f"dtype must be auto or one of {', '.join(DTYPES)}", parameter="dtype", value=name
        )
    return DTYPES[name]


def kv_bytes_per_token(model: ModelConfig, dtype: str) -> int | None:
    """What keys and values of one token take; None when config.json does not say."""
    config = model.hf_config
    try:
        num_heads = int(config["num_attention_heads"])
        num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
        head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // num_heads)
        return int(config["num_hidden_layers"]) * 2 * num_kv_heads * head_dim * ITEM_BYTES[dtype]
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
