"""A token for each row: the arg max over tokens of logit / temperature + Gumbel noise, in one pass.

    logits [R, V]   float32, rows may be strided; V of at least 16
    temperature [R] float32
    keys [2, R]     uint32, see `noise.row_keys`
    token [R]       int64; the first of equals, 0 when all are -inf; what is not a number is never drawn

Law: a row's token depends on its own row alone.  The noise is `noise.gumbel`'s up to rounding.

Roofline: bytes = 4 R V, and about 60 instructions for 16 tokens, which is what bounds it.
"""

import math

import numpy as np
import torch
from torch import Tensor

from trouper.kernels import launch
from trouper.kernels.noise import MULTIPLIERS, gumbel, row_keys
from trouper.kernels.simd import LANES, Code, Value

TOKENS_PER_THREAD = 2**15  # 30 µs; to wake a second thread costs 3
SQRT_HALF = 0.707106781186547524
# log(1 + f) = f - f²/2 + f³ P(f) on [√½ - 1, √2 - 1], of Cephes' logf
LOG = (
    3.3333331174e-1, -2.4999993993e-1, 2.0000714765e-1, -1.6668057665e-1, 1.4249322787e-1,
    -1.2420140846e-1, 1.1676998740e-1, -1.1514610310e-1, 7.0376836292e-2,
)  # fmt: skip
LN2 = 0.693359375, -2.12194440e-4  # high and low part


def draw(
    logits_RV: Tensor, temperature_R: Tensor, seeds: np.ndarray, positions: np.ndarray
) -> Tensor:
    """Tokens [R], int64.

    Args:
        logits_RV: float32.
        temperature_R: float32, above 0.
        seeds: [R] uint64.
        positions: [R], of the token that is to be drawn.
    """
    assert logits_RV.dtype == temperature_R.dtype == torch.float32
    num_rows, vocab_size = logits_RV.shape
    if not launch.is_available() or vocab_size < LANES:
        return draw_reference(logits_RV, temperature_R, seeds, positions)
    keys = np.stack(row_keys(seeds, positions))
    token_R = torch.empty(num_rows, dtype=torch.int64)
    is_long = num_rows * vocab_size >= 2 * TOKENS_PER_THREAD
    launch.compiled(draw_rows)(
        num_rows,
        logits_RV.data_ptr(),
        logits_RV.stride(0),
        temperature_R.data_ptr(),
        keys.ctypes.data,
        token_R.data_ptr(),
        num_rows,
        vocab_size,
        num_threads=torch.get_num_threads() if is_long else 1,
    )
    return token_R


def draw_rows(code: Code) -> None:
    """Logits, their stride, temperatures, keys, tokens, R, V.  A piece is a row."""
    logits, stride, temperature, keys, tokens, num_rows, length = code.arguments(7)
    for row in code.pieces():
        values = code.pointer(logits, "f32") + row * stride
        divisor = code.lanes((code.pointer(temperature, "f32") + row)[0])
        both = code.pointer(keys, "i32") + row
        key0, key1 = code.words(both[0]), code.words(both[num_rows])
        best, at = code.var(code.lanes(-math.inf)), code.var(code.words(0))
        for start in code.loop(0, length + (LANES - 1), LANES):
            first = code.smaller(start, length - LANES)  # the last sixteen overlap those before
            ids = code.words(code.narrowed(first, "i32")) + code.steps()
            x = values.load(first) / divisor + _gumbel(code, _hash32(ids, key0, key1))
            is_better = x > best
            at.set(code.select(is_better, ids, at))
            best.set(code.select(is_better, x, best))
        is_best = best.equals(code.lanes(code.max_of(best)))
        others = code.select(is_best, 0 - at, -(2**31))
        code.pointer(tokens, "i64")[row] = 0 - code.widened(code.max_of(others))


def _hash32(x: Value, key0: Value, key1: Value) -> Value:
    """`noise.hash32`."""
    first, second = MULTIPLIERS
    x = x ^ key0
    x = (x ^ _shifted(x, 16)) * first + key1
    x = (x ^ _shifted(x, 15)) * second
    return x ^ _shifted(x, 16)


def _shifted(x: Value, count: int) -> Value:
    """To the right, zeros from the left."""
    return (x >> count) & (2 ** (32 - count) - 1)


def _gumbel(code: Code, bits: Value) -> Value:
    u = (code.numbers(_shifted(bits, 9)) + 0.5) * 2.0**-23
    return 0.0 - _log(code, 0.0 - _log(code, u))


def _log(code: Code, x: Value) -> Value:
    """Of positive normal numbers."""
    exponent, half_to_one = code.split(x)
    is_low = half_to_one < SQRT_HALF
    f = code.select(is_low, half_to_one + half_to_one, half_to_one) - 1.0
    e = code.numbers(code.select(is_low, exponent - 1, exponent))
    power = code.lanes(LOG[-1])
    for c in reversed(LOG[:-1]):
        power = code.fma(power, f, code.lanes(c))
    square = f * f
    tail = code.fma(e, code.lanes(LN2[1]), power * f * square) - 0.5 * square
    return code.fma(e, code.lanes(LN2[0]), f + tail)


def draw_reference(
    logits_RV: Tensor, temperature_R: Tensor, seeds: np.ndarray, positions: np.ndarray
) -> Tensor:
    vocabulary = np.arange(logits_RV.shape[1], dtype=np.uint32)
    noisy_RV = logits_RV / temperature_R.unsqueeze(1) + gumbel(seeds, positions, vocabulary)
    return torch.from_numpy(noisy_RV.numpy().argmax(-1))
