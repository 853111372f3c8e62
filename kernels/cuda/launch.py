"""Helpers of all launchers: launch configurations, the type of dot products, and the column of a ragged batch.

A table of configurations is keyed by device and by the largest size of a bucket.  Nothing is timed at run time, so a
launch is the same in every run and can be captured.  A device without its own rows uses Hopper's.

    bounds [C + 1]  int32: the tokens of column i are bounds[i] … bounds[i + 1] - 1 of the flat batch;
                    columns that pad the batch to a captured size are empty and last
"""

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl

# The value that `triton.jit` read when the kernels were decorated.
INTERPRETED = triton.knobs.runtime.interpret

# Triton's default changes in 3.10, which would change numerics.
OPTIONS = {"enable_fp_fusion": True}
# For kernels that merge a few numbers in a program.
MERGE = {"num_warps": 1, **OPTIONS}

# The constants of a kernel, `num_warps` and `num_stages`.
Config = Mapping[str, int]
# For each device, configurations by their largest size, in rising order.
Table = Mapping[str, Sequence[tuple[int, Config]]]


def config_of(table: Table, device: torch.device, size: int) -> Config:
    """Return the first row of the device's table with a bucket that holds `size`.

    Raises:
        ValueError: the size exceeds every bucket.
    """
    rows = table.get(_architecture(device), table["sm_90"])
    for largest, config in rows:
        if size <= largest:
            return {**config, **OPTIONS}
    raise ValueError(f"no launch configuration for size {size}: the largest is {rows[-1][0]}")


def dot_type(dtype: torch.dtype) -> tl.dtype:
    """Return the type in which matrices are multiplied.

    Triton's interpreter cannot multiply bfloat16, so it uses float32.
    """
    if INTERPRETED or dtype == torch.float32:
        return tl.float32
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float16


def _architecture(device: torch.device) -> str:
    # The kernel is interpreted, or only compiled.
    if device.type != "cuda":
        return "sm_90"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@triton.jit
def column_of(bounds_ptr, num_columns, index, BLOCK: tl.constexpr):
    """Return the column of the `index`-th block, if each column has at most count // BLOCK + 1 blocks.

    Column i's blocks begin at bounds[i] // BLOCK + i; with BLOCK = 0 they are its tokens.
    """
    low = 0
    high = num_columns
    while low < high:
        middle = (low + high) // 2
        bound = tl.load(bounds_ptr + middle)
        if BLOCK > 0:
            bound = bound // BLOCK + middle
        low = tl.where(bound <= index, middle + 1, low)
        high = tl.where(bound <= index, high, middle)
    return low - 1
