"""y = act(g) · u for the two halves g, u of a fused gate-and-up product, in Numba; see `act_mul.py`.

    gate_up [T, 2 M] -> y [T, M],  M a multiple of 16

silu(g) = g / (1 + e^-g);  gelu's tanh form is g / (1 + e^(-2 a (g + b g³))), a = √(2 / π), b = 0.044715.

Roofline: bytes = 3 e T M, FLOPs ≈ 20 T M.
Measured, one EPYC core, M = 3072, bf16: 27 µs for 16 rows, 40 in torch.
"""

import functools
import math

import numpy as np
from numba import types

from trouper.kernels import simd
from trouper.kernels.launch import Kernel, compiled
from trouper.kernels.simd import LANES, inner

LOG2_E = np.float32(math.log2(math.e))
GELU_A = np.float32(2 * math.sqrt(2 / math.pi) * math.log2(math.e))
GELU_B = np.float32(0.044715)


@inner
def _gated(args, dtype):
    """args: gate_up, y, M, is_gelu.  A piece is a row."""
    width = args[5]
    one = simd.fill(np.float32(1.0))
    while True:
        row = simd.fetch_add(args)
        if row >= args[2]:
            break
        gates = simd.at(simd.pointer(args[3], dtype), row * 2 * width)
        ups = simd.at(gates, width)
        y = simd.at(simd.pointer(args[4], dtype), row * width)
        for d in range(0, width, LANES):
            g = simd.load(gates, d)
            power = simd.mul(g, simd.fill(-LOG2_E))
            if args[6] != 0:
                cube = simd.fma(simd.mul(g, g), simd.fill(GELU_B), one)
                power = simd.mul(simd.mul(g, cube), simd.fill(-GELU_A))
            act = simd.div(g, simd.add(one, simd.exp2(power)))
            simd.store(y, d, simd.mul(act, simd.load(ups, d)))


def gated_bf16(args):
    _gated(args, types.uint16)


def gated_f32(args):
    _gated(args, types.float32)


@functools.cache
def gated_kernel(dtype: str) -> Kernel:
    return compiled({"bfloat16": gated_bf16, "float32": gated_f32}[dtype])
