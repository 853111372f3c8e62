"""Define sampling for every device: the numbers that a kernel reads for a row, the noise, and the reference of the draw in numpy.

A device stores one `ROW` for each request slot.  `PARAMETERS` says how each number is computed from a request's `Sampling`, so
a new sampling parameter is one more entry here, and then code in the reference and in each device's kernel.  No other
code lists them.

The noise is Gumbel noise, as a pure function of (seed, position, token id):

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
import ctypes
import math
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

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


# Larger than any vocabulary, and an int32.
NO_TOP_K = 2**31 - 1


class RowParameter(NamedTuple):
    """One number of a row.

    Args:
        of: computes the number from a `Sampling`.
        neutral: the value that changes nothing.  That of the temperature is 0, which is greedy.
        may_forbid: whether other values forbid some of the tokens.
    """

    dtype: type[np.generic]
    of: Callable[[Any], float]
    neutral: float = 0
    may_forbid: bool = False


def _seed(sampling: Any) -> int:
    return sampling.seed % 2**64


def _log_min_p(sampling: Any) -> float:
    return math.log(sampling.min_p) if sampling.min_p else -math.inf


def _top_k(sampling: Any) -> int:
    return min(max(sampling.top_k, 0), NO_TOP_K)


PARAMETERS = {
    "seed": RowParameter(np.uint64, _seed),
    # 0 is greedy.
    "temperature": RowParameter(np.float32, attrgetter("temperature")),
    # In (0, 1].
    "top_p": RowParameter(np.float32, attrgetter("top_p"), neutral=1, may_forbid=True),
    "log_min_p": RowParameter(
        np.float32,
        _log_min_p,
        neutral=-math.inf,
        may_forbid=True,
    ),
    # A number that is at least the size of the vocabulary forbids nothing either.
    "top_k": RowParameter(np.int32, _top_k, may_forbid=True),
    # The CPU writes 0 for a row that it has edited, and the kernel then skips the test for finite logits, too.
    "repetition": RowParameter(np.float32, attrgetter("repetition"), neutral=1),
    # The CPU subtracts these before its kernel runs.
    "frequency": RowParameter(np.float32, attrgetter("frequency_penalty")),
    "presence": RowParameter(np.float32, attrgetter("presence_penalty")),
}
ROW = np.dtype([(name, parameter.dtype) for name, parameter in PARAMETERS.items()])
ROW_WORDS = ROW.itemsize // 4
# The index of each number in a row, in words of 32 bits.
WORD = {name: field[1] // 4 for name, field in (ROW.fields or {}).items()}
NEUTRAL = np.array([tuple(parameter.neutral for parameter in PARAMETERS.values())], dtype=ROW)

# Codes in place of a token: the logits contain NaN or an infinity, or all of them are -inf.
NOT_FINITE, NOTHING_LEFT = -1, -2


def row_of(sampling: Any) -> tuple[float, ...]:
    """Compute the `ROW` of a request from its `Sampling`."""
    return tuple(parameter.of(sampling) for parameter in PARAMETERS.values())


def allows_all(sampling: Any) -> bool:
    """Return whether a request may draw any token, so that the likeliest token with its noise is the draw."""
    return sampling.temperature == 0 or all(
        parameter.of(sampling) == parameter.neutral
        for parameter in PARAMETERS.values()
        if parameter.may_forbid
    )


def sample_reference(
    logits_TV: Tensor,
    picked_R: np.ndarray,
    parameters_S: np.ndarray,
    rows_R: np.ndarray,
    ends_R: np.ndarray,
    tokens_SL: np.ndarray,
    masks_S: np.ndarray,
    out: np.ndarray | None = None,
) -> np.ndarray:
    token_R = np.empty(len(rows_R), dtype=np.int64) if out is None else out
    for i, (picked, row, end) in enumerate(zip(picked_R, rows_R, ends_R, strict=True)):
        if picked < 0:
            continue
        logits: np.ndarray = logits_TV[picked].numpy()
        parameters: Any = parameters_S[row]
        if parameters["repetition"]:
            if not np.isfinite(logits).all():
                token_R[i] = NOT_FINITE
                continue
            apply_repetition_penalty_reference_(
                logits, tokens_SL[row, :end], parameters["repetition"]
            )
        if masks_S[row]:
            logits[~_allowed(int(masks_S[row]), len(logits))] = -np.inf
        logits = np.where(np.isnan(logits), -np.inf, logits)
        if parameters["temperature"] and not np.isneginf(logits).all():
            kept = top_k_top_p_reference(logits, parameters)
            noise = gumbel(
                parameters["seed"].reshape(1),
                np.array([end]),
                np.arange(len(logits), dtype=np.uint32),
            )
            noisy = logits / parameters["temperature"] + noise[0].numpy()
            logits = np.where(kept, noisy, -np.inf)
        token_R[i] = logits.argmax() if not np.isneginf(logits).all() else NOTHING_LEFT
    return token_R


def _allowed(address: int, vocab_size: int) -> np.ndarray:
    num_bytes = -(-vocab_size // 32) * 4
    bits = np.frombuffer(ctypes.string_at(address, num_bytes), np.uint8)
    return np.unpackbits(bits, count=vocab_size, bitorder="little").astype(bool)


def apply_repetition_penalty_reference_(
    logits_V: np.ndarray, ids: np.ndarray, penalty: np.float32
) -> None:
    ids = ids[(ids >= 0) & (ids < len(logits_V))]
    logits = logits_V[ids]
    # A row that is not finite fails later, without affecting other rows.
    with np.errstate(all="ignore"):
        logits_V[ids] = np.where(logits > 0, logits / penalty, logits * penalty)


def top_k_top_p_reference(logits_V: np.ndarray, row: Any) -> np.ndarray:
    """Return which tokens may be drawn, computed by a stable sort in float64.  `row` has the numbers of a `ROW` by name.

    Tests compare the kernels' selection without a sort with it.
    """
    order = np.argsort(-logits_V, kind="stable")
    with np.errstate(invalid="ignore"):  # -inf minus -inf
        x = (logits_V[order].astype(np.float64) - logits_V[order[0]]) / row["temperature"]
    kept = x >= row["log_min_p"]
    if 0 < row["top_k"] < len(x):
        kept[row["top_k"] :] = False
    if row["top_p"] < 1:
        mass = np.where(kept, np.exp(x), 0)
        kept &= mass.cumsum() - mass < row["top_p"] * mass.sum()
    kept_V = np.empty_like(kept)
    kept_V[order] = kept
    return kept_V
