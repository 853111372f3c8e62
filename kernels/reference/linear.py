"""Linear layers and what follows them in float64: the oracle of every `LinearMethod`."""

import torch.nn.functional as F
from torch import Tensor

from trouper.kernels.reference.activation import activate


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
