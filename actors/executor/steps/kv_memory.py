"""KV memory: what the layers keep of a token, the number of blocks, and the tensors.

H  KV heads    D  head width    S  slots = blocks × tokens of a block
"""

from collections.abc import Callable, Sequence
from typing import Self

from torch import Tensor

from trouper.actors.executor.models.decoder import KVCacheSpec, windows_of
from trouper.config.engine_config import EngineConfig
from trouper.config.kv_layout import KVLayout, short_step
from trouper.errors import TrouperValidationError

# The scheduler keeps about a hundred bytes for each block, so their number is limited; an 8 B model has
# 50,000 blocks in 110 GB.
MAX_PREFIX_BLOCKS = 2**17


class KVCache:
    """The keys and values of all layers.

    Args:
        groups: one tensor [layers, 2, H, S, D] for each spec, in the order of the layers.
        places: for each spec, the place of each layer in its tensor; () if it is the order of the layers.
        block_size: tokens of a block.
    """

    def __init__(
        self, groups: Sequence[Tensor], places: Sequence[Sequence[int]], block_size: int
    ) -> None:
        self.groups = tuple(groups)
        self.layers = tuple(
            group[place]
            for group, order in zip(groups, places, strict=True)
            for place in order or range(len(group))
        )
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
        groups = [empty(spec.shape(num_blocks * block_size)) for spec in specs]
        return cls(groups, [spec.places for spec in specs], block_size)

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


def kv_layout(
    config: EngineConfig, specs: Sequence[KVCacheSpec] = (), item_bytes: int = 0
) -> KVLayout:
    """Return the groups of layers that take blocks.

    Args:
        specs: what all layers with a block keep.
        item_bytes: bytes of one element in the cache.
    """
    size = sum(spec.token_size for spec in specs) * config.block_size * item_bytes
    step = short_step(config.scheduler, config.media)
    return KVLayout(config.block_size, windows_of(specs), step, size)


def num_kv_blocks(
    config: EngineConfig,
    specs: Sequence[KVCacheSpec],
    item_bytes: int,
    other_bytes: int = 0,
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
    layout = kv_layout(config, specs, item_bytes)
    num_bytes, of_longest = layout.block_bytes, layout.num_blocks(longest)
    num_groups = len(layout.windows)
    # The option counts blocks of all layers.
    usable = None if config.num_blocks is None else config.num_blocks * num_groups
    if usable is None:
        assert config.kv_cache_bytes is not None
        useful = config.scheduler.max_num_seqs * of_longest
        # GPU memory is meant to be used: blocks beyond the running sequences keep prefixes.
        if config.device == "cuda":
            useful = max(useful, MAX_PREFIX_BLOCKS)
        else:
            useful = min(useful, max(MAX_PREFIX_BLOCKS, of_longest))
        usable = useful = -(-useful // num_groups) * num_groups
        # Without keys in any layer, blocks take no memory.
        if num_bytes:
            usable = min(max(0, config.kv_cache_bytes - other_bytes) // num_bytes, useful)
        # A restarted worker is given the number of blocks of all layers.
        usable = usable // num_groups * num_groups
    fits = layout.num_tokens(usable)
    if fits < 1 or (fits < longest and not config.is_length_open):
        raise TrouperValidationError(
            f"the KV cache holds {usable} blocks of {size} tokens ({usable * num_bytes / 2**20:.0f} MiB), "
            f"and the largest max_model_len that fits is {fits}: set max_model_len='auto' "
            "(--max-model-len auto) for the longest that fits, or more memory by kv_cache_memory_bytes "
            "(--kv-cache-memory-bytes)",
            parameter="max_model_len",
            value=longest,
        )
    return usable + 1
