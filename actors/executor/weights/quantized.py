"""The matrices of quantised checkpoints: integers, e4m3 and e2m1 with their scales, as the kernels multiply with them.

    w = s · (q - z)     q [O, I], s and z [O, G] or less

`layouts.py` says in which tensors they are stored.  awq has the outputs 0 2 4 6 1 3 5 7 of each eight in this order;
gptq stores z - 1, unless its format is gptq_v2.  The codes of bnb4 choose from a table of any 16 numbers, so no kernel multiplies
with them: they are read as plain weights.  e2m1 are looked up and doubled, with half the scale; with one for 16 inputs
they are bytes.

Where inputs of one group do not lie side by side (`desc_act`), columns are sorted by group, and `order_I` tells which
input each of them multiplies.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves the types of view and some others open.

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from trouper.actors.executor.weights.layouts import (
    BNB_BLOCKS,
    BNB_STATES,
    StackedPart,
    WeightLayout,
    base_of,
)
from trouper.errors import invalid
from trouper.kernels.cpu.linear.quantization import E2M1, IntegerWeight, dequantized
from trouper.kernels.formats import Format

# The positions of eight consecutive outputs within an int32.
AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
E4M3_NAN = 0x7F
WORDS = ("gptq", "awq", "packed")
Shape = tuple[int, ...]
Parts = Mapping[str, Tensor]
Read = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # q, scales, zeros, order of the inputs
SCALES = (
    "scales", "weight_scale", "weight_scale_inv", "weight_global_scale", "weight_scale_2", "SCB",
)  # fmt: skip
# The most bytes of JSON in a state. bitsandbytes writes about 200.
LARGEST_STATE = 2**16


def matrix(
    layout: WeightLayout,
    name: str,
    shape: Shape,
    parts: Parts,
    dtype: torch.dtype,
) -> IntegerWeight:
    """Assemble the matrix [O, I] from its stored parts, given by their suffixes.

    Raises:
        TrouperValidationError: numbers that no checkpoint has; the message names the tensor.
    """
    base = base_of(name)
    for part in SCALES:
        if part in parts and not torch.isfinite(_floats(parts[part])).all():
            raise invalid("model", f"{base}{part}: scales that are not finite")
    q, scales, zeros, order = READERS[layout.method](layout, base, shape, parts)
    return IntegerWeight(
        _format(layout),
        dtype,
        (q if order is None else q[:, order]).contiguous(),
        _of_groups(scales if scales.dtype == torch.bfloat16 else scales.float(), shape[0]),
        None if zeros is None or not zeros.any() else zeros,
        order_I=order,
    )


def _format(layout: WeightLayout) -> Format:
    match layout.method:
        case "fp8":
            return "fp8"
        case "nvfp4":
            return "int8"
        case "fp4":
            return "int8" if layout.has_global_scale else "fp4"
        case _:
            return "int4" if layout.method in WORDS and layout.bits == 4 else "int8"


def _gptq(layout: WeightLayout, base: str, _shape: Shape, parts: Parts) -> Read:
    q, zeros = _unpacked(parts["qweight"].T, layout.bits), _unpacked(parts["qzeros"], layout.bits)
    zeros = (zeros.T + layout.zeros_less) & ((1 << layout.bits) - 1)
    order = _order(parts.get("g_idx"), f"{base}g_idx", layout.group_size)
    return *_signed(layout, q, parts["scales"].T, zeros), order


def _awq(layout: WeightLayout, _base: str, _shape: Shape, parts: Parts) -> Read:
    q, zeros = (_in_order(_unpacked(parts[part], 4)).T for part in ("qweight", "qzeros"))
    return *_signed(layout, q, parts["scales"].T, zeros), None


def _packed(layout: WeightLayout, base: str, shape: Shape, parts: Parts) -> Read:
    found = parts["weight_shape"].tolist()
    if tuple(found) != shape:
        raise invalid("model", f"{base}weight_shape: must be {list(shape)}", found)
    q, zeros = _unpacked(parts["weight_packed"], layout.bits)[:, : shape[1]], None
    if layout.has_zeros:
        zeros = _unpacked(parts["weight_zero_point"].T, layout.bits).T
    order = _order(parts.get("weight_g_idx"), f"{base}weight_g_idx", layout.group_size)
    return *_signed(layout, q, parts["weight_scale"], zeros), order


def _signed(
    layout: WeightLayout, q: Tensor, scales: Tensor, zeros: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Convert unsigned integers to int8 around 0."""
    middle = 1 << (layout.bits - 1)
    zeros = None if zeros is None else (zeros[: len(q)] - middle).to(torch.int8)
    return (q - middle).to(torch.int8), scales, zeros


def _int8(layout: WeightLayout, _base: str, shape: Shape, parts: Parts) -> Read:
    zeros = _of_groups(parts["weight_zero_point"], shape[0]) if layout.has_zeros else None
    return parts["weight"], parts["weight_scale"], zeros, None


def _fp4(_layout: WeightLayout, _base: str, _shape: Shape, parts: Parts) -> Read:
    scales, whole = _floats(parts["weight_scale"]) / 2, parts.get("weight_global_scale")
    scales = scales.bfloat16() if whole is None else scales / whole  # powers of two, or of any size
    return _e2m1(parts["weight_packed"]), scales, None, None


def _nvfp4(_layout: WeightLayout, _base: str, _shape: Shape, parts: Parts) -> Read:
    scales = _floats(parts["weight_scale"]) / 2 * parts["weight_scale_2"]
    return _e2m1(parts["weight"]), scales, None, None


def _bnb8(_layout: WeightLayout, base: str, _shape: Shape, parts: Parts) -> Read:
    if "weight_format" in parts and parts["weight_format"].any():
        raise invalid(
            "model", f"{base}weight_format: must be 0, in rows", parts["weight_format"].tolist()
        )
    return parts["weight"], parts["SCB"] / 127, None, None


def _fp8(layout: WeightLayout, base: str, shape: Shape, parts: Parts) -> Read:
    num_out, num_in = shape
    weight = parts["weight"]
    if ((weight.view(torch.uint8) & E4M3_NAN) == E4M3_NAN).any():
        raise invalid("model", f"{base}weight: weights that are not numbers")
    scales = _floats(parts.get("weight_scale_inv", parts.get("weight_scale")))
    if layout.block is not None:
        rows, columns = layout.block
        size = math.gcd(num_in, columns)  # where the last block is shorter
        of_group = torch.arange(0, num_in, size) // columns
        scales = scales[torch.arange(num_out) // rows][:, of_group]
    return weight, scales, None, None


READERS: dict[str, Callable[[WeightLayout, str, Shape, Parts], Read]] = {
    "gptq": _gptq,
    "awq": _awq,
    "packed": _packed,
    "int8": _int8,
    "fp8": _fp8,
    "fp4": _fp4,
    "nvfp4": _nvfp4,
    "bnb8": _bnb8,
}


def experts(parts: Parts, name: str) -> Tensor:
    """Return the weights [E, I, O] of MXFP4 experts in float32: blocks of 32 e2m1 numbers share a power of two."""
    blocks, powers = parts["_blocks"], _floats(parts["_scales"])
    if not torch.isfinite(powers).all():
        raise invalid("model", f"{name}_scales: scales that are not finite")
    return (_e2m1(blocks) * (powers / 2).unsqueeze(-1)).flatten(2).transpose(1, 2).contiguous()


def of_expert(part: StackedPart, parts: Parts, dtype: torch.dtype) -> IntegerWeight:
    """Return the matrix of one MXFP4 expert, in which blocks of 32 e2m1 numbers share a power of two."""
    blocks, powers = (parts[last][part.expert][part.rows] for last in ("_blocks", "_scales"))
    scales = _floats(powers) / 2
    if not torch.isfinite(scales).all():
        raise invalid("model", f"{part.name}_scales: scales that are not finite")
    return IntegerWeight("fp4", dtype, _e2m1(blocks).flatten(1), scales.bfloat16())


def joined(parts: Sequence[IntegerWeight]) -> IntegerWeight | None:
    """Concatenate the outputs of matrices in the smallest of their group sizes. Returns None if one matrix cannot hold all.

    Of several kinds of integers all become bytes.
    """
    first, num_groups = parts[0], max(part.scales_OG.shape[1] for part in parts)
    kinds = {part.fmt for part in parts}
    if "fp8" in kinds and len(kinds) > 1:
        return None
    for part in parts:
        is_same = (part.order_I is None) == (first.order_I is None)
        if is_same and part.order_I is not None and first.order_I is not None:
            is_same = torch.equal(part.order_I, first.order_I)
        if not is_same or num_groups % part.scales_OG.shape[1]:
            return None

    def finer(x_OG: Tensor) -> Tensor:
        return x_OG.repeat_interleave(num_groups // x_OG.shape[1], 1)

    zeros = None
    if any(part.zeros_OG is not None for part in parts):
        zeros = [
            torch.zeros(part.scales_OG.shape, dtype=torch.int8)
            if part.zeros_OG is None
            else part.zeros_OG
            for part in parts
        ]
    return first._replace(
        fmt="int8" if len(kinds) > 1 else first.fmt,
        q_OI=torch.cat([part.q_OI for part in parts]),
        scales_OG=torch.cat([finer(part.scales_OG) for part in parts]),
        zeros_OG=None if zeros is None else torch.cat([finer(each) for each in zeros]),
    )


def widened(layout: WeightLayout, name: str, shape: Shape, parts: Parts) -> Tensor:
    """Dequantize a tensor exactly, to float32.

    Used for tensors that no product needs, and for kernels without support for the format. Rounding to the model's
    dtype follows later.
    """
    if layout.method == "mxfp4":
        return experts(parts, name)
    if layout.method == "bnb4":
        return _from_table(base_of(name), shape, parts)
    return dequantized(matrix(layout, name, shape, parts, torch.float32))


def shape_of_codes(base: str, state: Tensor) -> Shape:
    """Read the shape [O, I] from the state of a bitsandbytes matrix.

    Raises:
        TrouperValidationError: the state is not JSON, or has no such shape.
    """
    return _bnb_state(base, state)[1]


def _bnb_state(base: str, state: Tensor) -> tuple[dict[str, object], Shape]:
    try:
        if state.numel() > LARGEST_STATE:
            raise ValueError(f"more than {LARGEST_STATE} bytes")
        found = json.loads(bytes(state.flatten().tolist()))
        shape, block = found["shape"], found["blocksize"]
        nested = found.get("nested_blocksize", BNB_BLOCKS[0])
        offset = float(found.get("nested_offset", 0.0))
        sizes = [block, nested, *shape]
        if len(shape) != 2 or not all(type(size) is int and size > 0 for size in sizes):
            raise ValueError("shape and blocksize must be whole numbers above 0")
        if block not in BNB_BLOCKS or not math.isfinite(offset):
            raise ValueError("blocksize or nested_offset is out of range")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        rule = f"{base}weight.quant_state: is not the state of a matrix ({error})"
        raise invalid("model", rule) from error
    return found, tuple(shape)


def _from_table(base: str, shape: Shape, parts: Parts) -> Tensor:
    """Return the weights [O, I] of four-bit codes: values of a table, times the scale of their block."""
    state = next(parts[name] for name in BNB_STATES.values() if name in parts)
    found, stored_shape = _bnb_state(base, state)
    if stored_shape != shape:
        raise invalid(
            "model", f"{base}weight.quant_state: shape must be {list(shape)}", stored_shape
        )
    size, block = math.prod(shape), cast("int", found["blocksize"])
    absmax = parts["weight.absmax"]
    if len(absmax) != -(-size // block):
        rule = f"{base}weight.absmax: must have {-(-size // block)} numbers for blocks of {block}"
        raise invalid("model", rule, len(absmax))
    if absmax.dtype == torch.uint8:
        if not {"weight.nested_absmax", "weight.nested_quant_map"} <= parts.keys():
            raise invalid("model", f"{base}weight.absmax: bytes without weight.nested_absmax")
        of_block = parts["weight.nested_absmax"].flatten()
        nested = cast("int", found.get("nested_blocksize", 256))
        if len(of_block) != -(-len(absmax) // nested):
            rule = f"{base}weight.nested_absmax: must have {-(-len(absmax) // nested)} numbers"
            raise invalid("model", rule, len(of_block))
        whole = of_block.repeat_interleave(nested)[: len(absmax)]
        offset = torch.tensor(cast("float", found.get("nested_offset", 0.0)))
        absmax = parts["weight.nested_quant_map"][absmax.int()] * whole + offset
    absmax, table = absmax.float(), parts["weight.quant_map"]
    if not (torch.isfinite(absmax).all() and torch.isfinite(table).all()):
        raise invalid("model", f"{base}weight.absmax: scales that are not finite")
    bytes_ = parts["weight"].flatten().int()
    both = torch.stack((table[bytes_ >> 4], table[bytes_ & 15]), -1).flatten()[:size]
    return (both * absmax.repeat_interleave(block)[:size]).view(shape)


def _floats(scales: Tensor | None) -> Tensor:
    """Return scales as floats. Bytes are exponents of two, where 255 means not finite."""
    assert scales is not None
    if scales.dtype in (torch.uint8, torch.float8_e8m0fnu):
        powers = scales.view(torch.uint8).int()
        # The smallest power of two is a subnormal number.
        bits = torch.where(powers == 0, 1 << 22, powers << 23)
        return bits.view(torch.float32)
    return scales.float() if scales.dtype == torch.float8_e4m3fn else scales


def _of_groups(x: Tensor, num_out: int) -> Tensor:
    """Expand scales or zeros to [O, G], from one for the whole matrix, one for each output, or one for each group."""
    if x.dim() == 2:
        return x.contiguous()
    return (
        (x.reshape(-1, 1) if x.numel() == num_out else x.reshape(1, 1))
        .expand(num_out, 1)
        .contiguous()
    )


def _order(g_idx: Tensor | None, name: str, group_size: int | None) -> Tensor | None:
    """Return the order that sorts inputs by their groups, or None if they are sorted already.

    Raises:
        TrouperValidationError: a group has more or fewer inputs than its size.
    """
    if g_idx is None or group_size is None:
        return None
    of_input = torch.arange(len(g_idx)) // group_size
    if torch.equal(g_idx.long(), of_input):
        return None
    order = torch.argsort(g_idx.long(), stable=True)
    if not torch.equal(g_idx.long()[order], of_input):
        raise invalid("model", f"{name}: each group must have {group_size} inputs")
    return order


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpack unsigned integers: [N, M] int32 to [N, 32 / bits · M]."""
    # Flattened first, because a view to bytes needs a contiguous last dimension even for one column.
    bytes_ = words.flatten().view(torch.uint8).view(len(words), -1)
    if bits == 8:
        return bytes_.to(torch.int16)
    return torch.stack((bytes_ & 15, bytes_ >> 4), -1).flatten(1).to(torch.int8)


def _in_order(stored: Tensor) -> Tensor:
    places: Tensor = stored.reshape(len(stored), -1, 8)[..., AWQ_PLACES]
    return places.reshape(len(stored), -1)


def _e2m1(bytes_: Tensor) -> Tensor:
    """Unpack e2m1 numbers: […, N] bytes to […, 2 N] doubled values, the low half of a byte first."""
    both = [(E2M1[byte & 15], E2M1[byte >> 4]) for byte in range(256)]
    table = torch.tensor(both, dtype=torch.int8).view(torch.int16)
    return table.squeeze(-1)[bytes_.int()].view(torch.int8)
