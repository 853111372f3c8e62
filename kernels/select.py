"""The operations of a decoder between its products, and the one place that chooses who computes them.

    TorchOps   any dtype, shape and machine; several torch calls an operation
    NativeOps  kernels of this folder: one pass over memory, one launch an operation, on torch's threads

Law: the choice depends on the model and the machine alone, never on a batch; each pair of paths has a
test that they agree (`tests/kernels/test_decoder_ops.py`).
"""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from trouper.kernels.codegen import launch

LANES = 16
Integers = Sequence[int] | np.ndarray


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What the operations know of a model."""

    dtype: torch.dtype
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    block_size: int
    norm_eps: float
    residual_scale: float
    activation: Literal["silu", "gelu_tanh"]
    scale: float
    softcap: float | None


class Ops(Protocol):
    def plan(
        self,
        block_ids: np.ndarray,
        rows: Integers,
        starts: Integers,
        counts: Integers,
        window: int | None,
    ) -> Any:
        """Prepare the attention of a step: column i is counts[i] tokens at positions starts[i] …

        Args:
            block_ids: [rows, blocks] int64.
        """
        ...

    def look_up(self, table_VE: Tensor, ids_T: Tensor, scale: float) -> Tensor:
        """scale · table[ids], [T, E]."""
        ...

    def begin(self, positions_T: Tensor, slots_T: Tensor, tables: Sequence[Tensor]) -> Any:
        """What all layers of a step share."""
        ...

    def norm(self, x_TE: Tensor, weight: Tensor) -> Tensor: ...

    def norm_(self, x_TX: Tensor, weight: Tensor) -> None:
        """In place; rows may be strided."""
        ...

    def add_norm(self, x_TE: Tensor, y_TE: Tensor, weight: Tensor | None) -> Tensor:
        """x += scale · y, in place; the norm of the sum, or the sum where there is no weight."""
        ...

    def finish_qkv(
        self,
        qkv_TND: Tensor,
        head_norm: Tensor | None,
        step: Any,
        rope: int | None,
        cache_2HSD: Tensor,
    ) -> None:
        """Norm, rotate, write to the cache; in place."""
        ...

    def attend(self, qkv_TND: Tensor, cache_2HSD: Tensor, plan: Any) -> Tensor: ...

    def act_mul(self, gate_up_TM: Tensor) -> Tensor: ...

    def finish_logits(self, product_RV: Tensor, scale: float, cap: float | None) -> Tensor:
        """cap · tanh(scale · product / cap) in float32, where there is a cap."""
        ...


def make_ops(shape: Shape, *, native: bool | None = None) -> Ops:
    """`native`: None = where it can."""
    if native or (native is None and can_be_native(shape)):
        from trouper.kernels.cpu.fused.ops import NativeOps

        return NativeOps(shape)
    from trouper.kernels.reference.ops import TorchOps

    return TorchOps(shape)


def can_be_native(shape: Shape) -> bool:
    sizes = (shape.head_dim, shape.hidden_size, shape.intermediate_size)
    if any(n % LANES for n in sizes) or launch.kind_of(shape.dtype) is None:
        return False
    from trouper.kernels.cpu.attention.prefill import can_prefill

    return can_prefill(shape.num_q_heads // shape.num_kv_heads, shape.head_dim)
