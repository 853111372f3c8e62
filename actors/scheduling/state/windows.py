"""Free the KV blocks that have left a sliding window, and find the cached prefixes of models with windows.

A block table contains one entry per block and group of layers (`KVLayout`).  An entry is the null block once the group no longer
needs the block.  Names in the prefix cache include the group, because groups free their blocks at different times.

Laws:
1. A block is freed when the next token to compute no longer sees its last token.  The next token is the one after the last *answered*
   step, because a failed step is computed again.
2. No step reads a null block.
3. A cached prefix is usable if all its blocks are cached for groups without a window and, for the other groups, the blocks that
   the next token sees.  Otherwise attention would read null blocks.
4. A freed block is worth keeping only if it is within a window before a *cut*: the end of the prompt, the end of the sequence, or a
   position up to which several prompts agree.  Other freed blocks stay in the prefix cache, but are reused first (`KVBlocks.spare`).
   Otherwise useless old windows would evict the blocks from which the next turn of a conversation starts.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from typing import NamedTuple

from trouper.actors.scheduling.state.kv_blocks import KVBlocks
from trouper.actors.scheduling.state.sequence import Sequence

# Remembered positions up to which several prompts agree.  A system prompt takes one.
MAX_JUNCTIONS = 1024
NULL_BLOCK = 0


class WindowHit(NamedTuple):
    """The cached prefix of a sequence: its length in blocks, and its block table.

    `junction` is the longer prefix, in blocks, that is cached only in the groups without a window; 0 if there is none.
    """

    num_blocks: int
    table: list[int]
    junction: int


class Windows:
    """Apply the laws of windows to the block tables of one replica's sequences.

    Args:
        blocks: the pool.  Its layout contains at least one group with a window.
    """

    def __init__(self, blocks: KVBlocks) -> None:
        self._blocks, self._layout = blocks, blocks.layout
        windows = self._layout.windows
        self._num_groups = len(windows)
        self._full = [group for group, window in enumerate(windows) if window is None]
        self._groups: dict[int, list[int]] = {}
        for group, window in enumerate(windows):
            if window is not None:
                self._groups.setdefault(window, []).append(group)
        self._most_seen = max(map(self._layout.num_seen, self._groups))
        # Names of the last blocks before the positions where prompts diverge.  The least recently used first.
        self._junctions: OrderedDict[bytes, None] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Windows of {sorted(self._groups)} tokens, {len(self._junctions)} junctions>"

    # Start

    def find(self, hashes: Items[bytes]) -> WindowHit:
        """Find the longest usable cached prefix of a sequence, without any side effect.

        Args:
            hashes: the hashes of its blocks.
        """
        blocks, num_full = self._blocks, 0
        for name in hashes:
            if any(blocks.find(_name(name, group)) is None for group in self._full):
                break
            num_full += 1
        count = num_full
        while count and (gap := self._gap(hashes, count)) is not None:
            count = gap
        table = [NULL_BLOCK] * (count * self._num_groups)
        for group, window in enumerate(self._layout.windows):
            first = 0 if window is None else max(0, count - self._layout.num_seen(window))
            for i in range(first, count):
                table[i * self._num_groups + group] = (
                    blocks.find(_name(hashes[i], group)) or NULL_BLOCK
                )
        return WindowHit(count, table, num_full if self._full and num_full > count else 0)

    def _gap(self, hashes: Items[bytes], count: int) -> int | None:
        """Return the last uncached block that the token after the first `count` blocks sees, or None if all are cached."""
        for i in range(count - 1, max(0, count - self._most_seen) - 1, -1):
            for window, groups in self._groups.items():
                if i >= count - self._layout.num_seen(window) and any(
                    self._blocks.find(_name(hashes[i], group)) is None for group in groups
                ):
                    return i
        return None

    def fork(self, leader: Sequence, num_shared: int, *, copies_next: bool) -> list[int] | None:
        """Return the block table of a sibling that shares the first blocks of its leader.

        Args:
            copies_next: whether the sibling also receives a copy of the leader's next block.

        Returns:
            The table; None if the leader has freed a block that the sibling needs.
        """
        table, num = leader.blocks[: num_shared * self._num_groups], self._num_groups
        for window, groups in self._groups.items():
            first = self._layout.num_behind(window, num_shared * self._layout.block_size)
            for group in groups:
                needed = leader.blocks[first * num + group : (num_shared + copies_next) * num : num]
                if NULL_BLOCK in needed:
                    return None
                table[group : first * num : num] = [NULL_BLOCK] * first
        return table

    def num_needed(self, table: Items[int], end: int, wanted: int) -> int:
        """Count the free blocks that a sequence needs to start.

        Args:
            table: its cached blocks.
            end: the length of the sequence after its first step.
            wanted: the length in tokens that must fit.
        """
        held = len(table) - table.count(NULL_BLOCK)
        first_step = self._blocks.num_for(end) - len(table)
        return max(first_step, self._layout.num_blocks(wanted) - held) + self._blocks.num_idle(
            table
        )

    def begin(self, sequence: Sequence, num_blocks: int, junction: int) -> None:
        """Start a sequence after its first `num_blocks` blocks, and choose its cuts.

        Args:
            junction: `WindowHit.junction` of its hit.
        """
        marks, size = sequence.marks, self._layout.block_size
        cuts = {(sequence.num_prompt - 1) // size}
        for cut in (num_blocks, junction):
            if not 0 < cut <= len(sequence.hashes):
                continue
            name = sequence.hashes[cut - 1]
            if cut == junction or name in self._junctions:
                cuts.add(cut)
                self._junctions[name] = None
                self._junctions.move_to_end(name)
        if len(self._junctions) > MAX_JUNCTIONS:
            self._junctions.popitem(last=False)
        marks.cuts = tuple(sorted(cuts))
        marks.behind = {
            window: self._layout.num_behind(window, num_blocks * size) for window in self._groups
        }

    # Free

    def give_back(self, sequence: Sequence) -> None:
        """Free the blocks that have left the windows of the next token to compute."""
        marks, blocks, table = sequence.marks, self._blocks, sequence.blocks
        for window, groups in self._groups.items():
            first = marks.behind.get(window, 0)
            end = self._layout.num_behind(window, sequence.num_computed_on_device)
            if end <= first:
                continue
            kept, spare = list[int](), list[int]()
            seen = self._layout.num_seen(window)
            for i in range(first, end):
                is_kept = any(i < cut <= i + seen for cut in marks.cuts)
                for place in (i * self._num_groups + group for group in groups):
                    if table[place] != NULL_BLOCK:
                        (kept if is_kept else spare).append(table[place])
                        table[place] = NULL_BLOCK
            marks.behind[window] = end
            blocks.spare(spare)
            blocks.free(kept)

    def are_coming(self, sequence: Sequence) -> bool:
        """Whether a sequence will free blocks when its steps in flight are answered."""
        position, behind = sequence.num_computed, sequence.marks.behind
        return position > sequence.num_computed_on_device and any(
            self._layout.num_behind(window, position) > behind.get(window, 0)
            for window in self._groups
        )

    # Names

    def names(self, hashes: Items[bytes], first: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Yield the place in the table and the name of each entry of the blocks first … end - 1."""
        for i in range(first, end):
            for group in range(self._num_groups):
                yield i * self._num_groups + group, _name(hashes[i], group)

    def forget(self, sequence: Sequence) -> None:
        """Withdraw all prefixes that a sequence has offered, including the blocks that it has freed.

        Their keys and values may be wrong, because a step of the sequence failed.
        """
        # A sibling shares its leader's blocks before it has hashed its own tokens.
        count = sequence.num_registered
        hashes = sequence.hash_blocks(count, self._layout.block_size)
        for _, name in self.names(hashes, 0, count):
            while (block := self._blocks.find(name)) is not None:
                self._blocks.forget((block,))

    def num_held(self, sequences: Iterable[Sequence]) -> int:
        """Count the blocks that sequences hold for layers with a window.  Takes O(blocks), and is called only for reports."""
        held: set[int] = set()
        for sequence in sequences:
            for group in (group for groups in self._groups.values() for group in groups):
                held.update(sequence.blocks[group :: self._num_groups])
        return len(held - {NULL_BLOCK})


def _name(hash: bytes, group: int) -> bytes:
    """Return the name of a block of one group.  The first group uses the plain hash, like models with a single group."""
    return hash + bytes((group,)) if group else hash
