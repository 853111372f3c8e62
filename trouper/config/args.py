"""The options of an engine under vLLM's names, as the user gives them.  `resolve.py` turns them into a plan without open choices.

vLLM's options without an implementation here are accepted with their default value and refused with any other.
`--pooler-config.task embed` means `--pooler-config '{"task": "embed"}'`.  `FlexibleArgumentParser` serves programs that accept an
engine's options next to their own.
"""

import argparse
import dataclasses
import difflib
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from types import NoneType
from typing import Any, Self, cast, get_args, get_origin

from trouper.errors import TrouperValidationError, UnsupportedFeatureError

ALIASES = {
    "chunked_prefill_enabled": "enable_chunked_prefill",
    "cuda_graph_sizes": "cudagraph_capture_sizes",
}


def _checked_names(cls: type[Any]) -> Any:
    """Let the constructor accept both spellings of an option, and suggest similar names for an unknown one."""
    plain_init: Callable[..., None] = cls.__init__

    @wraps(plain_init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        fields = {field.name for field in dataclasses.fields(cls)}
        for alias, name in ALIASES.items():
            if alias in kwargs:
                value = kwargs.pop(alias)
                if kwargs.setdefault(name, value) != value:
                    raise TrouperValidationError(
                        f"{alias} and {name} are the same option; give only one of them",
                        parameter=name,
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
    """The options of an engine under vLLM's names.  `None` and `"auto"` leave the choice to the engine.

    Values are checked when the engine starts.

    Raises:
        TrouperValidationError: an option with that name does not exist; the message suggests similar names.
        UnsupportedFeatureError: an option of vLLM that trouper does not implement has another value than its default.
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
    pooler_config: Any = None  # a PoolerConfig, or a dict or JSON text of its fields
    max_logprobs: int = 20
    generation_config: str = "auto"
    override_generation_config: dict[str, Any] | None = None
    renderer_num_workers: int = 1
    block_size: int | None = None
    enable_prefix_caching: bool | None = None
    prefix_caching_hash_algo: str = "sha256"
    kv_tier_dir: str | None = None
    kv_tier_size: int | str | None = None
    kv_tier_min_free: float | None = None
    kv_tier_write_rate: int | str | None = None
    kv_transfer_config: dict[str, Any] | None = None
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
    limit_mm_per_prompt: dict[str, Any] | None = None
    language_model_only: bool = False
    mm_processor_kwargs: dict[str, Any] | None = None
    mm_processor_cache_gb: float = 4
    encoder_cache_gb: float = 0.25
    encode_ms: int = 30
    media_processor: str = "process"
    allowed_media_domains: list[str] | None = None
    allowed_local_media_path: str = ""
    allow_http_media: bool = False
    allow_private_media_hosts: bool = False
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    lora_dtype: str = "auto"
    lora_target_modules: list[str] | None = None

    @classmethod
    def from_cli_args(cls, options: dict[str, Any] | argparse.Namespace) -> Self:
        """Create the options from a dict, or from the namespace of a parser such as vLLM's.

        Every key of a dict must be an option; other names in a namespace are ignored.
        """
        if isinstance(options, argparse.Namespace):
            fields = {field.name for field in dataclasses.fields(cls)}
            known = fields | NOT_IMPLEMENTED.keys() | ALIASES.keys()
            options = {name: value for name, value in vars(options).items() if name in known}
        return cls(**options)

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add one option for each field to a parser, with dashes in place of underscores.

        Options not on the command line keep the field's default.  `from_cli_args` creates the
        arguments from the parsed values.
        """
        for field in dataclasses.fields(cls):
            parser.add_argument(f"--{field.name.replace('_', '-')}", **_parser_settings(field))
        return parser


def _parser_settings(field: "dataclasses.Field[Any]") -> dict[str, Any]:
    """Return the keywords of `add_argument` for one option: lists take several values, dicts take JSON."""
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
    """`EngineArgs` under the name that programs for vLLM's async engine import.

    Both classes accept the same options, because every engine of trouper is asynchronous inside.
    """


logger = logging.getLogger("trouper")
_ACCEPTED_AT: tuple[tuple[Any, str], ...] = (
    (None, """
        logits_processors
        max_cudagraph_capture_size compilation_config attention_backend
        default_mm_loras custom_histogram_buckets
        kv_events_config sleep_preserve_parameter_names sleep_mode_backend
        hf_config_path safetensors_load_strategy ir_op_priority distributed_timeout_seconds
        cpu_distributed_timeout_seconds numa_bind_nodes numa_bind_cpus device_ids dcp_comm_backend
        dcp_q_replicate cp_kv_cache_interleave_size data_parallel_rank data_parallel_start_rank
        data_parallel_size_local data_parallel_address data_parallel_rpc_port
        enable_batch_sharded_sampling elastic_ep_max_dp_size disable_nccl_for_dp_synchronization
        eplb_config max_parallel_loading_workers disable_cascade_attn cpu_offload_params
        offload_params model_class_overrides quantization_config media_io_kwargs
        mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
        mm_encoder_fp8_scale_save_path io_processor_plugin video_pruning_rate
        max_lora_cls_labels model_loader_extra_config disable_hybrid_kv_cache_manager
        aux_output_config reasoning_parser_plugin spec_method spec_model spec_tokens
        watermark_config diffusion_config show_hidden_metrics_for_version collect_detailed_traces
        scheduler_cls attention_config engram_config mamba_config kernel_config
        enable_flashinfer_autotune logging_config log_level log_config_file
        ec_transfer_config ec_manager_config kv_cache_dtype_skip_layers
        mamba_block_size prefix_match_unit mamba_ssu_algorithm additional_config
        fault_tolerance_config kv_offloading_size weight_transfer_config gdn_prefill_backend
        kda_prefill_backend kda_decode_backend
    """),
    ("auto", """
        kv_cache_dtype config_format tokenizer_mode moe_backend linear_backend
        sparse_indexer_topk_backend offload_backend mm_processor_device worker_cls
        mamba_cache_dtype mamba_ssm_cache_dtype
    """),
    ("", """
        model_weights reasoning_parser worker_extension_cls
    """),
    (1, """
        prefill_schedule_interval
        max_num_partial_prefills max_long_partial_prefills max_concurrent_prefills
        prefill_context_parallel_size decode_context_parallel_size
        dcp_kv_cache_interleave_size _api_process_count offload_num_in_group offload_prefetch_step
    """),
    (0, """
        cpu_offload_gb ubatch_size _api_process_rank prefix_cache_retention_interval
        offload_group_size mm_ipc_gpu_memory_gb mamba_cache_philox_rounds
    """),
    (False, """
        kv_cache_metrics disable_chunked_mm_input
        enable_return_routed_experts return_sampling_mask numa_bind data_parallel_hybrid_lb
        data_parallel_external_lb data_parallel_multi_port_external_lb enable_hc_sp
        enable_expert_parallel enable_ep_weight_filter enable_elastic_ep enable_dbo enable_eplb
        disable_sliding_window use_fp64_gumbel enable_trace_replay aggregate_engine_logging
        allow_deprecated_quantization disable_custom_all_reduce enable_shm_tensor_arena
        enable_mm_embeds interleave_mm_strings mm_encoder_only skip_mm_profiling
        fully_sharded_loras enable_tower_connector_lora specialize_active_lora
        enable_mixed_moe_lora_format enable_moe_shared_loras ray_workers_use_nsight
        cudagraph_metrics enable_layerwise_nvtx_tracing enable_mfu_metrics
        enable_logging_iteration_details jit_monitor_verbose enable_mm_processor_stats
        sleep_mode_offload_cudagraph enable_cumem_allocator enable_nccl_comm_suspend
        enable_mamba_shared_prefix_checkpoint use_replayssm enable_mamba_cache_stochastic_rounding
        kv_sharing_fast_prefill enable_fault_tolerance tokens_only fail_on_environ_validation
        enable_log_requests
    """),
    (16, """
        dp_sync_interval replayssm_buffer_len
    """),
    ("raw_logprobs", "logprobs_mode"),
    (8, "safetensors_prefetch_num_threads"),
    (2**24, "safetensors_prefetch_block_size"),
    ("mp", "data_parallel_backend"),
    ("allgather_reducescatter", "all2all_backend"),
    (32, "dbo_decode_token_threshold"),
    (512, "dbo_prefill_token_threshold"),
    ("linear", "expert_placement_strategy"),
    ("lru", "mm_processor_cache_type"),
    ("blake3", "mm_hasher_algorithm"),
    (128, "mm_shm_cache_max_object_size_mb"),
    ("weights", "mm_encoder_tp_mode"),
    (1.5, "mm_encoder_fp8_scale_save_margin"),
    ("evs", "video_pruning_method"),
    ("direct_rpc", "mm_tensor_ipc"),
    (True, """
        mm_device_do_normalize use_tqdm_on_load swa_bounded_replay
    """),
    (["original/**/*"], "ignore_patterns"),
    ("none", """
        per_request_spec_decode_metrics mamba_cache_mode
    """),
    (0.01, "kv_cache_metrics_sample"),
    ("warn", "jit_monitor_mode"),
    ("triton", "mamba_backend"),
    ("cpu", "pt_load_map_location"),
    (2, "optimization_level"),
    ("balanced", "performance_mode"),
    ("native", "kv_offloading_backend"),
)  # fmt: skip
NOT_NEEDED = dict.fromkeys(
    ("max_num_partial_prefills", "max_long_partial_prefills", "max_concurrent_prefills"),
    "not needed: steps are shared by time, as docs/latency.md says",
)
NOT_IMPLEMENTED: dict[str, Any] = {
    name: value for value, names in _ACCEPTED_AT for name in names.split()
}


# Options that choose between implementations with the same answers, or show metrics of older versions.  trouper has one
# implementation for each device, and hides no metrics.
_EQUIVALENT = """
    attention_backend mm_encoder_attn_backend moe_backend linear_backend sparse_indexer_topk_backend
    all2all_backend mm_hasher_algorithm dcp_comm_backend mamba_backend mamba_ssu_algorithm gdn_prefill_backend kda_prefill_backend
    kda_decode_backend compilation_config optimization_level performance_mode max_cudagraph_capture_size
    ir_op_priority enable_flashinfer_autotune disable_custom_all_reduce disable_cascade_attn
    disable_nccl_for_dp_synchronization safetensors_load_strategy safetensors_prefetch_num_threads
    safetensors_prefetch_block_size max_parallel_loading_workers use_tqdm_on_load jit_monitor_mode
    jit_monitor_verbose pt_load_map_location mm_device_do_normalize show_hidden_metrics_for_version
"""
EQUIVALENT = frozenset(_EQUIVALENT.split())
# Values accepted in addition to the default, because the engine always behaves like this: recurrent states are float32, and
# are saved at block boundaries.
ALREADY_SO = {"mamba_cache_mode": "align", "mamba_ssm_cache_dtype": "float32"}


def check_not_implemented(name: str, value: Any) -> None:
    """Check the value of an option that trouper does not implement.

    Options that choose between equivalent implementations are logged only, because the answers do not change.

    Raises:
        UnsupportedFeatureError: the value would change the answers.
    """
    default = NOT_IMPLEMENTED[name]
    value = getattr(value, "value", value)  # a member of one of vLLM's enumerations
    is_off = default is None and value in (False, "")
    is_default = value is None or value == default or is_off or value in ({}, [], set())
    is_default = is_default or value == ALREADY_SO.get(name, default)
    if not is_default and name in EQUIVALENT:
        logger.warning("%s=%r has no effect: it does not change the answers", name, value)
    elif not is_default:
        if name in NOT_NEEDED:
            raise UnsupportedFeatureError(f"{name}={value!r} is {NOT_NEEDED[name]}", parameter=name)
        same = f" or {ALREADY_SO[name]!r}, which has the same effect" if name in ALREADY_SO else ""
        raise UnsupportedFeatureError(
            f"{name}={value!r} is not supported yet; leave it at {default!r}{same}",
            parameter=name,
        )


def join_dotted(arguments: Iterable[str]) -> list[str]:
    """Replace dotted options by one JSON option each.  Other arguments keep their order.

    Raises:
        TrouperValidationError: an option has no value, or a key has both a value and nested keys.
    """
    kept: list[str] = []
    values: list[str] = []  # after a `--`
    found: dict[str, dict[str, Any]] = {}
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        option, *keys = name.split(".")
        if argument == "--":
            values = [argument, *rest]
        elif not keys or not option.startswith("--") or not all(keys):
            kept.append(argument)
        else:
            given = value if equals else next(rest, None)
            if given is None:
                raise TrouperValidationError("needs a value", parameter=name)
            _put(found.setdefault(option, {}), keys, _as_json(given), name)
    joined = [text for option, fields in found.items() for text in (option, json.dumps(fields))]
    return [*kept, *joined, *values]


def _put(fields: dict[str, Any], keys: list[str], value: Any, name: str) -> None:
    *path, last = keys
    for key in path:
        inner = fields.setdefault(key, {})
        if not isinstance(inner, dict):
            raise TrouperValidationError("a key has a value and keys of its own", parameter=name)
        fields = cast("dict[str, Any]", inner)
    if isinstance(fields.get(last), dict):
        raise TrouperValidationError("a key has a value and keys of its own", parameter=name)
    fields[last] = value


def _as_json(text: str) -> Any:
    """Parse a value as JSON, or return it as a text if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


class FlexibleArgumentParser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` that accepts `--max_model_len` for `--max-model-len`, and dots for nested JSON.

    `--pooler-config.task embed` means `--pooler-config '{"task": "embed"}'`.
    """

    def parse_known_args(  # type: ignore[override]  # the overloads of argparse
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        import sys

        given = sys.argv[1:] if args is None else args
        return super().parse_known_args(join_dotted(map(_with_dashes, given)), namespace)


def _with_dashes(argument: str) -> str:
    """Replace underscores in the name of an option by dashes.  Its value, and keys after a dot, do not change."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    head, dot, keys = name.partition(".")
    return f"{head.replace('_', '-')}{dot}{keys}{equals}{value}"
