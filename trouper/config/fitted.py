"""The final context length of an engine, once its devices have measured their memory."""

import sys

import msgspec

from trouper.config.resolve import EngineConfig


def fitted(config: EngineConfig, num_blocks: int, longest: int | None = None) -> EngineConfig:
    """Shorten the context of an engine to the length that its devices can hold.

    Args:
        num_blocks: usable KV blocks.
        longest: the largest length that the model's code can compute, if it is less than the model's own.
    """
    fits = min(num_blocks * config.block_size, longest or sys.maxsize)
    if not config.is_length_open or config.pooler is not None or fits >= config.max_model_len:
        return config
    scheduler = msgspec.structs.replace(config.scheduler, max_model_len=fits)
    return msgspec.structs.replace(
        config, max_model_len=fits, scheduler=scheduler, model=config.model.with_lengths_below(fits)
    )


def context_line(config: EngineConfig, longest: int | None = None) -> str | None:
    """Describe a context that is shorter than the model's: why, and how to get more.  Returns None for a full one."""
    length, whole = config.max_model_len, config.model.max_position_embeddings
    if not config.is_length_open or config.pooler is not None or length >= whole:
        return None
    if length == longest:
        why = "beyond it the model's code makes one sequence depend on the length of others"
    elif config.device == "cuda":
        why = "more do not fit the memory for the KV cache; --gpu-memory-utilization for more"
    else:
        why = "more do not fit the memory for the KV cache; --kv-cache-memory-bytes for more"
    return f"context {length:,} of {whole:,} tokens: {why}"
