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
# The largest integer in a quantized row.
LIMIT = 127.0
# What is added to weights of this format, so that they are stored without a sign.  Those of eight bits keep their sign, and
# fp4 is stored as codes.
CENTRES: dict[Format, int] = {"int4": 8, "int5": 16, "int6": 32, "int8": 0, "fp4": 0}
# What products of bytes add to weights of this format, because one of the two factors must not have a sign.
OFFSETS: dict[Format, int] = {**CENTRES, "int8": 128, "fp4": 12}
