"""Features of the processor that the kernel builder asks about."""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownLambdaType=false
# llvmlite has no types.

import ctypes
import functools

from llvmlite import binding

ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18  # of Linux on x86-64


def has_bf16_dot() -> bool:
    """AVX512-BF16 multiplies pairs of bfloat16, and rounds to bfloat16."""
    return _has("avx512bf16")


def has_fma() -> bool:
    """A product and a sum of vectors are one instruction."""
    return _has("fma") and (_has("avx2") or _has("avx512f"))


def has_permutations() -> bool:
    """One instruction permutes the thirty-two 16-bit integers of a register."""
    return _has("avx512bw")


def has_scaling() -> bool:
    """AVX-512 splits floats into exponent and fraction, and joins them again."""
    return _has("avx512dq")


def num_registers() -> int:
    """Count the registers' worth of sixteen floats that the processor holds."""
    return 32 if _has("avx512f") else 8


@functools.cache
def has_tiles() -> bool:
    """AMX multiplies bfloat16, and this process may use it: Linux grants it once, for all threads."""
    if not (has_bf16_dot() and _has("amx-tile") and _has("amx-bf16")):
        return False
    syscall = ctypes.CDLL(None).syscall
    return syscall(ARCH_PRCTL, *(ctypes.c_long(x) for x in (REQUEST_PERMISSION, TILE_DATA))) == 0


@functools.cache  # the question takes 0.3 ms
def _has(feature: str) -> bool:
    return bool(binding.get_host_cpu_features().get(feature))
