"""Recurrent kernels against the reference in torch, and their law: the division of tokens into steps changes no bit."""

import math
from itertools import pairwise

import pytest
import torch

from trouper.kernels.codegen import units
from trouper.kernels.recurrent import RecurrentOps
from trouper.kernels.reference.recurrent import Entries
from trouper.kernels.select import make_recurrent_ops

needs_native = pytest.mark.skipif(not units.is_available(), reason="needs native kernels")
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
ROWS = 4


def entries_of(*entries, num_drafts=0):
    """Entries of (row, start, count), whose tokens follow each other; the last ones are drafts."""
    rows, starts, counts = (torch.tensor(x) for x in zip(*entries, strict=True))
    keeps = torch.arange(len(rows)) * num_drafts
    return Entries(counts.cumsum(0) - counts, counts, rows, starts, counts - num_drafts, keeps)


class Convolution:
    def __init__(self, num_tokens, dtype, *, channels=48, taps=4, has_bias=True, has_silu=True):
        self.inputs = (torch.randn(num_tokens, channels + 16).to(dtype)[:, :channels],)
        self.weights = (
            torch.randn(taps, channels).to(dtype),
            torch.randn(channels).to(dtype) if has_bias else None,
        )
        self.shape, self.dtype, self.has_silu = (taps - 1, channels), dtype, has_silu

    def run(self, ops, inputs, state, entries):
        return ops.causal_conv(*inputs, *self.weights, state, entries, has_silu=self.has_silu)


class ShortConvolution(Convolution):
    def __init__(self, num_tokens, dtype, *, channels=48, taps=3):
        super().__init__(num_tokens, dtype, channels=channels, taps=taps)
        self.inputs = (torch.randn(num_tokens, 3 * channels).to(dtype),)

    def run(self, ops, inputs, state, entries):
        return ops.short_conv(*inputs, *self.weights, state, entries)


class Delta:
    def __init__(
        self, num_tokens, dtype, *, heads=(2, 4), k_dim=32, v_dim=48, rows=False, normalises=True
    ):
        (num_k, num_v), self.dtype = heads, torch.float32
        qkv = torch.randn(num_tokens, 2 * num_k * k_dim + num_v * v_dim).to(dtype)
        q, k, v = qkv.split([num_k * k_dim, num_k * k_dim, num_v * v_dim], 1)
        a, b = torch.randn(2, num_tokens, num_v).to(dtype)
        decay, beta = RecurrentOps().delta_gates(a, b, -torch.rand(num_v), torch.randn(num_v))
        if rows:
            decay = torch.rand(num_tokens, num_v, k_dim)
        if not normalises:
            k = k / k_dim
        self.normalises = normalises
        self.inputs = (
            q.unflatten(1, (num_k, k_dim)),
            k.unflatten(1, (num_k, k_dim)),
            v.unflatten(1, (num_v, v_dim)),
            decay,
            beta,
        )
        self.shape = num_v, k_dim, v_dim

    def run(self, ops, inputs, state, entries):
        return ops.gated_delta(*inputs, state, entries, normalises=self.normalises)


class Ssd:
    def __init__(self, num_tokens, dtype, *, heads=4, groups=2, width=32, states=16, skips=True):
        x = torch.randn(num_tokens, heads, width).to(dtype)
        b, c = torch.randn(2, num_tokens, groups, states).to(dtype)
        dt = torch.randn(num_tokens, heads).to(dtype)
        bias, rates = torch.randn(heads) - 1, -torch.rand(heads) - 0.1
        gates = RecurrentOps().ssd_gates(dt, rates, bias, 0.0, math.inf)
        self.inputs, self.skip = (x, *gates, b, c), torch.randn(heads) if skips else None
        self.shape, self.dtype = (heads, width, states), torch.float32

    def run(self, ops, inputs, state, entries):
        return ops.ssd(*inputs, self.skip, state, entries)


CASES = {
    "conv": Convolution,
    "conv without bias": lambda *a: Convolution(*a, has_bias=False, has_silu=False, channels=32),
    "conv of two taps": lambda *a: Convolution(*a, taps=2, channels=544),
    "short conv": ShortConvolution,
    "delta": Delta,
    "delta 16": lambda *a: Delta(*a, k_dim=16, v_dim=16, heads=(1, 3)),
    "delta 128": lambda *a: Delta(*a, k_dim=128, v_dim=128, heads=(2, 2)),
    "delta 256": lambda *a: Delta(*a, k_dim=256, v_dim=64, heads=(1, 1)),
    "delta 96": lambda *a: Delta(*a, k_dim=96, v_dim=96, normalises=False),
    "delta with row decay": lambda *a: Delta(*a, rows=True),
    "delta of odd widths": lambda *a: Delta(*a, k_dim=12, v_dim=20),
    "ssd": Ssd,
    "ssd 128": lambda *a: Ssd(*a, width=64, states=128, groups=1),
    "ssd without skip": lambda *a: Ssd(*a, skips=False, states=64),
    "ssd of odd widths": lambda *a: Ssd(*a, width=12, states=20),
}
both = pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name in CASES for dtype in DTYPES]
)


def state_of(case, fill=math.nan):
    """Rows that are part of wider ones, as in the pool of an engine."""
    size = math.prod(case.shape)
    wide = torch.full((ROWS, size + 64), fill, dtype=case.dtype)
    return wide[:, :size].unflatten(1, case.shape)


def cut(case, spans):
    return tuple(torch.cat([x[a:b] for a, b in spans]) for x in case.inputs)


def close(found, wanted, dtype):
    scale = wanted.float().abs().max()
    assert (found.float() - wanted.float()).abs().max() <= TOLERANCE[dtype] * scale


@needs_native
@both
def test_kernels_equal_the_reference(name, dtype):
    torch.manual_seed(1)
    case = CASES[name](41, dtype)
    step = entries_of((2, 0, 17), (0, 0, 1), (-1, 0, 0), (3, 0, 3), (1, 5, 20))
    state = state_of(case)
    state[1] = torch.randn(case.shape)
    expected = state.clone()
    wanted = case.run(RecurrentOps(), case.inputs, expected, step)
    found = case.run(make_recurrent_ops(dtype), case.inputs, state, step)
    close(found, wanted, dtype)
    close(state, expected, dtype)


@needs_native
@both
def test_any_cut_gives_the_same_bits(name, dtype):
    torch.manual_seed(2)
    case, ops = CASES[name](60, dtype), make_recurrent_ops(dtype)
    whole = state_of(case)
    wanted = case.run(ops, cut(case, [(0, 40)]), whole, entries_of((1, 0, 40)))
    state, found = state_of(case), []
    # Chunks of 1, 2, 17, 1, 1 and 18 tokens, each in front of another sequence's chunk.
    ends = [0, 1, 3, 20, 21, 22, 40]
    for begin, end in pairwise(ends):
        companion = (40 + begin // 2, 40 + end // 2)
        count = companion[1] - companion[0]
        step = entries_of((3, begin // 2, count), (1, begin, end - begin), (-1, 3, 0))
        y = case.run(ops, cut(case, [companion, (begin, end)]), state, step)
        found.append(y[count:])
    assert torch.equal(torch.cat(found), wanted)
    assert torch.equal(state[1], whole[1])
    # Steps of one token each.
    alone = state_of(case)
    for token in range(4):
        y = case.run(ops, cut(case, [(token, token + 1)]), alone, entries_of((1, token, 1)))
        assert torch.equal(y, wanted[token : token + 1])


@needs_native
@both
def test_only_rows_of_entries_are_touched(name, dtype):
    torch.manual_seed(3)
    case = CASES[name](6, dtype)
    state = state_of(case, 7.0)
    case.run(
        make_recurrent_ops(dtype), case.inputs, state, entries_of((1, 0, 3), (-1, 0, 2), (-1, 4, 1))
    )
    assert (state[[0, 2, 3]] == 7).all()
    assert not (state[1] == 7).all()
    before = state.clone()
    case.run(make_recurrent_ops(dtype), case.inputs, state, entries_of((-1, 0, 6)))
    assert torch.equal(state, before)


@needs_native
@both
@pytest.mark.parametrize("is_compiled", [True, False])
def test_drafts_are_computed_and_change_no_state(name, dtype, is_compiled):
    torch.manual_seed(6)
    case = CASES[name](20, dtype)
    ops = make_recurrent_ops(dtype) if is_compiled else RecurrentOps()
    before = torch.randn(ROWS, *case.shape).to(case.dtype)
    plain, state = (state_of(case) for _ in range(2))
    for states in (plain, state):
        states.copy_(before)
    step = (2, 5, 8), (0, 0, 6), (3, 9, 6)
    wanted = case.run(ops, case.inputs, plain, entries_of(*step))
    found = case.run(ops, case.inputs, state, entries_of(*step, num_drafts=5))
    assert torch.equal(found, wanted)
    # The accepted drafts are two of the first entry, all of the second and none of the third.
    later = cut(case, [(3, 5), (9, 14)])
    case.run(ops, later, state, entries_of((2, 8, 2), (0, 1, 5)))
    settled = state_of(case)
    settled.copy_(before)
    spans = cut(case, [(0, 5), (8, 14), (14, 15)])
    case.run(ops, spans, settled, entries_of((2, 5, 5), (0, 0, 6), (3, 9, 1)))
    assert torch.equal(state, settled)


@needs_native
@both
@pytest.mark.parametrize("is_compiled", [True, False])
def test_states_saved_inside_chunks_are_those_of_shorter_chunks(name, dtype, is_compiled):
    torch.manual_seed(7)
    case = CASES[name](30, dtype)
    ops = make_recurrent_ops(dtype) if is_compiled else RecurrentOps()
    before = torch.randn(ROWS + 4, *case.shape).to(case.dtype)
    plain, state, short = before.clone(), before.clone(), before.clone()
    step = entries_of((0, 0, 11), (1, 5, 1), (-1, 0, 0), (2, 9, 18))
    # Behind tokens 0, 7 and 10 of the first sequence, and behind token 3 of the last one.
    saves = [(1, 4), (8, 5), (11, 6), (16, 7), (2**62, -1)]
    wanted = case.run(ops, case.inputs, plain, step)
    found = case.run(ops, case.inputs, state, step._replace(saves=torch.tensor(saves)))
    assert torch.equal(found, wanted)
    assert torch.equal(state[:4], plain[:4])
    for first, start, end, row, target in ((0, 0, 1, 0, 4), (0, 0, 8, 0, 5), (12, 9, 16, 2, 7)):
        again = short.clone()
        case.run(ops, cut(case, [(first, end)]), again, entries_of((row, start, end - first)))
        assert torch.equal(state[target], again[row])
    assert torch.equal(state[6], state[0])


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [5, 16, 50])
def test_inputs_of_drafts_are_kept(width, dtype):
    x = torch.randn(19, width + 3).to(dtype)[:, :width]
    step = entries_of((2, 5, 8), (-1, 0, 5), (3, 9, 6), num_drafts=5)
    for ops in (make_recurrent_ops(dtype), RecurrentOps()):
        kept = torch.zeros(16, width, dtype=dtype)
        ops.keep_drafts(x, kept, step)
        assert torch.equal(kept[:5], x[3:8])
        assert torch.equal(kept[10:15], x[14:19])
        assert not kept[5:10].any()


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_heads", [3, 16, 40])
def test_gates_equal_the_reference(dtype, num_heads):
    torch.manual_seed(4)
    a, b = (torch.randn(5, 2 * num_heads) * 8).to(dtype).split(num_heads, 1)
    rates, bias = -torch.rand(num_heads), torch.randn(num_heads)
    ops = make_recurrent_ops(dtype)
    pairs = (
        (ops.delta_gates(a, b, rates, bias), RecurrentOps().delta_gates(a, b, rates, bias)),
        (
            ops.ssd_gates(a, rates, bias, 0.01, math.inf),
            RecurrentOps().ssd_gates(a, rates, bias, 0.01, math.inf),
        ),
        (
            ops.ssd_gates(b, rates, bias, 0.0, 2.0),
            RecurrentOps().ssd_gates(b, rates, bias, 0.0, 2.0),
        ),
    )
    for found, wanted in pairs:
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=2e-6, atol=1e-7)


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_gate_first", [False, True])
@pytest.mark.parametrize("group", [16, 48, 96])
@pytest.mark.parametrize("num_tokens", [0, 1, 33])
def test_gated_norms_equal_the_reference(dtype, is_gate_first, group, num_tokens):
    torch.manual_seed(5)
    x, z = torch.randn(2, num_tokens, 112).to(dtype)[..., :96]
    for weight in (torch.randn(96), torch.randn(group)):
        found, wanted = (
            ops.gated_norm(x, z, weight, 1e-6, group=group, is_gate_first=is_gate_first)
            for ops in (make_recurrent_ops(dtype), RecurrentOps())
        )
        torch.testing.assert_close(found, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    found, wanted = (ops.mul_sigmoid(x, z) for ops in (make_recurrent_ops(dtype), RecurrentOps()))
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
