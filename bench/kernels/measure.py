"""Measure operations at a model's shapes and compare them with the limits ("roofs") of a processor or GPU.

An operation is a function from `Shapes` to `Case`s: a call, the reference for its result, and the bytes and FLOPs it
needs. A wrong result is an error instead of a figure, so a fast but broken kernel never appears in a table. `cpu.py` and
`cuda.py` have the operations.

The roofs are the rates of reading memory and of multiplying matrices. Rates in data sheets are not reached on shared machines, so
operations are compared with rates measured in the same process. A CUDA device is timed by events on the stream, with an empty
L2 cache.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trouper.errors import TrouperError
from trouper.kernels.ops import CpuOps, OpsConfig
from trouper.kernels.select import make_linear, make_ops

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
    """Return the time of a single call in seconds, for calls too slow to repeat, such as those in Triton's interpreter.

    There is no warm-up call.
    """
    started = perf_counter()
    call()
    return perf_counter() - started


def samples(call: Callable[[], object], sample_s: float = SAMPLE_S) -> list[float]:
    """Return `NUM_SAMPLES` times of one call in seconds, each the mean over at least `sample_s` seconds.

    The first calls warm up caches and are not counted.
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


EPS = 1e-6
TOLERANCE = {
    torch.float32: 1e-4,
    torch.bfloat16: 3e-2,
    torch.float16: 3e-3,
}  # relative to the largest
# The most compared outputs of a product: a vocabulary in float64 takes a gigabyte.
NUM_CHECKED_OUTPUTS = 1024


class WrongResultError(TrouperError):
    """A kernel's result differs from its reference's.

    Its speed is then not reported, because a wrong kernel may be fast for the wrong reason. The message names the
    case.
    """


class Shapes(NamedTuple):
    """The sizes of a model and of one step; the defaults are Qwen3-0.6B's.

    Attributes:
        context: cached tokens of each decoding sequence.
        cold_bytes: weights and caches are copied until they fill this much memory, and the copies are read alternately.
    """

    dtype: torch.dtype = torch.bfloat16
    hidden: int = 1024
    mlp: int = 3072
    num_q: int = 16
    num_kv: int = 8
    width: int = 128
    vocab: int = 151_936
    block_size: int = 128
    context: int = 1024
    num_tokens: int = 1
    cold_bytes: int = 2**28
    device: str = "cpu"

    def copies(self, num_bytes: int) -> int:
        """Return how many copies of an array fill `cold_bytes`, so that it comes from memory as in a real step.

        Successive calls use different copies.
        """
        return max(1, self.cold_bytes // num_bytes)

    @property
    def item(self) -> int:
        return self.dtype.itemsize

    def ops(self) -> CpuOps:
        """Create the operations for a model of these shapes. They are the same objects that an engine uses."""
        return make_ops(
            OpsConfig(
                dtype=self.dtype,
                num_q_heads=self.num_q,
                num_kv_heads=self.num_kv,
                head_dim=self.width,
                hidden_size=self.hidden,
                intermediate_size=self.mlp,
                block_size=self.block_size,
                norm_eps=EPS,
                residual_scale=1.0,
                activation="silu",
                scale=self.width**-0.5,
                softcap=None,
            )
        )

    @classmethod
    def of(cls, config: dict[str, Any], **more: Any) -> "Shapes":
        """Read the sizes of a model from its config.json.

        `more` are the other fields, such as the number of tokens and the dtype. Missing fields are derived.
        """
        num_q = int(config["num_attention_heads"])
        return cls(
            hidden=int(config["hidden_size"]),
            mlp=int(config["intermediate_size"]),
            num_q=num_q,
            num_kv=int(config.get("num_key_value_heads") or num_q),
            width=int(config.get("head_dim") or int(config["hidden_size"]) // num_q),
            vocab=int(config["vocab_size"]),
            **more,
        )


class Case(NamedTuple):
    """One call to measure.

    Attributes:
        run: the call; it may write in place.
        reference: called once, before `run`; it may return only the first rows and columns of the result.
        num_repeats: how often `run` executes the operation.
    """

    shape: str
    run: Callable[[], Tensor]
    reference: Callable[[], Tensor]
    num_bytes: float
    num_flops: float
    num_repeats: int = 1


Operation = Callable[[Shapes], Iterable[Case]]


def shapes(
    config: dict[str, Any] | None, num_tokens: Sequence[int], *, dtype: str, **more: Any
) -> list[Shapes]:
    """Return the shapes of a step for each number of tokens; without a config.json those of Qwen3-0.6B.

    They determine the sizes of all measured operations.
    """
    options: dict[str, Any] = {"dtype": getattr(torch, dtype), **more}
    make = Shapes if config is None else partial(Shapes.of, config)
    return [make(num_tokens=num, **options) for num in num_tokens]


def measure(
    shapes: Sequence[Shapes],
    roofs: Roofs,
    ops: Sequence[str],
    *,
    table: Mapping[str, Operation],
    clock: Callable[[Callable[[], object]], float] = seconds_of,
) -> Iterator[dict[str, Any]]:
    """Measure operations and yield a record for each case when it is done.

    Args:
        ops: names of operations in `table`.
        clock: returns the seconds of one call.

    Raises:
        WrongResultError: a result differs from its reference's by more than the tolerance.
    """
    for name in ops:
        for step in shapes:
            torch.manual_seed(0)
            for case in table[name](step):
                error = _error(name, case, step.dtype)
                seconds = clock(case.run) / case.num_repeats
                yield {
                    "op": name,
                    "shape": case.shape,
                    "error": float(f"{error:.2g}"),
                    "us": round(1e6 * seconds, 2),
                    "gb_s": round(case.num_bytes / seconds / 1e9, 2),
                    "gflop_s": round(case.num_flops / seconds / 1e9, 2),
                    "share_of_roof": round(roofs.share(case.num_bytes, case.num_flops, seconds), 3),
                }


def _error(name: str, case: Case, dtype: torch.dtype) -> float:
    """Return the largest error of a result, relative to the largest value of the reference; integers must be equal.

    Raises WrongResultError if the error exceeds the tolerance of the dtype.
    """
    expected = case.reference()
    found = case.run()[tuple(map(slice, expected.shape))]
    largest = max(expected.double().abs().max().item(), torch.finfo(dtype).tiny)
    error = (found.double() - expected.double()).abs().max().item() / largest
    limit = TOLERANCE[dtype] if expected.is_floating_point() else 0
    if not error <= limit:
        raise WrongResultError(
            f"{name} {case.shape}: relative error {error:.2g} (maximum {limit:g})"
        )
    return error
