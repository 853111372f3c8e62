"""Features of the processor that the kernel builder asks about.

`choice.py` may leave some of them out, so that a machine with more compiles and computes as one with less does.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownLambdaType=false
# llvmlite has no types.

import ctypes
import functools
import platform

from llvmlite import binding

from trouper.kernels.codegen import choice

ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18  # of Linux on x86-64
X86 = ("x86_64", "AMD64")
# what a processor of AVX2 does not have; AVX-VNNI is all that it may have beside
BEYOND_AVX2 = ("avx512", "avx10", "amx", "avxvnni", "avxifma", "avxneconvert", "evex")


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


def has_byte_pairs() -> bool:
    """One instruction multiplies bytes and adds the products of neighbours, and another one of 16-bit integers: AVX2."""
    return _has("avx2")


def has_wide_byte_pairs() -> bool:
    """One instruction does so for a register of 64 bytes."""
    return _has("avx512bw")


def has_byte_dots() -> bool:
    """VNNI adds products of four bytes, or two 16-bit integers, to 32 bits."""
    return _has("avxvnni") or has_wide_byte_dots()


def has_wide_byte_dots() -> bool:
    """One instruction does so for a register of 64 bytes."""
    return _has("avx512vnni")


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


@functools.cache
def target() -> tuple[str, str]:
    """Return LLVM's name of the processor that kernels are compiled for, and its features."""
    chosen = choice.chosen()
    if chosen == "all":
        return binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    name = "x86-64" if platform.machine() in X86 else "generic"
    if chosen == "portable":
        return name, ""
    known = sorted(_host_features())
    return name, ",".join(f"{'+' if _has(feature) else '-'}{feature}" for feature in known)


def _has(feature: str) -> bool:
    chosen = choice.chosen()
    if chosen == "portable" or not _host_features().get(feature):
        return False
    is_beyond = feature.startswith(BEYOND_AVX2) and (chosen, feature) != ("avx-vnni", "avxvnni")
    return chosen == "all" or not is_beyond


@functools.cache  # the question takes 0.3 ms
def _host_features() -> dict[str, bool]:
    return dict(binding.get_host_cpu_features())
