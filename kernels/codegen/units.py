"""The instructions that multiply on this machine, and the dtypes that compiled kernels support.

The choice of kernels needs these answers also without llvmlite and torch, so this module imports neither.
Without llvmlite every answer is no.
"""

import functools
import logging
from typing import TYPE_CHECKING, Literal

from trouper.kernels.codegen import choice

if TYPE_CHECKING:
    import torch

# The number of float32 in the register that the kernel builder assumes: one zmm, two ymm or four NEON registers.
LANES = 16
# The element types in memory.
Kind = Literal["bf16", "f16", "f32", "i64", "i32", "i16", "i8"]

# Instructions that multiply:
#   dots    AVX512-BF16, or two FMAs of float32 instead
#   tiles   AMX with bfloat16
#   floats  FMAs of float32
#   bytes   integers: VNNI, products of bytes of AVX2, or plain multiplications
Unit = Literal["dots", "tiles", "floats", "bytes"]

logger = logging.getLogger(__name__)


@functools.cache
def is_available() -> bool:
    """Test whether kernels can be compiled: llvmlite is installed, and TROUPER_KERNELS is not torch.

    Without kernels torch computes everything, slower but with the same interface.
    """
    if choice.chosen() == "torch":
        return False
    try:
        from trouper.kernels.codegen import features
    except ImportError as error:
        logger.warning("cannot import llvmlite, so torch computes everything on the CPU: %s", error)
        return False
    return bool(features)


def kind_of(dtype: "torch.dtype") -> Kind | None:
    """Return the kernels' name of a dtype, or None if the kernels of this machine do not support it.

    Torch computes all other dtypes, such as float16.
    """
    kinds: dict[str, Kind] = {"torch.bfloat16": "bf16", "torch.float32": "f32"}
    kind = kinds.get(str(dtype))
    return kind if can_multiply() or (kind == "f32" and is_available()) else None


def row_kind(dtype: "torch.dtype", width: int, *, native: bool | None = None) -> Kind | None:
    """Return `kind_of` the dtype if rows of this width fill whole registers, or else None.

    Args:
        native: False forces None, so that a caller can request torch.
    """
    return None if native is False or width % LANES else kind_of(dtype)


def can_multiply() -> bool:
    """Test whether compiled products are faster than torch's in both dtypes.

    This is the case with AVX2 or more. Otherwise torch computes products.
    """
    if not is_available():
        return False
    from trouper.kernels.codegen.features import has_fma

    return has_fma()


def can_decode() -> bool:
    """Test whether weights of few bits can be decoded as fast as memory delivers them: with AVX512-BF16.

    Otherwise products with rounded rows are used for them.
    """
    if not is_available():
        return False
    from trouper.kernels.codegen.features import has_bf16_dot

    return has_bf16_dot()


def integer_unit(*, has_tiles: bool = True) -> Literal["dots", "tiles", "bytes"]:
    """Return the instructions that multiply weights of few bits.

    Processors without bfloat16 instructions multiply bytes.  With AVX-512 VNNI, bytes are also faster than dots, 1.3 to 1.7
    times from two rows on.

    Args:
        has_tiles: whether tiles support the other properties of the weight.
    """
    if not can_decode():
        return "bytes"
    if has_tiles and bf16_unit() == "tiles":
        return "tiles"
    from trouper.kernels.codegen.features import has_wide_byte_dots

    return "bytes" if has_wide_byte_dots() else "dots"


@functools.cache
def bf16_unit() -> Literal["dots", "tiles"]:
    """Return the instructions that multiply bfloat16 on this machine.

    Tiles are AMX; dots are AVX512-BF16, or a replacement by FMAs. It does not change within a process.
    """
    from trouper.kernels.codegen.features import has_tiles

    return "tiles" if has_tiles() else "dots"
