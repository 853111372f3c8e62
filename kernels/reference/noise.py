"""Gumbel noise as a pure function of (seed, position, token id).

    g(seed, position, token) = -log(-log(u)),  u = ((h >> 9) + ½) / 2²³ in (0, 1)
    h = hash32(token; key0, key1),  (key0, key1) = two words mixed from the seed and the position

The token with the largest logit + g is a draw from softmax(logit).  Because the noise is counter-based, a request's tokens
depend neither on other requests nor on the order of execution.  With 23 bits u and 1 - u are exact in float32; a token
less probable than e^-16.6 of the best is never drawn.

`hash32` is the finaliser of murmur3 with the constants of Chris Wellons ("lowbias32"), and adds the second key word
between its two products.  All of it is uint32, so Triton can use the same lines.

Roofline: 4 bytes written, about 12 integer operations and two logarithms for each token and row.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves the types of split, view and some others open.

import numpy as np
import torch
from torch import Tensor

MULTIPLIERS = 0x7FEB352D, 0x846CA68B
_A, _B = map(np.uint32, MULTIPLIERS)


def gumbel(seeds: np.ndarray, positions: np.ndarray, token_ids: np.ndarray) -> Tensor:
    """Return noise [R, N] float32.

    Args:
        seeds: [R] uint64.
        positions: [R] positions of the tokens to draw.
        token_ids: [N], or [R, N] if each row has its own candidates.
    """
    key0, key1 = row_keys(seeds, positions)
    bits = hash32(token_ids.astype(np.uint32), key0[:, None], key1[:, None])
    bits >>= np.uint32(9)
    noise = torch.from_numpy(bits.view(np.int32)).to(torch.float32)
    return noise.add_(0.5).mul_(2.0**-23).log_().neg_().log_().neg_()


def row_keys(seeds: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return two uint32 words for each row.

    Both depend on all 64 bits of the seed and on the position.  Hashed with a token id they give the noise of this
    token.
    """
    low, high = (seeds & 0xFFFFFFFF).astype(np.uint32), (seeds >> 32).astype(np.uint32)
    zero = np.uint32(0)
    mixed = hash32(hash32(positions.astype(np.uint32), low, high), high, low)
    return mixed, hash32(mixed ^ low, high, zero)


def hash32(x: np.ndarray, key0: np.ndarray, key1: np.ndarray | np.uint32) -> np.ndarray:
    """Return hashes […] uint32, broadcast over the keys.  For every pair of keys it is a bijection of x."""
    x = x ^ key0
    x ^= x >> np.uint32(16)
    x *= _A
    x += key1
    x ^= x >> np.uint32(15)
    x *= _B
    x ^= x >> np.uint32(16)
    return x


def gumbel_reference(seed: int, position: int, token_id: int) -> float:
    """Compute one number with Python integers and float64."""
    word = 2**32 - 1

    def mix(x: int, key0: int, key1: int) -> int:
        x = (x ^ key0) & word
        x = (x ^ (x >> 16)) * int(_A) & word
        x = (x + key1) & word
        x = (x ^ (x >> 15)) * int(_B) & word
        return x ^ (x >> 16)

    low, high = seed & word, seed >> 32 & word
    key0 = mix(mix(position, low, high), high, low)
    key1 = mix(key0 ^ low, high, 0)
    u = ((mix(token_id, key0, key1) >> 9) + 0.5) / 2**23
    return float(-np.log(-np.log(u)))
