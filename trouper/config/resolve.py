"""Resolve the options of an engine to its plan: `resolve` returns an `EngineConfig` without open choices.

Only JSON files are read, and torch is never imported.
"""

import math
from typing import Any, cast

from trouper.config.adapters import lora_config
from trouper.config.args import EngineArgs
from trouper.config.checkpoint.pooler import PoolerSpec
from trouper.config.checkpoint.recurrent import check_states, keeps_state
from trouper.config.checks import (
    METHOD_ALIASES,
    ROUNDED,
    check_engine_args,
    environ_number,
    log_idle_options,
)
from trouper.config.context import (
    Sizes,
    find_context,
    weight_bytes,
)
from trouper.config.devices import (
    DeviceKind,
    check_num_devices,
    choose_device,
    choose_device_worker,
)
from trouper.config.engine_config import EngineConfig, Quantization, scheduler_config, with_drafts
from trouper.config.generation import (
    Frontend,
    reasoning_marks,
    structured_outputs_config,
)
from trouper.config.media import media_config
from trouper.config.model import (
    ModelConfig,
    code_folder,
    concrete_dtype,
    kv_bytes_per_token,
    lasting_share,
    tokenizer_path,
)
from trouper.config.parallel import (
    SEVERAL_WORKERS,
    check_workers,
    layer_partition,
    nodes_config,
    read_cpu_bind,
)
from trouper.config.speculation import draft_model, speculative_config
from trouper.config.tier import tier_config
from trouper.errors import UnsupportedFeatureError, invalid

# The CPU's decode kernel reads blocks of 128 tokens at twice the bandwidth of blocks of 16.
DEFAULT_BLOCK_SIZES: dict[DeviceKind, int] = {"cpu": 128, "cuda": 16}
# Recurrent states are saved at block boundaries only, so small blocks are needed to reuse most of a prefix of a few hundred tokens.
RECURRENT_BLOCK_SIZE = 32
# 12-bit weights make products with one row 1.2 times as fast as 16-bit weights, but with eight or more rows 0.85 to 0.95 times.
COMPRESSED_ROWS = 8
UNCHANGED = (
    "load_format", "model_impl", "gpu_memory_utilization", "enforce_eager", "seed", "max_logprobs", "renderer_num_workers",
    "stream_interval", "chat_template", "enable_prompt_embeds", "otlp_traces_endpoint",
)  # fmt: skip
NOT_INVARIANT = (
    "batch_invariant is not supported on the CPU, where attention sums a prompt in another order if the prompt is split "
    "over several steps; use device='cuda'"
)


def resolve(
    args: EngineArgs, *, offline: bool = False, frontend: Frontend = "library"
) -> EngineConfig:
    """Find the model, read its config and resolve every option.

    This reads files and may download a model, so async programs must call it in a worker thread.

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
    batch_invariant = args.batch_invariant or bool(environ_number("TROUPER_BATCH_INVARIANT", 0.0))
    if device == "cpu":
        log_idle_options(args)
        if batch_invariant:
            raise UnsupportedFeatureError(NOT_INVARIANT, parameter="batch_invariant")
    quantization = _rounding(args, model, pooler)
    sizes = [check_workers(args, name, device, pooler) for name in SEVERAL_WORKERS]
    partition = layer_partition(args, model)
    if device == "cuda" and args.tensor_parallel_size > 1:
        check_num_devices("tensor_parallel_size", args.tensor_parallel_size)
    nodes = nodes_config(args, device)
    dtype = concrete_dtype(args.dtype, model)
    default = RECURRENT_BLOCK_SIZE if keeps_state(model.hf_config) else DEFAULT_BLOCK_SIZES[device]
    block_size = args.block_size or default
    speculation = speculative_config(args.speculative_config, device, pools=pooler is not None)
    draft = draft_model(args, model, speculation)
    check_states(model.hf_config, _unsupported_with_states(args, device, pooler))
    num_nodes = 1 if nodes is None else nodes.num_nodes
    context_sizes = Sizes(
        longest=model.max_position_embeddings,
        block_size=block_size,
        token_bytes=_token_bytes(args, model, draft, dtype),
        lasting_share=lasting_share(model.hf_config) if device == "cpu" else 1.0,
        weight_bytes=weight_bytes(args, model, dtype) * args.data_parallel_size // num_nodes,
        num_workers=max(1, math.prod(sizes) // num_nodes),
    )
    context = find_context(args, context_sizes, device, pooler)
    max_model_len = context.max_model_len
    scheduler = scheduler_config(args, max_model_len, device, pooler, offline)
    if speculation is not None:
        scheduler = with_drafts(args, scheduler, speculation)
    compresses = args.compress_weights
    if compresses is None:
        compresses = scheduler.max_num_seqs < COMPRESSED_ROWS
    device_worker = choose_device_worker(
        "process" if max(sizes) > 1 or nodes is not None else args.device_worker,
        can_be_chosen=frontend == "server" and device == "cpu" and pooler is None,
    )
    media, no_media = media_config(args, model, device)
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
        is_num_seqs_open=args.max_num_seqs is None,
        block_size=block_size,
        num_blocks=args.num_gpu_blocks_override,
        kv_cache_bytes=context.kv_cache_bytes,
        shutdown_timeout_s=args.shutdown_timeout,
        render_timeout_s=environ_number("TROUPER_CHAT_TEMPLATE_RENDER_TIMEOUT", 30.0),
        served_names=_served_names(args),
        profiler_config=args.profiler_config,
        log_stats=not args.disable_log_stats,
        log_stats_interval_s=environ_number("TROUPER_LOG_STATS_INTERVAL", 10.0),
        # The caller of an offline engine waits for its requests, so it needs no limits.
        max_num_queued_reqs=None if offline else args.max_num_queued_reqs,
        max_num_queued_tokens=None if offline else args.max_num_queued_tokens,
        lora=lora_config(args, dtype, device, pooler),
        media=media,
        no_media=no_media,
        speculation=speculation,
        draft_model=draft,
        structured_outputs=structured_outputs_config(args.structured_outputs_config),
        reasoning=reasoning_marks(args.reasoning_config),
        tier=tier_config(args, device, generates=pooler is None),
        scheduler=scheduler,
        **{name: getattr(args, name) for name in UNCHANGED},
    )


def _served_names(args: EngineArgs) -> tuple[str, ...]:
    """Return the model's names for clients; empty means the engine's own name."""
    names = args.served_model_name or ()
    return (names,) if isinstance(names, str) else tuple(names)


def _unsupported_with_states(
    args: EngineArgs, device: DeviceKind, pooler: PoolerSpec | None
) -> dict[str, Any]:
    """Return the options in use, by name, that the engine lacks for models with recurrent states."""
    num_ranks = args.tensor_parallel_size
    return {
        "tensor_parallel_size": num_ranks if num_ranks > 1 else 0,
        "device": device if device != "cpu" else "",
        "runner": "pooling" if pooler is not None else "",
    }


def _token_bytes(
    args: EngineArgs, model: ModelConfig, draft: ModelConfig | None, dtype: str
) -> int | None:
    """Return the bytes of a token's keys and values in one worker, with the layers distributed evenly over the stages."""
    whole = kv_bytes_per_token(model, dtype, args.tensor_parallel_size)
    if whole is None:
        return None
    whole += (draft and kv_bytes_per_token(draft, dtype)) or 0
    return -(-whole // args.pipeline_parallel_size)


def _rounding(args: EngineArgs, model: ModelConfig, pooler: PoolerSpec | None) -> Quantization:
    """Return the format to which the weights are rounded at load.  The checkpoint's own method rounds nothing."""
    wanted = args.quantization
    if wanted is None:
        return None
    if pooler is not None:
        raise UnsupportedFeatureError(
            "quantization is not supported for pooling models", parameter="quantization"
        )
    scheme: dict[str, Any] = model.hf_config.get("quantization_config") or {}
    own: Any = scheme.get("quant_method")
    if wanted in ROUNDED:
        if scheme:
            raise invalid("quantization", "the checkpoint is already quantized", wanted)
        return cast("Quantization", wanted)
    if METHOD_ALIASES.get(wanted, wanted) != METHOD_ALIASES.get(own, own):
        rule = (
            f"the checkpoint is not quantized; use {' or '.join(ROUNDED)} to round its weights"
            if own is None
            else f"the checkpoint is quantized with {own}, which is detected without an option"
        )
        raise invalid("quantization", rule, wanted)
    return None


def _graph_sizes(args: EngineArgs) -> tuple[int, ...] | None:
    sizes = args.cudagraph_capture_sizes
    if sizes is None:
        return ()
    return tuple(sorted(set(sizes))) or None
