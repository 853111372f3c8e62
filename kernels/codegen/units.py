"""Units that this machine multiplies with, and the dtypes that compiled kernels compute with.

Importing this module needs neither llvmlite nor torch: without llvmlite every question is answered with no.
"""

import functools
import logging
from typing import TYPE_CHECKING, Literal

from trouper.kernels.codegen import choice

if TYPE_CHECKING:
    import torch

LANES = 16  # float32 of the register that the kernel builder assumes: one zmm, two ymm
Kind = Literal["bf16", "f32", "i64", "i32", "i16", "i8"]  # element types of memory

# Instructions that multiply:
#   dots    AVX512-BF16, or two FMAs of float32 in its place
#   tiles   AMX of bfloat16
#   floats  FMAs of float32
#   bytes   integers: VNNI, AVX2's products of bytes, or plain ones
Unit = Literal["dots", "tiles", "floats", "bytes"]

logger = logging.getLogger(__name__)


@functools.cache
def is_available() -> bool:
    """llvmlite can be imported, and TROUPER_KERNELS=torch does not ask for torch's operations instead."""
    if choice.chosen() == "torch":
        return False
    try:
        from trouper.kernels.codegen import features
    except ImportError as error:
        logger.warning("llvmlite cannot be imported, the CPU runs on torch alone: %s", error)
        return False
    return bool(features)


def kind_of(dtype: "torch.dtype") -> Kind | None:
    """The kernels' name of the dtype; None where this machine's kernels do not compute with it."""
    kinds: dict[str, Kind] = {"torch.bfloat16": "bf16", "torch.float32": "f32"}
    kind = kinds.get(str(dtype))
    return kind if can_multiply() or (kind == "f32" and is_available()) else None


def row_kind(dtype: "torch.dtype", width: int, *, native: bool | None = None) -> Kind | None:
    """`kind_of` where rows of this width are whole registers, else None; None with `native=False`."""
    return None if native is False or width % LANES else kind_of(dtype)


def can_multiply() -> bool:
    """Compiled products beat torch's in both dtypes: the machine has AVX2 or more."""
    if not is_available():
        return False
    from trouper.kernels.codegen.features import has_fma

    return has_fma()


def can_decode() -> bool:
    """Weights of few bits become numbers as fast as they are read: the machine has AVX512-BF16."""
    if not is_available():
        return False
    from trouper.kernels.codegen.features import has_bf16_dot

    return has_bf16_dot()


def integer_unit() -> Literal["dots", "tiles", "bytes"]:
    """The instructions that multiply weights of few bits on this machine: bytes where none knows bfloat16."""
    return bf16_unit() if can_decode() else "bytes"


@functools.cache
def bf16_unit() -> Literal["dots", "tiles"]:
    """The instructions that multiply bfloat16 on this machine."""
    from trouper.kernels.codegen.features import has_tiles

    return "tiles" if has_tiles() else "dots"
