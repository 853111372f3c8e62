"""y[t, i] = x[t, order[i]]: the inputs of a matrix whose columns were sorted, in the order of its columns.

    x [T, I]   bfloat16, rows may be strided;  order [I] int64;  y [T, I]

Roofline: bytes = 4 T I + 8 I.  One launch, which a recording holds, where torch's call lets go of the interpreter.
"""

import torch
from torch import Tensor

from trouper.kernels.codegen import launch
from trouper.kernels.codegen.builder import KernelBuilder


def gathered(x_TI: Tensor, order_I: Tensor) -> Tensor:
    """Return the columns of x in another order."""
    y_TI = x_TI.new_empty(x_TI.shape)
    launch.compiled(gather_columns)(
        len(x_TI),
        x_TI.data_ptr(),
        x_TI.stride(0),
        order_I.data_ptr(),
        len(order_I),
        y_TI.data_ptr(),
        num_threads=torch.get_num_threads(),
    )
    return y_TI


def gather_columns(code: KernelBuilder) -> None:
    """Write the kernel of the arguments x, its stride, order, I, y.  A piece is a row."""
    xs, stride, order, width, ys = code.arguments(5)
    place = code.pointer(order, "i64")
    for row in code.pieces():
        x = code.pointer(xs, "i16") + row * stride
        y = code.pointer(ys, "i16") + row * width
        for i in code.loop(0, width):
            y[i] = x[place[i]]
