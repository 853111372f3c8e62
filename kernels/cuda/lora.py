"""The adapters of one linear layer on a GPU: their memory, and the two launches that add them to the base's product."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trouper.kernels.cuda.lora_expand import BLOCK_N, lora_expand_
from trouper.kernels.cuda.lora_shrink import BLOCK_ROWS, lora_shrink
from trouper.kernels.lora import LoRAWeights, LowRank, rounded_rank


class DeviceRows(NamedTuple):
    """A `RowTable` on the device, at a fixed address."""

    order: Tensor  # [T] int32
    blocks: Tensor  # [1 + B, 3] int32
    max_loras: int  # adapters of one step


def max_blocks(num_rows: int, max_loras: int) -> int:
    """Return a bound of the blocks that so many rows of so many adapters make: each adapter's last one may be short."""
    return min(num_rows, (num_rows + max_loras * (BLOCK_ROWS - 1)) // BLOCK_ROWS)


class TritonLoRA(LoRAWeights):
    """Slots at fixed addresses: what a captured graph reads is whatever they hold.

    Args:
        part_sizes: outputs of each part.
        num_slots: adapters that fit; their memory is taken at once.
        empty: takes memory of the device.
    """

    def __init__(
        self,
        part_sizes: Sequence[int],
        num_in: int,
        num_slots: int,
        max_rank: int,
        empty: Callable[[Sequence[int], torch.dtype], Tensor],
        dtype: torch.dtype,
    ) -> None:
        rank, num_parts = rounded_rank(max_rank), len(part_sizes)
        self._part_sizes = tuple(part_sizes)
        self.a = empty((num_slots, num_parts, rank, num_in), dtype)
        self.b = empty((num_slots, sum(part_sizes), rank), dtype)
        self.ranks = empty((num_slots + 1,), torch.int32).zero_()
        found = _tiles(part_sizes)
        self.tiles = empty((len(found), 3), torch.int32)
        self.tiles.copy_(torch.tensor(found, dtype=torch.int32))

    def load(self, slot: int, parts: Sequence[LowRank | None]) -> None:
        rank = rounded_rank(max((len(part.a_RI) for part in parts if part is not None), default=0))
        a_PRI = torch.zeros((len(parts), rank, self.a.shape[3]), dtype=self.a.dtype)
        b_OR = torch.zeros((self.b.shape[1], rank), dtype=self.b.dtype)
        first = 0
        for number, (part, size) in enumerate(zip(parts, self._part_sizes, strict=True)):
            if part is not None:
                own = len(part.a_RI)
                a_PRI[number, :own] = part.a_RI
                b_OR[first : first + size, :own] = part.b_OR
            first += size
        self.a[slot - 1, :, :rank].copy_(a_PRI)
        self.b[slot - 1, :, :rank].copy_(b_OR)
        self.ranks[slot].fill_(rank)

    def clear(self, slot: int) -> None:
        self.ranks[slot].fill_(0)

    def move(self, place: Callable[[Tensor], Tensor]) -> None:
        """Put the slots where `place` puts them."""
        self.a, self.b, self.ranks, self.tiles = map(
            place, (self.a, self.b, self.ranks, self.tiles)
        )

    def add_to(self, y_TO: Tensor, x_TI: Tensor, rows: DeviceRows | None) -> None:
        if rows is None:
            return
        order, blocks, max_loras = rows
        bound = max_blocks(len(x_TI), max_loras)
        h_CTX = lora_shrink(x_TI, self.a, self.ranks, order, blocks, max_blocks=bound)
        lora_expand_(y_TO, h_CTX, self.b, self.ranks, self.tiles, order, blocks, max_blocks=bound)


def _tiles(part_sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """List part, first output and the part's end of each tile of outputs."""
    found: list[tuple[int, int, int]] = []
    begin = 0
    for part, size in enumerate(part_sizes):
        found += [(part, first, begin + size) for first in range(begin, begin + size, BLOCK_N)]
        begin += size
    return found
