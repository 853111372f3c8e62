"""Measure what this machine can do at most: reading memory, and multiplying matrices."""

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch

from trouper.kernels.select import make_linear

SAMPLE_S = 0.02  # a sample repeats the call for at least so long
NUM_SAMPLES = 7


class Roofs(NamedTuple):
    """In bytes and operations per second."""

    bytes_s: float
    flops_s: float

    def share(self, num_bytes: float, num_flops: float, seconds: float) -> float:
        """The least time that either roof allows, as a share of the time taken."""
        return max(num_bytes / self.bytes_s, num_flops / self.flops_s) / seconds


def measure_roofs(dtype: torch.dtype, *, read_bytes: int = 2**29, gemm: int = 2048) -> Roofs:
    """The best of several tries.

    Args:
        read_bytes: size of the array that is summed; larger than every cache.
        gemm: side of the square matrices, multiplied as `kernels/linear` does.
    """
    array = torch.ones(read_bytes // 4, dtype=torch.float32)
    read_s = min(samples(lambda: array.sum()))
    layer = make_linear(torch.randn(gemm, gemm).to(dtype))
    x = torch.randn(gemm, gemm).to(dtype)
    gemm_s = min(samples(lambda: layer.apply(x)))
    return Roofs(array.numel() * 4 / read_s, 2 * gemm**3 / gemm_s)


def seconds_of(call: Callable[[], object], sample_s: float = SAMPLE_S) -> float:
    """Median time of one call."""
    return median(samples(call, sample_s))


def once(call: Callable[[], object]) -> float:
    started = perf_counter()
    call()
    return perf_counter() - started


def samples(call: Callable[[], object], sample_s: float = SAMPLE_S) -> list[float]:
    call()
    started = perf_counter()
    call()
    num = max(1, int(sample_s / max(perf_counter() - started, 1e-7)))
    times = []
    for _ in range(NUM_SAMPLES):
        started = perf_counter()
        for _ in range(num):
            call()
        times.append((perf_counter() - started) / num)
    return times
