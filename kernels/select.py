"""The choice of an implementation: for a decoder's operations and for each linear layer.

Operations on the CPU:

    NativeOps  compiled kernels: one launch and one pass over memory for each operation
    CpuOps     torch: any dtype, shape and machine; several calls for each operation

Linear layers:

    CompressedLinear   bfloat16 in 12 bits a weight, with AVX512-BF16 (`cpu/linear/compressed.py`)
    DenseLinear        other bfloat16, and float32, with AVX2 (`cpu/linear/dense.py`)
    SplitLinear        float32 for many rows, with AMX (`cpu/linear/split_fp32.py`)
    INTEGER_LINEARS    int4 to int8 and fp4 with scales, for bfloat16, if kernels compile (`cpu/linear/integer.py`);
                       otherwise the rounded weights are kept in their own dtype, which saves nothing
    OneDNNLinear       other shapes and machines (`cpu/linear/by_torch.py`)
    PlainLinear        weights that oneDNN does not pack, and GPUs, where cuBLAS multiplies
    InvariantLinear    batch-invariant products on a GPU (`cuda/linear.py`)

Law: a choice depends on the weight, the machine and the configuration, never on a batch.  Tests compare the
implementations with each other (`tests/kernels/cpu`).
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
    StackedWeight,
    can_pack,
    dequantized,
    quantize,
)
from trouper.kernels.experts import Experts, PlainExperts, Routing
from trouper.kernels.formats import Format
from trouper.kernels.linear import LinearConfig, LinearMethod, LoRAWeights
from trouper.kernels.ops import CpuOps, OpsConfig
from trouper.kernels.recurrent import RecurrentOps


class Processor(NamedTuple):
    """The capabilities of the processor that a choice depends on."""

    can_compile: bool  # llvmlite is installed
    can_multiply: bool  # AVX2
    can_decode: bool  # AVX512-BF16
    has_tiles: bool  # AMX
    onednn_dtypes: frozenset[torch.dtype]


class WeightSpec(NamedTuple):
    """The properties of a weight that a choice depends on.

    `fmt` is the format of a checkpoint's integers, if a kernel can read their groups.
    """

    num_out: int
    num_in: int
    dtype: torch.dtype
    fmt: Format | None = None


def make_ops(config: OpsConfig, *, native: bool | None = None) -> CpuOps:
    """Build the operations of a decoder on the CPU.

    Args:
        native: whether to use compiled kernels; by default if they support the model and the machine.
    """
    if native or (native is None and can_be_native(config)):
        from trouper.kernels.cpu.ops import NativeOps

        return NativeOps(config)
    return CpuOps(config)


def make_recurrent_ops(dtype: torch.dtype) -> RecurrentOps:
    """Build the operations of recurrent mixers on the CPU, for activations of this dtype."""
    kind = units.kind_of(dtype)
    if kind is None:
        return RecurrentOps()
    from trouper.kernels.cpu.recurrent_ops import NativeRecurrentOps

    return NativeRecurrentOps(kind)


def can_be_native(config: OpsConfig) -> bool:
    """Test whether compiled kernels support the model: its widths fill whole registers, and its dtype and heads are known."""
    sizes = (config.head_dim, config.hidden_size, config.intermediate_size)
    if any(n % LANES for n in sizes) or units.kind_of(config.dtype) is None:
        return False
    from trouper.kernels.cpu.attention.prefill import can_prefill

    return can_prefill(config.num_q_heads // config.num_kv_heads, config.head_dim)


def make_linear(
    weight: Tensor | IntegerWeight | StackedWeight,
    bias_O: Tensor | None = None,
    config: LinearConfig = LinearConfig(),  # noqa: B008  # immutable
) -> LinearMethod:
    """Choose the method for a weight, and pack the weight into its layout."""
    if isinstance(weight, StackedWeight):
        methods = [choose_linear(spec_of(x), this_processor(), config) for x in weight.parts]
        if all(method.takes_integers for method in methods):
            from trouper.kernels.cpu.linear.integer import StackedLinear

            return StackedLinear.pack(weight, bias_O)
        weight = dequantized(weight).to(weight.parts[0].dtype)
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
    """Choose the method of a linear layer.  It is a pure function of its arguments, so tests can enumerate the choices."""
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
    """Combine the experts of a layer, into one launch for each product if a kernel accepts the form of their weights."""
    if units.is_available():
        from trouper.kernels.cpu.experts import grouped

        if (native := grouped(gate_up, down, routing)) is not None:
            return native
    return PlainExperts(gate_up, down, routing)


def make_lora(
    part_sizes: Sequence[int], num_in: int, num_slots: int, max_rank: int, dtype: torch.dtype
) -> LoRAWeights:
    """Allocate empty adapter slots for a layer.  Uses compiled kernels if they support its sizes and dtype.

    Args:
        part_sizes: number of outputs of each part of a fused layer.
    """
    if units.is_available():
        from trouper.kernels.cpu.linear.lora import NativeLoRA, can_adapt

        if can_adapt(part_sizes, num_in, dtype):
            return NativeLoRA(part_sizes, num_in, num_slots, max_rank, dtype)
    return PlainLoRA(part_sizes)


def this_processor() -> Processor:
    """Detect the capabilities of this machine's processor and of torch."""
    can_multiply = units.can_multiply()
    return Processor(
        can_compile=units.is_available(),
        can_multiply=can_multiply,
        can_decode=units.can_decode(),
        has_tiles=can_multiply and units.bf16_unit() == "tiles",
        onednn_dtypes=packed_dtypes(),
    )


def spec_of(weight: Tensor | IntegerWeight) -> WeightSpec:
    """Extract the properties of a weight that `choose_linear` reads."""
    if isinstance(weight, IntegerWeight):
        num_out, num_in = weight.q_OI.shape
        fmt = weight.fmt if can_pack(weight) else None
        return WeightSpec(num_out, num_in, weight.dtype, fmt=fmt)
    num_out, num_in = weight.shape
    return WeightSpec(num_out, num_in, weight.dtype)
