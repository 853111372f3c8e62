"""From wishes to a plan: `EngineArgs` (vLLM's names) -> `resolve` -> `EngineConfig` (all concrete).

Only json files are read here; torch is never imported.  Source: spec section 2.6.
"""

import argparse
import dataclasses
import difflib
import math
import operator
import os
from collections.abc import Callable
from functools import wraps
from typing import Any, Literal, Self, cast

import msgspec

from trouper.config.checks import check_engine_args, tell_what_is_idle
from trouper.config.devices import DeviceKind, choose_device
from trouper.config.model import (
    DEMO_MODEL,
    DTYPES,
    ModelConfig,
    concrete_dtype,
    kv_bytes_per_token,
    tokenizer_path,
)
from trouper.config.pooler import PoolerSpec
from trouper.config.vllm_options import NOT_IMPLEMENTED, check_not_implemented
from trouper.errors import TrouperValidationError, UnsupportedFeatureError

__all__ = [
    "DEMO_MODEL",
    "DTYPES",
    "NOT_IMPLEMENTED",
    "AsyncEngineArgs",
    "EngineArgs",
    "EngineConfig",
    "ModelConfig",
    "SchedulerConfig",
]

Quantization = Literal["int8", "int4"] | None
# a decode kernel of the CPU reads 2 x the bandwidth at 128 of what it reads at 16
DEFAULT_BLOCK_SIZES: dict[DeviceKind, int] = {"cpu": 128, "cuda": 16}
# of more the activations of a layer come from the system anew: 16 prompts of 1,024 take 1.2 times as long
CPU_STEP_TOKENS = 1024
# twelve bits a weight multiply one row 1.2 times as fast as sixteen, eight rows or more 0.85 to 0.95 times
COMPRESSED_ROWS = 8
DEFAULT_KV_CACHE_BYTES = (
    2 * 2**30
)  # CPU, when nothing else says; capped by what max_num_seqs can use
NOT_INVARIANT = (
    "batch_invariant: not on the CPU, whose attention adds up a prompt in another order when it is split "
    "(its bfloat16 products and norms do not); device='cuda' has it"
)
ALIASES = {
    "chunked_prefill_enabled": "enable_chunked_prefill",
    "cuda_graph_sizes": "cudagraph_capture_sizes",
}


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
            check_not_implemented(name, kwargs.pop(name))
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
    device: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    compress_weights: bool | None = None
    max_model_len: int | str | None = None
    seed: int = 0
    enforce_eager: bool = False
    batch_invariant: bool = False
    runner: str = "auto"
    convert: str = "auto"
    pooler_config: Any = None  # a PoolerConfig, or a dict or json text of its fields
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
    enable_prompt_embeds: bool = False

    @classmethod
    def from_cli_args(cls, options: dict[str, Any] | argparse.Namespace) -> Self:
        """From a dict, every name of which is an option; or from vLLM's kind of parser, whose other names are left."""
        if isinstance(options, argparse.Namespace):
            fields = {field.name for field in dataclasses.fields(cls)}
            known = fields | NOT_IMPLEMENTED.keys() | ALIASES.keys()
            options = {name: value for name, value in vars(options).items() if name in known}
        return cls(**options)

    def resolve(self, *, offline: bool = False) -> "EngineConfig":
        """Find the model, read its config and fill in every default.

        `offline` picks the batch limits of `LLM` instead of the server's.  May download (hub ids),
        so it is called from a thread.
        """
        check_engine_args(self)
        model = ModelConfig.load(self)
        pooler = model.pooler(self.runner, self.convert, self.pooler_config)
        device = choose_device(self.device, pools=pooler is not None)
        batch_invariant = self.batch_invariant or bool(_environ("TROUPER_BATCH_INVARIANT", 0.0))
        if device == "cpu":
            tell_what_is_idle(self)
            if batch_invariant:
                raise UnsupportedFeatureError(NOT_INVARIANT)
        if pooler is not None and self.quantization is not None:
            raise UnsupportedFeatureError("quantization: not of a model that pools")
        if self.quantization is not None and model.hf_config.get("quantization_config"):
            raise TrouperValidationError(
                "the checkpoint is quantised already",
                parameter="quantization",
                value=self.quantization,
            )
        dtype = concrete_dtype(self.dtype, model)
        block_size = self.block_size or DEFAULT_BLOCK_SIZES[device]
        kv_cache_bytes = self.kv_cache_memory_bytes
        if kv_cache_bytes is None and device == "cpu":
            kv_cache_bytes = _kv_cache_bytes()
        max_model_len = self._max_model_len(model, dtype, pooler, block_size, kv_cache_bytes)
        max_num_seqs, max_num_batched_tokens = self._batch_limits(max_model_len, offline)
        chunked = self.enable_chunked_prefill is not False
        step_tokens = self.max_num_scheduled_tokens or max_num_batched_tokens
        if device == "cpu" and pooler is None and chunked and self._is_step_open:
            step_tokens = min(step_tokens, max(CPU_STEP_TOKENS, max_num_seqs))
        return EngineConfig(
            model=model.with_lengths_below(max_model_len),
            pooler=pooler,
            tokenizer=None if self.skip_tokenizer_init else tokenizer_path(self, model),
            dtype=dtype,
            load_format=self.load_format,
            device=device,
            batch_invariant=batch_invariant,
            graphs=None if self.enforce_eager else self._graph_sizes,
            gpu_memory_utilization=self.gpu_memory_utilization,
            quantization=cast("Quantization", self.quantization),
            compress_weights=max_num_seqs < COMPRESSED_ROWS
            if self.compress_weights is None
            else self.compress_weights,
            enforce_eager=self.enforce_eager,
            seed=self.seed,
            max_model_len=max_model_len,
            max_logprobs=self.max_logprobs,
            renderer_num_workers=self.renderer_num_workers,
            block_size=block_size,
            num_blocks=self.num_gpu_blocks_override,
            kv_cache_bytes=kv_cache_bytes,
            stream_interval=self.stream_interval,
            chat_template=self.chat_template,
            enable_prompt_embeds=self.enable_prompt_embeds,
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
                max_num_scheduled_tokens=step_tokens,
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

    @property
    def _is_step_open(self) -> bool:
        """Nobody says how many tokens a step takes."""
        return self.max_num_scheduled_tokens is None and self.max_num_batched_tokens is None

    @property
    def _graph_sizes(self) -> tuple[int, ...] | None:
        sizes = self.cudagraph_capture_sizes
        if sizes is None:
            return ()
        return tuple(sorted(set(sizes))) or None

    def _max_model_len(
        self,
        model: ModelConfig,
        dtype: str,
        pooler: PoolerSpec | None,
        block_size: int,
        kv_cache_bytes: int | None,
    ) -> int:
        """None: the model's own; -1 or auto: as much of that as the KV memory holds, if its size is known."""
        wanted, longest = self.max_model_len, model.max_position_embeddings
        if wanted is None:
            return min(longest, (pooler and pooler.max_length) or longest)
        if wanted in (-1, "-1", "auto"):
            if pooler is not None:  # it keeps no KV
                return longest
            num_blocks = self.num_gpu_blocks_override
            token_bytes = kv_bytes_per_token(model, dtype)
            if num_blocks is None and token_bytes and kv_cache_bytes:
                num_blocks = kv_cache_bytes // (token_bytes * block_size)
            if num_blocks is None:
                return longest
            return max(1, min(longest, num_blocks * block_size))
        length = _human_int(wanted)
        if not 1 <= length <= longest:
            raise TrouperValidationError(
                f"max_model_len must be in [1, {longest}] for this model",
                parameter="max_model_len",
                value=wanted,
            )
        return length

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


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The resolved plan of one engine; nothing in it changes after start."""

    model: ModelConfig
    pooler: PoolerSpec | None = None  # None: it generates
    tokenizer: str | None  # a folder; None = token ids only
    dtype: str
    load_format: str
    device: DeviceKind = "cpu"
    batch_invariant: bool = False  # a request's bits do not depend on its neighbours
    graphs: tuple[int, ...] | None = None  # sizes to capture, () = the device's own; None = none
    gpu_memory_utilization: float = 0.92  # of the GPU's memory
    seed: int
    max_model_len: int
    max_logprobs: int
    renderer_num_workers: int
    block_size: int
    num_blocks: int | None  # usable blocks; None = as many as kv_cache_bytes hold
    kv_cache_bytes: int | None  # None = what gpu_memory_utilization leaves
    stream_interval: int
    chat_template: str | None
    enable_prompt_embeds: bool = False
    shutdown_timeout_s: float
    quantization: Quantization = None  # of the weights, at load
    compress_weights: bool = False  # bfloat16 in twelve bits, where the machine can
    enforce_eager: bool = False  # no recorded decode steps
    render_timeout_s: float = 30.0  # for one prompt
    log_stats: bool = False
    log_stats_interval_s: float = 10.0
    metrics_prefix: str = "trouper"
    otlp_traces_endpoint: str | None = None
    max_num_queued_reqs: int | None
    max_num_queued_tokens: int | None
    scheduler: SchedulerConfig

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        return ("generate",) if self.pooler is None else self.pooler.tasks


def _human_int(value: Any) -> int:
    """`8k`, `1M`, `4096`: lower-case suffixes are decimal, upper-case ones binary."""
    units = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
    try:
        if isinstance(value, bool):
            raise TypeError
        if not isinstance(value, str):
            return operator.index(value)
        return int(float(value[:-1]) * units[value[-1]]) if value[-1:] in units else int(value)
    except (OverflowError, TypeError, ValueError):
        raise TrouperValidationError(
            "must be a number such as 4096, 8k or 1M", parameter="max_model_len", value=value
        ) from None


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
