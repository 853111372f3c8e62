"""The one place that chooses who computes a decoder's operations.

    TorchOps   any dtype, shape and machine; several torch calls an operation
    NativeOps  compiled kernels: one pass over memory and one launch an operation, on torch's threads

Law: the choice depends on the model and the machine alone, never on a batch; tests compare the two
(`tests/kernels/cpu/test_decoder_ops.py`).
"""

from trouper.kernels.codegen import units
from trouper.kernels.codegen.units import LANES
from trouper.kernels.ops import CpuOps, OpsConfig


def make_ops(config: OpsConfig, *, native: bool | None = None) -> CpuOps:
    """Build the operations; `native` = None chooses compiled kernels wherever they can be used."""
    if native or (native is None and can_be_native(config)):
        from trouper.kernels.cpu.ops import NativeOps

        return NativeOps(config)
    from trouper.kernels.reference.ops import TorchOps

    return TorchOps(config)


def can_be_native(config: OpsConfig) -> bool:
    """All rows are whole registers, and the kernels know the dtype and the heads."""
    sizes = (config.head_dim, config.hidden_size, config.intermediate_size)
    if any(n % LANES for n in sizes) or units.kind_of(config.dtype) is None:
        return False
    from trouper.kernels.cpu.attention.prefill import can_prefill

    return can_prefill(config.num_q_heads // config.num_kv_heads, config.head_dim)
