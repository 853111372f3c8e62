"""The ranks that share out the layers of a model among them, as the operations of one of them call the others.

    part_TE   what a rank's part of o, or of an MLP, makes of all tokens; the sum of all ranks' is the layer's
    x_TE      the residual stream, of which every rank keeps its own copy, the same bits in all

One mechanism with two kinds of sum: `kernels/cpu/shared_group.py` adds up in memory that the ranks share, `kernels/cuda/collectives.py` by
collective calls between GPUs.

Laws:
  * All ranks make the same calls in the same order, with as many rows; none decides by itself whether to make one.
  * All come to the same bits. On the CPU sums are in float32 and in the order of the ranks; on GPUs NCCL chooses the order, but where
    batches must not change it.
"""

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from torch import Tensor

from trouper.kernels.ops import CpuOps, Integers, Ops

OpsT = TypeVar("OpsT", bound=Ops)


class RankShare(NamedTuple):
    """The sizes and constants that the operations of a rank depend on, beside their arguments."""

    vocab_size: int  # of all ranks
    norm_eps: float
    residual_scale: float = 1.0
    first_logit: int = 0  # column of this rank's head
    num_logits: int = 0  # columns of a rank's head, of which the last has no more
    num_kv_copies: int = 1  # ranks that have the same heads of keys, one after the other


class RankSums(Protocol):
    """The operations in which all ranks take part, as one rank calls them."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def fused_add_rms_norm(
        self,
        x_TE: Tensor,
        part_TE: Tensor,
        weight: Tensor | None,
        post_weight: Tensor | None = None,
    ) -> Tensor:
        """Do what the operation of this name does, with the sum of all ranks' parts in the place of y."""
        ...

    def all_heads_norm_(self, qkv_TND: Tensor, q_norm: Tensor, k_norm: Tensor) -> None:
        """Normalise this rank's queries and keys in place, over the heads of all ranks together; see `Ops`."""
        ...

    def finish_logits(self, product_RW: Tensor, scale: float, cap: float | None) -> Tensor:
        """Finish this rank's columns of the logits, and put all ranks' side by side: [R, V] on rank 0, anything on the others."""
        ...


class RankGroup(RankSums, Protocol):
    """The ranks of a model on the CPU, which find out by themselves that they differ, and vote."""

    def begin_step(self, step: int) -> None:
        """Say which step the calls that follow belong to."""
        ...

    def check(self) -> None:
        """Raise if some rank has not made the same calls: then nothing that they gave is of use."""
        ...

    def all_agree(self, value: bool) -> bool:
        """Return whether every rank says yes; all ask at the same time."""
        ...

    def forget_weights(self) -> None:
        """Give back what has been made of weights, none of which is used again."""
        ...


class RankedOps(Generic[OpsT]):
    """The operations of one rank: those in which all take part are the group's, the others are computed here.

    Args:
        ops: for this rank's part of the model.
    """

    def __init__(self, ops: OpsT, sums: RankSums) -> None:
        self._ops, self._sums = ops, sums

    def __repr__(self) -> str:
        return f"<RankedOps: {self._ops!r} of rank {self._sums.rank} of {self._sums.size}>"

    def begin_step(
        self, tokens: Any, table_VE: Tensor, scale: float, rope_tables: Sequence[Tensor]
    ) -> tuple[Tensor, Any]:
        return self._ops.begin_step(tokens, table_VE, scale, rope_tables)

    def fused_add_rms_norm(
        self,
        x_TE: Tensor,
        y_TE: Tensor,
        weight: Tensor | None,
        post_weight: Tensor | None = None,
    ) -> Tensor:
        return self._sums.fused_add_rms_norm(x_TE, y_TE, weight, post_weight)

    def all_heads_norm_(self, qkv_TND: Tensor, q_norm: Tensor, k_norm: Tensor) -> None:
        self._sums.all_heads_norm_(qkv_TND, q_norm, k_norm)

    def finish_logits(self, product_RV: Tensor, scale: float, cap: float | None) -> Tensor:
        return self._sums.finish_logits(product_RV, scale, cap)

    def rms_norm(self, x_TE: Tensor, weight: Tensor) -> Tensor:
        return self._ops.rms_norm(x_TE, weight)

    def rms_norm_(self, x_TX: Tensor, weight: Tensor) -> None:
        self._ops.rms_norm_(x_TX, weight)

    def qk_norm_rope_kv_write(
        self,
        qkv_TND: Tensor,
        head_norm: Tensor | None,
        step: Any,
        rope: int | None,
        cache_2HSD: Tensor,
    ) -> None:
        self._ops.qk_norm_rope_kv_write(qkv_TND, head_norm, step, rope, cache_2HSD)

    def attend(
        self, qkv_TND: Tensor, cache_2HSD: Tensor, plan: Any, sinks_N: Tensor | None = None
    ) -> Tensor:
        return self._ops.attend(qkv_TND, cache_2HSD, plan, sinks_N)

    def act_and_mul(self, gate_up_TM: Tensor) -> Tensor:
        return self._ops.act_and_mul(gate_up_TM)


class RankedCpuOps(RankedOps[CpuOps]):
    """`CpuOps` of one rank."""

    def begin(self, positions_T: Tensor, slots_T: Tensor, rope_tables: Sequence[Tensor]) -> Any:
        return self._ops.begin(positions_T, slots_T, rope_tables)

    def plan(
        self,
        block_ids: np.ndarray,
        rows: Integers,
        starts: Integers,
        counts: Integers,
        window: int | None,
    ) -> Any:
        return self._ops.plan(block_ids, rows, starts, counts, window)
