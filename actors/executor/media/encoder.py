"""Compute the rows of images, and keep those of the last images in memory.

Laws.
1. An item is computed separately, so its rows do not depend on what else is in a step.
2. A sequence keeps the rows that it has asked for until it has read them, whatever the cache forgets.
3. An error of the tower belongs to the step that reads the rows, because the search for a culprit looks at entries of steps.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from math import inf

import torch
from torch import Tensor

from trouper.actors.executor.media.tower import MediaTower, SlicedWork
from trouper.actors.messages.media import MediaItem

# Items between two calls of `give_back`: each item leaves about 1 MiB of freed memory between blocks in use.
GIVE_BACK_ITEMS = 16


class MediaEncoder:
    """The vision tower of a runner, with a cache of rows by key.

    Args:
        load: reads the tower.
        cache_bytes: the most bytes of cached rows.
        give_back: returns freed memory to the system, which the allocator would keep: 500 MiB after 500 images.
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
        # The key of the item encoded in slices.
        self._begun: tuple[bytes, SlicedWork] | None = None

    @property
    def num_weight_bytes(self) -> int:
        """Return the bytes that the tower takes in memory."""
        return 0 if self._tower is None else self._tower.num_bytes

    @property
    def num_cached_bytes(self) -> int:
        """Return the bytes of the cached rows."""
        return self._num_bytes

    def load(self) -> None:
        """Read the tower unless it is in memory.  Raises like `load`."""
        if self._tower is None:
            self._tower = self._load()

    def sleep(self, level: int) -> None:
        """Forget all rows at level 1, and the tower too at level 2."""
        if level >= 1:
            self._rows.clear()
            self._num_bytes = 0
            if self._begun is not None:
                self._begun[1].abandon()
                self._begun = None
        if level >= 2:
            self._tower = None

    def advance(self, wholes: Sequence["WholeItem"], seconds: float) -> int:
        """Encode items in their order for about this time, and return how many of them are ready to be read.

        An item begun for another sequence is finished first.  At least one slice is computed unless all are ready.
        """
        deadline = time.monotonic() + seconds
        for i, whole in enumerate(wholes):
            while not whole.is_ready():
                key, work = self._begun or self._begin(whole.item)
                if key == whole.item.key:
                    whole.work = work
                self._go_on(deadline - time.monotonic())
                if time.monotonic() >= deadline and not whole.is_ready():
                    return i
        return len(wholes)

    def cached(self, item: MediaItem) -> Tensor | None:
        """Return the rows of an item if the cache has them, and keep them for longer."""
        if item.key in self._rows:
            self._rows.move_to_end(item.key)
        return self._rows.get(item.key)

    def rows(self, item: MediaItem) -> Tensor:
        """Return the rows [R, E] of an item: from the cache, or computed now without slices.

        Raises:
            RuntimeError: the tower is not loaded, or its rows do not fit the item.
        """
        while (found := self.cached(item)) is None and self._begun is not None:
            key, work = self._begun
            self._go_on(inf)
            if key == item.key:
                return work.result()
        if found is None:
            with torch.inference_mode():
                found = self._loaded().rows(item)
            self._keep(item.key, found)
        return found

    def _loaded(self) -> MediaTower:
        if self._tower is None:
            raise RuntimeError("the tower is not loaded")
        return self._tower

    def _begin(self, item: MediaItem) -> tuple[bytes, SlicedWork]:
        self._begun = item.key, self._loaded().begin(item)
        return self._begun

    def _go_on(self, seconds: float) -> None:
        """Continue the begun item, and keep its rows if this was the end of it."""
        assert self._begun is not None
        key, work = self._begun
        if work.advance(seconds):
            self._begun = None
            if not work.has_failed:
                self._keep(key, work.result())

    def _keep(self, key: bytes, rows_RE: Tensor) -> None:
        """Keep rows until newer ones need their room."""
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
    """An item of one sequence, and its rows from the time when they are encoded or read."""

    def __init__(self, item: MediaItem, encoder: MediaEncoder) -> None:
        self.item = item
        # Encodes the item in slices, perhaps for several sequences.
        self.work: SlicedWork | None = None
        self._encoder = encoder
        self._rows: Tensor | None = None

    def is_ready(self) -> bool:
        """Whether `rows` returns, or raises, at once."""
        if self._rows is None:
            self._rows = self._encoder.cached(self.item)
        return self._rows is not None or (self.work is not None and self.work.has_ended)

    def rows(self) -> Tensor:
        """Return the rows of the item.  Raises the tower's error, if it had one."""
        if not self.is_ready():
            self._rows = self._encoder.rows(self.item)
        if self._rows is None:
            assert self.work is not None
            self._rows = self.work.result()
        return self._rows

    def runs(self) -> list[tuple[int, "ItemRows"]]:
        """Return the rows of each run, with the position of the first one in the prompt."""
        made: list[tuple[int, ItemRows]] = []
        begin = 0
        for offset, length in self.item.runs:
            made.append((self.item.first + offset, ItemRows(self, begin, length)))
            begin += length
        return made


class ItemRows:
    """The rows of one run of an item's tokens."""

    def __init__(self, whole: WholeItem, begin: int, length: int) -> None:
        self._whole, self._begin, self._length = whole, begin, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> Tensor:
        begin, end, _ = part.indices(self._length)
        return self._whole.rows()[self._begin + begin : self._begin + end]
