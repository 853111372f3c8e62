"""x += α · y, in place, and then  z = x / √(mean(x²) + ε) · w : a residual sum and the next norm.

    x, y, z [T, D]   D a multiple of 16, rows may be strided;  w [D] float32;  y may be absent, or w and z

The sum is rounded to x's dtype before it is squared, as two calls would do.

Roofline: bytes = 4 e T D, FLOPs = 6 T D; 0.3 µs a row of 1024 bfloat16 from cache.
Measured, one EPYC core: 9 µs for 16 rows, 26 in torch.
"""

from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.units import LANES, Kind


def fused_add_rms_norm(code: KernelBuilder, kind: Kind) -> None:
    """Write the kernel of the arguments x, its stride, y or 0, its stride, w or 0, z, its stride, D, α, ε.  A piece is a row."""
    xs, x_stride, ys, y_stride, weights, zs, z_stride, width, alpha, eps = code.arguments(10)
    alpha, eps = code.f32_argument(alpha), code.f32_argument(eps)
    weight = code.pointer(weights, "f32")
    for row in code.pieces():
        x = code.pointer(xs, kind) + row * x_stride
        z = code.pointer(zs, kind) + row * z_stride
        with code.when(ys > 0):
            y = code.pointer(ys, kind) + row * y_stride
            for d in code.loop(0, width, LANES):
                x.store(d, code.fma(alpha, y.load(d), x.load(d)))
        with code.when(weights > 0):
            total = code.var(code.f32x16(0.0))
            for d in code.loop(0, width, LANES):
                value = x.load(d)
                total.set(code.fma(value, value, total))
            inverse = 1.0 / code.sqrt(code.reduce_sum(total) / code.f32(width) + eps)
            for d in code.loop(0, width, LANES):
                z.store(d, x.load(d) * inverse * weight.load(d))
