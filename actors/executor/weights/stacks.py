"""Tensors that are stored in another shape: those that hold a projection of all experts of a layer, and turned ones.

    gpt_oss      experts.gate_up_proj [X, E, 2 M]  inputs by outputs; the outputs of gate and of up take turns
                 experts.down_proj [X, M, E]       and of each a bias, with the name's end `_bias`: [X, 2 M], [X, E]
    granite_moe  input_linear.weight [X, 2 M, E]   outputs by inputs; those of gate, then those of up
                 output_linear.weight [X, E, M]
    gpt2         the matrices of the layers, inputs by outputs

X experts, E hidden size, M width of an expert.  A part goes by the name that it has where each expert is stored alone.
"""

import re
from typing import NamedTuple, Protocol

from torch import Tensor

from trouper.actors.executor.models.names import NAMES
from trouper.actors.executor.models.traits import DecoderTraits

Shape = tuple[int, ...]
EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
ALL = slice(None)


class StackedPart(NamedTuple):
    """One expert's part of a tensor that holds all of them, or a turned tensor."""

    name: str  # of the tensor
    shape: Shape  # of the tensor
    expert: int | None  # None: all of it
    rows: slice  # its outputs
    is_transposed: bool  # inputs by outputs

    def of(self, whole: Tensor) -> Tensor:
        """Return the matrix [O, I], or the bias, as a view."""
        own: Tensor = whole if self.expert is None else whole[self.expert]
        return (own.T if self.is_transposed else own)[self.rows]


class Views(Protocol):
    """A way in which a checkpoint stores some tensors in another shape."""

    def find(self, name: str, shape: Shape) -> StackedPart | None:
        """Find a matrix or bias of that shape; None: a tensor that is stored as it is."""
        ...


class Turned(NamedTuple):
    """The way in which a checkpoint stores the matrices of its layers as inputs by outputs."""

    layers: str  # the beginning of their names

    def find(self, name: str, shape: Shape) -> StackedPart | None:
        if len(shape) != 2 or not name.startswith(self.layers):
            return None
        return StackedPart(name, shape[::-1], None, ALL, is_transposed=True)


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


def views_of(traits: DecoderTraits) -> Views | None:
    """Return how a checkpoint of the model stores tensors in another shape; None where it does not."""
    experts, names = traits.experts, NAMES[traits.names]
    if names.is_transposed:
        return Turned(names.base + names.layers)
    if experts is None or experts.names not in ("gpt_oss", "granite_moe"):
        return None
    return Stacks(experts.count, experts.names == "granite_moe")
