"""Find where a checkpoint stores each matrix: as the tensors of a quantised one, as a part of a stack, or transposed.

Loaders ask for one matrix X.weight [O, I], and checkpoints store it in many ways.  Nothing here imports torch, so the engine's process
can check a checkpoint before a worker reads it.  A quantised matrix is several tensors:

    gptq   X.qweight [I / n, O]  X.qzeros [G, O / n]  X.scales [G, O]  X.g_idx [I]
    awq    X.qweight [I, O / n]  X.qzeros [G, O / n]  X.scales [G, O]
    packed X.weight_packed [O, I / n]  X.weight_scale [O, G]  X.weight_shape [2], where it is not symmetric
           X.weight_zero_point [O / n, G], and where the order of inputs is another X.weight_g_idx [I]
    int8   X.weight [O, I] of bytes  X.weight_scale  X.weight_zero_point
    fp8    X.weight [O, I] of e4m3  X.weight_scale, or X.weight_scale_inv of blocks
    fp4    X.weight_packed [O, I / 2] of two e2m1 a byte  X.weight_scale [O, G]  X.weight_global_scale [1]
    nvfp4  X.weight [O, I / 2] of two e2m1 a byte  X.weight_scale [O, G]  X.weight_scale_2 []
    bnb8   X.weight [O, I] of bytes  X.SCB [O]  X.weight_format []
    bnb4   X.weight [O · I / 2, 1] of two codes a byte, the high half first  X.weight.absmax [B], of blocks of codes in row order
           X.weight.quant_map [16]  X.weight.quant_state.bitsandbytes__nf4 (or fp4), JSON in bytes; where absmax are
           bytes themselves, X.weight.nested_absmax and X.weight.nested_quant_map [256]
    mxfp4  X_blocks [E, O, I / 32, 16]  X_scales [E, O, I / 32] for X [E, I, O], the experts of gpt-oss

n integers of 4 or 8 bits are an int32, lowest bits first; G groups of inputs share a scale.

Other matrices are within a tensor for all experts of a layer, or transposed:

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
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import msgspec

from trouper.actors.executor.models.names import NAMES
from trouper.actors.executor.models.traits import DecoderTraits
from trouper.errors import UnsupportedFeatureError, invalid

if TYPE_CHECKING:
    from torch import Tensor


Method = Literal["gptq", "awq", "packed", "int8", "fp8", "fp4", "nvfp4", "bnb4", "bnb8", "mxfp4"]
Shape = tuple[int, ...]
FLOATS = ("F32", "F16", "BF16")
INTEGERS = ("I32", "I64")
# The dtypes of scales stored as exponents of two.
POWERS = ("U8", "F8_E8M0")
FP8 = "F8_E4M3"
# How many codes may share a scale in bitsandbytes.
BNB_BLOCKS = tuple(2**n for n in range(5, 13))
BNB_STATES = {kind: f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")}
# Scales of activations and of a KV cache. Both stay in the model's dtype, so nothing reads these tensors.
OF_ACTIVATIONS = (
    "input_scale", "input_zero_point", "input_global_scale", "input_scale_ub", "activation_scale",
)  # fmt: skip
OF_KV_CACHE = ("k_scale", "v_scale", "q_scale", "prob_scale", "output_scale")


class StoredTensor(NamedTuple):
    """The shapes and safetensors dtypes that one stored tensor may have. Without shapes, any shape is accepted."""

    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]


class StoredNames(Protocol):
    """The names and dtypes of a checkpoint's tensors."""

    def __contains__(self, name: str) -> bool: ...

    def dtype(self, name: str) -> str: ...


class WeightLayout(msgspec.Struct, frozen=True):
    """How a quantised matrix is stored.

    `group_size` inputs share a scale, or all of them if it is None. In fp8, a `block` of outputs and inputs does.
    `zeros_less` is how much smaller zeros are stored than they are.
    """

    method: Method
    bits: int = 4
    group_size: int | None = None
    block: tuple[int, int] | None = None
    zeros_less: int = 0
    has_zeros: bool = True
    has_global_scale: bool = False

    @property
    def per_word(self) -> int:
        """Return how many integers one int32 contains."""
        return 32 // self.bits

    def parts(self, name: str, shape: Shape, stored: StoredNames) -> dict[str, StoredTensor]:
        """List the stored tensors of a matrix by their suffixes behind its base name.

        Raises:
            UnsupportedFeatureError: groups do not divide the inputs, or it is no matrix.
        """
        if self.method == "mxfp4":
            return _expert_parts(shape)
        if len(shape) != 2:  # experts that are stored together, or a bias
            what = f"{self.method} of {name}, which has {len(shape)} dimensions"
            raise unsupported("quant_method", what)
        num_out, num_in = shape
        size, base = self.group_size or num_in, base_of(name)
        if num_in % size:
            raise unsupported("group_size", f"{size} does not divide the {num_in} inputs of {name}")
        parts = PARTS[self.method](self, num_out, num_in, num_in // size)
        if base + "weight_scale_inv" in stored and "weight_scale" in parts:
            parts["weight_scale_inv"] = parts.pop("weight_scale")
        if self.method in ("bnb4", "bnb8"):
            parts = {last: part for last, part in parts.items() if _is_needed(base, last, stored)}
        order = {"gptq": "g_idx", "packed": "weight_g_idx"}.get(self.method)
        if order is not None and base + order in stored:
            parts[order] = StoredTensor(((num_in,),), INTEGERS)
        return parts

    def shape(self, name: str, shape_of: Callable[[str], Shape]) -> Shape:
        """Compute the shape of a matrix from the shapes of its stored tensors."""
        base = base_of(name)
        match self.method:
            case "gptq":
                rows, num_out = _two(base, "qweight", shape_of)
                return num_out, rows * self.per_word
            case "awq":
                num_in, columns = _two(base, "qweight", shape_of)
                return columns * self.per_word, num_in
            case "packed" | "fp4":
                num_out, columns = _two(base, "weight_packed", shape_of)
                return num_out, columns * (2 if self.method == "fp4" else self.per_word)
            case "nvfp4":
                num_out, columns = _two(base, "weight", shape_of)
                return num_out, columns * 2
            case "bnb4":
                raise unsupported(
                    "quant_method", f"the shape of {name} is not in its tensors' shapes"
                )
            case "int8" | "fp8" | "bnb8":
                return _two(base, "weight", shape_of)
            case "mxfp4":
                blocks = shape_of(name + "_blocks")
                if len(blocks) != 4:
                    raise invalid("model", f"{name}_blocks: must have four dimensions", blocks)
                return blocks[0], blocks[2] * 32, blocks[1]


def base_of(name: str) -> str:
    """Return the prefix common to the names of a matrix's stored tensors.

    For example, `X.weight` is stored as `X.qweight` and `X.scales`. `name` is that of the plain matrix.
    """
    return name.removesuffix("weight")


def unsupported(field: str, what: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(f"quantization_config: {field}: not supported: {what}")


def _expert_parts(shape: Shape) -> dict[str, StoredTensor]:
    experts, num_in, num_out = shape
    blocks = (experts, num_out, num_in // 32)
    return {
        "_blocks": StoredTensor(((*blocks, 16),), ("U8",)),
        "_scales": StoredTensor((blocks,), POWERS),
    }


def _scales(num_out: int, groups: int, dtypes: tuple[str, ...] = FLOATS) -> StoredTensor:
    """Return the possible shapes of scales: one for each output and group; with one group also one per output or matrix."""
    whole = ((num_out,), (1,), ()) if groups == 1 else ()
    return StoredTensor(((num_out, groups), *whole), dtypes)


def _gptq_parts(
    layout: WeightLayout, num_out: int, num_in: int, groups: int
) -> dict[str, StoredTensor]:
    per = layout.per_word
    q = (num_in // per, num_out) if layout.method == "gptq" else (num_in, num_out // per)
    return {
        "qweight": StoredTensor((q,), ("I32",)),
        "qzeros": StoredTensor(((groups, -(-num_out // per)),), ("I32",)),
        "scales": StoredTensor(((groups, num_out),), FLOATS),
    }


def _packed_parts(
    layout: WeightLayout, num_out: int, num_in: int, groups: int
) -> dict[str, StoredTensor]:
    per = layout.per_word
    parts = {
        "weight_packed": StoredTensor(((num_out, -(-num_in // per)),), ("I32",)),
        "weight_scale": _scales(num_out, groups),
        "weight_shape": StoredTensor(((2,),), INTEGERS),
    }
    if layout.has_zeros:
        parts["weight_zero_point"] = StoredTensor(((-(-num_out // per), groups),), ("I32",))
    return parts


def _int8_parts(
    layout: WeightLayout, num_out: int, num_in: int, groups: int
) -> dict[str, StoredTensor]:
    parts = {
        "weight": StoredTensor(((num_out, num_in),), ("I8",)),
        "weight_scale": _scales(num_out, groups),
    }
    if layout.has_zeros:
        parts["weight_zero_point"] = _scales(num_out, groups, ("I8",))
    return parts


def _fp8_parts(
    layout: WeightLayout, num_out: int, num_in: int, groups: int
) -> dict[str, StoredTensor]:
    scales = _scales(num_out, groups)
    if layout.block is not None:
        rows, columns = layout.block
        scales = StoredTensor(((-(-num_out // rows), -(-num_in // columns)),), (*FLOATS, *POWERS))
    return {"weight": StoredTensor(((num_out, num_in),), (FP8,)), "weight_scale": scales}


def _fp4_parts(
    layout: WeightLayout, num_out: int, num_in: int, groups: int
) -> dict[str, StoredTensor]:
    parts = {
        "weight_packed": StoredTensor(((num_out, num_in // 2),), ("U8",)),
        "weight_scale": StoredTensor(((num_out, groups),), POWERS),
    }
    if layout.has_global_scale:
        parts["weight_scale"] = StoredTensor(((num_out, groups),), (FP8,))
        parts["weight_global_scale"] = StoredTensor(((1,), ()), ("F32",))
    return parts


def _nvfp4_parts(
    _layout: WeightLayout, num_out: int, num_in: int, groups: int
) -> dict[str, StoredTensor]:
    return {
        "weight": StoredTensor(((num_out, num_in // 2),), ("U8",)),
        "weight_scale": StoredTensor(((num_out, groups),), (FP8,)),
        "weight_scale_2": StoredTensor(((), (1,)), ("F32",)),
    }


def _bnb8_parts(
    _layout: WeightLayout, num_out: int, num_in: int, _groups: int
) -> dict[str, StoredTensor]:
    return {
        "weight": StoredTensor(((num_out, num_in),), ("I8",)),
        "SCB": StoredTensor(((num_out,),), ("F32",)),
        "weight_format": StoredTensor(((), (1,)), ("U8",)),
    }


def _bnb4_parts(
    _layout: WeightLayout, num_out: int, num_in: int, _groups: int
) -> dict[str, StoredTensor]:
    size = num_out * num_in
    blocks = tuple((-(-size // block),) for block in BNB_BLOCKS)
    return {
        "weight": StoredTensor(((-(-size // 2), 1),), ("U8",)),
        "weight.absmax": StoredTensor(blocks, ("U8", *FLOATS)),
        "weight.quant_map": StoredTensor(((16,),), ("F32",)),
        "weight.nested_absmax": StoredTensor((), ("F32",)),
        "weight.nested_quant_map": StoredTensor(((256,),), ("F32",)),
        **{state: StoredTensor((), ("U8",)) for state in BNB_STATES.values()},
    }


def _is_needed(base: str, last: str, stored: StoredNames) -> bool:
    """Whether a matrix of bitsandbytes must have this part, which only some of its formats have."""
    is_of_some = last == "weight_format" or "nested" in last or last in BNB_STATES.values()
    if last == BNB_STATES["nf4"]:
        is_of_some = base + BNB_STATES["fp4"] in stored
    return not is_of_some or base + last in stored


PARTS: dict[str, Callable[[WeightLayout, int, int, int], dict[str, StoredTensor]]] = {
    "gptq": _gptq_parts,
    "awq": _gptq_parts,
    "packed": _packed_parts,
    "int8": _int8_parts,
    "fp8": _fp8_parts,
    "fp4": _fp4_parts,
    "nvfp4": _nvfp4_parts,
    "bnb4": _bnb4_parts,
    "bnb8": _bnb8_parts,
}


def _two(base: str, part: str, shape_of: Callable[[str], Shape]) -> tuple[int, int]:
    shape = shape_of(base + part)
    if len(shape) != 2:
        raise invalid("model", f"{base}{part}: must have two dimensions", shape)
    return shape


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
    # The name and shape of the tensor whose stored shape shows whether the checkpoint contains transposed matrices.  A square matrix
    # has the same shape either way, so another tensor of the layer decides for it.  None if the orientation is fixed.
    witness: tuple[str, Shape] | None = None

    def stored_as(self, shape: Shape) -> "StackedPart":
        """Return this part, transposed if the checkpoint stores the witness with a transposed shape.

        Args:
            shape: of the witness in the checkpoint.
        """
        if self.witness is None or shape == self.witness[1] or shape != _turned(self.witness[1]):
            return self
        return self._replace(shape=_turned(self.shape), is_transposed=True)

    def of(self, whole: "Tensor") -> "Tensor":
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
