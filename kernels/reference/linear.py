"""References of linear layers: the oracles of every `LinearMethod`.

Plain weights are multiplied in float64.  Integer weights are multiplied with the same roundings as the kernel in
`kernels/cpu/linear/integer_bytes.py`, so that tests can compare bits.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves the types of some others open.
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from trouper.kernels.formats import LIMIT, Format
from trouper.kernels.reference.norms import activate


def linear_reference(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    y_TO = x_TI.double() @ weight_OI.double().T
    return (y_TO if bias_O is None else y_TO + bias_O.double()).to(x_TI.dtype)


def linear_act_reference(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, act: str
) -> Tensor:
    y_TO = F.linear(x_TI.double(), weight_OI.double(), _double(bias_O))
    return activate(y_TO, act).to(x_TI.dtype)


def linear_add_reference(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, residual_TO: Tensor
) -> Tensor:
    y_TO = F.linear(x_TI.double(), weight_OI.double(), _double(bias_O)) + residual_TO.double()
    return y_TO.to(x_TI.dtype)


def _double(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.double()


SMALLEST = 1e-30


class Integers(Protocol):
    """The parts of an `IntegerWeight` that a product needs.

    A protocol keeps the references independent of the kernels' modules.
    """

    @property
    def fmt(self) -> Format: ...
    @property
    def q_OI(self) -> Tensor: ...
    @property
    def scales_OG(self) -> Tensor: ...
    @property
    def zeros_OG(self) -> Tensor | None: ...
    @property
    def minima_OG(self) -> Tensor | None: ...
    @property
    def order_I(self) -> Tensor | None: ...


class IntegerRows(NamedTuple):
    """Rows of x as integers with a scale for each group of inputs.

    Integer kernels multiply them with the integers of the weight, without rounding.
    """

    q_TGI: Tensor  # int32, in groups
    scales_TG: Tensor  # float32


def row_group(weight_group: int) -> int:
    """Return how many inputs of a row share a scale.

    It divides the weight's groups, so each partial sum has one scale on either side.
    """
    return 32 if weight_group % 32 == 0 else 16


def quantize_rows_reference(x_TI: Tensor, group: int) -> IntegerRows:
    limit, groups = torch.tensor(LIMIT), x_TI.float().unflatten(1, (-1, group))
    # A group with NaN gets NaN.
    largest = groups.abs().amax(2, keepdim=True)
    is_finite = largest.isfinite()
    inverse = torch.where(is_finite & (largest > SMALLEST), limit / largest, 0.0)
    q_TGI = (torch.where(is_finite, groups, 0.0) * inverse).round().int()
    return IntegerRows(q_TGI, (largest * (1.0 / limit)).squeeze(2))


def integer_linear_reference(
    x_TI: Tensor, weight: Integers, bias_O: Tensor | None = None
) -> Tensor:
    """Return x (s · (q - z) + m)ᵀ + b, [T, O], with the roundings of the kernel."""
    num_out, num_in = weight.q_OI.shape
    num_groups = weight.scales_OG.shape[1]
    group, x_TI = row_group(num_in // num_groups), _in_order(x_TI, weight.order_I)
    rows = quantize_rows_reference(x_TI, group)
    integers, minima_OG = weight.q_OI.double().unflatten(1, (num_groups, -1)), weight.minima_OG
    if weight.zeros_OG is not None and weight.fmt == "int8":
        minima_OG = -weight.zeros_OG.float() * weight.scales_OG.float()
    elif weight.zeros_OG is not None:
        integers -= weight.zeros_OG.unsqueeze(2)
    integers = integers.flatten(1).unflatten(1, (-1, group))
    total = torch.zeros(len(x_TI), num_out)
    for g in range(num_in // group):
        of_weight = g * group * num_groups // num_in
        part = rows.q_TGI[:, g].double() @ integers[:, g].T  # exact, like 32-bit integers
        factor = weight.scales_OG[:, of_weight].float() * rows.scales_TG[:, g, None]
        total = _fma(part.float(), factor, total)
        if minima_OG is not None:
            x_sum = rows.scales_TG[:, g] * rows.q_TGI[:, g].sum(1).float()
            total = _fma(x_sum[:, None], minima_OG[:, of_weight], total)
    if bias_O is not None:
        total += bias_O.float()
    return total.bfloat16()


def _in_order(x_TI: Tensor, order_I: Tensor | None) -> Tensor:
    return x_TI if order_I is None else x_TI[:, order_I]


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a · b + c in float32, rounded once.

    The product is exact in float64, and the sum so precise that a second rounding almost never differs.
    """
    return (a.double() * b.double() + c.double()).float()
