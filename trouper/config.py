"""From wishes to a plan: `EngineArgs` (vLLM's names) -> `resolve` -> `EngineConfig` (all concrete).

Only json files are read here; torch is never imported.  Source: spec section 2.6.
"""

import dataclasses
import difflib
import json
import math
import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Literal, Self, cast

import msgspec

from trouper.errors import TrouperValidationError, UnsupportedFeatureError

DEMO_MODEL = Path(__file__).parent / "demo"
DTYPES = {
    "half": "float16", "float16": "float16", "fp16": "float16",
    "bfloat16": "bfloat16", "bf16": "bfloat16",
    "float": "float32", "float32": "float32", "fp32": "float32",
}  # fmt: skip
DEFAULT_BLOCK_SIZE = 16
DEFAULT_BLOCK_SIZE_CPU = (
    128  # a decode kernel reads 2 x the bandwidth at 128 of what it reads at 16
)
DEFAULT_KV_CACHE_BYTES = (
    2 * 2**30
)  # CPU, when nothing else says; capped by what max_num_seqs can use
ALIASES = {
    "chunked_prefill_enabled": "enable_chunked_prefill",
    "cuda_graph_sizes": "cudagraph_capture_sizes",
}
# vLLM's names that are accepted at this value only; anything else is an UnsupportedFeatureError.
NOT_IMPLEMENTED: dict[str, Any] = {
    "quantization": None, "hf_overrides": None, "logits_processors": None, "runner": "auto",
    "convert": "auto", "pooler_config": None, "allowed_local_media_path": "",
    "allowed_media_domains": None, "mm_processor_kwargs": None, "limit_mm_per_prompt": None,
    "mm_processor_cache_gb": 4, "kv_cache_dtype": "auto", "prefill_schedule_interval": 1,
    "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1,
    "distributed_executor_backend": None, "max_cudagraph_capture_size": None, "cpu_offload_gb": 0,
    "compilation_config": None, "attention_backend": None, "enable_lora": False, "max_loras": 1,
    "max_lora_rank": 16, "max_cpu_loras": None, "default_mm_loras": None,
    "structured_outputs_config": None, "speculative_config": None,
    "kv_cache_metrics": False, "custom_histogram_buckets": None, "kv_events_config": None,
    "config_format": "auto", "code_revision": None, "logprobs_mode": "raw_logprobs",
    "enable_prompt_embeds": False, "disable_chunked_mm_input": False, "tokenizer_mode": "auto",
    "sleep_preserve_parameter_names": None, "sleep_mode_backend": None,
}  # fmt: skip

ALSO_ACCEPTED = {"runner": "generate", "convert": "none"}  # said aloud, what trouper does anyway


def _checked_names(cls: type[Any]) -> Any:
    """Let the constructor accept both spellings and answer an unknown name with the nearest known."""
    plain_init: Callable[..., None] = cls.__init__

    @wraps(plain_init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        fields = {field.name for field in dataclasses.fields(cls)}
        for alias, name in ALIASES.items():
            if alias in kwargs:
                value = kwargs.pop(alias)
                if kwargs.setdefault(name, value) != value:
                    raise TrouperValidationError(
                        f"{alias} and {name} are one option and got two values", parameter=name
                    )
        for name in sorted(kwargs.keys() - fields):
            if name not in NOT_IMPLEMENTED:
                known = [*fields, *NOT_IMPLEMENTED, *ALIASES]
                near = difflib.get_close_matches(name, known, n=3)
                hint = f"; did you mean {', '.join(near)}?" if near else ""
                raise TrouperValidationError(f"unknown option {name!r}{hint}", parameter=name)
            value = kwargs.pop(name)
            is_default = value == NOT_IMPLEMENTED[name] or value in (None, {}, [])
            if not is_default and value != ALSO_ACCEPTED.get(name):
                raise UnsupportedFeatureError(
                    f"{name}={value!r} is not supported yet; leave it at {NOT_IMPLEMENTED[name]!r}"
                )
        plain_init(self, *args, **kwargs)

    cls.__init__ = __init__
    return cls


@_checked_names
@dataclasses.dataclass
class EngineArgs:
    """What the caller wishes, in vLLM's words.  `None` and `"auto"` mean "choose for me".

    Raises:
        TrouperValidationError: a name that does not exist (the nearest known ones are named), or a
            value that cannot be.
        UnsupportedFeatureError: a vLLM option that trouper does not implement, off its default.
    """

    model: str | None = None
    served_model_name: str | list[str] | None = None
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    revision: str | None = None
    tokenizer_revision: str | None = None
    hf_token: str | bool | None = None
    download_dir: str | None = None
    load_format: str = "auto"
    dtype: str = "auto"
    max_model_len: int | str | None = None
    seed: int = 0
    enforce_eager: bool = False
    max_logprobs: int = 20
    generation_config: str = "auto"
    override_generation_config: dict[str, Any] | None = None
    renderer_num_workers: int = 1
    block_size: int | None = None
    enable_prefix_caching: bool | None = None
    prefix_caching_hash_algo: str = "sha256"
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    max_num_scheduled_tokens: int | None = None
    max_num_active_seqs: int | None = None
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    enable_chunked_prefill: bool | None = None
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    scheduling_policy: str = "priority"
    async_scheduling: bool | None = None
    stream_interval: int = 1
    scheduler_reserve_full_isl: bool = True
    watermark: float = 0.0
    cudagraph_capture_sizes: list[int] | None = None
    enable_sleep_mode: bool = False
    shutdown_timeout: float = 0
    disable_log_stats: bool = False
    otlp_traces_endpoint: str | None = None
    profiler_config: dict[str, Any] | None = None
    chat_template: str | None = None

    @classmethod
    def from_cli_args(cls, options: dict[str, Any]) -> Self:
        return cls(**options)

    def resolve(self, *, offline: bool = False) -> "EngineConfig":
        """Find the model, read its config and fill in every default.

        `offline` picks the batch limits of `LLM` instead of the server's.  May download (hub ids),
        so it is called from a thread.
        """
        self._check_ranges()
        model = ModelConfig.load(self)
        max_model_len = _max_model_len(self.max_model_len, model)
        max_num_seqs, max_num_batched_tokens = self._batch_limits(max_model_len, offline)
        chunked = self.enable_chunked_prefill is not False
        return EngineConfig(
            model=model,
            tokenizer=None if self.skip_tokenizer_init else _tokenizer_path(self, model),
            dtype=_dtype(self.dtype, model),
            load_format=self.load_format,
            seed=self.seed,
            max_model_len=max_model_len,
            max_logprobs=self.max_logprobs,
            renderer_num_workers=self.renderer_num_workers,
            block_size=self.block_size or DEFAULT_BLOCK_SIZE_CPU,
            num_blocks=self.num_gpu_blocks_override,
            kv_cache_bytes=self.kv_cache_memory_bytes or _kv_cache_bytes(),
            stream_interval=self.stream_interval,
            chat_template=self.chat_template,
            shutdown_timeout_s=self.shutdown_timeout,
            render_timeout_s=_environ("TROUPER_CHAT_TEMPLATE_RENDER_TIMEOUT", 30.0),
            log_stats=not self.disable_log_stats,
            otlp_traces_endpoint=self.otlp_traces_endpoint,
            log_stats_interval_s=_environ("TROUPER_LOG_STATS_INTERVAL", 10.0),
            # Who adds requests to an offline engine waits for them, too: it needs no door.
            max_num_queued_reqs=None if offline else self.max_num_queued_reqs,
            max_num_queued_tokens=None if offline else self.max_num_queued_tokens,
            scheduler=SchedulerConfig(
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                max_num_active_seqs=self.max_num_active_seqs or max_num_seqs,
                max_num_scheduled_tokens=self.max_num_scheduled_tokens or max_num_batched_tokens,
                enable_chunked_prefill=chunked,
                long_prefill_token_threshold=self.long_prefill_token_threshold,
                long_prefill_token_threshold_adaptive=self.long_prefill_token_threshold_adaptive,
                policy="fcfs" if self.scheduling_policy == "fcfs" else "priority",
                reserve_full_isl=self.scheduler_reserve_full_isl,
                watermark=self.watermark,
                enable_prefix_caching=self.enable_prefix_caching is not False,
                max_steps_in_flight=1 if self.async_scheduling is False else 2,
                seed=self.seed,
            ),
        )

    def _check_ranges(self) -> None:
        """What needs no model."""
        for name, low in _AT_LEAST.items():
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TrouperValidationError("must be a number", parameter=name, value=value)
            if not value >= low:
                raise TrouperValidationError(f"must be at least {low}", parameter=name, value=value)
            if name != "shutdown_timeout" and not isinstance(value, int):
                raise TrouperValidationError("must be an integer", parameter=name, value=value)
        for name, choices in _ONE_OF.items():
            if getattr(self, name) not in choices:
                raise TrouperValidationError(
                    f"{name} must be {' or '.join(choices)}",
                    parameter=name,
                    value=getattr(self, name),
                )
        if not 0 <= self.watermark < 1:
            raise TrouperValidationError(
                "watermark must be in [0, 1)", parameter="watermark", value=self.watermark
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise TrouperValidationError(
                "gpu_memory_utilization must be in (0, 1]",
                parameter="gpu_memory_utilization",
                value=self.gpu_memory_utilization,
            )

    def _batch_limits(self, max_model_len: int, offline: bool) -> tuple[int, int]:
        """`max_num_seqs` and `max_num_batched_tokens`; what is left out fits what is given."""
        num_tokens = self.max_num_batched_tokens
        num_seqs = self.max_num_seqs or min(256 if offline else 128, num_tokens or 256)
        chunked = self.enable_chunked_prefill is not False
        if num_tokens is None:
            num_tokens = max(4096 if offline else 2048, num_seqs, 0 if chunked else max_model_len)
        if num_tokens < num_seqs:
            raise TrouperValidationError(
                f"max_num_batched_tokens ({num_tokens}) must be at least max_num_seqs ({num_seqs})",
                parameter="max_num_batched_tokens",
            )
        if not chunked and num_tokens < max_model_len:
            raise TrouperValidationError(
                f"without chunked prefill max_num_batched_tokens ({num_tokens}) must be "
                f"at least max_model_len ({max_model_len})",
                parameter="max_num_batched_tokens",
            )
        if self.max_num_active_seqs is not None and self.max_num_active_seqs > num_seqs:
            raise TrouperValidationError(
                f"max_num_active_seqs ({self.max_num_active_seqs}) must be at most "
                f"max_num_seqs ({num_seqs})",
                parameter="max_num_active_seqs",
            )
        return num_seqs, num_tokens


class AsyncEngineArgs(EngineArgs):
    """`EngineArgs` under the name that vLLM's async programs import."""


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that the pure policy needs to know; spec sections 5 and 6.

    The defaults are those of "config object used directly (unit tests)", spec section 2.6.
    """

    max_model_len: int = 8192
    max_num_seqs: int = 128
    max_num_active_seqs: int = 128
    max_num_scheduled_tokens: int = 2048  # token budget of one step
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0  # 0 = off
    long_prefill_token_threshold_adaptive: bool = False
    policy: Literal["priority", "fcfs"] = "priority"
    reserve_full_isl: bool = True
    watermark: float = 0.0  # share of all blocks that must stay free when a request is admitted
    enable_prefix_caching: bool = True
    max_steps_in_flight: int = 1
    seed: int = 0


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A model folder as its json files describe it."""

    path: str  # a folder on disk
    name: str  # what the caller asked for
    architecture: str
    hf_config: dict[str, Any]  # config.json, with a nested text_config lifted to the top
    vocab_size: int
    max_position_embeddings: int
    dtype: str  # as stored: float32, bfloat16 or float16
    eos_token_ids: tuple[int, ...]  # the first is the primary one
    default_sampling: dict[str, Any]  # from generation_config.json

    @classmethod
    def load(cls, args: EngineArgs) -> Self:
        """Read the folder, the hub snapshot or the bundled demo that `args.model` names.

        Raises:
            TrouperValidationError: no such folder or hub id, or no readable config.json in it.
        """
        path = _model_path(args)
        raw = _read_json(path / "config.json", required=True)
        config: dict[str, Any] = {**raw, **(raw.get("text_config") or {})}
        architectures: list[str] = raw.get("architectures") or config.get("architectures") or []
        config["architectures"] = architectures
        generation = _generation_config(args, path)
        eos: int | list[int] | None = generation.get("eos_token_id", config.get("eos_token_id"))
        try:
            return cls(
                path=str(path),
                name=args.model or "trouper-demo",
                architecture=architectures[0],
                hf_config=config,
                vocab_size=int(config["vocab_size"]),
                max_position_embeddings=int(config["max_position_embeddings"]),
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


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The resolved plan of one engine; nothing in it changes after start."""

    model: ModelConfig
    tokenizer: str | None  # a folder; None = token ids only
    dtype: str
    load_format: str
    seed: int
    max_model_len: int
    max_logprobs: int
    renderer_num_workers: int
    block_size: int
    num_blocks: int | None  # usable blocks; None = as many as kv_cache_bytes hold
    kv_cache_bytes: int
    stream_interval: int
    chat_template: str | None
    shutdown_timeout_s: float
    render_timeout_s: float = 30.0  # for one prompt
    log_stats: bool = False
    log_stats_interval_s: float = 10.0
    metrics_prefix: str = "trouper"
    otlp_traces_endpoint: str | None = None
    max_num_queued_reqs: int | None
    max_num_queued_tokens: int | None
    scheduler: SchedulerConfig


_AT_LEAST = {
    "max_num_seqs": 1, "max_num_batched_tokens": 1, "max_num_scheduled_tokens": 1,
    "max_num_active_seqs": 1, "block_size": 1, "renderer_num_workers": 1, "stream_interval": 1,
    "num_gpu_blocks_override": 1, "kv_cache_memory_bytes": 1, "max_num_queued_reqs": 0,
    "max_num_queued_tokens": 0, "long_prefill_token_threshold": 0, "max_logprobs": -1,
    "shutdown_timeout": 0,
}  # fmt: skip
_ONE_OF = {
    "scheduling_policy": ("priority", "fcfs"),
    "prefix_caching_hash_algo": ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor"),
}
_SAMPLING_DEFAULTS = (
    "repetition_penalty",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "max_new_tokens",
)


def _model_path(args: EngineArgs) -> Path:
    if args.model is None:
        return DEMO_MODEL
    path = Path(args.model).expanduser()
    if args.model and path.is_dir():
        return path
    if path.is_absolute() or args.model.startswith((".", "~")) or args.model.count("/") != 1:
        raise TrouperValidationError("no such model folder", parameter="model", value=args.model)
    return _download(args, args.model, args.revision)


def _download(args: EngineArgs, repo_id: str, revision: str | None) -> Path:
    """Fetch a hub snapshot (huggingface_hub shows the progress bar), safetensors and json only."""
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]  # untyped dicts in it
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
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


def _tokenizer_path(args: EngineArgs, model: ModelConfig) -> str:
    if args.tokenizer is None:
        return model.path
    path = Path(args.tokenizer).expanduser()
    if path.is_dir():
        return str(path)
    return str(_download(args, args.tokenizer, args.tokenizer_revision))


def _read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        if not required:
            return {}
        raise TrouperValidationError(
            f"no {path.name} in the model folder", parameter="model", value=str(path.parent)
        ) from None
    except (OSError, ValueError) as error:
        raise TrouperValidationError(
            f"{path.name} cannot be read: {error}", parameter="model", value=str(path.parent)
        ) from None
    if not isinstance(value, dict):
        raise TrouperValidationError(
            f"{path.name} is not an object", parameter="model", value=str(path.parent)
        )
    return cast("dict[str, Any]", value)


def _generation_config(args: EngineArgs, path: Path) -> dict[str, Any]:
    source = args.generation_config
    own = _read_json(path / "generation_config.json")
    if source in ("trouper", "vllm"):
        own = {name: value for name, value in own.items() if name not in _SAMPLING_DEFAULTS}
    elif source != "auto":
        own = _read_json(Path(source) / "generation_config.json", required=True)
    return {**own, **(args.override_generation_config or {})}


def _default_sampling(generation: dict[str, Any]) -> dict[str, Any]:
    found = {n: generation[n] for n in _SAMPLING_DEFAULTS if generation.get(n) is not None}
    if "max_new_tokens" in found:
        found["max_tokens"] = found.pop("max_new_tokens")
    return found


def _max_model_len(wanted: int | str | None, model: ModelConfig) -> int:
    longest = model.max_position_embeddings
    if wanted is None or wanted in (-1, "-1", "auto"):
        return longest
    length = _human_int(wanted)
    if not 1 <= length <= longest:
        raise TrouperValidationError(
            f"max_model_len must be in [1, {longest}] for this model",
            parameter="max_model_len",
            value=wanted,
        )
    return length


def _human_int(value: int | str) -> int:
    """`8k`, `1M`, `4096`: lower-case suffixes are decimal, upper-case ones binary."""
    units = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
    if isinstance(value, int):
        return value
    try:
        return int(float(value[:-1]) * units[value[-1]]) if value[-1:] in units else int(value)
    except (OverflowError, TypeError, ValueError):
        raise TrouperValidationError(
            "must be a number such as 4096, 8k or 1M", parameter="max_model_len", value=value
        ) from None


def _dtype(wanted: str, model: ModelConfig) -> str:
    name = str(model.dtype if wanted == "auto" else wanted).removeprefix("torch.")
    if name not in DTYPES:
        raise TrouperValidationError(
            f"dtype must be auto or one of {', '.join(DTYPES)}", parameter="dtype", value=name
        )
    return DTYPES[name]


def _kv_cache_bytes() -> int:
    """`TROUPER_CPU_KVCACHE_SPACE` is in GiB; 0 or unset means the default."""
    return int(_environ("TROUPER_CPU_KVCACHE_SPACE", 0.0) * 2**30) or DEFAULT_KV_CACHE_BYTES


def _environ(name: str, default: float) -> float:
    """A number ≥ 0 from the environment.  The only place that reads it."""
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise TrouperValidationError("must be a number ≥ 0", parameter=name, value=text)
    return value
