"""Names of weight formats, norms and activations.

The configuration and the kernels share them, so this module does not import torch.
"""

from typing import Literal

# fp4 is e2m1, stored as integers of twice the value.  Only checkpoints contain int5, int6, fp4 and fp8; no option rounds to
# them.
Format = Literal["int4", "int5", "int6", "int8", "fp4", "fp8"]
Activation = Literal["silu", "gelu_tanh", "clamped_swiglu", "gelu", "relu", "relu2"]
Norm = Literal["rms", "layer"]

BITS: dict[Format, int] = {"int4": 4, "fp4": 4, "int5": 5, "int6": 6, "int8": 8}  # bits of a weight
# The largest integer in a quantized row.  Rows have at least two bits more than the weights that multiply them.
LIMITS: dict[Format, float] = {fmt: 32767.0 if fmt == "int8" else 127.0 for fmt in BITS}
# What is added to weights of this format, so that they are stored without a sign.  Those of eight bits keep their sign, and
# fp4 is stored as codes.
CENTRES: dict[Format, int] = {"int4": 8, "int5": 16, "int6": 32, "int8": 0, "fp4": 0}


def integers_per_word(fmt: Format) -> int:
    """Count the integers of a quantized row that fit an int32, for rows that multiply weights of this format."""
    return 2 if fmt == "int8" else 4
