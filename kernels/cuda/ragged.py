"""Which column of a ragged batch something belongs to: device code of several kernels.

bounds [C + 1]  int32: the tokens of column i are bounds[i] … bounds[i + 1] - 1 of the flat batch;
                columns that pad the batch to a captured size are empty and lie at its end
"""

import triton
import triton.language as tl


@triton.jit
def column_of(bounds_ptr, num_columns, index, BLOCK: tl.constexpr):
    """Return the column of the `index`-th block, when each column has count // BLOCK + 1 blocks or fewer.

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
