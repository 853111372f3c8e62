"""y = x Φ(x) of bfloat16: Φ is ½ + x Q(x²), where |x| is at most EDGE.

    x, y [T, M]   rows of y may be strided; M a multiple of 16

Q is the minimax polynomial of degree 8 for the error of y: 6e-5, half a unit of bfloat16 at 0.03.  No
division and no exponential: 16 instructions for sixteen numbers.

Roofline: bytes = 2 e T M, FLOPs = 22 T M.
"""

from trouper.kernels.simd import LANES, Code

EDGE = 4.5
Q = (
    0.398708517, -0.0659771813, 0.00958060547, -0.00103624066, 8.12078696e-05, -4.43152813e-06,
    1.5801801e-07, -3.28370832e-09, 2.99978262e-11,
)  # fmt: skip


def gelu(code: Code) -> None:
    """x, y, its stride, M.  A piece is a row."""
    xs, ys, stride, width = code.arguments(4)
    for row in code.pieces():
        x, y = code.pointer(xs, "bf16") + row * width, code.pointer(ys, "bf16") + row * stride
        for d in code.loop(0, width, LANES):
            value = x.load(d)
            near = code.select(value > EDGE, EDGE, value)
            near = code.select(near < -EDGE, -EDGE, near)
            square = near * near
            sum_ = code.lanes(Q[-1])
            for c in reversed(Q[:-1]):
                sum_ = code.fma(sum_, square, code.lanes(c))
            y.store(d, value * code.fma(near, sum_, code.lanes(0.5)))
