"""The roofs of a CUDA device, and its clock: events on the stream, with nothing left in the L2 cache."""

from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from trouper.bench import roofs
from trouper.bench.roofs import Roofs

NUM_CUDA_SAMPLES = 30
NUM_WARM_UPS = 3  # the first call may compile
# Several times the L2; and while it is written, the launches that follow are queued.
FLUSH_BYTES = 2**29


class DeviceClock:
    """Callable: median seconds of one call, on the device."""

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
    """The best of several copies, of bytes read and written, and products of square random matrices."""
    source = torch.empty(copy_bytes, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    copy_s = min(clock.samples(lambda: target.copy_(source)))
    a, b = torch.randn(2, gemm, gemm, device="cuda", dtype=dtype)
    gemm_s = min(clock.samples(lambda: a @ b))
    return Roofs(2 * copy_bytes / copy_s, 2 * gemm**3 / gemm_s)


def clock_and_roofs(
    device: str, dtype: str, *, roof_mib: int | None, roof_gemm: int | None, sample_s: float
) -> tuple[Callable[[Callable[[], object]], float], Roofs]:
    """Make the clock that times an operation on the device, "cpu", "cuda" or "interpreter" (once, on the CPU)."""
    number: torch.dtype = getattr(torch, dtype)
    if device == "cuda":
        clock = DeviceClock()
        num_bytes = (roof_mib or 4096) * 2**20
        return clock, measure_cuda_roofs(
            clock, number, copy_bytes=num_bytes, gemm=roof_gemm or 8192
        )
    found = roofs.measure_roofs(
        number, read_bytes=(roof_mib or 512) * 2**20, gemm=roof_gemm or 2048
    )
    is_cpu = device == "cpu"
    return partial(roofs.seconds_of, sample_s=sample_s) if is_cpu else roofs.once, found
