"""Measure operations at a model's shapes and compare them with the machine's limits.

An operation is a function from `Shapes` to `Case`s: a call, the reference for its result, and the bytes and FLOPs it
needs. A wrong result is an error instead of a figure, so a fast but broken kernel never appears in a table. `cpu.py` and
`cuda.py` have the operations.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trouper.bench.kernels.roofs import Roofs, seconds_of
from trouper.errors import TrouperError
from trouper.kernels.ops import CpuOps, OpsConfig
from trouper.kernels.select import make_ops

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
    """Return the largest error of a result relative to its largest value; integers must be equal.

    Raises WrongResultError if the error exceeds the tolerance of the dtype.
    """
    expected = case.reference()
    found = case.run()[tuple(map(slice, expected.shape))]
    largest = max(expected.double().abs().max().item(), torch.finfo(dtype).tiny)
    error = (found.double() - expected.double()).abs().max().item() / largest
    limit = TOLERANCE[dtype] if expected.is_floating_point() else 0
    if not error <= limit:
        raise WrongResultError(f"{name} {case.shape}: wrong by {error:.2g}, {limit:g} is allowed")
    return error
