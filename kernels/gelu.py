"""y = x Φ(x): Φ is ½ + x Q(x²), where |x| is at most EDGE.

Q is the minimax polynomial of degree 8 for the error of y: 6e-5, half a unit of bfloat16 at 0.03.  No
division and no exponential: 16 instructions for sixteen numbers, which `matmul.py` applies to its sums.
"""

from trouper.kernels.simd import Code, Value

EDGE = 4.5
Q = (
    0.398708517, -0.0659771813, 0.00958060547, -0.00103624066, 8.12078696e-05, -4.43152813e-06,
    1.5801801e-07, -3.28370832e-09, 2.99978262e-11,
)  # fmt: skip


def gelu(code: Code, x: Value) -> Value:
    near = code.select(x > EDGE, EDGE, x)
    near = code.select(near < -EDGE, -EDGE, near)
    square = near * near
    sum_ = code.lanes(Q[-1])
    for c in reversed(Q[:-1]):
        sum_ = code.fma(sum_, square, code.lanes(c))
    return x * code.fma(near, sum_, code.lanes(0.5))
