"""Layers with a sliding window: which blocks their sequences give back, and which of these a later prompt may begin with.

A block table has one entry for each group of layers, block by block (`KVLayout`).  An entry is the null block if the group no longer
needs the block.  The names of blocks in the prefix cache contain the group.

Laws:
1. A block is given back when its last token is behind the window of the next token to compute.  That token follows the last *answered*
   step, because a failed step is computed again.
2. No step reads an entry that is the null block.
3. A prompt begins at the longest prefix whose last blocks are cached in every group: all blocks of groups without a window, and of
   the others those that the next token sees.  Otherwise a hit would read what is not there.
4. A block that is given back stays a good prefix only before a *cut*: the end of the prompt, the end of the sequence, and the
   position up to which several prompts agree.  Other blocks keep their name until they are allocated again (`KVBlocks.spare`), but
   this happens before the blocks of any cut are.  Otherwise old windows would push out what the next turn of a conversation begins with.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from typing import NamedTuple

from trouper.actors.scheduling.state.kv_blocks import KVBlocks
from trouper.actors.scheduling.state.sequence import Sequence

# Positions up to which prompts agree, of which the blocks are kept.  A system prompt takes one.
MAX_JUNCTIONS = 1024
NULL_BLOCK = 0


class WindowHit(NamedTuple):
    """The cached prefix of a sequence: its length in blocks, its table, and the blocks that are cached without their windows."""

    num_blocks: int
    table: list[int]
    junction: int


class Windows:
    """The rules of windows for all sequences of one replica.

    Args:
        blocks: the pool; its layout has a group with a window.
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
        # The names of blocks that end where prompts part.  The least recently used first.
        self._junctions: OrderedDict[bytes, None] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Windows of {sorted(self._groups)} tokens, {len(self._junctions)} junctions>"

    # Where a sequence begins

    def find(self, hashes: Items[bytes]) -> WindowHit:
        """Find the longest prefix that a sequence may begin with.  It changes nothing.

        Args:
            hashes: of its blocks.
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
        """Return the last block which a token behind the first `count` blocks sees and which is not cached, or None."""
        for i in range(count - 1, max(0, count - self._most_seen) - 1, -1):
            for window, groups in self._groups.items():
                if i >= count - self._layout.num_seen(window) and any(
                    self._blocks.find(_name(hashes[i], group)) is None for group in groups
                ):
                    return i
        return None

    def fork(self, leader: Sequence, num_shared: int, *, copies_next: bool) -> list[int] | None:
        """Return the table of a sibling that begins with the first blocks of its leader.

        Args:
            copies_next: whether the sibling gets a copy of the leader's next block too.

        Returns:
            None if the leader has given back a block that the sibling needs.
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
            table: the blocks with which it begins.
            end: the position behind its first step.
            wanted: the length for which there must be room.
        """
        held = len(table) - table.count(NULL_BLOCK)
        first_step = self._blocks.num_for(end) - len(table)
        return max(first_step, self._layout.num_blocks(wanted) - held) + self._blocks.num_idle(
            table
        )

    def begin(self, sequence: Sequence, num_blocks: int, junction: int) -> None:
        """Note that a sequence begins behind its first `num_blocks` blocks, and choose its cuts.

        Args:
            junction: the blocks that other prompts have computed too, if their windows were missing; else 0.
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

    # What it gives back

    def give_back(self, sequence: Sequence) -> None:
        """Free the blocks of which the next token to compute sees no token."""
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
        """Whether the answers to its steps in flight let a sequence give blocks back."""
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
        """Withdraw all blocks that a sequence has offered, those that it has given back too.

        Their keys and values may be wrong, because a step of the sequence has failed.
        """
        # A sibling shares its leader's blocks before it has hashed its own tokens.
        count = sequence.num_registered
        hashes = sequence.hash_blocks(count, self._layout.block_size)
        for _, name in self.names(hashes, 0, count):
            while (block := self._blocks.find(name)) is not None:
                self._blocks.forget((block,))

    def num_held(self, sequences: Iterable[Sequence]) -> int:
        """Count the held blocks of layers with a window.  Takes time for each block, and is called for reports only."""
        held: set[int] = set()
        for sequence in sequences:
            for group in (group for groups in self._groups.values() for group in groups):
                held.update(sequence.blocks[group :: self._num_groups])
        return len(held - {NULL_BLOCK})


def _name(hash: bytes, group: int) -> bytes:
    """Return the name of a block of one group.  The first group has the hash itself, as models with one group have."""
    return hash + bytes((group,)) if group else hash
