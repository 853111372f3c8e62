"""The operations of a decoder between its matrix products, each declared once.

`Ops` names every operation with its arguments and a default; `CpuOps` adds the torch reference of the operations that
need a step's tokens on the host.  `cpu/ops.py` and `cuda/ops.py` override what they compile a kernel for and inherit
the rest, so a new operation is one method here and one in each of those two files.  Python resolves the override when
the class is made: a call costs the same as without the base class.

    T  tokens of a step    E  hidden size    M  MLP width    V  vocabulary
    N  query heads         H  KV heads       D  head width   S  cache slots

A model that several ranks share replaces three operations, those of `SharedOps`: their results depend on the data of
all ranks.

    y_TE         a rank's share of the output of attention or an MLP; the layer's output is the sum over ranks
    x_TE         the residual stream; each rank has its own copy, with the same bits
    product_RV   a rank's columns of the logits; rank 0 gets all columns, the other ranks get arbitrary values
    qkv_TND      a rank's queries and keys, normalised over the heads of all ranks

`kernels/cpu/rank_exchange.py` adds in memory that the ranks share; `kernels/cuda/collectives.py` calls NCCL.

Laws:
  * All ranks make the same calls in the same order, with the same number of rows.
  * All ranks compute the same bits.  On the CPU sums are float32 in the order of the ranks.  On GPUs NCCL chooses the
    order, unless batch invariance is requested.
"""

import functools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import msgspec
import numpy as np
import torch
from torch import Tensor

from trouper.kernels.formats import Activation, Norm
from trouper.kernels.reference.norms import (
    act_and_mul,
    activate,
    clamped_swiglu,
    kv_write_,
    layer_norm,
    layer_norm_heads_,
    rms_norm,
    rms_norm_heads_,
    rope_,
    rotation_of,
)
from trouper.kernels.reference.paged_attention import (
    MAX_TILE_CAPPED,
    mask_tensors,
    paged_attention,
    plan_attention,
)

Integers = Sequence[int] | np.ndarray


class Spans(NamedTuple):
    """The spans of a step: entries whose queries see keys behind their own position, up to the end of the span.

    Attributes:
        ends_C: for each entry the position behind its span, or 0 for an entry of causal attention.
        ignore_window: queries of a span see all of it, whatever the window is.
    """

    ends_C: np.ndarray
    ignore_window: bool


class OpsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes and constants of a model that its operations depend on.

    `swiglu_alpha` and `swiglu_limit` are read only for the activation `clamped_swiglu`.  With `is_norm_last` q and k
    are rotated before the norm of each head, not after it.
    """

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
    swiglu_alpha: float = 0.0
    swiglu_limit: float = 0.0
    scale: float
    softcap: float | None
    is_norm_last: bool = False


class HostTokens(NamedTuple):
    """The token ids, positions and cache slots of one step: int64 tensors [T] in host memory.

    All sequences of the step follow each other without padding. If groups of layers have block tables of their own, `slots_T`
    has a row for each table, [tables, T]. With images in a model of positions in time, height and
    width, `axes_3T` contains these positions.
    """

    ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    axes_3T: Tensor | None = None


def q_and_k(qkv_TND: Tensor, q_norm: Tensor, k_norm: Tensor) -> tuple[Tensor, Tensor]:
    """Return the queries [T, N D] and the keys [T, H D] of a fused product, as views.

    The sizes of the two norm weights give the widths, so this also works on the part of the heads that a rank has.
    """
    x_TX, q_width = qkv_TND.flatten(1), q_norm.numel()
    return x_TX.narrow(1, 0, q_width), x_TX.narrow(1, q_width, k_norm.numel())


def finished_logits(product_RV: Tensor, scale: float, cap: float | None) -> Tensor:
    """Return cap · tanh(scale · product / cap) in float32, or scale · product if there is no cap."""
    logits_RV = product_RV.float()
    if scale != 1:
        logits_RV *= scale
    return logits_RV.div_(cap).tanh_().mul_(cap) if cap else logits_RV


class SharedOps:
    """The operations whose results depend on all ranks of a model.

    A single device computes them like its other operations.  For several ranks a group object overrides these three
    and nothing else; every other operation is local to a rank.
    """

    def fused_add_norm(
        self,
        x_TE: Tensor,
        y_TE: Tensor,
        weight: Tensor | None,
        post_weight: Tensor | None = None,
    ) -> Tensor:
        """Add residual_scale · y to x in place, and return the norm of the sum, a new tensor.

        Returns x itself if `weight` is None.

        Args:
            weight: weights [E], or [2, E] weights and biases of a layer norm.
            post_weight: weights of a norm that is applied to y before the sum (Gemma).
        """
        self._missing("fused_add_norm")

    def all_heads_norm_(self, qkv_TND: Tensor, q_norm: Tensor, k_norm: Tensor) -> None:
        """Normalise in place over all heads of q together, and over all heads of k together (OLMo-2).

        Args:
            q_norm: weights [N D].
            k_norm: weights [H D].
        """
        self._missing("all_heads_norm_")

    def finish_logits(self, product_RV: Tensor, scale: float, cap: float | None) -> Tensor:
        """Return the logits: cap · tanh(scale · product / cap), or scale · product if there is no cap."""
        self._missing("finish_logits")

    def _missing(self, operation: str) -> NoReturn:
        """Raise the error of an operation that this device does not implement."""
        raise NotImplementedError(f"{type(self).__name__} does not implement {operation}")


class RankShare(NamedTuple):
    """The sizes and constants that the shared operations of one rank depend on.

    The last rank may have fewer than `num_logits` columns.  `num_kv_copies` consecutive ranks hold the same KV heads.
    """

    vocab_size: int  # of all ranks together
    norm_eps: float
    residual_scale: float = 1.0
    first_logit: int = 0
    num_logits: int = 0
    num_kv_copies: int = 1
    norm: Norm = "rms"


class RankGroup(SharedOps):
    """The ranks of a model on the CPU, as one of them calls them.

    The ranks vote, and each one detects by itself that the ranks made different calls.
    """

    rank: int
    size: int

    @abstractmethod
    def begin_step(self, step: int) -> None:
        """Set the number of the step to which the following calls belong.

        Ranks compare it, to detect a rank that missed a step.
        """

    @abstractmethod
    def check(self) -> None:
        """Check that all ranks made the same calls; the results are unusable if they did not.

        Raises:
            RanksDisagreeError: a rank made another call; see `cpu/rank_exchange.py`.
        """

    @abstractmethod
    def all_agree(self, value: bool) -> bool:
        """Return whether every rank passed True; all ranks must call this at the same point.

        Decisions that must be equal on all ranks are made with it.
        """

    @abstractmethod
    def forget_weights(self) -> None:
        """Free the float32 copies of weights; the group makes new ones for the weights of later calls."""


class Ops(SharedOps):
    """The operations on one device.  Tensors are contiguous in their last dimension.

    The defaults call torch and work on every device.  Operations that depend on how a device describes the tokens of
    a step have no default: `begin_step` returns that description, and the others take it as `step` or `plan`.
    """

    def __init__(self, config: OpsConfig) -> None:
        self._config = config
        is_rms = config.norm == "rms"
        self._norm = rms_norm if is_rms else layer_norm
        self._norm_heads_ = rms_norm_heads_ if is_rms else layer_norm_heads_
        self._gated = _gated_activation(config)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    def begin_step(
        self, tokens: Any, table_VE: Tensor, scale: float, rope_tables: Sequence[Tensor]
    ) -> tuple[Tensor, Any]:
        """Embed a step's tokens.  Returns scale · table[ids], [T, E], and the data that all layers share."""
        self._missing("begin_step")

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
            head_norm: weights [N + H, D] of the norm of each head, or [N + H, 2, D] weights and biases.  Heads are
                not normalised if it is None.
            step: the second result of `begin_step`.
            rope: index of the rope table among those given to `begin_step`; without one nothing is rotated.
            query_rope: index of a different table for the queries; it rotates the same number of dimensions.
        """
        self._missing("qk_norm_rope_kv_write")

    def attend(
        self, qkv_TND: Tensor, cache_2HSD: Tensor, plan: Any, sinks_N: Tensor | None = None
    ) -> Tensor:
        """Return the output of attention [T, N D] over the cache, which already holds this step's keys and values.

        Args:
            plan: the result of this device's `plan`.
            sinks_N: for each query head the score of an extra key without a value, visible to every query (gpt-oss).
        """
        self._missing("attend")

    def norm(self, x_TE: Tensor, weight: Tensor) -> Tensor:
        """Return the norm of the configured kind, with weights [E], or [2, E] weights and biases."""
        return self._norm(x_TE, weight, self._config.norm_eps)

    def norm_(self, x_TX: Tensor, weight: Tensor) -> None:
        """Normalise in place; rows may be strided.

        Used for the heads of q and k, which are columns of a larger tensor. The result replaces the input.
        """
        x_TX.copy_(self.norm(x_TX, weight))

    def all_heads_norm_(self, qkv_TND: Tensor, q_norm: Tensor, k_norm: Tensor) -> None:
        q_TX, k_TX = q_and_k(qkv_TND, q_norm, k_norm)
        self.norm_(q_TX, q_norm)
        self.norm_(k_TX, k_norm)

    def fused_add_norm(
        self,
        x_TE: Tensor,
        y_TE: Tensor,
        weight: Tensor | None,
        post_weight: Tensor | None = None,
    ) -> Tensor:
        if post_weight is not None:
            y_TE = self.norm(y_TE, post_weight)
        x_TE.add_(y_TE, alpha=self._config.residual_scale)
        return x_TE if weight is None else self.norm(x_TE, weight)

    def act_and_mul(self, gate_up_TM: Tensor) -> Tensor:
        """Return activation(gate) · up, [T, M], for the halves of gate_up [T, 2 M].

        `clamped_swiglu` computes (up + 1) · activation(gate) of clamped halves.
        """
        return self._gated(gate_up_TM)

    def activate(self, x_TM: Tensor) -> Tensor:
        """Return activation(x), [T, M], for an MLP without a gate.

        The function is that of the model's configuration.
        """
        return activate(x_TM, self._config.activation)

    def finish_logits(self, product_RV: Tensor, scale: float, cap: float | None) -> Tensor:
        return finished_logits(product_RV, scale, cap)


def _gated_activation(config: OpsConfig) -> Callable[[Tensor], Tensor]:
    if config.activation == "clamped_swiglu":
        return functools.partial(
            clamped_swiglu, alpha=config.swiglu_alpha, limit=config.swiglu_limit
        )
    return functools.partial(act_and_mul, act=config.activation)


class CpuOps(Ops):
    """The operations for `HostTokens` by torch: any dtype, shape and machine, several torch calls each.

    It is the reference of the compiled kernels in `cpu/ops.py`, and the fallback where these cannot run.
    """

    def plan(
        self,
        block_ids: np.ndarray,
        rows: Integers,
        starts: Integers,
        counts: Integers,
        window: int | None,
        are_prompts: np.ndarray | None = None,
        spans: Spans | None = None,
    ) -> Any:
        """Prepare the attention of a step whose entry i has counts[i] tokens from position starts[i] on.

        Args:
            block_ids: [rows, blocks] int64; entry i uses row rows[i].
            window: the number of most recent keys that a query sees; all earlier keys if it is None.
            are_prompts: [entries] bool.  If the operations can, they give the tokens of these entries the bits that
                they would have in any other chunk of the prompt; every other entry has one token.  By default
                the entries of several tokens.
            spans: which entries see their own later tokens; none by default.
        """
        size = self._config.block_size
        chosen, firsts, nums = (np.asarray(x).tolist() for x in (rows, starts, counts))
        ends: list[int] = [] if spans is None else spans.ends_C.tolist()
        tables = [
            block_ids[row, : -(-max(start + count, end) // size)]
            for row, start, count, end in zip(
                chosen, firsts, nums, ends or [0] * len(nums), strict=True
            )
        ]
        max_tile = MAX_TILE_CAPPED if self._config.softcap else None
        tiles = plan_attention(
            tables,
            firsts,
            nums,
            block_size=size,
            window=window,
            max_tile=max_tile,
            span_ends=ends,
            ignore_window=spans is not None and spans.ignore_window,
        )
        return tiles, mask_tensors(tiles, self._config.dtype)

    def plan_tables(self, tables: Sequence[np.ndarray], *args: Any) -> list[Any]:
        """Prepare the attention of a step for layers with one window and several block tables.

        Args:
            tables: the block ids of each; the other arguments are those of `plan`.
        """
        return [self.plan(table, *args) for table in tables]

    def begin_step(
        self, tokens: HostTokens, table_VE: Tensor, scale: float, rope_tables: Sequence[Tensor]
    ) -> tuple[Tensor, Any]:
        x_TE = self.embed(table_VE, tokens.ids_T, scale)
        return x_TE, self.begin(tokens.positions_T, tokens.slots_T, rope_tables)

    def begin(self, positions_T: Tensor, slots_T: Tensor, rope_tables: Sequence[Tensor]) -> Any:
        """Return the data that all layers share, for a step whose tokens another pipeline stage embedded."""
        return slots_T, [rotation_of(table, positions_T) for table in rope_tables]

    def with_slots(self, step: Any, slots_T: Tensor) -> Any:
        """Return the data of a step for layers whose keys have other cache slots."""
        return slots_T, step[1]

    def embed(self, table_VE: Tensor, ids_T: Tensor, scale: float) -> Tensor:
        """Return scale · table[ids], [T, E].

        Some families scale embeddings, for example by the root of the hidden size.
        """
        x_TE = table_VE.index_select(0, ids_T)
        return x_TE if scale == 1 else x_TE.mul_(scale)

    def qk_norm_rope_kv_write(
        self,
        qkv_TND: Tensor,
        head_norm: Tensor | None,
        step: Any,
        rope: int | None,
        cache_2HSD: Tensor,
        query_rope: int | None = None,
    ) -> None:
        num_q, num_kv = self._config.num_q_heads, self._config.num_kv_heads
        slots_T, rotations = step
        qk_TND = qkv_TND.narrow(1, 0, num_q + num_kv)
        is_norm_last = self._config.is_norm_last
        if head_norm is not None and not is_norm_last:
            self._norm_heads_(qk_TND, head_norm, self._config.norm_eps)
        if rope is not None and query_rope is None:
            rope_(qk_TND, rotations[rope])
        elif rope is not None and query_rope is not None:
            rope_(qkv_TND.narrow(1, 0, num_q), rotations[query_rope])
            rope_(qkv_TND.narrow(1, num_q, num_kv), rotations[rope])
        if head_norm is not None and is_norm_last:
            self._norm_heads_(qk_TND, head_norm, self._config.norm_eps)
        kv_TXD = qkv_TND.narrow(1, num_q, 2 * num_kv)
        kv_T2HD = kv_TXD.view(len(kv_TXD), 2, num_kv, kv_TXD.shape[-1])
        kv_write_(cache_2HSD, kv_T2HD, slots_T)

    def attend(
        self, qkv_TND: Tensor, cache_2HSD: Tensor, plan: Any, sinks_N: Tensor | None = None
    ) -> Tensor:
        num_q, num_kv = self._config.num_q_heads, self._config.num_kv_heads
        return paged_attention(
            qkv_TND.narrow(1, 0, num_q),
            qkv_TND.narrow(1, num_q, num_kv),
            qkv_TND.narrow(1, num_q + num_kv, num_kv),
            cache_2HSD,
            *plan,
            scale=self._config.scale,
            softcap=self._config.softcap,
            sinks_N=sinks_N,
        )
