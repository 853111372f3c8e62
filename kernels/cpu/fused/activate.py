"""y = act(x), of an MLP without a gate; the activations are those of `act_and_mul.py`.

    x [T, M] -> y [T, M],  M a multiple of 16, rows of y may be strided

Roofline: bytes = 2 e T M, FLOPs ≈ 20 T M.
"""

from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.units import LANES, Kind
from trouper.kernels.cpu.fused.act_and_mul import activated
from trouper.kernels.formats import Activation


def activate(code: KernelBuilder, kind: Kind, activation: Activation) -> None:
    """Write the kernel of the arguments x, y, its stride, M.  A piece is a row."""
    xs, ys, stride, width = code.arguments(4)
    for row in code.pieces():
        x = code.pointer(xs, kind) + row * width
        y = code.pointer(ys, kind) + row * stride
        for d in code.loop(0, width, LANES):
            y.store(d, activated(code, x.load(d), activation))
