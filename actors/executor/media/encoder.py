"""Compute the embedding rows of images and recordings ("items"), and cache the most recently used ones.

Laws.
1. Each item is computed separately, so its rows do not depend on what else is in a step.
2. A sequence holds the rows of its items until it has read them, even if the cache evicts them.
3. An error of the tower is raised in the step that reads the rows, because the scheduler finds the failing request among the entries
   of a failed step.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from math import inf

import torch
from torch import Tensor

from trouper.actors.executor.media.tower import MediaTower, SlicedWork
from trouper.actors.messages.media import MediaItem

# Items between two calls of `give_back`: after each item, the allocator keeps about 1 MiB of fragmented free memory.
GIVE_BACK_ITEMS = 16


class MediaEncoder:
    """Run the tower of a runner, and cache its rows by the items' keys.

    Args:
        load: loads the tower.
        cache_bytes: the maximum size of the cache.
        give_back: returns freed memory to the operating system. The allocator would otherwise keep 500 MiB after 500 images.
    """

    def __init__(
        self,
        load: Callable[[], MediaTower],
        cache_bytes: int,
        give_back: Callable[[], None] = lambda: None,
    ) -> None:
        self._load, self._cache_bytes, self._give_back = load, cache_bytes, give_back
        self._num_computed = 0
        self._tower: MediaTower | None = None
        self._rows = OrderedDict[bytes, Tensor]()
        self._num_bytes = 0
        # The key and the work of the item in progress.
        self._begun: tuple[bytes, SlicedWork] | None = None

    @property
    def num_weight_bytes(self) -> int:
        """Return the size of the tower's weights in memory."""
        return 0 if self._tower is None else self._tower.num_bytes

    @property
    def num_cached_bytes(self) -> int:
        """Return the bytes of the cached rows."""
        return self._num_bytes

    def load(self) -> None:
        """Load the tower unless it is already in memory.  Raises what `load` raises."""
        if self._tower is None:
            self._tower = self._load()

    def sleep(self, level: int) -> None:
        """Drop the cached rows and the item in progress at level 1, and also the tower at level 2."""
        if level >= 1:
            self._rows.clear()
            self._num_bytes = 0
            if self._begun is not None:
                self._begun[1].abandon()
                self._begun = None
        if level >= 2:
            self._tower = None

    def advance(self, wholes: Sequence["WholeItem"], seconds: float) -> int:
        """Encode items in order for about this many seconds.  Returns how many of them, from the first on, are ready to be read.

        An item begun for another sequence is finished first.  At least one slice is computed unless all items are ready.
        """
        deadline = time.monotonic() + seconds
        for i, whole in enumerate(wholes):
            while not whole.is_ready():
                key, work = self._begun or self._begin(whole.item)
                if key == whole.item.key:
                    whole.work = work
                self._resume(deadline - time.monotonic())
                if time.monotonic() >= deadline and not whole.is_ready():
                    return i
        return len(wholes)

    def cached(self, item: MediaItem) -> Tensor | None:
        """Return the rows of an item and mark them as recently used, or None if they are not cached."""
        if item.key in self._rows:
            self._rows.move_to_end(item.key)
        return self._rows.get(item.key)

    def rows(self, item: MediaItem) -> Tensor:
        """Return the rows [R, E] of an item from the cache, or compute them now in one go.

        Raises:
            RuntimeError: the tower is not loaded, or its rows do not fit the item.
        """
        while (found := self.cached(item)) is None and self._begun is not None:
            key, work = self._begun
            self._resume(inf)
            if key == item.key:
                return work.result()
        if found is None:
            with torch.inference_mode():
                found = self._loaded().rows(item)
            self._cache(item.key, found)
        return found

    def _loaded(self) -> MediaTower:
        if self._tower is None:
            raise RuntimeError("the tower is not loaded")
        return self._tower

    def _begin(self, item: MediaItem) -> tuple[bytes, SlicedWork]:
        self._begun = item.key, self._loaded().begin(item)
        return self._begun

    def _resume(self, seconds: float) -> None:
        """Continue the item in progress for this many seconds, and cache its rows if it is finished."""
        assert self._begun is not None
        key, work = self._begun
        if work.advance(seconds):
            self._begun = None
            if not work.has_failed:
                self._cache(key, work.result())

    def _cache(self, key: bytes, rows_RE: Tensor) -> None:
        """Cache rows, and evict the least recently used ones above the size limit."""
        self._num_computed += 1
        if self._num_computed % GIVE_BACK_ITEMS == 0:
            self._give_back()
        if rows_RE.nbytes > self._cache_bytes or key in self._rows:
            return
        self._rows[key] = rows_RE
        self._num_bytes += rows_RE.nbytes
        while self._num_bytes > self._cache_bytes:
            _, oldest = self._rows.popitem(last=False)
            self._num_bytes -= oldest.nbytes


class WholeItem:
    """Hold an item of one sequence, and its rows once they are encoded or read."""

    def __init__(self, item: MediaItem, encoder: MediaEncoder) -> None:
        self.item = item
        # Encodes the item in slices. Sequences with the same item share it.
        self.work: SlicedWork | None = None
        self._encoder = encoder
        self._rows: Tensor | None = None

    def is_ready(self) -> bool:
        """Return whether `rows` would return or raise without computing."""
        if self._rows is None:
            self._rows = self._encoder.cached(self.item)
        return self._rows is not None or (self.work is not None and self.work.has_ended)

    def rows(self) -> Tensor:
        """Return the rows of the item, computing them if necessary.  Raises the tower's error if it failed."""
        if not self.is_ready():
            self._rows = self._encoder.rows(self.item)
        if self._rows is None:
            assert self.work is not None
            self._rows = self.work.result()
        return self._rows

    def runs(self) -> list[tuple[int, "ItemRows"]]:
        """Return each run of placeholder tokens as its first position in the prompt and its rows."""
        made: list[tuple[int, ItemRows]] = []
        begin = 0
        for offset, length in self.item.runs:
            made.append((self.item.first + offset, ItemRows(self, begin, length)))
            begin += length
        return made


class ItemRows:
    """Give access to the rows of one run of an item's placeholder tokens.  Slicing it may compute the item."""

    def __init__(self, whole: WholeItem, begin: int, length: int) -> None:
        self._whole, self._begin, self._length = whole, begin, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> Tensor:
        begin, end, _ = part.indices(self._length)
        return self._whole.rows()[self._begin + begin : self._begin + end]
