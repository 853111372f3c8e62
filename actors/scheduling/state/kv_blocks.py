"""Paged KV memory as numbers: which blocks are held, and which free blocks still contain a reusable prefix.

Paging lets sequences of any length share one memory without moving data.  This module handles only block ids: it is independent of
sequences, tokens and devices, and its callers keep the lists of their blocks.

Laws:
1. Block 0 is the null block.  It is never allocated and not counted as usable.
2. A block is *held* (references > 0) or *free* (in the free list), never both.
3. An allocation gets all its blocks or none, from the front of the free list.  A block loses its hash when it is allocated again,
   so a cache hit never returns a block that another holder writes to.
4. The blocks of a sequence are freed from its end.  A block with a hash goes to the end of the free list, where it is reused last,
   and a block without a hash to the front.  Spare blocks are reused between the two: they have a hash, but a hit is not expected.
5. Only full blocks have a hash, and their holders only read them.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from trouper.config.kv_layout import KVLayout

# The parent of the first block of a sequence.  It is constant, so hashes are equal in all runs.
FIRST_PARENT = bytes(32)
ALWAYS_HELD = 2**62


def block_hash(parent: bytes, token_ids: Sequence[int], extra: bytes = b"") -> bytes:
    """Hash the content of a full block: all tokens up to its end, and everything else that its KV depends on.

    Parent and tokens have fixed sizes, so two different inputs never have the same bytes.

    Args:
        extra: the cache salt, the cache scope and the adapter in a first block, and digests of embeddings.
    """
    return hashlib.sha256(parent + array("q", token_ids).tobytes() + extra).digest()


class KVBlocks:
    """The block pool and its prefix cache.  Every operation is O(number of blocks named).

    A block has an id, a number of holders, and possibly the hash of its content.  The memory itself is on the device.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        layout: KVLayout | None = None,
    ) -> None:
        """Make a pool of `num_blocks` free blocks, including the null block.

        Args:
            layout: the groups of layers that take blocks; by default one group that sees all tokens.
        """
        self.layout = layout or KVLayout(block_size)
        # The tokens of the longest sequence that all blocks together hold.
        self.capacity = self.layout.num_tokens(num_blocks - 1)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        # The front is allocated next.
        self._free = OrderedDict.fromkeys(range(1, num_blocks))
        # Free blocks with a hash that are reused before the others; the oldest first.
        self._spare: OrderedDict[int, None] = OrderedDict()
        # The null block is in many tables, and none of them holds it.
        self._references = [ALWAYS_HELD] + [0] * (num_blocks - 1)
        self._hashes: list[bytes | None] = [None] * num_blocks
        # Blocks with equal content may coexist.  The first one is offered.
        self._cached: dict[bytes, list[int]] = {}
        # Free blocks with a hash.
        self._num_idle_cached = 0
        # Called with the hash of each prefix that is forgotten, except by `reset_cache`.
        self.on_forget: Callable[[bytes], None] | None = None

    def __repr__(self) -> str:
        return (
            f"<KVBlocks {self.num_free} of {self.num_usable} free, block_size={self.block_size}, "
            f"{len(self._cached)} prefixes>"
        )

    @property
    def num_usable(self) -> int:
        """Count the blocks without the null block, which is never allocated."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Count the blocks that no sequence holds.

        They include blocks with a cached prefix; these are reused last.
        """
        return len(self._free) + len(self._spare)

    @property
    def num_cached(self) -> int:
        """Count the free blocks that still contain a cached prefix.  It is O(1), because it is read for every picture of the cache."""
        return self._num_idle_cached

    @property
    def usage(self) -> float:
        """Return the held share of the usable blocks: 0 … 1.

        Cached prefixes without a holder do not count as held.
        """
        return 1 - self.num_free / self.num_usable if self.num_usable else 0.0

    @property
    def free_list(self) -> tuple[int, ...]:
        """List the free blocks in the order of reuse, for tests and debugging.

        Blocks without a cached prefix come first.
        """
        free = list(self._free)
        # A block that was withdrawn while it was free stays where it is.
        front = next((i for i, block in enumerate(free) if self._hashes[block]), len(free))
        return (*free[:front], *self._spare, *free[front:])

    def num_references(self, block: int) -> int:
        """Count the holders of a block.

        It is more than 1 if sequences share a prefix.
        """
        return self._references[block]

    def hash_of(self, block: int) -> bytes | None:
        """Return the hash under which a block is offered as a prefix.  Returns None if it is not offered."""
        return self._hashes[block]

    def prefixes(self) -> dict[bytes, tuple[int, ...]]:
        """Copy the table of offered prefixes, for tests and debugging.

        Several blocks can have the same content, if sequences computed it at the same time.
        """
        return {name: tuple(equal) for name, equal in self._cached.items()}

    def num_for(self, num_tokens: int) -> int:
        """Count the entries of all block tables for `num_tokens` positions.

        The last block may be filled only in part.
        """
        return -(-num_tokens // self.block_size) * len(self.layout.windows)

    def allocate(self, count: int) -> list[int] | None:
        """Allocate `count` blocks to write to.  Returns None, and changes nothing, if fewer are free.

        A block with a cached prefix loses it, the least recently used one first.
        """
        if count > self.num_free:
            return None
        taken: list[int] = []
        for _ in range(count):
            block = self._next_free()
            if self._hashes[block] is not None:
                self._forget(block)
            self._references[block] = 1
            taken.append(block)
        return taken

    def _next_free(self) -> int:
        if self._spare and (not self._free or self._hashes[next(iter(self._free))] is not None):
            return self._spare.popitem(last=False)[0]
        return self._free.popitem(last=False)[0]

    def share(self, blocks: Iterable[int]) -> None:
        """Add a holder to each block: a prefix hit or a fork.

        A block without a holder is removed from the free list, and its content remains valid.
        """
        for block in blocks:
            if self._references[block] == 0:
                del (self._spare if block in self._spare else self._free)[block]
                self._num_idle_cached -= self._hashes[block] is not None
            self._references[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Remove a holder from each of these blocks, given in the order of the sequence's positions.

        Later blocks of a prefix become reusable before earlier ones, because fewer sequences share them.
        """
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block]:
                continue
            self._put(block)

    def spare(self, blocks: Iterable[int]) -> None:
        """Remove a holder from each of these blocks.  Those with a hash are reused before all others with one."""
        for block in blocks:
            self._references[block] -= 1
            if self._references[block]:
                continue
            if self._hashes[block] is None:
                self._put(block)
            else:
                self._spare[block] = None
                self._num_idle_cached += 1

    def _put(self, block: int) -> None:
        self._free[block] = None
        if self._hashes[block] is None:
            self._free.move_to_end(block, last=False)
        else:
            self._num_idle_cached += 1

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Find the blocks of the longest cached prefix of a hash chain.  It changes nothing; `share` takes the blocks."""
        found: list[int] = []
        for name in hashes:
            equal = self._cached.get(name)
            if equal is None:
                break
            found.append(equal[0])
        return found

    def find(self, name: bytes) -> int | None:
        """Return the block that is offered under a name, or None."""
        equal = self._cached.get(name)
        return None if equal is None else equal[0]

    def num_idle(self, blocks: Iterable[int]) -> int:
        """Count the blocks without a holder, which sharing would remove from the free list.

        A caller adds them to the blocks that it needs, to check whether all of them are available.
        """
        return sum(self._references[block] == 0 for block in blocks)

    def register(self, block: int, name: bytes) -> None:
        """Offer a held block as a prefix.  It must be full and computed.

        If prefix caching is off, or the block has been offered already, nothing happens.
        """
        if self.enable_prefix_caching and self._hashes[block] is None:
            self._hashes[block] = name
            self._cached.setdefault(name, []).append(block)

    def forget(self, blocks: Iterable[int]) -> None:
        """Withdraw blocks from the prefix cache, because their KV may be wrong.

        Sequences that hold them keep them; only new sequences no longer find them.
        """
        for block in blocks:
            if self._hashes[block] is not None:
                self._forget(block)

    def reset_cache(self) -> bool:
        """Forget every prefix.  Returns False, and changes nothing, while any block is held.

        Used after new weights are loaded, since cached KV would then be wrong.
        """
        if self.num_free != self.num_usable:
            return False
        self._cached.clear()
        self._free.update(self._spare)
        self._spare.clear()
        self._hashes = [None] * self.num_blocks
        self._num_idle_cached = 0
        return True

    def _forget(self, block: int) -> None:
        name = self._hashes[block]
        if name is None:
            return
        self._hashes[block] = None
        self._num_idle_cached -= self._references[block] == 0
        equal = self._cached[name]
        equal.remove(block)
        if not equal:
            del self._cached[name]
            if self.on_forget is not None:
                self.on_forget(name)
