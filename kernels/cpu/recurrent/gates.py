"""The kernels behind a recurrence or an attention: norms with a gate, and gates without a norm.

    gated_norm    y = rms(x) w ⊙ silu(z), or rms(x ⊙ silu(z)) w        x, y [T, groups · D], z strided, w float32
    mul_sigmoid   y = x ⊙ σ(z)                                         x, y [T, D], x and z strided

D is a multiple of 16.

Roofline: 3 e T D bytes and about 25 FLOPs a number.
"""

from functools import partial

from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.core import Pointer, Value
from trouper.kernels.codegen.units import LANES, Kind
from trouper.kernels.cpu.norms import activated, row_norm
from trouper.kernels.cpu.recurrent.entries import sigmoid


def gated_norm(code: KernelBuilder, kind: Kind, is_gate_first: bool) -> None:
    """Write the kernel with the arguments x, its stride, z, its stride, w, weights from a group to the next, y, its
    stride, groups, D, ε.  A work item is a group of a row.
    """
    xs, x_stride, zs, z_stride, ws, w_step, ys, y_stride, num_groups, width, eps = code.arguments(
        11
    )
    eps = code.f32_argument(eps)
    for item in code.work_items():
        row, group = item // num_groups, item % num_groups
        x = code.pointer(xs, kind) + (row * x_stride + group * width)
        z = code.pointer(zs, kind) + (row * z_stride + group * width)
        y = code.pointer(ys, kind) + (row * y_stride + group * width)
        weight = code.pointer(ws, "f32") + group * w_step

        gate = partial(_silu, code, z)
        load = partial(_gated, code, x, z) if is_gate_first else x.load
        normed = row_norm(code, load, width, weight, eps, "rms")
        for d in code.loop(0, width, LANES):
            y.store(d, normed(d) if is_gate_first else normed(d) * gate(d))


def _silu(code: KernelBuilder, z: Pointer, d: Value) -> Value:
    return activated(code, z.load(d), "silu")


def _gated(code: KernelBuilder, x: Pointer, z: Pointer, d: Value) -> Value:
    return x.load(d) * _silu(code, z, d)


def mul_sigmoid(code: KernelBuilder, kind: Kind) -> None:
    """Write the kernel with the arguments x, its stride, z, its stride, y, its stride, D.  A work item is a row."""
    xs, x_stride, zs, z_stride, ys, y_stride, width = code.arguments(7)
    for row in code.work_items():
        x, z = code.pointer(xs, kind) + row * x_stride, code.pointer(zs, kind) + row * z_stride
        y = code.pointer(ys, kind) + row * y_stride
        for d in code.loop(0, width, LANES):
            y.store(d, x.load(d) * sigmoid(code, z.load(d)))
