"""y = x Wᵀ + b, with W packed once into the layout that reads fastest, and the one place that chooses it.

    x [T, I]   tokens × inputs
    W [O, I]   as checkpoints store it; packed, its values are the same
    y [T, O]

    compressed   bfloat16 where the machine has AVX512-BF16, 12 bits a weight: kernels/cpu/linear/compressed.py
    native   the same products of weights that do not fit, or of other machines with AVX2: kernels/cpu/linear/dense.py
    floats   the same of float32
    split    of float32 too, for many rows, where it has AMX: kernels/cpu/linear/split_fp32.py
    oneDNN   both of other machines and shapes: no reorder in every call
    plain    what oneDNN does not pack here (float16), and builds without it
    invariant   on a GPU, where asked for: kernels/cuda/matmul.py; cuBLAS is "plain"
    int8, int4   integers with scales, rounded here or in the checkpoint: kernels/cpu/linear/integer.py
             where bfloat16 would be compressed; elsewhere the rounded weights in their own dtype, with no
             gain but the same outputs

Law: the choice depends on the weight, the machine and the use (an encoder's are native, and split), never on a batch.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from trouper.kernels.codegen import launch, units
from trouper.kernels.cpu.linear.quantization import (
    LANES,
    PANELS,
    Format,
    Integers,
    dequantized,
    group_of,
    num_blocks,
    packed,
    quantize,
)

if TYPE_CHECKING:
    from trouper.kernels.cpu.linear.dense import Act, Unit

NATIVE = ("native", "floats", "split")
COMPILED = (*NATIVE, "compressed", "int8", "int4")
ONEDNN_DTYPES = (torch.bfloat16, torch.float32)


class Linear:
    """The weight of one `linear`, packed if that pays, and its bias.

    Owns the only copy: after packing nothing refers to the plain matrix.
    """

    __slots__ = ("bias", "layout", "scales", "shape", "weight", "zeros")

    def __init__(
        self,
        weight: Tensor | Integers,
        bias_O: Tensor | None = None,
        *,
        layout: str | None = None,
        quantization: Format | None = None,
    ) -> None:
        plain = weight.empty() if isinstance(weight, Integers) else weight
        self.shape = tuple(plain.shape)
        self.layout = layout or layout_of(plain)
        self.bias = bias_O
        self.scales: Tensor | None = None
        self.zeros: Tensor | None = None
        can_decode = self.layout == "native" and units.can_decode()
        if quantization is not None and isinstance(weight, Tensor):
            if can_decode:
                self.layout = quantization
                self.weight, self.scales = _round(weight, quantization)
                _product_of(quantization, self.scales.dtype, has_zeros=False)
                return
            weight = quantize(weight, quantization)
        if isinstance(weight, Integers):
            if can_decode:
                self.layout = weight.fmt
                self.weight, self.scales, self.zeros = packed(weight)
                _product_of(weight.fmt, self.scales.dtype, self.zeros is not None)
                return
            weight = dequantized(weight).to(weight.dtype)
        if layout is None and can_decode:
            compressed = _compressed_or_none(weight)
            if compressed is not None:
                self.layout, self.weight = "compressed", compressed
                return
        self.weight = _PACKERS[self.layout](weight)

    @property
    def is_compiled(self) -> bool:
        """A kernel of ours multiplies it."""
        return self.layout in COMPILED

    @property
    def num_bytes(self) -> int:
        """What a product reads of it."""
        if self.layout == "onednn":  # knows no size of its own
            return self.shape[0] * self.shape[1] * self.weight.element_size()
        parts = (self.weight, self.scales, self.zeros)
        return sum(part.nbytes for part in parts if part is not None)

    def __repr__(self) -> str:
        return f"Linear({self.shape[1]} -> {self.shape[0]}, {self.weight.dtype}, {self.layout})"


def layout_of(weight: Tensor, *, is_for_many: bool = False) -> str:
    """`is_for_many`: most products have more than a dozen rows."""
    num_out, num_in = weight.shape
    if weight.device.type != "cpu" or not weight.numel():
        return "plain"
    if not num_out % 16 and units.can_multiply():
        if weight.dtype == torch.bfloat16 and not num_in % 32:
            return "native"
        if weight.dtype == torch.float32 and not num_in % 16:
            can_split = not num_in % 32 and units.bf16_unit() == "tiles"
            return "split" if is_for_many and can_split else "floats"
    if weight.dtype not in ONEDNN_DTYPES or not torch.backends.mkldnn.is_available():
        return "plain"
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "plain"
    return "onednn"


def linear(x_TI: Tensor, layer: Linear) -> Tensor:
    if layer.layout == "compressed":
        return _compressed(x_TI, layer)
    if layer.layout in NATIVE:
        return native(x_TI, layer)
    if layer.layout == "invariant":
        from trouper.kernels.cuda.matmul import matmul

        return matmul(x_TI, layer.weight, layer.bias)
    if layer.layout in ("int4", "int8"):
        return _quantized(x_TI, layer)
    if layer.layout == "onednn":
        return torch.ops.mkldnn._linear_pointwise(x_TI, layer.weight, layer.bias, "none", [], "")
    return F.linear(x_TI, layer.weight, layer.bias)


def native(x_TI: Tensor, layer: Linear, act: "Act" = "none") -> Tensor:
    """Of a native layer; what it is followed by is computed with it."""
    if layer.layout == "split":
        return _split(x_TI, layer, act)
    from trouper.kernels.cpu.linear.dense import SHAPES, matmul
    from trouper.kernels.cpu.ops import padded

    unit = _unit_of(x_TI.dtype)
    num_rows, (num_out, num_in) = len(x_TI), layer.shape
    per_word = 4 // x_TI.itemsize
    # the next product reads what an activation leaves
    y_TO = (
        x_TI.new_empty((num_rows, num_out))
        if act == "none"
        else padded(num_rows, num_out, x_TI.dtype)
    )
    launch.compiled(matmul, unit, act)(
        SHAPES[unit].num_pieces(num_rows, num_out, 2 * num_in // per_word),
        x_TI.data_ptr(),
        x_TI.stride(0) // per_word,
        layer.weight.data_ptr(),
        0 if layer.bias is None else layer.bias.data_ptr(),
        y_TO.data_ptr(),
        y_TO.stride(0),
        num_rows,
        num_in // per_word,
        num_out // 16,
        num_threads=torch.get_num_threads(),
    )
    return y_TO


def _unit_of(dtype: torch.dtype) -> "Unit":
    return "floats" if dtype == torch.float32 else units.bf16_unit()


def _split(x_TI: Tensor, layer: Linear, act: "Act") -> Tensor:
    from trouper.kernels.cpu.linear.split_fp32 import (
        FEW,
        SHAPE,
        parts_bytes,
        rows_at_once,
        scratch_bytes,
        split_matmul,
        split_rows,
    )

    num_rows, (num_out, num_in) = len(x_TI), layer.shape
    num_threads = torch.get_num_threads()
    y_TO = x_TI.new_empty((num_rows, num_out))
    most = rows_at_once(num_rows, num_in, num_threads)
    own_bytes = num_threads * scratch_bytes(most, num_in)
    scratch = launch.scratch(own_bytes + parts_bytes(most, num_in))
    parts = scratch + own_bytes
    split, product = launch.compiled(split_rows), launch.compiled(split_matmul, act)
    for first in range(0, num_rows, most):
        rows = min(most, num_rows - first)
        x = x_TI.data_ptr() + first * x_TI.stride(0) * 4, x_TI.stride(0)
        if rows > FEW.rows:
            split(-(-rows // 16), *x, parts, rows, num_in, num_threads=num_threads)
        product(
            SHAPE.num_pieces(rows, num_out, 3 * num_in),
            *x,
            parts,
            layer.weight.data_ptr(),
            0 if layer.bias is None else layer.bias.data_ptr(),
            y_TO.data_ptr() + first * num_out * 4,
            num_out,
            rows,
            num_in,
            num_out // 16,
            scratch,
            num_threads=num_threads,
        )
    return y_TO


def _compressed(x_TI: Tensor, layer: Linear) -> Tensor:
    from trouper.kernels.cpu.linear.compressed import SHAPES, compressed_matmul, scratch_bytes

    unit = units.bf16_unit()
    num_rows, (num_out, num_in) = len(x_TI), layer.shape
    num_threads = torch.get_num_threads()
    y_TO = x_TI.new_empty((num_rows, num_out))
    launch.compiled(compressed_matmul, unit)(
        SHAPES[unit].num_pieces(num_rows, num_out, num_in),
        x_TI.data_ptr(),
        x_TI.stride(0) // 2,
        layer.weight.data_ptr(),
        0 if layer.bias is None else layer.bias.data_ptr(),
        y_TO.data_ptr(),
        num_out,
        num_rows,
        num_in // 2,
        num_out // 16,
        num_threads,
        launch.scratch(num_threads * scratch_bytes(num_rows, num_in, unit)),
        num_threads=num_threads,
    )
    return y_TO


def _quantized(x_TI: Tensor, layer: Linear) -> Tensor:
    from trouper.kernels.cpu.linear.integer import SHAPES, scratch_bytes

    assert layer.scales is not None
    unit = units.bf16_unit()
    fmt: Format = "int4" if layer.layout == "int4" else "int8"
    num_rows, (num_out, num_in) = len(x_TI), layer.shape
    num_threads = torch.get_num_threads()
    bytes_each = scratch_bytes(num_rows, num_in, unit, fmt)
    y_TO = x_TI.new_empty((num_rows, num_out))
    _product_of(fmt, layer.scales.dtype, layer.zeros is not None)(
        SHAPES[unit, fmt].num_pieces(num_rows, num_out, num_in),
        x_TI.data_ptr(),
        x_TI.stride(0) // 2,
        layer.weight.data_ptr(),
        layer.scales.data_ptr(),
        0 if layer.zeros is None else layer.zeros.data_ptr(),
        0 if layer.bias is None else layer.bias.data_ptr(),
        y_TO.data_ptr(),
        num_rows,
        num_in // 2,
        num_out // 16,
        num_in // layer.scales.shape[1] // 2,
        num_threads,
        launch.scratch(num_threads * bytes_each),
        bytes_each,
        num_threads=num_threads,
    )
    return y_TO


def _product_of(fmt: Format, scales: torch.dtype, has_zeros: bool) -> launch.Kernel:
    """Asked for on loading too, so that no step compiles it."""
    from trouper.kernels.cpu.linear.integer import quantized_matmul

    kind = "bf16" if scales == torch.bfloat16 else "f32"
    return launch.compiled(quantized_matmul, units.bf16_unit(), fmt, kind, has_zeros)


def _round(weight_OI: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """Packed integers and scales, as `packed(quantize(...))`."""
    from trouper.kernels.cpu.linear.pack_integer import quantize_panels

    weight_OI = weight_OI.contiguous()
    num_out, num_in = weight_OI.shape
    group = group_of(num_in, fmt)
    blocks, half_bytes = num_blocks(num_out), 1 if fmt == "int4" else 2
    numbers = torch.zeros((blocks, num_in, 32 * half_bytes), dtype=torch.int8)
    scales = weight_OI.new_zeros((blocks, num_in // group, PANELS, LANES))
    launch.compiled(quantize_panels, fmt)(
        num_out // LANES,
        weight_OI.data_ptr(),
        numbers.data_ptr(),
        scales.data_ptr(),
        num_in // 2,
        group // 2,
        num_threads=torch.get_num_threads(),
    )
    return numbers, scales


def _compressed_or_none(weight_OI: Tensor) -> Tensor | None:
    """None where too many weights have an exponent of their own."""
    from trouper.kernels.cpu.linear.compressed import compress, compressed_matmul, weight_words

    launch.compiled(compressed_matmul, units.bf16_unit())  # now, and not in the first step
    weight_OI = weight_OI.contiguous()
    num_out, num_in = weight_OI.shape
    packed = torch.empty(weight_words(num_out, num_in), dtype=torch.int32)
    failures = torch.zeros(1, dtype=torch.int64)
    launch.compiled(compress)(
        num_out // 16,
        weight_OI.data_ptr(),
        packed.data_ptr(),
        num_in // 2,
        failures.data_ptr(),
        num_threads=torch.get_num_threads(),
    )
    return None if failures.item() else packed


def _pack_native(weight_OI: Tensor) -> Tensor:
    from trouper.kernels.cpu.linear.dense import matmul

    launch.compiled(matmul, _unit_of(weight_OI.dtype), "none")  # now, and not in the first step
    return _packed(weight_OI)


def _pack_split(weight_OI: Tensor) -> Tensor:
    from trouper.kernels.cpu.linear.split_fp32 import split_matmul, split_rows

    assert units.bf16_unit() == "tiles"  # who has not asked may not use them
    launch.compiled(split_rows)
    launch.compiled(split_matmul, "none")
    return _packed(weight_OI)


def _packed(weight_OI: Tensor) -> Tensor:
    from trouper.kernels.cpu.linear.dense import pack

    weight_OI = weight_OI.contiguous()
    num_out, num_in = weight_OI.shape
    per_word = 4 // weight_OI.itemsize
    packed = weight_OI.new_empty((num_out // 16, num_in // per_word, 16, per_word))
    launch.compiled(pack)(
        num_out // 16,
        weight_OI.data_ptr(),
        packed.data_ptr(),
        num_in // per_word,
        num_threads=torch.get_num_threads(),
    )
    return packed


def _pack_onednn(weight_OI: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), None)


_PACKERS = {
    "native": _pack_native,
    "floats": _pack_native,
    "split": _pack_split,
    "onednn": _pack_onednn,
    "plain": lambda weight: weight,
    "invariant": lambda weight: weight,
}


def linear_reference(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    y_TO = x_TI.double() @ weight_OI.double().T
    return (y_TO if bias_O is None else y_TO + bias_O.double()).to(x_TI.dtype)
