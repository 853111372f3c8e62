"""The layout of the memory that ranks share; importing it needs neither llvmlite nor torch."""

from typing import NamedTuple

LINE = 8  # int64 of a cache line
CONTROL = 2 * LINE  # of a rank
PAGE = 4096
FLOAT_BYTES = 4


class ExchangeSizes(NamedTuple):
    """The sizes of what the ranks of a group share."""

    num_ranks: int
    part_bytes: int  # of the largest part of a sum: the rows of a step
    sheet_numbers: int = 0  # float32 of the largest sheet of logits

    @property
    def parts_offset(self) -> int:
        return whole_pages(self.num_ranks * CONTROL * 8)

    @property
    def sheet_offset(self) -> int:
        return self.parts_offset + 2 * self.num_ranks * whole_pages(self.part_bytes)

    @property
    def num_bytes(self) -> int:
        return self.sheet_offset + whole_pages(self.sheet_numbers * FLOAT_BYTES)


def whole_pages(num_bytes: int) -> int:
    """Round up to pages."""
    return -(-num_bytes // PAGE) * PAGE
