"""The layout of the memory that ranks on one machine share.

The memory has three parts: control words of each rank, two buffers of each rank for its part of a sum, and one sheet
for rows of logits.  The process that starts the ranks allocates it, so this module imports neither llvmlite nor torch.
"""

from typing import NamedTuple

LINE = 8  # int64 in a cache line
CONTROL = 2 * LINE  # int64 for each rank
PAGE = 4096
FLOAT_BYTES = 4


class ExchangeSizes(NamedTuple):
    """The sizes of the buffers that a group of ranks shares.

    The processes compute them independently from the config, so they agree on all addresses.
    """

    num_ranks: int
    part_bytes: int  # largest part of a sum: all rows of a step
    sheet_numbers: int = 0  # float32 in the sheet of logits

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
    """Round up to whole pages."""
    return -(-num_bytes // PAGE) * PAGE
