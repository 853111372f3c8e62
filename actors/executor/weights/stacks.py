"""Find matrices within tensors of another shape: one tensor for all experts of a layer, or a transposed matrix.

    gpt_oss      experts.gate_up_proj [X, E, 2 M]  inputs by outputs; the outputs of gate and up alternate
                 experts.down_proj [X, M, E]       each also has a bias with the suffix `_bias`: [X, 2 M], [X, E]
    granite_moe  input_linear.weight [X, 2 M, E]   outputs by inputs; those of gate, then those of up
                 output_linear.weight [X, E, M]
    others       experts.gate_up_proj [X, 2 M, E]  the same, if the checkpoint has no tensors of single experts
                 experts.down_proj [X, E, M]
    qwen3_vl_moe as others, or inputs by outputs; the shapes of both tensors show which
    gpt2         the matrices of the layers, inputs by outputs

X experts, E hidden size, M width of an expert. A part has the name that it would have if each expert were stored separately.
"""

import re
from typing import NamedTuple, Protocol

from torch import Tensor

from trouper.actors.executor.models.names import NAMES
from trouper.actors.executor.models.traits import DecoderTraits

Shape = tuple[int, ...]
EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.(weight|bias)")
DOWN, UP = ("down_proj", "w2"), ("up_proj", "w3")
ALL = slice(None)


class StackedPart(NamedTuple):
    """One expert's part of a tensor for all experts, or a transposed tensor.

    `name` and `shape` are those of the stored tensor. `expert` is None for a tensor without experts. `rows` are the outputs,
    and `is_transposed` marks tensors stored as [inputs, outputs].
    """

    name: str
    shape: Shape
    expert: int | None
    rows: slice
    is_transposed: bool
    # The name and shape of the tensor that decides whether the checkpoint stores the transpose: its own shape shows it.  A square
    # matrix has the same shape either way, so another tensor of the layer decides for it.  None: there is nothing to decide.
    witness: tuple[str, Shape] | None = None

    def stored_as(self, shape: Shape) -> "StackedPart":
        """Return this part, transposed if the checkpoint stores the witness with a transposed shape.

        Args:
            shape: of the witness in the checkpoint.
        """
        if self.witness is None or shape == self.witness[1] or shape != _turned(self.witness[1]):
            return self
        return self._replace(shape=_turned(self.shape), is_transposed=True)

    def of(self, whole: Tensor) -> Tensor:
        """Return the matrix [O, I], or the bias, as a view."""
        own: Tensor = whole if self.expert is None else whole[self.expert]
        return (own.T if self.is_transposed else own)[self.rows]


class Views(Protocol):
    """A way in which a checkpoint stores some tensors in another shape.

    Loaders ask it for each tensor, and read a part or the transpose instead. If a way `is_optional`, they do so only
    if the checkpoint has the stored tensor.
    """

    @property
    def is_optional(self) -> bool:
        """Whether a checkpoint may also store such tensors under their own names."""
        ...

    def find(self, name: str, shape: Shape) -> StackedPart | None:
        """Find a matrix or bias with this shape. Returns None if it is stored under its own name in this shape."""
        ...


class Turned(NamedTuple):
    """Matrices of layers that a checkpoint stores as [inputs, outputs]. `layers` is the prefix of their names."""

    layers: str

    @property
    def is_optional(self) -> bool:
        return False

    def find(self, name: str, shape: Shape) -> StackedPart | None:
        if len(shape) != 2 or not name.startswith(self.layers):
            return None
        return StackedPart(name, shape[::-1], None, ALL, is_transposed=True)


class Stacks(NamedTuple):
    """Experts that a checkpoint stores in one tensor for each projection of a layer.

    The part of one expert is a view, so nothing is copied.
    """

    num_experts: int
    style: str

    @property
    def is_optional(self) -> bool:
        return self.style not in ("gpt_oss", "granite_moe")

    def find(self, name: str, shape: Shape) -> StackedPart | None:
        """Find an expert's matrix or bias with this shape. Returns None for all other tensors."""
        found = EXPERT.fullmatch(name)
        if found is None:
            return None
        module, expert, projection, kind = found.groups()
        is_down, is_up, size = projection in DOWN, projection in UP, shape[0]
        num_out = size if is_down else 2 * size
        if self.style != "gpt_oss":
            rows = slice(size * is_up, size * (is_up + 1))
            stored = f"{module}.experts.{'down' if is_down else 'gate_up'}_proj"
            if self.style == "granite_moe":
                stored = f"{module}.{'output' if is_down else 'input'}_linear.{kind}"
            whole = self.num_experts, num_out, *shape[1:]
            part = StackedPart(stored, whole, int(expert), rows, is_transposed=False)
            if self.style != "qwen3_vl_moe":
                return part
            # Of the matrices [2 M, E] and [E, M], at most one is square.
            is_square = num_out == shape[1]
            other = self._other(module, shape, is_down=is_down) if is_square else (stored, whole)
            return part._replace(witness=other)
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

    def _other(self, module: str, shape: Shape, *, is_down: bool) -> tuple[str, Shape]:
        """Return the layer's other tensor, given the shape of a part of this one."""
        num_out, num_in = shape
        other = (2 * num_in, num_out) if is_down else (num_in, num_out)
        end = "gate_up" if is_down else "down"
        return f"{module}.experts.{end}_proj", (self.num_experts, *other)


def _turned(shape: Shape) -> Shape:
    return *shape[:-2], shape[-1], shape[-2]


def views_of(traits: DecoderTraits) -> Views | None:
    """Return how checkpoints of the model store tensors in another shape, or None if they do not."""
    experts, names = traits.experts, NAMES[traits.names]
    if names.is_transposed:
        return Turned(names.base + names.layers)
    return None if experts is None else Stacks(experts.count, experts.names)
