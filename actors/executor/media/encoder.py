"""Compute the rows of images, and keep those of the last images in memory.

Laws.
1. An item is computed separately, so its rows do not depend on what else is in a step.
2. A sequence keeps the rows that it has begun to read until it has read them, whatever the cache forgets.
"""

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor

from trouper.actors.executor.media.tower import VisionTower
from trouper.actors.messages.media import MediaItem


class ImageEncoder:
    """The vision tower of a runner, with a cache of rows by key.

    Args:
        load: reads the tower.
        cache_bytes: the most bytes of cached rows.
    """

    def __init__(self, load: Callable[[], VisionTower], cache_bytes: int) -> None:
        self._load, self._cache_bytes = load, cache_bytes
        self._tower: VisionTower | None = None
        self._rows = OrderedDict[bytes, Tensor]()
        self._num_bytes = 0

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
        if level >= 2:
            self._tower = None

    def rows(self, item: MediaItem) -> Tensor:
        """Return the rows [R, E] of an item: from the cache, or computed now.

        Raises:
            RuntimeError: the tower is not loaded, or its rows do not fit the item.
        """
        found = self._rows.get(item.key)
        if found is not None:
            self._rows.move_to_end(item.key)
            return found
        if self._tower is None:
            raise RuntimeError("the vision tower is not loaded")
        with torch.inference_mode():
            found = self._tower.rows(item)
        if found.nbytes <= self._cache_bytes:
            self._rows[item.key] = found
            self._num_bytes += found.nbytes
            while self._num_bytes > self._cache_bytes:
                _, oldest = self._rows.popitem(last=False)
                self._num_bytes -= oldest.nbytes
        return found


class ItemRows:
    """The rows of one run of an item's tokens.  The item is computed when the first of them is read."""

    def __init__(self, whole: "WholeItem", begin: int, length: int) -> None:
        self._whole, self._begin, self._length = whole, begin, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> Tensor:
        begin, end, _ = part.indices(self._length)
        return self._whole.rows()[self._begin + begin : self._begin + end]


class WholeItem:
    """An item of one sequence, and its rows from the first read on."""

    def __init__(self, item: MediaItem, encoder: ImageEncoder) -> None:
        self._item, self._encoder = item, encoder
        self._rows: Tensor | None = None

    def rows(self) -> Tensor:
        """Return the rows of the item."""
        if self._rows is None:
            self._rows = self._encoder.rows(self._item)
        return self._rows

    def runs(self) -> list[tuple[int, ItemRows]]:
        """Return the rows of each run, with the position of the first one in the prompt."""
        made: list[tuple[int, ItemRows]] = []
        begin = 0
        for offset, length in self._item.runs:
            made.append((self._item.first + offset, ItemRows(self, begin, length)))
            begin += length
        return made
