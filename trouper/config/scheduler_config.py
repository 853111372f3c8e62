"""The limits of the scheduling policy, and how they follow from the options of an engine.  Pure."""

from typing import Literal

import msgspec

from trouper.config.args import EngineArgs
from trouper.config.checkpoint.pooler import PoolerSpec
from trouper.config.devices import DeviceKind
from trouper.config.parallel import max_steps_in_flight
from trouper.config.speculation import SpeculativeConfig
from trouper.errors import TrouperValidationError, UnsupportedFeatureError

# Beyond this size the system provides new memory for each layer's activations: 16 prompts of 1,024 tokens take 1.2 times as
# long.
CPU_STEP_TOKENS = 1024


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
    # Seconds of a step in which images may be encoded beside streams; 0 encodes each image at once.
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
    """Add the drafts of speculative decoding to the limits.  Raises UnsupportedFeatureError for several workers."""
    for name in ("pipeline_parallel_size", "tensor_parallel_size"):
        if (size := getattr(args, name)) > 1:
            raise UnsupportedFeatureError(
                f"speculative_config: not with {name}={size}", parameter="speculative_config"
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
