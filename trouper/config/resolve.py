"""Resolve the options of an engine to its plan: `resolve` returns an `EngineConfig` without open choices.

Only JSON files are read, and torch is never imported.
"""

import math
import os
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from trouper.config.adapters import LoRAConfig
from trouper.config.args import EngineArgs
from trouper.config.checkpoint.pooler import PoolerSpec
from trouper.config.checks import METHOD_ALIASES, ROUNDED, check_engine_args, log_idle_options
from trouper.config.context import (
    Context,
    Sizes,
    check_weights_fit,
    choose_context,
    default_kv_cache_bytes,
    given_length,
    weight_bytes,
)
from trouper.config.devices import (
    DeviceKind,
    DeviceWorker,
    check_num_devices,
    choose_device,
    choose_device_worker,
)
from trouper.config.generation import (
    Frontend,
    Marks,
    StructuredOutputsConfig,
    reasoning_marks,
    structured_outputs_config,
)
from trouper.config.media import NO_IMAGES, MediaConfig, media_config
from trouper.config.memory import available_bytes
from trouper.config.model import (
    ModelConfig,
    code_folder,
    concrete_dtype,
    kv_bytes_per_token,
    tokenizer_path,
)
from trouper.config.parallel import (
    PARTITION,
    CpuBind,
    NodesConfig,
    max_steps_in_flight,
    nodes_config,
    read_cpu_bind,
    read_partition,
    split_layers,
)
from trouper.config.speculation import SpeculativeConfig, draft_model, speculative_config
from trouper.errors import TrouperValidationError, UnsupportedFeatureError, invalid

Quantization = Literal["int8", "int4"] | None
# At a block size of 128 a decode kernel of the CPU reads at twice the bandwidth of 16.
DEFAULT_BLOCK_SIZES: dict[DeviceKind, int] = {"cpu": 128, "cuda": 16}
# Beyond this size the system provides new memory for each layer's activations: 16 prompts of 1,024 tokens take 1.2 times as
# long.
CPU_STEP_TOKENS = 1024
# Weights in twelve bits multiply one row 1.2 times as fast as in sixteen, and eight or more rows 0.85 to 0.95 times as fast.
COMPRESSED_ROWS = 8
# The number of loaded adapters.  On the CPU a slot uses memory only when it is first loaded; on a GPU all memory is allocated
# at start.
ADAPTER_SLOTS: dict[DeviceKind, int] = {
    "cpu": 32,
    "cuda": 8,
}
UNCHANGED = (
    "load_format", "model_impl", "gpu_memory_utilization", "enforce_eager", "seed", "max_logprobs", "renderer_num_workers",
    "stream_interval", "chat_template", "enable_prompt_embeds", "otlp_traces_endpoint",
)  # fmt: skip
SEVERAL_WORKERS = "pipeline_parallel_size", "tensor_parallel_size", "data_parallel_size"
ON_GPUS = ("tensor_parallel_size",)
NOT_INVARIANT = (
    "batch_invariant: not on the CPU, whose attention adds up a prompt in another order when it is split "
    "(its bfloat16 products and norms do not); device='cuda' has it"
)


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the plan that the scheduling policy uses.

    The policy is pure, so these limits and the requests determine every decision.  The defaults
    serve tests of the policy only.
    """

    max_model_len: int = 8192
    max_num_seqs: int = 128
    max_num_active_seqs: int = 128
    max_num_scheduled_tokens: int = 2048  # token budget of one step
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0  # 0 is off
    long_prefill_token_threshold_adaptive: bool = False
    policy: Literal["priority", "fcfs"] = "priority"
    reserve_full_isl: bool = True
    # The share of all blocks that must remain free when a request is admitted.
    watermark: float = 0.0
    enable_prefix_caching: bool = True
    max_steps_in_flight: int = 1
    # The longest duration of a step; None learns it, and 0 allows any duration, in the order of arrival.
    max_step_ms: int | None = 0
    num_stages: int = 1  # of the pipeline
    # The number of adapters among the running sequences; None allows any number.
    max_loras: int | None = None
    # The number of drafts of one sequence that a step may verify.
    num_speculative_tokens: int = 0
    seed: int = 0


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The resolved plan of one engine.

    Nothing in it changes after start. `resolve` creates it from `EngineArgs`; afterwards no part of
    the engine reads an option or a default again.  It can be sent to other processes.
    """

    model: ModelConfig
    pooler: PoolerSpec | None = None  # None for generation
    tokenizer: str | None  # a folder, or None for token ids only
    dtype: str
    load_format: str
    # The folder of Python code that may run, if any.
    code_path: str | None = None
    model_impl: str = "auto"  # trouper, transformers; auto prefers trouper
    device: DeviceKind = "cpu"
    device_worker: DeviceWorker = "inline"
    # The number of restarts within the window, for losses that no request explains.
    max_worker_restarts: int = 3
    worker_restart_window_s: float = 300.0
    # None learns the limit from earlier steps.
    step_timeout_s: float | None = None
    tensor_parallel_size: int = 1  # ranks of each layer
    # The number of replicas of the model, each with its own device.
    data_parallel_size: int = 1
    # None if all workers are on this machine.
    nodes: NodesConfig | None = None
    # The number of workers of a machine other than the coordinator's.
    num_workers_here: int | None = None
    layer_partition: tuple[int, ...] | None = None  # layers by stage, or None for equal cost
    # The processors of each worker, or None for those of this process.
    cpu_bind: CpuBind | None = None
    # Whether a request's bits must not depend on its batch.
    batch_invariant: bool = False
    # The sizes to capture; () uses the device's own, and None captures none.
    graphs: tuple[int, ...] | None = None
    gpu_memory_utilization: float = 0.92  # of the GPU's memory
    seed: int
    max_model_len: int
    # The user gave no max_model_len, so it is reduced to what the KV cache holds once that is known.
    is_length_open: bool = False
    max_logprobs: int
    renderer_num_workers: int
    block_size: int
    # Usable blocks, or None for as many as fit in kv_cache_bytes.
    num_blocks: int | None
    # None for the memory that gpu_memory_utilization leaves.
    kv_cache_bytes: int | None
    stream_interval: int
    chat_template: str | None
    structured_outputs: StructuredOutputsConfig = StructuredOutputsConfig()
    reasoning: Marks | None = None  # if an option names them
    enable_prompt_embeds: bool = False
    # None for a model that takes no images, with the reason.
    media: MediaConfig | None = None
    no_media: str = NO_IMAGES
    shutdown_timeout_s: float
    quantization: Quantization = None  # of weights, at load
    # Whether to store bfloat16 in twelve bits if the machine supports it.
    compress_weights: bool = False
    enforce_eager: bool = False  # disables recorded decode steps
    render_timeout_s: float = 30.0  # for one prompt
    log_stats: bool = False
    log_stats_interval_s: float = 10.0
    metrics_prefix: str = "trouper"
    # The names of --served-model-name; empty means the model's own name.
    served_names: tuple[str, ...] = ()
    profiler_config: dict[str, Any] | None = None
    otlp_traces_endpoint: str | None = None
    max_num_queued_reqs: int | None
    max_num_queued_tokens: int | None
    lora: LoRAConfig | None = None  # None refuses adapters
    speculation: SpeculativeConfig | None = None
    draft_model: ModelConfig | None = None  # for drafts
    scheduler: SchedulerConfig

    @property
    def shown_name(self) -> str:
        """The model's name in metrics and traces, where a path would only describe this machine."""
        if self.served_names:
            return self.served_names[0]
        name = self.model.name
        return Path(name).absolute().name if Path(name).exists() else name

    def profile_folder(self) -> str:
        """Return the folder for the profiler's traces.

        Raises:
            TrouperValidationError: `profiler_config` names no folder.
        """
        settings = self.profiler_config or {}
        if "torch_profiler_dir" not in settings:
            rule = "needs a folder in torch_profiler_dir"
            raise invalid("profiler_config", rule, self.profiler_config)
        return str(settings["torch_profiler_dir"])

    @property
    def num_stages(self) -> int:
        """The number of processes that share the layers."""
        return self.scheduler.num_stages

    @property
    def num_workers(self) -> int:
        """The number of processes on a machine that compute at once and share its cores."""
        if self.num_workers_here is not None:
            return self.num_workers_here
        num_nodes = 1 if self.nodes is None else self.nodes.num_nodes
        return self.workers_per_replica * self.data_parallel_size // num_nodes

    @property
    def workers_per_replica(self) -> int:
        """The number of processes of one replica: the ranks of each stage."""
        return self.num_stages * self.tensor_parallel_size

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        return ("generate",) if self.pooler is None else self.pooler.tasks


def resolve(
    args: EngineArgs, *, offline: bool = False, frontend: Frontend = "library"
) -> EngineConfig:
    """Find the model, read its config and resolve every option.

    It may download a model (hub ids), so it must be called from a thread.

    Args:
        offline: whether to use the batch limits of `LLM` instead of the server's.
        frontend: the interface in use: only a server starts a process by default, and sampling defaults differ.

    Raises:
        TrouperValidationError: a value is out of range, or does not suit the model; the message names it.
        UnsupportedFeatureError: an option or a model that this build does not support.
    """
    check_engine_args(args)
    model = ModelConfig.load(args, frontend)
    pooler = model.pooler(args.runner, args.convert, args.pooler_config)
    device = choose_device(args.device, pools=pooler is not None)
    batch_invariant = args.batch_invariant or bool(_environ("TROUPER_BATCH_INVARIANT", 0.0))
    if device == "cpu":
        log_idle_options(args)
        if batch_invariant:
            raise UnsupportedFeatureError(NOT_INVARIANT, parameter="batch_invariant")
    quantization = _rounding(args, model, pooler)
    sizes = [_check_workers(args, name, device, pooler) for name in SEVERAL_WORKERS]
    partition = _layer_partition(args, model)
    if device == "cuda" and args.tensor_parallel_size > 1:
        check_num_devices("tensor_parallel_size", args.tensor_parallel_size)
    nodes = nodes_config(args, device)
    dtype = concrete_dtype(args.dtype, model)
    block_size = args.block_size or DEFAULT_BLOCK_SIZES[device]
    speculation = speculative_config(args.speculative_config, device, pools=pooler is not None)
    draft = draft_model(args, model, speculation)
    num_nodes = 1 if nodes is None else nodes.num_nodes
    context_sizes = Sizes(
        longest=model.max_position_embeddings,
        block_size=block_size,
        token_bytes=_token_bytes(args, model, draft, dtype),
        weight_bytes=weight_bytes(args, model, dtype) * args.data_parallel_size // num_nodes,
        num_workers=max(1, math.prod(sizes) // num_nodes),
    )
    context = _context(args, context_sizes, device, pooler)
    max_model_len = context.max_model_len
    scheduler = _scheduler_config(args, max_model_len, device, pooler, offline)
    if speculation is not None:
        scheduler = _with_drafts(args, scheduler, speculation)
    compresses = args.compress_weights
    if compresses is None:
        compresses = scheduler.max_num_seqs < COMPRESSED_ROWS
    device_worker = choose_device_worker(
        "process" if max(sizes) > 1 or nodes is not None else args.device_worker,
        can_be_chosen=frontend == "server" and device == "cpu" and pooler is None,
    )
    media, no_media = media_config(args, model, device, pools=pooler is not None)
    return EngineConfig(
        model=model.with_lengths_below(max_model_len),
        pooler=pooler,
        tokenizer=None if args.skip_tokenizer_init else tokenizer_path(args, model),
        code_path=code_folder(args, model),
        dtype=dtype,
        device=device,
        device_worker=device_worker,
        cpu_bind=read_cpu_bind(math.prod(sizes), is_inline=device_worker == "inline"),
        tensor_parallel_size=args.tensor_parallel_size,
        data_parallel_size=args.data_parallel_size,
        nodes=nodes,
        layer_partition=partition,
        max_worker_restarts=args.max_worker_restarts,
        worker_restart_window_s=args.worker_restart_window,
        step_timeout_s=args.step_timeout,
        batch_invariant=batch_invariant,
        graphs=None if args.enforce_eager else _graph_sizes(args),
        quantization=quantization,
        compress_weights=compresses,
        max_model_len=max_model_len,
        is_length_open=context.is_open,
        block_size=block_size,
        num_blocks=args.num_gpu_blocks_override,
        kv_cache_bytes=context.kv_cache_bytes,
        shutdown_timeout_s=args.shutdown_timeout,
        render_timeout_s=_environ("TROUPER_CHAT_TEMPLATE_RENDER_TIMEOUT", 30.0),
        served_names=_served_names(args),
        profiler_config=args.profiler_config,
        log_stats=not args.disable_log_stats,
        log_stats_interval_s=_environ("TROUPER_LOG_STATS_INTERVAL", 10.0),
        # The caller of an offline engine waits for its requests, so it needs no limits.
        max_num_queued_reqs=None if offline else args.max_num_queued_reqs,
        max_num_queued_tokens=None if offline else args.max_num_queued_tokens,
        lora=_lora_config(args, dtype, device, pooler),
        media=media,
        no_media=no_media,
        speculation=speculation,
        draft_model=draft,
        structured_outputs=structured_outputs_config(args.structured_outputs_config),
        reasoning=reasoning_marks(args.reasoning_config),
        scheduler=scheduler,
        **{name: getattr(args, name) for name in UNCHANGED},
    )


def _served_names(args: EngineArgs) -> tuple[str, ...]:
    """Return the model's names for clients; empty means the engine's own name."""
    names = args.served_model_name or ()
    return (names,) if isinstance(names, str) else tuple(names)


def _token_bytes(
    args: EngineArgs, model: ModelConfig, draft: ModelConfig | None, dtype: str
) -> int | None:
    """Return the bytes that one worker keeps of a token, with the layers distributed evenly over the stages."""
    whole = kv_bytes_per_token(model, dtype, args.tensor_parallel_size)
    if whole is None:
        return None
    whole += (draft and kv_bytes_per_token(draft, dtype)) or 0
    return -(-whole // args.pipeline_parallel_size)


def _context(
    args: EngineArgs, sizes: Sizes, device: DeviceKind, pooler: PoolerSpec | None
) -> Context:
    """Choose the context length and the memory of the KV cache; a pooling model has no cache."""
    kv_cache_bytes = cast("int | None", args.kv_cache_memory_bytes)  # a text is already parsed
    if kv_cache_bytes is None and device == "cpu":
        kv_cache_bytes = int(_environ("TROUPER_CPU_KVCACHE_SPACE", 0.0) * 2**30) or None
    measures = kv_cache_bytes is None and device == "cpu"
    if measures:
        check_weights_fit(args, sizes.weight_bytes, available_bytes(with_swap=True))
    if pooler is not None:
        length = given_length(args.max_model_len, sizes.longest)
        default = min(sizes.longest, pooler.max_length or sizes.longest)
        return Context(default if length is None else length, kv_cache_bytes, length is None)
    if measures:
        kv_cache_bytes = default_kv_cache_bytes(args, sizes, available_bytes())
    return choose_context(args, sizes, kv_cache_bytes)


def _scheduler_config(
    args: EngineArgs,
    max_model_len: int,
    device: DeviceKind,
    pooler: PoolerSpec | None,
    offline: bool,
) -> SchedulerConfig:
    max_num_seqs, max_num_batched_tokens = _batch_limits(args, max_model_len, offline)
    chunked = args.enable_chunked_prefill is not False
    step_tokens = args.max_num_scheduled_tokens or max_num_batched_tokens
    is_open = args.max_num_scheduled_tokens is None and args.max_num_batched_tokens is None
    if device == "cpu" and pooler is None and chunked and is_open:
        step_tokens = min(step_tokens, max(CPU_STEP_TOKENS, max_num_seqs))
    return SchedulerConfig(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_active_seqs=args.max_num_active_seqs or max_num_seqs,
        max_num_scheduled_tokens=step_tokens,
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=args.long_prefill_token_threshold,
        long_prefill_token_threshold_adaptive=args.long_prefill_token_threshold_adaptive,
        policy="fcfs" if args.scheduling_policy == "fcfs" else "priority",
        reserve_full_isl=args.scheduler_reserve_full_isl,
        watermark=args.watermark,
        enable_prefix_caching=args.enable_prefix_caching is not False,
        max_steps_in_flight=max_steps_in_flight(
            args.pipeline_parallel_size, plans_ahead=args.async_scheduling is not False
        ),
        max_step_ms=args.max_step_ms,
        num_stages=args.pipeline_parallel_size,
        max_loras=args.max_loras if args.enable_lora else None,
        seed=args.seed,
    )


def _lora_config(
    args: EngineArgs, dtype: str, device: DeviceKind, pooler: PoolerSpec | None
) -> LoRAConfig | None:
    if not args.enable_lora:
        return None
    if pooler is not None:
        raise UnsupportedFeatureError(
            "enable_lora: not for a model that pools yet", parameter="enable_lora"
        )
    if args.lora_dtype not in ("auto", dtype):
        raise invalid("lora_dtype", f"must be auto or the model's own, {dtype}", args.lora_dtype)
    num_slots = args.max_cpu_loras or max(args.max_loras, ADAPTER_SLOTS[device])
    if num_slots < args.max_loras:
        raise invalid("max_cpu_loras", f"must be at least max_loras, {args.max_loras}", num_slots)
    targets = args.lora_target_modules
    return LoRAConfig(
        max_loras=args.max_loras,
        max_rank=args.max_lora_rank,
        num_slots=num_slots,
        target_modules=None if targets is None else tuple(targets),
    )


def _with_drafts(
    args: EngineArgs, scheduler: SchedulerConfig, speculation: SpeculativeConfig
) -> SchedulerConfig:
    for name in ("pipeline_parallel_size", "tensor_parallel_size"):
        if (size := getattr(args, name)) > 1:
            raise UnsupportedFeatureError(
                f"speculative_config: not with {name}={size}", parameter="speculative_config"
            )
    return msgspec.structs.replace(
        scheduler,
        num_speculative_tokens=speculation.num_speculative_tokens,
    )


def _rounding(args: EngineArgs, model: ModelConfig, pooler: PoolerSpec | None) -> Quantization:
    """Return the format to which the weights are rounded at load.  The checkpoint's own method rounds nothing."""
    wanted = args.quantization
    if wanted is None:
        return None
    if pooler is not None:
        raise UnsupportedFeatureError(
            "quantization: not of a model that pools", parameter="quantization"
        )
    scheme: dict[str, Any] = model.hf_config.get("quantization_config") or {}
    own: Any = scheme.get("quant_method")
    if wanted in ROUNDED:
        if scheme:
            raise invalid("quantization", "the checkpoint is quantised already", wanted)
        return cast("Quantization", wanted)
    if METHOD_ALIASES.get(wanted, wanted) != METHOD_ALIASES.get(own, own):
        rule = (
            f"the checkpoint's weights are plain; {' or '.join(ROUNDED)} rounds them"
            if own is None
            else f"the checkpoint's own is {own}, which needs no option"
        )
        raise invalid("quantization", rule, wanted)
    return None


def _check_workers(
    args: EngineArgs, name: str, device: DeviceKind, pooler: PoolerSpec | None
) -> int:
    """Return the value of an option that distributes a model over worker processes, after checking that this is possible."""
    number = getattr(args, name)
    if number == 1:
        return number
    missing = (
        "not of a model that pools" if pooler is not None and name != "data_parallel_size"
        else "not on a GPU yet; device='cpu' has it" if device == "cuda" and name not in ON_GPUS
        else "not on this system, which has no memory files" if not hasattr(os, "memfd_create")
        else None
    )  # fmt: skip
    if missing is not None:
        raise UnsupportedFeatureError(f"{name}={number}: {missing}", parameter=name)
    if args.device_worker == "inline":
        rule = f"must be auto or process where {name} is {number}"
        raise invalid("device_worker", rule, args.device_worker)
    return number


def _layer_partition(args: EngineArgs, model: ModelConfig) -> tuple[int, ...] | None:
    """Check that the model can be cut into the stages.  Returns the partition from the environment, if it has one."""
    num_stages = args.pipeline_parallel_size
    if num_stages == 1:
        return None
    text = os.environ.get(PARTITION)
    partition = None if text is None else read_partition(text)
    num_layers = model.hf_config.get("num_hidden_layers")
    if isinstance(num_layers, int):
        split_layers([1.0] * num_layers, num_stages, partition=partition)
    return partition


def _graph_sizes(args: EngineArgs) -> tuple[int, ...] | None:
    sizes = args.cudagraph_capture_sizes
    if sizes is None:
        return ()
    return tuple(sorted(set(sizes))) or None


def _batch_limits(args: EngineArgs, max_model_len: int, offline: bool) -> tuple[int, int]:
    """Choose `max_num_seqs` and `max_num_batched_tokens`.  A missing value is chosen to match the given one."""
    num_tokens = args.max_num_batched_tokens
    num_seqs = args.max_num_seqs or min(256 if offline else 128, num_tokens or 256)
    chunked = args.enable_chunked_prefill is not False
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
    if args.max_num_active_seqs is not None and args.max_num_active_seqs > num_seqs:
        raise TrouperValidationError(
            f"max_num_active_seqs ({args.max_num_active_seqs}) must be at most "
            f"max_num_seqs ({num_seqs})",
            parameter="max_num_active_seqs",
        )
    return num_seqs, num_tokens


def _environ(name: str, default: float) -> float:
    """Read a number ≥ 0 from an environment variable."""
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
