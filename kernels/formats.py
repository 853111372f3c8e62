"""Names of weight formats, norms and activations.

The configuration and the kernels share them, so this module does not import torch.
"""

from typing import Literal

# fp4 is e2m1, stored as integers of twice the value.  Only checkpoints contain fp4 and fp8; no option rounds to them.
Format = Literal["int4", "int8", "fp4", "fp8"]
Activation = Literal["silu", "gelu_tanh", "clamped_swiglu", "gelu", "relu", "relu2"]
Norm = Literal["rms", "layer"]

BITS: dict[Format, int] = {"int4": 4, "fp4": 4, "int8": 8}  # bits of a weight
# The largest integer in a quantized row.  Rows have twice as many bits as the weights that multiply them.
LIMITS: dict[Format, float] = {"int4": 127.0, "fp4": 127.0, "int8": 32767.0}


def integers_per_word(fmt: Format) -> int:
    """Count the integers of a quantized row that fit an int32, for rows that multiply weights of this format."""
    return 32 // (2 * BITS[fmt])
