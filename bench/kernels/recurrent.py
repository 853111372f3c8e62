"""The operations of recurrent mixers, for `trouper bench kernels`, in the sizes of Qwen3.5-0.8B and Granite 4 H."""

import math
from collections.abc import Iterator
from itertools import cycle

import torch
from torch import Tensor

from trouper.bench.kernels.measure import EPS, Case, Shapes
from trouper.kernels.recurrent import RecurrentOps
from trouper.kernels.reference.recurrent import Entries
from trouper.kernels.select import make_recurrent_ops

# Sequences that decode together: their states take 16 MB a layer, more than a cache holds.
MAX_ROWS = 16


def gated_delta(s: Shapes) -> Iterator[Case]:
    """Yield the recurrence of Qwen3.5-0.8B's layers, for single tokens and for one prompt."""
    return (_delta(s, name, entries) for name, entries in _steps(s.num_tokens))


def _delta(s: Shapes, name: str, entries: Entries) -> Case:
    num_tokens, num_heads, width = int(entries.counts.sum()), 16, 128
    q, k, v = torch.randn(3, num_tokens, num_heads, width).to(s.dtype)
    decay, beta = torch.rand(2, num_tokens, num_heads)
    ops, states = make_recurrent_ops(s.dtype), _states(s, entries, num_heads, width, width)
    turns = cycle(states)
    return Case(
        f"{name}, {num_heads} x [{width}, {width}]",
        lambda: ops.gated_delta(q, k, v, decay, beta, next(turns), entries),
        lambda: RecurrentOps().gated_delta(q, k, v, decay, beta, states[0].clone(), entries),
        8 * len(entries.rows) * num_heads * width**2,
        7 * num_tokens * num_heads * width**2,
    )


def ssd(s: Shapes) -> Iterator[Case]:
    """Yield Mamba-2's recurrence in the sizes of Granite 4 H, for single tokens and for one prompt."""
    return (_ssd(s, name, entries) for name, entries in _steps(s.num_tokens))


def _ssd(s: Shapes, name: str, entries: Entries) -> Case:
    num_tokens, num_heads, width, size = int(entries.counts.sum()), 48, 64, 128
    x = torch.randn(num_tokens, num_heads, width).to(s.dtype)
    b, c = torch.randn(2, num_tokens, 1, size).to(s.dtype)
    delta, decay = torch.rand(2, num_tokens, num_heads)
    ops, states = make_recurrent_ops(s.dtype), _states(s, entries, num_heads, width, size)
    turns = cycle(states)
    return Case(
        f"{name}, {num_heads} x [{width}, {size}]",
        lambda: ops.ssd(x, delta, decay, b, c, None, next(turns), entries),
        lambda: RecurrentOps().ssd(x, delta, decay, b, c, None, states[0].clone(), entries),
        8 * len(entries.rows) * num_heads * width * size,
        5 * num_tokens * num_heads * width * size,
    )


def causal_conv(s: Shapes) -> Iterator[Case]:
    """Yield a convolution of four taps with SiLU over 6,144 channels, for single tokens and for one prompt."""
    return (_conv(s, name, entries) for name, entries in _steps(s.num_tokens))


def _conv(s: Shapes, name: str, entries: Entries) -> Case:
    num_tokens, width = int(entries.counts.sum()), 6144
    x, weight = torch.randn(num_tokens, width).to(s.dtype), torch.randn(4, width)
    ops = make_recurrent_ops(s.dtype)
    state, before = torch.zeros(2, len(entries.rows), 3, width).to(s.dtype)
    return Case(
        f"{name}, {width}",
        lambda: ops.causal_conv(x, weight, None, state, entries, has_silu=True),
        lambda: RecurrentOps().causal_conv(x, weight, None, before, entries, has_silu=True),
        s.item * (2 * num_tokens + 6 * len(entries.rows)) * width,
        8 * num_tokens * width,
    )


def gated_norm(s: Shapes) -> Iterator[Case]:
    """Yield the norm of sixteen heads of 128 with a gate behind it."""
    x, gate = torch.randn(2, s.num_tokens, 2048).to(s.dtype)
    weight, ops = torch.randn(128), make_recurrent_ops(s.dtype)
    yield Case(
        f"[{s.num_tokens}, 16, 128]",
        lambda: ops.gated_norm(x, gate, weight, EPS, group=128),
        lambda: RecurrentOps().gated_norm(x, gate, weight, EPS, group=128),
        3 * s.item * s.num_tokens * 2048,
        8 * s.num_tokens * 2048,
    )


def _steps(num_tokens: int) -> Iterator[tuple[str, Entries]]:
    """Yield a step of single tokens, and one with a chunk of a prompt."""
    rows = torch.arange(min(num_tokens, MAX_ROWS))
    ones = torch.ones_like(rows)
    yield f"{len(rows)} rows", Entries(rows, ones, rows, ones, ones, rows)
    if num_tokens > 1:
        first = torch.zeros(1, dtype=torch.int64)
        yield (
            f"prompt of {num_tokens}",
            Entries(first, first + num_tokens, first, first + 1, first + num_tokens, first),
        )


def _states(s: Shapes, entries: Entries, *shape: int) -> list[Tensor]:
    """Return as many sets of states as fill the cold memory, so that they come from memory as in a real step."""
    num_rows = len(entries.rows)
    count = s.copies(4 * num_rows * math.prod(shape))
    return [torch.zeros(num_rows, *shape) for _ in range(count)]
