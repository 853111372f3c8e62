"""y = (s - mean(s)) / √(var(s) + ε) · w + b over the last dimension,  s = x + r

    x, r, y [T, D], r may be absent;  w, b [D], b may be absent

    native   bfloat16 and float32, D a multiple of 16: `center_norm.py`
    torch    elsewhere

Law: the choice depends on the dtype, the width and the machine, never on a batch.

Roofline: bytes = 3 e T D, FLOPs = 8 T D.
"""

import torch.nn.functional as F
from torch import Tensor

from trouper.kernels.codegen import launch, units
from trouper.kernels.cpu.rows import num_threads_for


class LayerNorm:
    """One layer norm: its weights, and the way it is computed."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, eps: float, *, native: bool | None = None
    ) -> None:
        """Take the weights; `native` = None compiles a kernel wherever one can be used."""
        self._weight, self._bias, self._eps = weight, bias, eps
        kind = units.row_kind(weight.dtype, len(weight), native=native)
        self._kernel: launch.Kernel | None = None
        if kind is not None:
            from trouper.kernels.cpu.fused.center_norm import center_norm

            self._kernel = launch.compiled(center_norm, kind)
            self._eps_bits = launch.float_bits(eps)
            self._wide = weight.float().contiguous()
            self._wide_bias = None if bias is None else bias.float().contiguous()

    def __repr__(self) -> str:
        return (
            f"<LayerNorm of {len(self._weight)}, {'torch' if self._kernel is None else 'native'}>"
        )

    def __call__(self, x_TD: Tensor, residual_TD: Tensor | None = None) -> Tensor:
        """Return the norm of x + residual, a new tensor; rows are contiguous."""
        if self._kernel is None:
            x_TD = x_TD if residual_TD is None else x_TD + residual_TD
            return F.layer_norm(x_TD, self._weight.shape, self._weight, self._bias, self._eps)
        y_TD = x_TD.new_empty(x_TD.shape)
        num_rows, width = x_TD.shape
        self._kernel(
            num_rows,
            x_TD.data_ptr(),
            0 if residual_TD is None else residual_TD.data_ptr(),
            self._wide.data_ptr(),
            0 if self._wide_bias is None else self._wide_bias.data_ptr(),
            y_TD.data_ptr(),
            width,
            self._eps_bits,
            num_threads=num_threads_for(num_rows),
        )
        return y_TD


def layer_norm_reference(x: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> Tensor:
    wide = x.double()
    centered = wide - wide.mean(-1, keepdim=True)
    y = centered * (centered.square().mean(-1, keepdim=True) + eps).rsqrt() * weight_D.double()
    return (y if bias_D is None else y + bias_D.double()).to(x.dtype)
