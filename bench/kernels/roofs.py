"""Measure the limits ("roofs") of a processor or GPU, the rates of reading memory and of multiplying matrices, and time calls.

Rates in data sheets are not reached on shared machines, so operations are compared with rates measured in the same
process. A CUDA device is timed by events on the stream, with an empty L2 cache.
"""

from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch

from trouper.kernels.select import make_linear

# A sample repeats the call for at least this many seconds.
SAMPLE_S = 0.02
NUM_SAMPLES = 7


class Roofs(NamedTuple):
    """The limits of a machine, in bytes and floating-point operations per second.

    They are measured on this machine, not taken from a data sheet. Results are compared with them.
    """

    bytes_s: float
    flops_s: float

    def share(self, num_bytes: float, num_flops: float, seconds: float) -> float:
        """Return the least time that either limit allows, divided by the measured time.

        1 means that the operation is as fast as the machine allows.
        """
        return max(num_bytes / self.bytes_s, num_flops / self.flops_s) / seconds


def measure_roofs(dtype: torch.dtype, *, read_bytes: int = 2**29, gemm: int = 2048) -> Roofs:
    """Measure the limits of the CPU, as the best of several samples.

    Args:
        read_bytes: size of an array to sum; it must exceed all caches.
        gemm: side of square matrices, multiplied by the same kernels as in a model.
    """
    array = torch.ones(read_bytes // 4, dtype=torch.float32)
    read_s = min(samples(lambda: array.sum()))
    layer = make_linear(torch.randn(gemm, gemm).to(dtype))
    x = torch.randn(gemm, gemm).to(dtype)
    gemm_s = min(samples(lambda: layer.apply(x)))
    return Roofs(array.numel() * 4 / read_s, 2 * gemm**3 / gemm_s)


def seconds_of(call: Callable[[], object], sample_s: float = SAMPLE_S) -> float:
    """Return the median time of one call in seconds.

    The median of several samples is hardly affected by interruptions of a shared machine. `sample_s` is the time of
    one sample.
    """
    return median(samples(call, sample_s))


def once(call: Callable[[], object]) -> float:
    """Return the time of a single call in seconds, for calls too slow to repeat.

    The interpreter of Triton takes seconds for each call. It includes everything.
    """
    started = perf_counter()
    call()
    return perf_counter() - started


def samples(call: Callable[[], object], sample_s: float = SAMPLE_S) -> list[float]:
    """Return `NUM_SAMPLES` times of one call, each the mean over at least `sample_s` seconds.

    The first calls warm up caches and are not counted. Each is in seconds.
    """
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


NUM_CUDA_SAMPLES = 30
# The first call may compile.
NUM_WARM_UPS = 3
# Several times the L2 cache.  While it is written, the following launches are queued, so launching costs no time.
FLUSH_BYTES = 2**29


class DeviceClock:
    """Returns the median seconds of one call on the CUDA device.

    It uses events of the device, because calls return before the work is done.
    """

    def __init__(self) -> None:
        self._flushed = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def __call__(self, call: Callable[[], object]) -> float:
        return median(self.samples(call))

    def samples(self, call: Callable[[], object]) -> list[float]:
        for _ in range(NUM_WARM_UPS):
            call()
        events = [
            [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            for _ in range(NUM_CUDA_SAMPLES)
        ]
        for begin, end in events:
            self._flushed.zero_()
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1000 for begin, end in events]


def measure_cuda_roofs(
    clock: DeviceClock, dtype: torch.dtype, *, copy_bytes: int, gemm: int
) -> Roofs:
    """Measure the limits of a CUDA device: copies (bytes read plus written) and products of random square matrices."""
    source = torch.empty(copy_bytes, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    copy_s = min(clock.samples(lambda: target.copy_(source)))
    a, b = torch.randn(2, gemm, gemm, device="cuda", dtype=dtype)
    gemm_s = min(clock.samples(lambda: a @ b))
    return Roofs(2 * copy_bytes / copy_s, 2 * gemm**3 / gemm_s)


def clock_and_roofs(
    device: str, dtype: str, *, roof_mib: int | None, roof_gemm: int | None, sample_s: float
) -> tuple[Callable[[Callable[[], object]], float], Roofs]:
    """Return a clock for the device ("cpu", "cuda" or "interpreter") and the device's limits.

    The interpreter runs each call only once, on the CPU.
    """
    number: torch.dtype = getattr(torch, dtype)
    if device == "cuda":
        clock = DeviceClock()
        num_bytes = (roof_mib or 4096) * 2**20
        return clock, measure_cuda_roofs(
            clock, number, copy_bytes=num_bytes, gemm=roof_gemm or 8192
        )
    found = measure_roofs(number, read_bytes=(roof_mib or 512) * 2**20, gemm=roof_gemm or 2048)
    is_cpu = device == "cpu"
    return partial(seconds_of, sample_s=sample_s) if is_cpu else once, found
