"""The Gumbel noise of `kernels/reference/noise.py` on the device: the same bits, logarithms within an ulp or two.

Device code of `sample`.  The hardware's logarithm is useless near one, where the largest noise comes
from (its error is 2⁻²² absolute), so `log` is Cephes' logf: an exact split and a polynomial.

Roofline: about 12 integer and 60 float operations a token, nothing read.
"""

import triton
import triton.language as tl

_A = tl.constexpr(0x7FEB352D)
_B = tl.constexpr(0x846CA68B)


@triton.jit
def gumbel(key0, key1, token_ids):
    """Return float32, for the row's keys and any block of token ids; see `row_keys`."""
    bits = hash32(token_ids.to(tl.uint32), key0, key1) >> 9
    return -log(-log((bits.to(tl.float32) + 0.5) * 1.1920928955078125e-07))  # 2⁻²³


@triton.jit
def row_keys(seed, position):
    """Return two uint32 words for a seed (int64) and a position (int32)."""
    low = seed.to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    mixed = hash32(hash32(position.to(tl.uint32), low, high), high, low)
    return mixed, hash32(mixed ^ low, high, low ^ low)


@triton.jit
def hash32(x, key0, key1):
    x = x ^ key0
    x = x ^ (x >> 16)
    x = x * _A + key1
    x = x ^ (x >> 15)
    x = x * _B
    return x ^ (x >> 16)


@triton.jit
def log(x):
    """Return the logarithm of normal positive float32; relative error below 2⁻²³ also near one."""
    bits = x.to(tl.int32, bitcast=True) - 0x3F3504F3  # √½, so that the rest is in [√½, √2)
    exponent = (bits >> 23).to(tl.float32)
    f = ((bits & 0x7FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True) - 1.0
    y = f * 7.0376836292e-2 - 1.1514610310e-1
    y = y * f + 1.1676998740e-1
    y = y * f - 1.2420140846e-1
    y = y * f + 1.4249322787e-1
    y = y * f - 1.6668057665e-1
    y = y * f + 2.0000714765e-1
    y = y * f - 2.4999993993e-1
    y = y * f + 3.3333331174e-1
    square = f * f
    y = y * f * square - 2.12194440e-4 * exponent - 0.5 * square
    return f + y + 0.693359375 * exponent
