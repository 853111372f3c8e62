"""The resolved plan of an engine, `EngineConfig`, with the limits of its scheduling policy, `SchedulerConfig`.  Pure.

`resolve` creates the plan from the options.  The actors read only the plan, so each default that depends on the model or the machine
is chosen in one place.  `get_model_config` and `vllm_config` show the plan under vLLM's names, for scripts that read vLLM's.
"""

from pathlib import Path
from typing import Any, Literal

import msgspec

from trouper.config.adapters import LoRAConfig
from trouper.config.args import EngineArgs
from trouper.config.checkpoint.pooler import PoolerSpec
from trouper.config.devices import DeviceKind, DeviceWorker
from trouper.config.generation import Marks, StructuredOutputsConfig
from trouper.config.media import NO_IMAGES, MediaConfig
from trouper.config.model import ModelConfig
from trouper.config.parallel import CpuBind, NodesConfig, max_steps_in_flight
from trouper.config.speculation import SpeculativeConfig
from trouper.config.tier import TierConfig
from trouper.errors import TrouperValidationError, UnsupportedFeatureError, invalid

# In larger steps the allocator requests new memory from the system for the activations of each layer, and 16 prompts of 1,024
# tokens take 1.2 times as long.
CPU_STEP_TOKENS = 1024


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the plan that the scheduling policy uses.

    The policy is pure, so these limits and the requests determine every decision.  The defaults
    are for tests of the policy only.
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
    # Target of a step's duration in milliseconds; None learns it, and 0 sets no limit and computes prompts in order of arrival.
    max_step_ms: int | None = 0
    num_stages: int = 1  # of the pipeline
    # The maximum number of different adapters among the running sequences; None sets no limit.
    max_loras: int | None = None
    # The maximum number of draft tokens of one sequence that a step verifies.
    num_speculative_tokens: int = 0
    # Seconds of a step that images may take while streams run; 0 encodes each image in one step.
    encode_s: float = 0.0
    seed: int = 0


def scheduler_config(
    args: EngineArgs,
    max_model_len: int,
    device: DeviceKind,
    pooler: PoolerSpec | None,
    offline: bool,
) -> SchedulerConfig:
    """Choose the limits of the scheduling policy.

    Args:
        offline: whether to use the batch limits of `LLM` instead of the server's.

    Raises:
        TrouperValidationError: two limits contradict each other.
    """
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
        encode_s=min(args.encode_ms, args.max_step_ms or args.encode_ms) / 1000,
        num_stages=args.pipeline_parallel_size,
        max_loras=args.max_loras if args.enable_lora else None,
        seed=args.seed,
    )


def with_drafts(
    args: EngineArgs, scheduler: SchedulerConfig, speculation: SpeculativeConfig
) -> SchedulerConfig:
    """Add the drafts of speculative decoding to the limits.  Raises UnsupportedFeatureError if workers share the model."""
    for name in ("pipeline_parallel_size", "tensor_parallel_size"):
        if (size := getattr(args, name)) > 1:
            raise UnsupportedFeatureError(
                f"speculative_config cannot be combined with {name}={size}",
                parameter="speculative_config",
            )
    return msgspec.structs.replace(
        scheduler,
        num_speculative_tokens=speculation.num_speculative_tokens,
    )


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


Quantization = Literal["int8", "int4"] | None


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
    # The folder of the model's own Python code, if it may run.
    code_path: str | None = None
    model_impl: str = "auto"  # trouper, transformers; auto prefers trouper
    device: DeviceKind = "cpu"
    device_worker: DeviceWorker = "inline"
    # The number of restarts within the window, for worker deaths that no request explains.
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
    # Whether results must be bit-identical in any batch.
    batch_invariant: bool = False
    # The sizes to capture; () uses the device's own, and None captures none.
    graphs: tuple[int, ...] | None = None
    gpu_memory_utilization: float = 0.92  # of the GPU's memory
    seed: int
    max_model_len: int
    # The user set no max_model_len, so it is reduced to what the KV cache holds, once that is known.
    is_length_open: bool = False
    # The user set no max_num_seqs, so it is reduced to the number of recurrent states that fit.
    is_num_seqs_open: bool = False
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
    # The marks of `reasoning_config`, or None to detect them from the chat template.
    reasoning: Marks | None = None
    enable_prompt_embeds: bool = False
    # None if requests with media are refused; `no_media` is the reason.
    media: MediaConfig | None = None
    no_media: str = NO_IMAGES
    shutdown_timeout_s: float
    quantization: Quantization = None  # of weights, at load
    # Whether to store bfloat16 weights in 12 bits if the machine supports it.
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
    tier: TierConfig | None = None  # of KV blocks on disk
    scheduler: SchedulerConfig

    @property
    def shown_name(self) -> str:
        """The model's name in metrics and traces.  It contains no path, because paths depend on the machine."""
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
        """The number of worker processes on a machine, which compute at the same time and share its cores."""
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


class FieldsOfConfig(dict[str, Any]):
    """The fields of config.json, as keys and as attributes.

    Scripts for vLLM read `hf_config` as a transformers object, with attributes; trouper does not
    import transformers for it.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"config.json has no field {name!r}") from None


class ModelView:
    """The facts about an engine's model under vLLM's names.  Other attributes are read from trouper's `ModelConfig`."""

    def __init__(self, config: EngineConfig) -> None:
        self._model = config.model
        self.model = config.model.name
        names = config.served_names or (config.model.name,)
        self.served_model_name = names[0] if len(names) == 1 else list(names)
        self.tokenizer = config.tokenizer
        self.skip_tokenizer_init = config.tokenizer is None
        self.dtype = config.dtype
        self.seed = config.seed
        self.max_model_len = config.max_model_len
        self.max_logprobs = config.max_logprobs
        self.quantization = config.quantization
        self.enforce_eager = config.enforce_eager
        self.runner_type = "generate" if config.pooler is None else "pooling"
        self.hf_config = FieldsOfConfig(config.model.source_config)
        self.hf_text_config = FieldsOfConfig(config.model.hf_config)

    def __getattr__(self, name: str) -> Any:
        # `copy` and `pickle` ask for private attributes before the model is set.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._model, name)

    def get_vocab_size(self) -> int:
        return self._model.vocab_size

    def get_hidden_size(self) -> int:
        return self._model.hidden_size

    def get_total_num_attention_heads(self) -> int:
        return int(self.hf_text_config.get("num_attention_heads") or 0)

    def get_total_num_kv_heads(self) -> int:
        found = self.hf_text_config.get("num_key_value_heads")
        return int(found or self.get_total_num_attention_heads())

    def get_total_num_hidden_layers(self) -> int:
        return int(self.hf_text_config.get("num_hidden_layers") or 0)

    def get_head_size(self) -> int:
        heads = self.get_total_num_attention_heads() or 1
        return int(self.hf_text_config.get("head_dim") or self.get_hidden_size() // heads)

    def get_diff_sampling_param(self) -> dict[str, Any]:
        """Return the sampling defaults that differ from those of `SamplingParams`."""
        return dict(self._model.default_sampling)


class ConfigView:
    """A part of the configuration under vLLM's names.  The error for an unknown name lists the existing ones."""

    def __init__(self, kind: str, **fields: Any) -> None:
        self.__dict__.update(fields)
        self._kind = kind

    def __repr__(self) -> str:
        fields = {name: value for name, value in vars(self).items() if name != "_kind"}
        return f"{self.__dict__.get('_kind')}({', '.join(f'{n}={v!r}' for n, v in fields.items())})"

    def __getattr__(self, name: str) -> Any:
        kind = self.__dict__.get("_kind")
        known = ", ".join(each for each in vars(self) if each != "_kind")
        raise AttributeError(
            f"{kind} has no {name!r}: it has {known}. The engine's `config` has the whole resolved configuration"
        )


def vllm_config(config: EngineConfig) -> ConfigView:
    """Return the parts that scripts for vLLM read, from the resolved configuration.

    Names are vLLM's, such as `cache_config.block_size`.  A name without a counterpart raises
    AttributeError with a hint.
    """
    scheduler = config.scheduler
    num_workers = config.tensor_parallel_size * scheduler.num_stages
    return ConfigView(
        "VllmConfig",
        model_config=ModelView(config),
        cache_config=ConfigView(
            "CacheConfig",
            block_size=config.block_size,
            enable_prefix_caching=scheduler.enable_prefix_caching,
            gpu_memory_utilization=config.gpu_memory_utilization,
        ),
        parallel_config=ConfigView(
            "ParallelConfig",
            tensor_parallel_size=config.tensor_parallel_size,
            pipeline_parallel_size=scheduler.num_stages,
            data_parallel_size=config.data_parallel_size,
            world_size=num_workers,
        ),
        scheduler_config=ConfigView(
            "SchedulerConfig",
            max_model_len=config.max_model_len,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_scheduled_tokens,
            enable_chunked_prefill=scheduler.enable_chunked_prefill,
            policy=scheduler.policy,
        ),
        device_config=ConfigView("DeviceConfig", device_type=config.device),
    )
