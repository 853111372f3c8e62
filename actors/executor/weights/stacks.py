"""Tensors that hold a projection of all experts of a layer, and where in them the part of one expert lies.

    gpt_oss      experts.gate_up_proj [X, E, 2 M]  inputs by outputs; the outputs of gate and of up take turns
                 experts.down_proj [X, M, E]       and of each a bias, with the name's end `_bias`: [X, 2 M], [X, E]
    granite_moe  input_linear.weight [X, 2 M, E]   outputs by inputs; those of gate, then those of up
                 output_linear.weight [X, E, M]

X experts, E hidden size, M width of an expert.  A part goes by the name that it has where each expert is stored alone.
"""

import re
from typing import NamedTuple

from torch import Tensor

from trouper.actors.executor.models.traits import ExpertsTraits

Shape = tuple[int, ...]
EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
ALL = slice(None)


class StackedPart(NamedTuple):
    """One expert's part of a tensor that holds all of them."""

    name: str  # of the tensor
    shape: Shape  # of the tensor
    expert: int
    rows: slice  # its outputs
    is_transposed: bool  # inputs by outputs

    def of(self, whole: Tensor) -> Tensor:
        """Return the matrix [O, I], or the bias, as a view."""
        own: Tensor = whole[self.expert]
        return (own.T if self.is_transposed else own)[self.rows]


class Stacks(NamedTuple):
    """The way in which a checkpoint stores experts together."""

    num_experts: int
    is_granite: bool

    def find(self, name: str, shape: Shape) -> StackedPart | None:
        """Find an expert's matrix or bias of that shape; None: a tensor of its own."""
        found = EXPERT.fullmatch(name)
        if found is None:
            return None
        module, expert, projection, kind = found.groups()
        is_down, is_up, size = projection == "down", projection == "up", shape[0]
        num_out = size if is_down else 2 * size
        if self.is_granite:
            rows = slice(size * is_up, size * (is_up + 1))
            stored = f"{module}.{'output' if is_down else 'input'}_linear.{kind}"
            whole = self.num_experts, num_out, *shape[1:]
            return StackedPart(stored, whole, int(expert), rows, is_transposed=False)
        end, whole = "", (self.num_experts, *shape[1:], num_out)
        if kind == "bias":
            end = "_bias"
        return StackedPart(
            f"{module}.experts.{'down' if is_down else 'gate_up'}_proj{end}",
            whole,
            int(expert),
            ALL if is_down else slice(int(is_up), None, 2),
            is_transposed=kind == "weight",
        )


def stacks_of(experts: ExpertsTraits | None) -> Stacks | None:
    """Return how a checkpoint stores experts together; None where it does not."""
    if experts is None or experts.names not in ("gpt_oss", "granite_moe"):
        return None
    return Stacks(experts.count, experts.names == "granite_moe")
