"""The part of a tensor that a rank keeps, of a plain one and of one of integers."""

import torch
from torch import Tensor

from trouper.actors.executor.models.parameters import WHOLE, Cut, HeadOrder, Span
from trouper.actors.executor.models.sharding import OPTION
from trouper.errors import UnsupportedFeatureError, invalid
from trouper.kernels.cpu.linear.quantization import IntegerWeight


def part_of(x: Tensor, cut: Cut) -> Tensor:
    """Return the part of a tensor: a view where its rows are one range, so of a mapped file no more is read."""
    if cut.columns is not None:
        first, last = cut.columns
        x = x.narrow(1, first, last - first)
    if cut.rows is not None:
        parts = [x.narrow(0, first, last - first) for first, last in cut.rows]
        x = parts[0] if len(parts) == 1 else torch.cat(parts)
    return x if cut.heads is None else x[row_order(len(x), cut.heads)]


def row_order(num_rows: int, heads: HeadOrder) -> Tensor:
    """Return where each row of whole heads is stored, so that the pairs that turn together become two halves."""
    width, rotated = heads
    rows_HD = torch.arange(num_rows).view(-1, width)
    pairs: Tensor = rows_HD[:, :rotated].reshape(len(rows_HD), -1, 2).transpose(1, 2).flatten(1)
    return torch.cat((pairs, rows_HD[:, rotated:]), dim=1).flatten()


def part_of_integers(weight: IntegerWeight, cut: Cut, name: str) -> IntegerWeight:
    """Return the part of a matrix of integers, with the scales that belong to it: the same numbers as in the whole.

    Args:
        name: of the matrix, for errors.

    Raises:
        TrouperValidationError: the part ends within a group of inputs that share a scale.
        UnsupportedFeatureError: a range of inputs of a matrix whose columns are in another order.
    """
    if cut == WHOLE:
        return weight
    groups = Cut(cut.rows, _groups(weight, cut.columns, name), cut.heads)

    def kept(x_OG: Tensor | None) -> Tensor | None:
        return None if x_OG is None else part_of(x_OG, groups).contiguous()

    return weight._replace(
        q_OI=part_of(weight.q_OI, cut).contiguous(),
        scales_OG=part_of(weight.scales_OG, groups).contiguous(),
        zeros_OG=kept(weight.zeros_OG),
        minima_OG=kept(weight.minima_OG),
    )


def _groups(weight: IntegerWeight, columns: Span | None, name: str) -> Span | None:
    """Return the groups that a range of inputs consists of; None = all."""
    (num_in, num_groups) = weight.q_OI.shape[1], weight.scales_OG.shape[1]
    if columns is None or columns == (0, num_in):
        return None
    if weight.order_I is not None:
        raise UnsupportedFeatureError(
            f"{OPTION}: the inputs of {name} are in an order of their own (act-order), so their groups cannot be cut",
            parameter=OPTION,
        )
    if num_groups == 1:
        return None
    size, (first, last) = num_in // num_groups, columns
    if first % size or last % size:
        rule = f"the {num_in} inputs of {name} have scales for {size} each, which a part of {last - first} would cut"
        raise invalid(OPTION, rule)
    return first // size, last // size
