"""KV memory: what the layers keep of a token, the number of blocks, and the tensors.

H  KV heads    D  head width    S  slots = blocks × tokens of a block
"""

from collections.abc import Callable, Sequence
from typing import Self

from torch import Tensor

from trouper.actors.executor.models.decoder import KVCacheSpec
from trouper.config.engine_config import EngineConfig
from trouper.errors import TrouperValidationError

# The scheduler keeps about a hundred bytes for each block, so their number is limited; an 8 B model has
# 50,000 blocks in 110 GB.
MAX_PREFIX_BLOCKS = 2**17


class KVCache:
    """The keys and values of all layers.

    Args:
        groups: one tensor [layers, 2, H, S, D] for each spec, in the order of the layers.
        block_size: tokens of a block.
    """

    def __init__(self, groups: Sequence[Tensor], block_size: int) -> None:
        self.groups = tuple(groups)
        self.layers = tuple(layer for group in groups for layer in group.unbind(0))
        self._block_size = block_size

    @classmethod
    def allocate(
        cls,
        specs: Sequence[KVCacheSpec],
        *,
        num_blocks: int,
        block_size: int,
        empty: Callable[[tuple[int, ...]], Tensor],
    ) -> Self:
        return cls([empty(spec.shape(num_blocks * block_size)) for spec in specs], block_size)

    @property
    def num_bytes(self) -> int:
        return sum(group.nbytes for group in self.groups)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy each source block to its target, one pair after another.

        The scheduler asks for copies when sequences fork with a partially filled block.
        """
        size = self._block_size
        for source, target in copies:
            for group in self.groups:
                block = group.narrow(3, source * size, size)
                group.narrow(3, target * size, size).copy_(block)


def num_kv_blocks(
    config: EngineConfig, specs: Sequence[KVCacheSpec], item_bytes: int, other_bytes: int = 0
) -> int:
    """Compute the number of blocks, including the null block.

    Args:
        item_bytes: bytes of one element in the cache.
        other_bytes: the part of the memory that is not for blocks.

    Raises:
        TrouperValidationError: a sequence of the requested length or a single block does not fit; the message
            contains the longest length that does.
    """
    size, longest = config.block_size, config.max_model_len
    block_bytes = sum(spec.token_size for spec in specs) * size * item_bytes
    usable = config.num_blocks
    if usable is None:
        assert config.kv_cache_bytes is not None
        useful = config.scheduler.max_num_seqs * -(-longest // size)
        # GPU memory is meant to be used: blocks beyond the running sequences keep prefixes.
        if config.device == "cuda":
            useful = max(useful, MAX_PREFIX_BLOCKS)
        else:
            useful = min(useful, max(MAX_PREFIX_BLOCKS, -(-longest // size)))
        usable = useful
        # The blocks of a model whose layers keep no keys take no memory.
        if block_bytes:
            usable = min(max(0, config.kv_cache_bytes - other_bytes) // block_bytes, useful)
    if usable < 1 or (usable * size < longest and not config.is_length_open):
        raise TrouperValidationError(
            f"the KV cache holds {usable} blocks of {size} tokens ({usable * block_bytes / 2**20:.0f} MiB), "
            f"and the largest max_model_len that fits is {usable * size}: set max_model_len='auto' "
            "(--max-model-len auto) for the longest that fits, or more memory by kv_cache_memory_bytes "
            "(--kv-cache-memory-bytes)",
            parameter="max_model_len",
            value=longest,
        )
    return usable + 1
