"""The operations of a decoder between its products, as a model calls them: names, arguments, no implementation.

T  tokens of a step    E  hidden size    M  MLP width    V  vocabulary
N  query heads         H  KV heads       D  head width   S  cache slots

The ranks that share out the layers of a model among them, as one of them calls the others.

    y_TE         what a rank's part of o, or of an MLP, makes of all tokens; the sum of all ranks' is the layer's
    x_TE         the residual stream, of which every rank keeps its own copy, the same bits in all
    product_RV   this rank's columns of the logits; all ranks' side by side, [R, V], are finished on rank 0, and anything is on the others
    qkv_TND      this rank's queries and keys, which are normalised over the heads of all ranks together

One mechanism with two kinds of sum: `kernels/cpu/rank_exchange.py` adds up in memory that the ranks share, `kernels/cuda/collectives.py` by
collective calls between GPUs.

Laws:
  * A group stands beside a rank's operations and has none of its own besides those of `SharedOps`.
  * All ranks make the same calls in the same order, with as many rows; none decides by itself whether to make one.
  * All come to the same bits. On the CPU sums are in float32 and in the order of the ranks; on GPUs NCCL chooses the order, but where
    batches must not change it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from trouper.kernels.formats import Activation, Norm

Integers = Sequence[int] | np.ndarray


class OpsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes and constants of a model that its operations depend on."""

    dtype: torch.dtype
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    block_size: int
    norm_eps: float
    norm: Norm = "rms"
    residual_scale: float
    activation: Activation
    swiglu_alpha: float = 0.0  # of clamped_swiglu, as the limit is
    swiglu_limit: float = 0.0
    scale: float
    softcap: float | None
    is_norm_last: bool = False  # the norm of each head of q and k follows their rotation


def q_and_k(qkv_TND: Tensor, q_norm: Tensor, k_norm: Tensor) -> tuple[Tensor, Tensor]:
    """Return the queries [T, N D] and the keys [T, H D] of a product, as views; the weights of their norms tell how wide they are."""
    x_TX, q_width = qkv_TND.flatten(1), q_norm.numel()
    return x_TX.narrow(1, 0, q_width), x_TX.narrow(1, q_width, k_norm.numel())


class HostTokens(NamedTuple):
    """The tokens of one step, in host memory; int64."""

    ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor


class SharedOps(Protocol):
    """The operations in which all ranks of a model take part; one device alone computes them like the others.

    Law: a group of ranks (`kernels/ops.py`) has no operations of its own besides these; all others are those of each rank's `Ops`.
    """

    def fused_add_norm(
        self,
        x_TE: Tensor,
        y_TE: Tensor,
        weight: Tensor | None,
        post_weight: Tensor | None = None,
    ) -> Tensor:
        """Add residual_scale · y to x in place; return the norm of the sum, or x where weight is None.

        Args:
            post_weight: of the norm of y, ahead of the sum; None = y has none.
        """
        ...

    def all_heads_norm_(self, qkv_TND: Tensor, q_norm: Tensor, k_norm: Tensor) -> None:
        """Normalise in place, over all heads of q together, and over all of k (OLMo-2).

        Args:
            q_norm: [N D] weights, and `k_norm` [H D].
        """
        ...

    def finish_logits(self, product_RV: Tensor, scale: float, cap: float | None) -> Tensor:
        """Return cap · tanh(scale · product / cap), or scale · product where there is no cap."""
        ...


class Ops(SharedOps, Protocol):
    """The operations on one kind of device.  Tensors are contiguous in their last dimension.

    The tokens of a step and the plan of its attention are whatever the implementation takes.
    """

    def begin_step(
        self, tokens: Any, table_VE: Tensor, scale: float, rope_tables: Sequence[Tensor]
    ) -> tuple[Tensor, Any]:
        """Return scale · table[ids], [T, E], and what all layers of the step share."""
        ...

    def norm(self, x_TE: Tensor, weight: Tensor) -> Tensor:
        """Return the norm of the config's kind: of weights [E], or of a layer norm [2, E] weights and biases."""
        ...

    def norm_(self, x_TX: Tensor, weight: Tensor) -> None:
        """Normalise in place; rows may be strided."""
        ...

    def qk_norm_rope_kv_write(
        self,
        qkv_TND: Tensor,
        head_norm: Tensor | None,
        step: Any,
        rope: int | None,
        cache_2HSD: Tensor,
        query_rope: int | None = None,
    ) -> None:
        """Normalise and rotate q and k in place, and write k and v to the cache.

        Args:
            head_norm: [N + H, D] weights of the norm of each head, or [N + H, 2, D] weights and biases; None = no norm.
            step: from `begin_step`.
            rope: which of the step's tables rotates; None = no rotation.
            query_rope: the table of the queries, where it is not that of the keys; both rotate as many dimensions.
        """
        ...

    def attend(
        self, qkv_TND: Tensor, cache_2HSD: Tensor, plan: Any, sinks_N: Tensor | None = None
    ) -> Tensor:
        """Return the attention's output [T, N · D] over the cache, which holds this step's keys already.

        Args:
            sinks_N: of each head the score of a key without a value, which every query sees; None = there is none.
        """
        ...

    def act_and_mul(self, gate_up_TM: Tensor) -> Tensor:
        """Return activation(gate) · up for the two halves of gate_up [T, 2 M], or (up + 1) · activation(gate) of clamped ones."""
        ...

    def activate(self, x_TM: Tensor) -> Tensor:
        """Return activation(x), of an MLP without a gate."""
        ...


class CpuOps(Ops, Protocol):
    """The operations on the CPU, whose tokens are `HostTokens`."""

    def embed(self, table_VE: Tensor, ids_T: Tensor, scale: float) -> Tensor:
        """Return scale · table[ids], [T, E]."""
        ...

    def begin(self, positions_T: Tensor, slots_T: Tensor, rope_tables: Sequence[Tensor]) -> Any:
        """Return what all layers of a step share whose tokens another stage has embedded."""
        ...

    def plan(
        self,
        block_ids: np.ndarray,
        rows: Integers,
        starts: Integers,
        counts: Integers,
        window: int | None,
        are_prompts: np.ndarray | None = None,
    ) -> Any:
        """Prepare the attention of a step whose entry i is counts[i] tokens from position starts[i] on.

        Args:
            block_ids: [rows, blocks] int64; entry i uses row rows[i].
            window: of keys that a query sees; None = all before it.
            are_prompts: [entries], which have the bits of their tokens in any other stretch of the prompt, as far as the
                operations can; the others are of one token each. None = those of several tokens.
        """
        ...


class RankShare(NamedTuple):
    """The sizes and constants that the operations of a rank depend on, beside their arguments."""

    vocab_size: int  # of all ranks
    norm_eps: float
    residual_scale: float = 1.0
    first_logit: int = 0  # column of this rank's head
    num_logits: int = 0  # columns of a rank's head, of which the last has no more
    num_kv_copies: int = 1  # ranks that have the same heads of keys, one after the other
    norm: Norm = "rms"


class RankGroup(SharedOps, Protocol):
    """The ranks of a model on the CPU as one of them calls them; they find out by themselves that they differ, and vote."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

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
