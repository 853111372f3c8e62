"""Decide how the layers of a model share the blocks of the KV cache, and how many blocks a sequence needs.

Layers with a sliding window need only the newest keys.  So layers are divided into groups of equal size, whose layers have the same
window, and each group has its own block table: a block contains the keys and values of one group's layers.  All groups take blocks
from one pool, so memory need not be partitioned between layers with and without a window.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, cycle

import msgspec

from trouper.config.engine_config import SchedulerConfig
from trouper.config.media import MediaConfig

# Each group adds a block table, which every step sends and reads.
MAX_GROUPS = 16
# Groups of equal size leave some slots without a layer.  Up to this share of unused memory, fewer groups are preferred.
MOST_PADDING = 0.08
# If free blocks are scarce, a step computes at most this many tokens of a prompt of a model with windows.  The prompt then holds fewer
# blocks of layers with a window: for a window of 1,024 tokens, 13 blocks of 128 tokens instead of 17.
SHORT_STEP = 512
# The first layer of a stage, and the one behind its last.
Span = tuple[int, int]


class KVLayout(msgspec.Struct, frozen=True):
    """The groups of layers of one model.  Pure."""

    block_size: int
    # The window of each group; None if its layers see all tokens.
    windows: tuple[int | None, ...] = (None,)
    # Maximum number of tokens of a sequence in a step when blocks are scarce.  A group with a window also holds their blocks.
    num_step_tokens: int = 1
    # The bytes of a block on all workers together, or 0 if unknown.
    block_bytes: int = 0

    @property
    def has_windows(self) -> bool:
        """Whether sequences free blocks while they run."""
        return self.windows != (None,)

    def num_blocks(self, num_tokens: int) -> int:
        """Count the blocks that a sequence of this length holds at most, over all groups."""
        whole = -(-num_tokens // self.block_size)
        return sum(min(whole, self._most(window)) for window in self.windows)

    def num_tokens(self, num_blocks: int) -> int:
        """Return the length of the longest sequence that these blocks hold."""
        full = self.windows.count(None)
        if self.num_blocks(self.block_size) > num_blocks:
            return 0
        if not full and self.num_blocks(2**40) <= num_blocks:
            return 2**40
        fits, too_many = 1, num_blocks + 1
        while fits + 1 < too_many:
            middle = (fits + too_many) // 2
            if self.num_blocks(middle * self.block_size) <= num_blocks:
                fits = middle
            else:
                too_many = middle
        return fits * self.block_size

    def num_room_tokens(self, num_blocks: int, num_tokens: int) -> int:
        """Count the tokens of all sequences of one length that these blocks hold at once."""
        if not self.has_windows:
            return num_blocks * self.block_size
        return num_blocks * num_tokens // self.num_blocks(num_tokens)

    def num_behind(self, window: int, position: int) -> int:
        """Count the leading blocks outside the window of a token at `position`, and so can be freed."""
        return max(0, position - window + 1) // self.block_size

    def num_seen(self, window: int) -> int:
        """Count the blocks in the window of the first token after a block boundary."""
        return -(-(window - 1) // self.block_size)

    def _most(self, window: int | None) -> int:
        if window is None:
            return 2**40
        # A fork begins inside a block, and may be rolled back to the start of this block.
        num_tokens = window - 1 + max(self.num_step_tokens, self.block_size)
        return -(-num_tokens // self.block_size) + 1


def short_step(scheduler: SchedulerConfig, media: MediaConfig | None = None) -> int:
    """Return the maximum number of tokens of a sequence in a step when blocks are scarce.

    All tokens of an image that see each other must fit into one step.
    """
    most = scheduler.max_num_scheduled_tokens
    short = SHORT_STEP if media is None else max(SHORT_STEP, media.num_image_tokens)
    return min(most, short) if scheduler.enable_chunked_prefill else most


def tables_of(
    windows: Sequence[int | None],
    num_tokens: int,
    block_size: int,
    num_step_tokens: int,
    num_drafting: float = 0.0,
    stages: Sequence[Span] = (),
) -> tuple[int, ...] | None:
    """Assign a group, and so a block table, to each layer with attention.

    Groups without a window come first.

    Args:
        windows: of each layer; None if no sequence is longer than the window.
        num_tokens: the length of the longest sequence.
        num_drafting: the layers of a draft model, which keeps every block of every group, in layers of this model's size.
        stages: the first layer of each stage of a pipeline, and the one behind its last.

    Returns:
        None if groups would not save memory for the longest sequence, relative to one table for all layers.
    """
    kinds = sorted(set(windows) - {None}, reverse=True, key=lambda window: window or 0)
    ordered = [None, *kinds] if None in windows else kinds
    if ordered == [None]:
        return None
    counts = [windows.count(window) for window in ordered]
    stages = stages or ((0, len(windows)),)
    # A stage takes as much memory for a block of any group, so another size may suit stages better.
    sizes = (group_size(counts),) if len(stages) == 1 else range(max(counts), 0, -1)
    best, least = None, max(last - first for first, last in stages) + num_drafting
    least *= -(-num_tokens // block_size)
    for size in sizes:
        groups = [-(-count // size) for count in counts]
        if sum(groups) > max(MAX_GROUPS, len(ordered)):
            continue
        tables = _dealt(windows, dict(zip(ordered, groups, strict=True)))
        widest = max(max(Counter(tables[first:last]).values()) for first, last in stages)
        of_groups = tuple(w for w, num in zip(ordered, groups, strict=True) for _ in range(num))
        layout = KVLayout(block_size, of_groups, num_step_tokens)
        taken = layout.num_blocks(num_tokens) * (widest + num_drafting)
        if taken < least:
            best, least = tables, taken
    return best


def _dealt(windows: Sequence[int | None], groups: Mapping[int | None, int]) -> tuple[int, ...]:
    """Distribute the layers of each window evenly over its groups, so that each stage has a similar part of each group.

    Args:
        groups: the number of groups of each window.
    """
    firsts = accumulate(groups.values(), initial=0)
    turns = {
        window: cycle(range(first, first + num))
        for (window, num), first in zip(groups.items(), firsts, strict=False)
    }
    return tuple(next(turns[window]) for window in windows)


def group_size(counts: Sequence[int]) -> int:
    """Choose the number of layers of a group.

    An unused slot costs most in a group without a window, whose blocks are held until the sequence ends.  So a group has at most as many
    layers as the rarest window, unless this makes too many groups.

    Args:
        counts: the number of layers of each window.
    """
    num_layers = sum(counts)
    groups = {
        size: sum(-(-count // size) for count in counts) for size in range(1, max(counts) + 1)
    }
    possible = [size for size in groups if groups[size] <= MAX_GROUPS]
    small = [
        size
        for size in possible
        if size <= min(counts) and groups[size] * size - num_layers < MOST_PADDING * num_layers
    ]
    if small:
        return max(small)
    return min(possible, key=lambda size: (groups[size] * size, groups[size]))
