"""y = act(g) · u for the two halves g, u of a fused gate-and-up product; see `act_and_mul.py`.

    gate_up [T, 2 M] -> y [T, M],  M a multiple of 16

clamped_swiglu: y = (u + 1) · g / (1 + e^(-α g)), of g ≤ limit and -limit ≤ u ≤ limit.
silu(g) = g / (1 + e^-g);  gelu's tanh form is g / (1 + e^(-2 a (g + b g³))), a = √(2 / π), b = 0.044715.
gelu by the error function is `linear/products.py`;  relu2 is max(g, 0)².

Roofline: bytes = 3 e T M, FLOPs ≈ 20 T M.
Measured, one EPYC core, M = 3072, bf16: 27 µs for 16 rows, 40 in torch.

y = act(x), of an MLP without a gate; the activations are those of `act_and_mul.py`.

    x [T, M] -> y [T, M],  M a multiple of 16, rows of y may be strided

Roofline: bytes = 2 e T M, FLOPs ≈ 20 T M.

y = cap(scale · x) in float32, cap(s) = c · tanh(s / c) if there is a c: what models do to their head's product.

    x [R, V]   as the product leaves it;  y [R, V] float32

Roofline: bytes = (e + 4) R V.
"""

import math

from trouper.kernels.codegen.builder import KernelBuilder
from trouper.kernels.codegen.core import Value
from trouper.kernels.codegen.units import LANES, Kind
from trouper.kernels.cpu.attention.decode import capped
from trouper.kernels.cpu.linear.products import gelu
from trouper.kernels.formats import Activation

LOG2_E = math.log2(math.e)
GELU_A = 2 * math.sqrt(2 / math.pi) * LOG2_E
GELU_B = 0.044715


def act_and_mul(code: KernelBuilder, kind: Kind, activation: Activation) -> None:
    """Write the kernel of the arguments gate_up, y, its stride, M; α and limit where it is clamped.  A piece is a row."""
    is_clamped = activation == "clamped_swiglu"
    gate_up, y, stride, width, *bounds = code.arguments(6 if is_clamped else 4)
    alpha, limit = [code.f32x16(code.f32_argument(x)) for x in bounds] if is_clamped else (1.0, 0.0)
    for row in code.pieces():
        gates = code.pointer(gate_up, kind) + row * 2 * width
        ups = gates + width
        target = code.pointer(y, kind) + row * stride
        for d in code.loop(0, width, LANES):
            g, u = gates.load(d), ups.load(d)
            if is_clamped:  # what is not a number stays so
                g = code.select(g > limit, limit, g)
                u = code.select(u > limit, limit, u)
                u = code.select(u < 0.0 - limit, 0.0 - limit, u) + 1.0
            target.store(d, activated(code, g, activation, alpha) * u)


def activated(
    code: KernelBuilder,
    g: Value,
    activation: Activation,
    alpha: Value | float = 1.0,
) -> Value:
    """Return the activation of sixteen numbers; alpha is that of the clamped one."""
    if activation == "gelu":
        # The form for float32 also of bfloat16: the other one is off by 6e-6 g far below zero.
        return gelu(code, g, "f32")
    if activation in ("relu", "relu2"):
        # A comparison passes NaN on, which a maximum would hide.
        positive = code.select(g < 0.0, 0.0, g)
        return positive * positive if activation == "relu2" else positive
    power = g * (alpha * -LOG2_E)
    if activation == "gelu_tanh":
        power = g * code.fma(GELU_B, g * g, code.f32x16(1.0)) * -GELU_A
    return g / (1.0 + code.exp2(power))


def activate(code: KernelBuilder, kind: Kind, activation: Activation) -> None:
    """Write the kernel of the arguments x, y, its stride, M.  A piece is a row."""
    xs, ys, stride, width = code.arguments(4)
    for row in code.pieces():
        x = code.pointer(xs, kind) + row * width
        y = code.pointer(ys, kind) + row * stride
        for d in code.loop(0, width, LANES):
            y.store(d, activated(code, x.load(d), activation))


def finish_logits(code: KernelBuilder, kind: Kind) -> None:
    """Write the kernel of the arguments x, y, V, at least 16, scale, cap or 0.  A piece is a row."""
    xs, ys, length, scale, cap = code.arguments(5)
    scale, cap = code.f32_argument(scale), code.f32_argument(cap)
    for row in code.pieces():
        x, y = code.pointer(xs, kind) + row * length, code.pointer(ys, "f32") + row * length
        for start in code.loop(0, length, LANES):
            first = code.minimum(start, length - LANES)  # those before again
            y.store(first, capped(code, x.load(first) * scale, cap))
