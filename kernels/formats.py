"""Formats of rounded weights, and kinds of norms and activations, by name; torch is not needed."""

from typing import Literal

# fp4 (e2m1, as integers of twice the value) and fp8 come from checkpoints alone.
Format = Literal["int4", "int8", "fp4", "fp8"]
Activation = Literal["silu", "gelu_tanh", "clamped_swiglu", "gelu", "relu", "relu2"]
Norm = Literal["rms", "layer"]

BITS: dict[Format, int] = {"int4": 4, "fp4": 4, "int8": 8}  # of a weight
# The largest integer of a row that is multiplied by such a weight: it has twice as many bits.
LIMITS: dict[Format, float] = {"int4": 127.0, "fp4": 127.0, "int8": 32767.0}


def integers_per_word(fmt: Format) -> int:
    """Count the integers of a row that are an int32, beside a weight of that format."""
    return 32 // (2 * BITS[fmt])
