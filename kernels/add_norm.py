"""x += α · y, in place, and then  z = x / √(mean(x²) + ε) · w : a residual sum and the next norm, in Numba.

    x, y, z [T, D]   rows contiguous, D a multiple of 16;  w [D] float32;  y may be absent

The sum is rounded to x's dtype before it is squared, as two calls would do.

Roofline: bytes = 4 e T D, FLOPs = 6 T D; 0.3 µs a row of 1024 bfloat16 from cache.
Measured, one EPYC core: 9 µs for 16 rows, 26 in torch.
"""

import functools

import numpy as np
from numba import types

from trouper.kernels import simd
from trouper.kernels.launch import Kernel, compiled
from trouper.kernels.simd import LANES, inner


@inner
def _add_norm(args, dtype):
    """args: x, y or 0, w, z, D, α, ε.  A piece is a row."""
    width, alpha, eps = args[7], simd.float_of(args[8]), simd.float_of(args[9])
    weight = simd.pointer(args[5], types.float32)
    while True:
        row = simd.fetch_add(args) * width
        if row >= args[2] * width:
            break
        x, z = (
            simd.at(simd.pointer(args[3], dtype), row),
            simd.at(simd.pointer(args[6], dtype), row),
        )
        total = simd.fill(np.float32(0.0))
        if args[4] != 0:
            y = simd.at(simd.pointer(args[4], dtype), row)
            for d in range(0, width, LANES):
                summed = simd.fma(simd.load(y, d), simd.fill(alpha), simd.load(x, d))
                simd.store(x, d, summed)
                summed = simd.load(x, d)
                total = simd.fma(summed, summed, total)
        else:
            for d in range(0, width, LANES):
                value = simd.load(x, d)
                total = simd.fma(value, value, total)
        mean = simd.sum_of(total) / np.float32(width)
        inverse = simd.fill(np.float32(1.0) / np.sqrt(mean + eps))
        for d in range(0, width, LANES):
            scaled = simd.mul(simd.mul(simd.load(x, d), inverse), simd.load(weight, d))
            simd.store(z, d, scaled)


def add_norm_bf16(args):
    _add_norm(args, types.uint16)


def add_norm_f32(args):
    _add_norm(args, types.float32)


@functools.cache
def add_norm_kernel(dtype: str) -> Kernel:
    return compiled({"bfloat16": add_norm_bf16, "float32": add_norm_f32}[dtype])
