"""The one place that chooses an implementation: of a decoder's operations, and of each linear layer.

    CpuOps     any dtype, shape and machine; several torch calls an operation
    NativeOps  compiled kernels: one pass over memory and one launch an operation, on torch's threads

    compressed  bfloat16 where the machine has AVX512-BF16: 12 bits a weight (`cpu/linear/compressed.py`)
    native      bfloat16 that is not compressed, and float32 ("floats"), with AVX2 (`cpu/linear/dense.py`)
    split       float32 for many rows, with AMX (`cpu/linear/split_fp32.py`)
    int8, int4, fp4  integers with scales for bfloat16, wherever kernels compile (`cpu/linear/integer.py`); elsewhere the
                rounded weights in their own dtype, with no gain
    onednn      other shapes and machines (`cpu/linear/onednn.py`)
    plain       what oneDNN does not pack, and GPUs, where cuBLAS multiplies (`cpu/linear/plain.py`)
    invariant   on a GPU, where it is asked for (`cuda/linear.py`)

Law: a choice depends on the weight, the machine and the configuration, never on a batch; tests compare the
implementations (`tests/kernels/cpu`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trouper.kernels.codegen import units
from trouper.kernels.codegen.units import LANES
from trouper.kernels.cpu.linear.by_torch import OneDNNLinear, PlainLinear, PlainLoRA, packed_dtypes
from trouper.kernels.cpu.linear.quantization import (
    IntegerWeight,
    can_pack,
    dequantized,
    quantize,
)
from trouper.kernels.experts import Experts, PlainExperts, Routing
from trouper.kernels.formats import Format
from trouper.kernels.linear import LinearConfig, LinearMethod
from trouper.kernels.lora import LoRAWeights
from trouper.kernels.ops import CpuOps, OpsConfig


class Processor(NamedTuple):
    """Capabilities of the processor that a choice depends on."""

    can_compile: bool  # kernels at all: llvmlite is there
    can_multiply: bool  # compiled products, AVX2
    can_decode: bool  # weights of few bits as fast as they are read, AVX512-BF16
    has_tiles: bool  # AMX
    onednn_dtypes: frozenset[torch.dtype]


class WeightSpec(NamedTuple):
    """Properties of a weight that a choice depends on."""

    num_out: int
    num_in: int
    dtype: torch.dtype
    fmt: Format | None = (
        None  # of numbers with scales in a checkpoint, if a kernel reads their groups
    )


def make_ops(config: OpsConfig, *, native: bool | None = None) -> CpuOps:
    """Build the operations; `native` = None chooses compiled kernels wherever they can be used."""
    if native or (native is None and can_be_native(config)):
        from trouper.kernels.cpu.ops import NativeOps

        return NativeOps(config)
    return CpuOps(config)


def can_be_native(config: OpsConfig) -> bool:
    """All rows are whole registers, and the kernels know the dtype and the heads."""
    sizes = (config.head_dim, config.hidden_size, config.intermediate_size)
    if any(n % LANES for n in sizes) or units.kind_of(config.dtype) is None:
        return False
    from trouper.kernels.cpu.attention.prefill import can_prefill

    return can_prefill(config.num_q_heads // config.num_kv_heads, config.head_dim)


def make_linear(
    weight: Tensor | IntegerWeight,
    bias_O: Tensor | None = None,
    config: LinearConfig = LinearConfig(),  # noqa: B008  # immutable
) -> LinearMethod:
    """Choose the method for a weight, and pack the weight."""
    method = choose_linear(spec_of(weight), this_processor(), config)
    if method.takes_integers:
        return method.pack(weight, bias_O)
    if isinstance(weight, Tensor) and config.quantization is not None:
        weight = quantize(weight, config.quantization)
    if isinstance(weight, IntegerWeight):
        weight = dequantized(weight).to(weight.dtype)
    return method.pack(weight, bias_O)


def choose_linear(
    weight: WeightSpec, processor: Processor, config: LinearConfig
) -> type[LinearMethod]:
    """Choose the method of a linear layer: a pure function of its arguments."""
    if config.device == "cuda":
        if not config.is_batch_invariant:
            return PlainLinear
        from trouper.kernels.cuda.linear import InvariantLinear

        return InvariantLinear
    if not weight.num_out * weight.num_in:
        return PlainLinear
    is_bf16 = weight.dtype == torch.bfloat16 and weight.num_in % (2 * LANES) == 0
    is_fp32 = weight.dtype == torch.float32 and weight.num_in % LANES == 0
    if processor.can_compile and weight.num_out % LANES == 0:
        if is_bf16 and (fmt := weight.fmt or config.quantization) not in (None, "fp8"):
            from trouper.kernels.cpu.linear.integer import INTEGER_LINEARS

            return INTEGER_LINEARS[fmt]
        if processor.can_multiply and is_bf16:
            return _choose_bf16(processor, config)
        if processor.can_multiply and is_fp32:
            return _choose_fp32(weight, processor, config)
    return OneDNNLinear if weight.dtype in processor.onednn_dtypes else PlainLinear


def _choose_bf16(processor: Processor, config: LinearConfig) -> type[LinearMethod]:
    if processor.can_decode and config.is_compressed and not config.is_for_many_rows:
        from trouper.kernels.cpu.linear.compressed import CompressedLinear

        return CompressedLinear
    from trouper.kernels.cpu.linear.dense import DenseLinear

    return DenseLinear


def _choose_fp32(
    weight: WeightSpec, processor: Processor, config: LinearConfig
) -> type[LinearMethod]:
    if config.is_for_many_rows and processor.has_tiles and weight.num_in % (2 * LANES) == 0:
        from trouper.kernels.cpu.linear.split_fp32 import SplitLinear

        return SplitLinear
    from trouper.kernels.cpu.linear.dense import DenseLinear

    return DenseLinear


def make_experts(
    gate_up: Sequence[LinearMethod], down: Sequence[LinearMethod], routing: Routing
) -> Experts:
    """Put the experts of a layer together: one launch a product where a kernel takes all of them in the form that they have."""
    if units.is_available():
        from trouper.kernels.cpu.experts.native import grouped

        if (native := grouped(gate_up, down, routing)) is not None:
            return native
    return PlainExperts(gate_up, down, routing)


def make_lora(
    part_sizes: Sequence[int], num_in: int, num_slots: int, max_rank: int, dtype: torch.dtype
) -> LoRAWeights:
    """Make empty slots for the adapters of a layer whose outputs are these parts: compiled kernels where they can be used."""
    if units.is_available():
        from trouper.kernels.cpu.linear.lora import NativeLoRA, can_adapt

        if can_adapt(part_sizes, num_in, dtype):
            return NativeLoRA(part_sizes, num_in, num_slots, max_rank, dtype)
    return PlainLoRA(part_sizes)


def this_processor() -> Processor:
    """Ask the processor and torch."""
    can_multiply = units.can_multiply()
    return Processor(
        can_compile=units.is_available(),
        can_multiply=can_multiply,
        can_decode=units.can_decode(),
        has_tiles=can_multiply and units.bf16_unit() == "tiles",
        onednn_dtypes=packed_dtypes(),
    )


def spec_of(weight: Tensor | IntegerWeight) -> WeightSpec:
    """Describe a weight to `choose_linear`."""
    if isinstance(weight, IntegerWeight):
        num_out, num_in = weight.q_OI.shape
        fmt = weight.fmt if can_pack(weight) else None
        return WeightSpec(num_out, num_in, weight.dtype, fmt=fmt)
    num_out, num_in = weight.shape
    return WeightSpec(num_out, num_in, weight.dtype)
