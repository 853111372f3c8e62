"""Paged KV memory as numbers: which blocks are held, and which still hold a prefix worth keeping.

Knows nothing of sequences, tokens or devices; a caller holds lists of block ids.

Laws:
1. Block 0 is the null block: never handed out, never counted as usable.
2. A block is *held* (references > 0) or *free* (in the free list), never both.
3. Allocation is all or nothing, from the front of the free list.  A block loses its hash when it is
   handed out again, so a hit can never name a block that another holder writes.
4. Blocks come back tail first; one with a hash goes to the end of the free list (it is used again last),
   one without to the front.
5. Only full blocks are hashed, and their holders only read them.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

FIRST_PARENT = bytes(32)  # the parent of a sequence's first block: fixed, so that runs agree


def block_hash(parent: bytes, token_ids: Sequence[int], extra: bytes = b"") -> bytes:
    """Name a full block's content: all tokens up to its end, and all else that shaped its KV.

    `extra` is the cache salt in a first block, and the place for adapters, media and embeddings.  Parent
    and tokens have fixed sizes, so no two different inputs are the same bytes.
    """
    return hashlib.sha256(parent + array("q", token_ids).tobytes() + extra).digest()


class KVBlocks:
    """The block pool and its prefix cache.  Every operation is O(number of blocks named)."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        """Make a pool of `num_blocks` free blocks, one of which is the null block."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._free = OrderedDict.fromkeys(range(1, num_blocks))  # front: handed out next
        self._references = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, list[int]] = {}  # equal blocks may coexist; the eldest is offered

    def __repr__(self) -> str:
        return (
            f"<KVBlocks {self.num_free} of {self.num_usable} free, block_size={self.block_size}, "
            f"{len(self._cached)} prefixes>"
        )

    @property
    def num_usable(self) -> int:
        """Blocks that can be handed out: all but the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Number of blocks that no sequence holds."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """The held part of the usable blocks, 0 … 1."""
        return 1 - self.num_free / self.num_usable if self.num_usable else 0.0

    @property
    def free_list(self) -> tuple[int, ...]:
        """The free blocks in the order of reuse, for tests and debugging."""
        return tuple(self._free)

    def num_references(self, block: int) -> int:
        """Count the holders of a block."""
        return self._references[block]

    def hash_of(self, block: int) -> bytes | None:
        """Return the name under which a block is offered as a prefix, if it is."""
        return self._hashes[block]

    def prefixes(self) -> dict[bytes, tuple[int, ...]]:
        """Copy the table of offered prefixes, for tests and debugging."""
        return {name: tuple(equal) for name, equal in self._cached.items()}

    def num_for(self, num_tokens: int) -> int:
        """Count the blocks that hold `num_tokens` positions."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """Hand out `count` blocks to write to; None, and nothing changes, if there are not so many."""
        if count > len(self._free):
            return None
        taken: list[int] = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            if self._hashes[block] is not None:
                self._forget(block)
            self._references[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add a holder to each block: a prefix hit or a fork."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Take a holder from each of a sequence's blocks, given in the order of its positions."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block]:
                continue
            self._free[block] = None
            if self._hashes[block] is None:
                self._free.move_to_end(block, last=False)

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Find the blocks of the longest cached prefix of a hash chain.  Changes nothing; `share` takes them."""
        found: list[int] = []
        for name in hashes:
            equal = self._cached.get(name)
            if equal is None:
                break
            found.append(equal[0])
        return found

    def num_idle(self, blocks: Iterable[int]) -> int:
        """Count those without a holder: sharing these takes them out of the free list."""
        return sum(self._references[block] == 0 for block in blocks)

    def register(self, block: int, name: bytes) -> None:
        """Offer a held block, which is full and computed, as a prefix."""
        if self.enable_prefix_caching and self._hashes[block] is None:
            self._hashes[block] = name
            self._cached.setdefault(name, []).append(block)

    def forget(self, blocks: Iterable[int]) -> None:
        """Withdraw these as prefixes: their KV is suspect."""
        for block in blocks:
            if self._hashes[block] is not None:
                self._forget(block)

    def reset_cache(self) -> bool:
        """Forget every prefix; False, and nothing changes, while any block is held."""
        if self.num_free != self.num_usable:
            return False
        self._cached.clear()
        self._hashes = [None] * self.num_blocks
        return True

    def _forget(self, block: int) -> None:
        name = self._hashes[block]
        if name is None:
            return
        self._hashes[block] = None
        equal = self._cached[name]
        equal.remove(block)
        if not equal:
            del self._cached[name]
