"""The features of the processor that the kernel builder uses.

`choice.py` can exclude features, so that a modern machine compiles and computes like an older one.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownLambdaType=false
# llvmlite has no types.

import ctypes
import functools
import platform

from llvmlite import binding

from trouper.kernels.codegen import choice

ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18  # Linux on x86-64
X86 = ("x86_64", "AMD64")
# Feature names beyond AVX2.  AVX-VNNI may be added to AVX2 on its own.
BEYOND_AVX2 = ("avx512", "avx10", "amx", "avxvnni", "avxifma", "avxneconvert", "evex")


def has_bf16_dot() -> bool:
    """Test for AVX512-BF16: it multiplies pairs of bfloat16 and rounds to bfloat16.

    Kernels for bfloat16 are otherwise computed in float32 or with integers. It is part of AVX-512 on newer servers.
    """
    return _has("avx512bf16")


def has_fma() -> bool:
    """Test whether one instruction multiplies and adds vectors.

    Products are left to torch on processors without it. It exists in all processors with AVX2 and in AVX-512.
    """
    return _has("fma") and (_has("avx2") or _has("avx512f"))


def has_half_conversion() -> bool:
    """Test whether one instruction converts half-precision numbers to float32.

    Scales of many checkpoints have half precision. All processors with AVX2 have it, and all of ARM.
    """
    return _has("f16c") or platform.machine() not in X86


def has_permutations() -> bool:
    """Test whether one instruction permutes the thirty-two 16-bit integers of a register.

    Layouts with small tables of weights need it. It belongs to AVX512-BW.
    """
    return _has("avx512bw")


def has_scaling() -> bool:
    """Test for the AVX-512 instructions that split a float into exponent and fraction, and join them.

    Otherwise `exp2` builds the power of two from bits.
    """
    return _has("avx512dq")


def has_byte_pairs() -> bool:
    """Test for AVX2: one instruction multiplies bytes and adds neighbouring products, another does so for 16-bit
    integers.

    They are the basis of integer products without VNNI.
    """
    return _has("avx2")


def has_wide_byte_pairs() -> bool:
    """Test for the instructions of `has_byte_pairs` on a register of 64 bytes.

    Otherwise each half of a register is processed with the narrower instruction.
    """
    return _has("avx512bw")


def has_byte_dots() -> bool:
    """Test for VNNI: it adds the products of four bytes, or of two 16-bit integers, to 32 bits.

    It replaces two instructions of `has_byte_pairs` by one.
    """
    return _has("avxvnni") or has_wide_byte_dots()


def has_wide_byte_dots() -> bool:
    """Test for VNNI on a register of 64 bytes.

    Otherwise each half of a register is processed with the narrower instruction. It is AVX512-VNNI.
    """
    return _has("avx512vnni")


def num_registers() -> int:
    """Return how many vectors of sixteen floats the processor's registers hold.

    Blocks of products are chosen so that their sums stay in registers. Older processors have half as many.
    """
    return 32 if _has("avx512f") else 8


@functools.cache
def has_tiles() -> bool:
    """Test for AMX with bfloat16, and request permission to use it.

    Linux grants the permission once for all threads of the process. The result is the same for the life of the
    process.
    """
    if not (has_bf16_dot() and _has("amx-tile") and _has("amx-bf16")):
        return False
    syscall = ctypes.CDLL(None).syscall
    return syscall(ARCH_PRCTL, *(ctypes.c_long(x) for x in (REQUEST_PERMISSION, TILE_DATA))) == 0


@functools.cache
def target() -> tuple[str, str]:
    """Return LLVM's name of the target processor, and its features.

    They are part of the hash of compiled kernels, so machines that share a home folder do not share code by mistake.
    """
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


@functools.cache
def _host_features() -> dict[str, bool]:
    return dict(binding.get_host_cpu_features())
