"""Attention of transformers' models over the engine's KV cache, through transformers' `AttentionInterface`.

    T  tokens of a step     N  query heads    H  KV heads    S  cache slots
    D  width of a head in the cache: the larger of a key's and a value's, rounded up to whole registers

A model calls its attention function once for each layer of a pass, always in the same order. The first pass, a trial on one
short prompt, records what each layer asks for. Later passes must ask for the same.

Law: as in transformers' eager attention, the mask that a layer receives determines what its queries see. A layer is accepted
if its mask is causal, or causal with one window, at every position that the engine accepts. Any other is refused by name.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from trouper.actors.executor.models.traits import PlanKey
from trouper.errors import UnsupportedFeatureError
from trouper.kernels.ops import CpuOps, HostTokens, Integers, OpsConfig
from trouper.kernels.select import make_ops

# The name of our functions in transformers' tables.
NAME = "trouper"
# The attribute of a model's modules and configs that contains their `HfAttention`.
ATTRIBUTE = "trouper_attention"
# Heads are padded to multiples of this width, the floats of a register.
WIDTH_STEP = 16
# Arguments of attention functions that do not change which keys a query sees, or how it weighs them.
IDLE = {
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "position_ids", "use_cache", "output_attentions",
    "sliding_window", "is_causal", "deterministic", "output_hidden_states", "output_router_logits",
    "position_embeddings", "return_dict",
}  # fmt: skip


class LayerAttention(msgspec.Struct, frozen=True):
    """The attention for which one layer of a model asked in the trial.

    The library's layers are not examined; they are observed when the model runs once with small inputs.
    """

    num_q_heads: int
    num_kv_heads: int
    key_width: int
    value_width: int
    scale: float
    softcap: float | None
    window: int | None  # a query sees this many keys, itself included; None = all before it

    @property
    def head_dim(self) -> int:
        """Return the width of a head in the cache."""
        return -(-max(self.key_width, self.value_width) // WIDTH_STEP) * WIDTH_STEP


class StepPlans:
    """The attention plans of one step for one window, one for each shape of heads.

    Each is made when it is first needed. Most models have one shape only.
    """

    def __init__(
        self,
        block_ids: np.ndarray,
        rows: Integers,
        starts: Integers,
        counts: Integers,
        window: int | None,
        are_prompts: np.ndarray | None = None,
    ) -> None:
        self._arguments = block_ids, rows, starts, counts, window, are_prompts
        self._plans: dict[int, Any] = {}

    def of(self, ops: CpuOps) -> Any:
        """Return the plan for these operations, and make it on first use.

        Layers with the same shape of heads share one plan. Others get one of their own.
        """
        plan = self._plans.get(id(ops))
        if plan is None:
            plan = self._plans[id(ops)] = ops.plan(*self._arguments)
        return plan


class HfStep(NamedTuple):
    """The part of a step's inputs that the model's own code never receives.

    The attention functions get it from `HfAttention` instead. It is set only during a pass.
    """

    tokens: HostTokens
    plans: Mapping[PlanKey, StepPlans]  # by window
    caches: Sequence[Tensor]  # of each layer [2, H, S, D]


class HfAttention:
    """The attention of all layers of one model.

    Args:
        max_model_len: tokens of the longest sequence; masks are examined as far as that.
    """

    def __init__(self, dtype: torch.dtype, block_size: int, max_model_len: int) -> None:
        self._dtype, self._block_size, self.max_model_len = dtype, block_size, max_model_len
        self.layers: tuple[LayerAttention, ...] = ()
        self._trial: _Trial | None = None
        self._ops: list[CpuOps] = []  # of each layer
        self._step: HfStep | None = None
        self._num_calls = 0  # in this pass
        self._mask = torch.empty((1, 1, 0, 0), dtype=dtype)

    def attach(self, model: nn.Module) -> None:
        """Attach this object to the modules and configs of a model, and register its functions with transformers."""
        from transformers import AttentionInterface, AttentionMaskInterface

        for registry, function in ((AttentionInterface, _attend), (AttentionMaskInterface, _mask)):
            cast("Any", registry).register(NAME, function)
        for module in model.modules():
            setattr(module, ATTRIBUTE, self)
            if hasattr(module, "config"):
                setattr(module.config, ATTRIBUTE, self)

    def learn(self, run: Callable[[], object]) -> None:
        """Record what each layer asks for in a pass over one prompt, which begins at position 0.

        Raises:
            UnsupportedFeatureError: a layer asks for what this attention does not do.
        """
        trial = self._trial = _Trial(self._dtype, self.max_model_len)
        try:
            run()
        finally:
            self._trial = None
        made: dict[LayerAttention, CpuOps] = {}
        for layer in trial.layers:
            if layer not in made:
                made[layer] = _make_ops(layer, self._dtype, self._block_size)
        self._ops = [made[layer] for layer in trial.layers]
        self.layers = tuple(trial.layers)

    def serve(self, step: HfStep, forward: Callable[[], Tensor]) -> Tensor:
        """Call `forward`, a pass of the model over a step.

        Meanwhile the model's attention functions find the step's plans and caches here. Passes never overlap, because
        one thread runs them.
        """
        self._step, self._num_calls = step, 0
        try:
            return forward()
        finally:
            self._step = None

    def mask(self, mask_function: Callable[..., Any]) -> Tensor:
        """Return an empty tensor instead of a mask. In the trial it identifies the layer's window."""
        return self._mask if self._trial is None else self._trial.mask(mask_function)

    def attend(
        self, q_NTD: Tensor, k_HTD: Tensor, v_HTD: Tensor, sinks_N: Tensor | None, asked: "_Asked"
    ) -> Tensor:
        """Write keys and values into the cache, and attend. Returns [T, N, width of a value]."""
        if self._trial is not None:
            self._trial.note(q_NTD, k_HTD, v_HTD, asked)
            return q_NTD.new_zeros((q_NTD.shape[1], len(q_NTD), v_HTD.shape[2]))
        step, index = self._step, self._num_calls
        assert step is not None, "attention outside of a step"
        self._num_calls += 1
        layer, ops, cache = self.layers[index], self._ops[index], step.caches[index]
        qkv_TND = _packed(q_NTD, k_HTD, v_HTD, layer.head_dim)
        shared = cast("Any", ops).begin(step.tokens.positions_T, step.tokens.slots_T, ())
        ops.qk_norm_rope_kv_write(qkv_TND, None, shared, None, cache)
        plan = step.plans[layer.window].of(ops)
        # in float32 they are read as they are: of another dtype the operations would keep each call's tensor
        sinks_N = None if sinks_N is None else sinks_N.float().contiguous()
        out_TX = ops.attend(qkv_TND, cache, plan, sinks_N)
        return out_TX.view(-1, layer.num_q_heads, layer.head_dim)[..., : layer.value_width]


class _Asked(NamedTuple):
    """The arguments of a model's attention other than queries, keys and values."""

    mask: Tensor | None
    scale: float | None
    softcap: float | None
    others: Mapping[str, Any]


class _Trial:
    """Records the trial pass, in which a model shows what its layers ask for."""

    def __init__(self, dtype: torch.dtype, max_model_len: int) -> None:
        self.layers: list[LayerAttention] = []
        self._dtype, self._max_model_len = dtype, max_model_len
        self._masks: list[tuple[Tensor, int | None]] = []  # stand-ins for masks, and their windows

    def mask(self, mask_function: Callable[..., Any]) -> Tensor:
        window = window_of(mask_function, self._max_model_len)
        self._masks.append((torch.empty((1, 1, 0, 0), dtype=self._dtype), window))
        return self._masks[-1][0]

    def note(self, q_NTD: Tensor, k_HTD: Tensor, v_HTD: Tensor, asked: _Asked) -> None:
        for name, value in asked.others.items():
            if name not in IDLE and value is not None:
                raise UnsupportedFeatureError(f"its attention needs {name!r}")
        windows = [window for mask, window in self._masks if mask is asked.mask]
        if not windows:
            kind = "none" if asked.mask is None else "of its own making"
            raise UnsupportedFeatureError(
                f"a layer's mask is not one of transformers' causal masks, but {kind}"
            )
        if q_NTD.shape[1] != k_HTD.shape[1]:
            raise UnsupportedFeatureError("its keys are not those of its tokens, one for each")
        self.layers.append(
            LayerAttention(
                num_q_heads=len(q_NTD),
                num_kv_heads=len(k_HTD),
                key_width=k_HTD.shape[2],
                value_width=v_HTD.shape[2],
                scale=float(asked.scale or k_HTD.shape[2] ** -0.5),
                softcap=asked.softcap,
                window=windows[0],
            )
        )


def window_of(mask_function: Callable[..., Any], num_positions: int) -> int | None:
    """Return the window of a mask [batch, head, query, key], which is true if the query sees the key.

    Raises:
        UnsupportedFeatureError: somewhere below `num_positions` it is neither causal nor causal with one window.
    """
    last = num_positions - 1
    keys = torch.arange(num_positions)

    def seen(query: int) -> Tensor:
        zero = torch.tensor(0)
        found = mask_function(zero, zero, torch.tensor(query), keys)
        return torch.as_tensor(found).expand(num_positions)

    window = int(seen(last).sum())
    probed = {0, 1, last // 3, last // 2, window - 1, window, window + 1, last - 1, last}
    for query in sorted(q for q in probed if 0 <= q <= last):
        expected = (keys <= query) & (keys > query - window)
        if not torch.equal(seen(query), expected):
            raise UnsupportedFeatureError(
                f"among {num_positions} positions a mask of its is neither causal nor a sliding window; "
                "a smaller max_model_len may have one that is"
            )
    return None if window == num_positions else window


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Implement transformers' attention function: query [1, N, T, D], key and value likewise. Returns [1, T, N, D]."""
    attention: HfAttention = getattr(module, ATTRIBUTE)
    asked = _Asked(attention_mask, scaling, softcap, others)
    return attention.attend(query[0], key[0], value[0], s_aux, asked)[None], None


def _mask(*, mask_function: Callable[..., Any], config: Any, **_: Any) -> Tensor:
    attention: HfAttention = getattr(config, ATTRIBUTE)
    return attention.mask(mask_function)


def _make_ops(layer: LayerAttention, dtype: torch.dtype, block_size: int) -> CpuOps:
    config = OpsConfig(
        dtype=dtype,
        num_q_heads=layer.num_q_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        # Any width will do, because the model itself computes norms and MLPs.
        hidden_size=WIDTH_STEP,
        intermediate_size=WIDTH_STEP,
        block_size=block_size,
        norm_eps=1e-6,
        residual_scale=1.0,
        activation="silu",
        scale=layer.scale,
        softcap=layer.softcap,
    )
    return make_ops(config)


def _packed(q_NTD: Tensor, k_HTD: Tensor, v_HTD: Tensor, head_dim: int) -> Tensor:
    """Join queries, keys and values as [T, N + 2 H, D], the layout of our operations, padded with zeros."""
    num_q, num_tokens, width = q_NTD.shape
    num_kv = len(k_HTD)
    shape = (num_tokens, num_q + 2 * num_kv, head_dim)
    is_full = width == v_HTD.shape[2] == head_dim
    qkv_TND = (torch.empty if is_full else torch.zeros)(shape, dtype=q_NTD.dtype)
    qkv_TND[:, :num_q, :width] = q_NTD.transpose(0, 1)
    qkv_TND[:, num_q : num_q + num_kv, :width] = k_HTD.transpose(0, 1)
    qkv_TND[:, num_q + num_kv :, : v_HTD.shape[2]] = v_HTD.transpose(0, 1)
    return qkv_TND
