"""Compute the attention, the GELU and the layer norms of a vision or audio tower by this engine's kernels.

The code of a tower calls torch's functions.  These take a third of its time, and the kernels are two to four times as fast in
bfloat16.  A call that the kernels cannot serve goes to torch.

Law: whether a kernel serves a call depends on the shapes and the mask of an item only, so an item has the same rows in every step.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trouper.kernels.codegen.units import LANES
from trouper.kernels.cpu.attention.varlen import attend_both_ways, is_native
from trouper.kernels.cpu.encoder_ops import LayerNorm, gelu


class TowerFunctions(TorchFunctionMode):
    """While it is entered, the calling thread's attention, GELU and layer norms are computed by kernels."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            found = _attended(*args, **kwargs)
            return func(*args, **kwargs) if found is None else found
        if func is F.gelu:
            return _gelu(*args, **kwargs)
        if func is F.layer_norm:
            found = _normed(*args, **kwargs)
            return func(*args, **kwargs) if found is None else found
        return func(*args, **kwargs)


def _gelu(input: Tensor, approximate: str = "none") -> Tensor:
    return gelu(input, has_tanh=approximate == "tanh")


def _normed(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor | None:
    """Compute torch's `layer_norm` of the last dimension, or return None if the kernel does not serve this call."""
    if weight is None or len(normalized_shape) != 1 or input.dtype != weight.dtype:
        return None
    rows = input.reshape(-1, input.shape[-1]).contiguous()
    return LayerNorm(weight, bias, eps)(rows).view(input.shape) if len(rows) else None


def _attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Compute torch's `scaled_dot_product_attention` of [B, N, L, D], or return None if the kernel does not serve this call."""
    if is_causal or dropout_p or enable_gqa or query.dim() != 4:
        return None
    if not query.shape == key.shape == value.shape or not query.numel():
        return None
    width = query.shape[-1]
    padded = -(-width // LANES) * LANES
    if not is_native(query.dtype, padded) or not _sees_all(attn_mask):
        return None
    # Zeros behind a head change no score, and their results are cut off.
    parts = [x if padded == width else F.pad(x, (0, padded - width)) for x in (query, key, value)]
    q_BLND, k_BLND, v_BLND = (part.transpose(1, 2) for part in parts)
    out_BLND = attend_both_ways(q_BLND, k_BLND, v_BLND, width**-0.5 if scale is None else scale)
    return out_BLND[..., :width].transpose(1, 2)


def _sees_all(mask: Tensor | None) -> bool:
    """Whether a mask hides nothing: some towers also make one for an image without padding."""
    if mask is None:
        return True
    return bool(mask.all()) if mask.dtype == torch.bool else not mask.any()
