"""Options of an engine under vLLM's names, as a caller gives them; `resolve.py` makes a plan of them."""

import argparse
import dataclasses
import difflib
import json
from collections.abc import Callable
from functools import wraps
from types import NoneType
from typing import Any, Self, get_args, get_origin

from trouper.config.vllm_options import NOT_IMPLEMENTED, check_not_implemented
from trouper.errors import TrouperValidationError

ALIASES = {
    "chunked_prefill_enabled": "enable_chunked_prefill",
    "cuda_graph_sizes": "cudagraph_capture_sizes",
}


def _checked_names(cls: type[Any]) -> Any:
    """Let the constructor accept both spellings of an option, and name the nearest ones for an unknown name."""
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
    """The options of an engine in vLLM's words.  `None` and `"auto"` leave the choice to the engine.

    Values are checked when the engine starts.

    Raises:
        TrouperValidationError: an option of that name does not exist; the nearest known ones are named.
        UnsupportedFeatureError: an option of vLLM that trouper does not implement, off its default.
    """

    model: str | None = None
    served_model_name: str | list[str] | None = None
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    revision: str | None = None
    code_revision: str | None = None
    tokenizer_revision: str | None = None
    hf_token: str | bool | None = None
    download_dir: str | None = None
    load_format: str = "auto"
    model_impl: str = "auto"
    hf_overrides: dict[str, Any] | None = None
    device: str = "auto"
    device_worker: str = "auto"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    distributed_executor_backend: str | None = None
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 29501
    max_worker_restarts: int = 3
    worker_restart_window: float = 300.0
    step_timeout: float | None = None
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
    kv_cache_memory_bytes: int | str | None = None
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
    max_step_ms: int | None = 0
    async_scheduling: bool | None = None
    speculative_config: dict[str, Any] | None = None
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
    structured_outputs_config: dict[str, Any] | None = None
    reasoning_config: dict[str, Any] | None = None
    enable_prompt_embeds: bool = False
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    lora_dtype: str = "auto"
    lora_target_modules: list[str] | None = None

    @classmethod
    def from_cli_args(cls, options: dict[str, Any] | argparse.Namespace) -> Self:
        """Make them from a dict, or from the namespace of a parser such as vLLM's.

        Every name in a dict must be an option; other names in a namespace are left alone.
        """
        if isinstance(options, argparse.Namespace):
            fields = {field.name for field in dataclasses.fields(cls)}
            known = fields | NOT_IMPLEMENTED.keys() | ALIASES.keys()
            options = {name: value for name, value in vars(options).items() if name in known}
        return cls(**options)

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Give a parser one option for each field, whose values `from_cli_args` reads."""
        for field in dataclasses.fields(cls):
            parser.add_argument(f"--{field.name.replace('_', '-')}", **_parser_settings(field))
        return parser


def _parser_settings(field: "dataclasses.Field[Any]") -> dict[str, Any]:
    """Return the keywords of `add_argument` for one option: lists take several values, dicts JSON."""
    wished: Any = field.type
    kinds = set(get_args(wished)) - {NoneType} if get_args(wished) else {wished}
    settings: dict[str, Any] = {"default": field.default}
    if kinds == {bool}:
        return {**settings, "action": argparse.BooleanOptionalAction}
    lists = [kind for kind in kinds if get_origin(kind) is list]
    if lists:
        return {**settings, "nargs": "+", "type": get_args(lists[0])[0]}
    if Any in kinds or any(get_origin(kind) is dict for kind in kinds):
        return {**settings, "type": json.loads, "metavar": "JSON"}
    return {**settings, "type": str if str in kinds else next(iter(kinds))}


class AsyncEngineArgs(EngineArgs):
    """`EngineArgs` under the name that vLLM's async programs import."""
