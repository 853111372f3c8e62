"""Both implementations of a decoder's operations against float64, and against each other."""

import random
import sys
from itertools import pairwise
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from trouper.actors.executor.runners.cpu.recorded_steps import MAX_ROWS
from trouper.kernels import codegen
from trouper.kernels.codegen import units
from trouper.kernels.codegen.launch import recorded_by
from trouper.kernels.cpu import memory
from trouper.kernels.cpu import ops as native_ops
from trouper.kernels.cpu.attention import decode
from trouper.kernels.cpu.attention.plan import AttentionPlanner
from trouper.kernels.cpu.attention.prefill import PARTS
from trouper.kernels.cpu.encoder_ops import layer_norm_reference
from trouper.kernels.cpu.linear.by_torch import PlainLoRA
from trouper.kernels.cpu.ops import NativeOps
from trouper.kernels.ops import CpuOps, Ops, OpsConfig
from trouper.kernels.reference.norms import activate, rms_norm_reference, rope_table
from trouper.kernels.reference.paged_attention import paged_attention_reference
from trouper.kernels.select import can_be_native, make_lora, make_ops

pytestmark = pytest.mark.usefixtures("unit")
COLUMNS = {  # (start, count) of each sequence
    "one token": [(0, 1)],
    "decode": [(0, 1), (63, 1), (64, 1), (17, 1), (127, 1), (128, 1)],
    "prefill": [(0, 63), (0, 2), (0, 17), (0, 129)],
    "mixed": [(0, 5), (40, 1), (33, 70), (1, 2), (15, 1)],
    "long": [(1023, 1), (1024, 1), (2100, 1), (1000, 40)],
}
TOLERANCES = {torch.float32: (5e-6, 2e-6), torch.bfloat16: (2e-2, 2e-2)}
TINY = OpsConfig(
    dtype=torch.float32,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=16,
    hidden_size=64,
    intermediate_size=96,
    block_size=16,
    norm_eps=1e-6,
    residual_scale=1.0,
    activation="silu",
    scale=0.3,
    softcap=None,
)


def shape_of(**changes):
    shape = msgspec.structs.replace(TINY, **changes)
    assert can_be_native(shape)
    return shape


class Step:
    """A cache of NaN but for the tokens of the sequences, and q, k, v of a step, k and v written."""

    def __init__(self, shape, columns, seed=0):
        torch.manual_seed(seed)
        self.shape, self.columns = shape, columns
        size, width = shape.block_size, shape.head_dim
        per_row = max(-(-(s + c) // size) for s, c in columns)
        ids = list(range(1, 1 + per_row * len(columns)))
        random.Random(seed).shuffle(ids)
        self.block_ids = np.zeros((len(columns) + 1, per_row + 1), dtype=np.int64)
        self.rows = list(range(len(columns), 0, -1))
        num_slots = (len(ids) + 1) * size
        self.cache = torch.full((2, shape.num_kv_heads, num_slots, width), torch.nan).to(
            shape.dtype
        )
        self.slots, self.starts, self.counts = [], *map(list, zip(*columns, strict=True))
        num_heads = shape.num_q_heads + 2 * shape.num_kv_heads
        self.qkv = torch.randn(sum(self.counts), num_heads, width).to(shape.dtype)
        first = 0
        for row, (start, count) in zip(self.rows, columns, strict=True):
            table = [ids.pop() for _ in range(-(-(start + count) // size))]
            self.block_ids[row, : len(table)] = table
            slots = [table[p // size] * size + p % size for p in range(start + count)]
            self.slots.append(slots)
            past = torch.randn(2, shape.num_kv_heads, start, width).to(shape.dtype)
            self.cache[:, :, slots[:start]] = past
            kv = self.qkv[first : first + count, shape.num_q_heads :]
            kv = kv.unflatten(1, (2, shape.num_kv_heads)).permute(1, 2, 0, 3)
            self.cache[:, :, slots[start:]] = kv
            first += count

    def attend(self, ops, window=None, cache=None, sinks=None):
        plan = ops.plan(self.block_ids, self.rows, self.starts, self.counts, window)
        return ops.attend(self.qkv, self.cache if cache is None else cache, plan, sinks)

    def reference(self, window=None, sinks=None):
        return paged_attention_reference(
            self.qkv[:, : self.shape.num_q_heads],
            self.cache,
            self.slots,
            self.starts,
            self.counts,
            scale=self.shape.scale,
            softcap=self.shape.softcap,
            window=window,
            sinks_N=sinks,
        )

    def check(self, window=None, atol=None, sinks=None):
        expected = self.reference(window, sinks)
        usual, rtol = TOLERANCES[self.shape.dtype]
        atol = atol or usual
        for ops in (CpuOps(self.shape), NativeOps(self.shape)):
            found = self.attend(ops, window, sinks=sinks)
            torch.testing.assert_close(found, expected, atol=atol, rtol=rtol)


@pytest.mark.parametrize("columns", COLUMNS.values(), ids=COLUMNS)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 7, 64, 100, 5000])
def test_attention_equals_the_reference(columns, softcap, window):
    Step(shape_of(softcap=softcap), columns).check(window)


@pytest.mark.parametrize("columns", COLUMNS.values(), ids=COLUMNS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("window", [None, 7, 5000])
def test_sinks_take_their_share_of_the_attention(columns, dtype, window):
    shape = shape_of(dtype=dtype)
    torch.manual_seed(0)
    sinks = 3 * torch.randn(shape.num_q_heads)
    sinks[0], sinks[1] = 200.0, -200.0  # of all of it, and of nothing
    step = Step(shape, columns)
    step.check(window, sinks=sinks.to(dtype))
    assert not step.attend(NativeOps(shape), window, sinks=sinks)[:, : shape.head_dim].any()


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (8, 8), (10, 2), (128, 1)])
@pytest.mark.parametrize("width", [16, 64, 80, 128, 208, 256])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_attention_of_any_heads_widths_and_dtypes(heads, width, dtype):
    shape = shape_of(num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=width, dtype=dtype)
    step = Step(msgspec.structs.replace(shape, scale=width**-0.5), COLUMNS["mixed"])
    step.check()
    step.check(window=9)


@pytest.mark.parametrize("block_size", [1, 5, 128])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_attention_over_blocks_of_any_size(block_size, dtype):
    Step(shape_of(block_size=block_size, dtype=dtype), COLUMNS["mixed"]).check()
    Step(shape_of(block_size=block_size, dtype=dtype), COLUMNS["decode"]).check(window=20)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_row_does_not_depend_on_rows_or_threads(dtype):
    step = Step(shape_of(dtype=dtype), [*COLUMNS["mixed"], *COLUMNS["long"]])
    ops, before = NativeOps(step.shape), torch.get_num_threads()
    together = step.attend(ops)
    try:
        torch.set_num_threads(3)
        assert torch.equal(step.attend(ops), together)
    finally:
        torch.set_num_threads(before)
    qkv, first = step.qkv, 0
    for row, start, count in zip(step.rows, step.starts, step.counts, strict=True):
        plan = ops.plan(step.block_ids, [row], [start], [count], None)
        alone = ops.attend(qkv[first : first + count], step.cache, plan)
        assert torch.equal(alone, together[first : first + count])
        first += count


def test_partial_results_are_merged_in_rounds(monkeypatch):
    """Outputs recomputed after a preemption can be this long; a recorded step needs one plan only."""
    assert decode.ROUND >= MAX_ROWS
    step = Step(shape_of(), [(1000, 50)])
    rows, starts = step.rows * 50, range(1000, 1050)
    found, most = [], 12
    for _ in range(2):
        ops = NativeOps(step.shape)
        plan = ops.plan(step.block_ids, rows, starts, [1] * 50, None)
        found.append((ops.attend(step.qkv, step.cache, plan), plan))
        monkeypatch.setattr(decode, "ROUND", most)
    (whole, one), (in_parts, several) = found
    assert torch.equal(in_parts, whole)
    assert (len(one.merges), one.later) == (26, ())
    sizes = [len(part.merges) for part in (several, *several.later)]
    assert sum(sizes) == 26
    assert len(sizes) >= 3
    assert max(sizes) <= most


@pytest.mark.parametrize("cuts", [(100, 128, 131), (1, 2, 64, 299), (5, 6, 13, 21, 298)], ids=str)
@pytest.mark.parametrize("block_size", [8, 128])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("window", [None, 70])
def test_a_prompts_bits_do_not_depend_on_chunks(cuts, block_size, dtype, window):
    step = Step(shape_of(dtype=dtype, block_size=block_size), [(0, 300)])
    ops, whole = NativeOps(step.shape), step.attend(NativeOps(step.shape), window)
    for begin, end in pairwise((0, *cuts, 300)):
        entry = step.block_ids, step.rows, [begin], [end - begin], window
        plan = ops.plan(*entry, np.array([True]))  # also where it is one token
        assert torch.equal(ops.attend(step.qkv[begin:end], step.cache, plan), whole[begin:end])


@pytest.mark.parametrize("width", [16, 64, 128])
@pytest.mark.parametrize("window", [None, 1030])
@pytest.mark.parametrize("num_kv", [1, 16])
def test_tokens_sharing_keys_equal_separate_ones(width, window, num_kv):
    shape = shape_of(num_q_heads=3 * num_kv, num_kv_heads=num_kv, head_dim=width)
    shape = msgspec.structs.replace(shape, dtype=torch.bfloat16)
    # over the end of a block, over that of a span, beyond it, and from the beginning
    columns = [(13, 8), (1019, 8), (1500, 7), (0, 5)]
    step = Step(shape, columns)
    entries = [
        (row, start + i)
        for row, (start, count) in zip(step.rows, columns, strict=True)
        for i in range(count)
    ]
    rows, starts = map(list, zip(*entries, strict=True))
    ops = NativeOps(shape)
    plan = ops.plan(step.block_ids, rows, starts, [1] * len(rows), window)
    assert plan.spans[:, 5].max() == (8 if num_kv == 16 else 4)
    together = ops.attend(step.qkv, step.cache, plan)
    torch.testing.assert_close(together, step.reference(window), atol=2e-2, rtol=2e-2)
    for i, (row, start) in enumerate(entries):
        plan = ops.plan(step.block_ids, [row], [start], [1], window)
        assert torch.equal(ops.attend(step.qkv[i : i + 1], step.cache, plan)[0], together[i])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("window", [None, 70])
def test_a_row_does_not_depend_on_shared_tiles(dtype, window, monkeypatch):
    step = Step(shape_of(dtype=dtype), [(0, 600), (100, 150)])
    step.check(window)
    found = []
    for parts in range(1, PARTS + 1):
        monkeypatch.setattr(AttentionPlanner, "_tiles_per_item", lambda *_, parts=parts: parts)
        found.append(step.attend(NativeOps(step.shape), window))
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert not found[0].isnan().any()


def test_extreme_scores_stay_in_their_row():
    step = Step(shape_of(scale=100.0), [(30, 1), (0, 40), (30, 1)])
    step.check(atol=3e-4)  # scores of ± 1500, of which float32 keeps four decimals
    clean = step.attend(NativeOps(step.shape))
    step.qkv[0] = torch.nan
    found = step.attend(NativeOps(step.shape))
    assert found[0].isnan().all()
    assert torch.equal(found[1:], clean[1:])


def pairs(**changes):
    shape = shape_of(**changes)
    return CpuOps(shape), NativeOps(shape)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 40])
@pytest.mark.parametrize(("width", "rotated"), [(16, 16), (128, 128), (80, 20), (48, None)])
@pytest.mark.parametrize(
    ("has_norm", "is_norm_last", "query_rope"),
    [
        (False, False, None),
        (True, False, None),
        (True, True, None),
        (True, False, 1),
        (False, False, 1),
    ],
)
def test_norm_rotation_and_write(
    dtype, num_tokens, width, rotated, has_norm, is_norm_last, query_rope
):
    torch.manual_seed(0)
    ops_pair = pairs(head_dim=width, dtype=dtype, is_norm_last=is_norm_last)
    qkv = torch.randn(num_tokens, 8, width).to(dtype)
    head_norm = torch.randn(6, width).to(dtype) if has_norm else None
    tables = []
    if rotated:
        inverse = 1e4 ** -(torch.arange(0, rotated, 2) / rotated)
        tables += [rope_table(inverse, 1000, scale, dtype) for scale in (1.25, 0.5)]
    positions, slots = torch.randint(0, 1000, (num_tokens,)), torch.randperm(64)[:num_tokens]
    found = []
    for ops in ops_pair:
        mine, cache = qkv.clone(), torch.full((2, 2, 64, width), torch.nan, dtype=dtype)
        step = ops.begin(positions, slots, tables)
        ropes = (0, query_rope) if rotated else (None, None)
        ops.qk_norm_rope_kv_write(mine, head_norm, step, ropes[0], cache, ropes[1])
        found.append((mine[:, :4], cache))
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 6e-2}[dtype]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_parts_of_rows_equal_whole_rows(parts, monkeypatch):
    torch.manual_seed(0)
    ops = NativeOps(shape_of(head_dim=48, dtype=torch.bfloat16))
    qkv, gate_up = torch.randn(2, 8, 48).bfloat16(), torch.randn(2, 2 * 80).bfloat16()
    inverse = 1e4 ** -(torch.arange(0, 48, 2) / 48)
    tables = [rope_table(inverse, 1000, 1.0, torch.bfloat16)]
    found = []
    for num in (1, parts):
        monkeypatch.setattr(native_ops, "num_parts_for", lambda _, num=num: num)
        mine, cache = qkv.clone(), torch.zeros((2, 2, 64, 48), dtype=torch.bfloat16)
        step = ops.begin(torch.tensor([7, 900]), torch.tensor([3, 5]), tables)
        ops.qk_norm_rope_kv_write(mine, torch.ones(6, 48).bfloat16(), step, 0, cache)
        found.append((mine, cache, ops.act_and_mul(gate_up)))
    assert all(map(torch.equal, *found))


def test_recorded_rows_are_divided_among_the_threads(monkeypatch):
    monkeypatch.setattr(memory.torch, "get_num_threads", lambda: 6)
    assert (memory.num_threads_for(15), memory.num_threads_for(16)) == (1, 6)
    assert memory.num_parts_for(1) == 1
    with recorded_by(None):
        assert memory.num_parts_for(1) == 1
    with recorded_by(mock.Mock()):
        assert (memory.num_threads_for(1), memory.num_threads_for(2)) == (1, 6)
        assert [memory.num_parts_for(rows) for rows in (0, 1, 2, 3, 4, 40)] == [4, 4, 3, 2, 1, 1]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", [(0, 16), (1, 16), (3, 64), (40, 1024)])
@pytest.mark.parametrize("weight_dtype", [torch.float32, None])
@pytest.mark.parametrize("scale", [1.0, 0.22])
def test_residual_sum_and_norm(dtype, shape, weight_dtype, scale):
    torch.manual_seed(0)
    x, y = torch.randn(2, *shape).to(dtype)
    weight = torch.randn(shape[1]).to(weight_dtype or dtype)
    total = (x.double() + scale * y.double()).to(dtype)
    atol = {torch.float32: 1e-5, torch.bfloat16: 6e-2}[dtype]
    for ops in pairs(dtype=dtype, residual_scale=scale):
        mine = x.clone()
        found = ops.fused_add_norm(mine, y, weight)
        torch.testing.assert_close(mine, total, atol=atol / 10, rtol=2**-7)
        expected = rms_norm_reference(mine, weight, 1e-6)
        torch.testing.assert_close(found, expected, atol=atol, rtol=2**-6)
        torch.testing.assert_close(ops.norm(mine, weight), expected, atol=atol, rtol=2**-6)
        mine = x.clone()
        assert ops.fused_add_norm(mine, y, None) is mine
        torch.testing.assert_close(mine, total, atol=atol / 10, rtol=2**-7)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_norms_of_sandwiches_and_of_projections(dtype):
    """The rows of a sum may be those of a norm, and those of a norm a part of wider ones."""
    torch.manual_seed(0)
    x, y, wide = torch.randn(5, 64).to(dtype), torch.randn(5, 64).to(dtype), torch.randn(5, 160)
    weight, wide, found = torch.randn(64).to(dtype), wide.to(dtype), []
    for ops in pairs(dtype=dtype):
        mine = wide.clone()
        ops.norm_(mine.narrow(1, 48, 64), weight)
        found.append((ops.fused_add_norm(x.clone(), ops.norm(y, weight), weight), mine))
    atol = {torch.float32: 1e-5, torch.bfloat16: 6e-2}[dtype]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=atol, rtol=2**-6)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", [(0, 16), (3, 64), (40, 1024)])
def test_layer_norms_of_rows_and_of_sums(dtype, shape):
    torch.manual_seed(0)
    x, y = (1 + torch.randn(2, *shape)).to(dtype)
    weights = torch.randn(2, shape[1]).to(dtype)
    atol = {torch.float32: 1e-5, torch.bfloat16: 6e-2}[dtype]
    for ops in pairs(dtype=dtype, norm="layer", norm_eps=1e-5):
        mine = x.clone()
        found = ops.fused_add_norm(mine, y, weights)
        torch.testing.assert_close(mine, x + y, atol=atol / 10, rtol=2**-7)
        expected = layer_norm_reference(mine, *weights, 1e-5)
        torch.testing.assert_close(found, expected, atol=atol, rtol=2**-6)
        torch.testing.assert_close(ops.norm(mine, weights), expected, atol=atol, rtol=2**-6)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_layer_norms_of_heads(dtype):
    torch.manual_seed(0)
    qkv, weights = torch.randn(5, 8, 32).to(dtype), torch.randn(6, 2, 32).to(dtype)
    expected = torch.stack(
        [layer_norm_reference(qkv[:, i], *weights[i], 1e-6) for i in range(6)], dim=1
    )
    atol = {torch.float32: 1e-5, torch.bfloat16: 6e-2}[dtype]
    for ops in pairs(dtype=dtype, norm="layer", head_dim=32):
        mine, cache = qkv.clone(), torch.zeros(2, 2, 64, 32, dtype=dtype)
        step = ops.begin(torch.arange(5), torch.arange(5), [])
        ops.qk_norm_rope_kv_write(mine, weights, step, None, cache)
        keys = cache[0, :, :5].transpose(0, 1)
        found = torch.cat((mine[:, :4], keys), dim=1)
        torch.testing.assert_close(found, expected, atol=atol, rtol=2**-6)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu", "relu", "relu2"])
def test_activation_without_a_gate(dtype, activation):
    torch.manual_seed(0)
    x = (3 * torch.randn(5, 48)).to(dtype)
    x[0, :4] = torch.tensor([-1e4, 1e4, 0.0, torch.nan]).to(dtype)
    expected = activate(x.double(), activation).to(dtype)
    rtol = {torch.float32: 2e-6, torch.bfloat16: 2**-6}[dtype]
    atol = {torch.float32: 1e-6, torch.bfloat16: 1e-3}[dtype]
    for ops in pairs(dtype=dtype, activation=activation):
        found = ops.activate(x)
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, equal_nan=True)
        gated = ops.act_and_mul(torch.cat((x, torch.full_like(x, 2.0)), dim=1))
        torch.testing.assert_close(gated, 2 * expected, rtol=rtol, atol=2 * atol, equal_nan=True)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(0, 32), (1, 32), (40, 6016)])
def test_gated_activation(dtype, activation, shape):
    torch.manual_seed(0)
    gate_up = (30 * torch.randn(shape)).to(dtype)
    if len(gate_up):
        gate_up[0, :4] = torch.tensor([-1e4, 1e4, 0.0, -90.0]).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    act = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    rtol = {torch.float32: 2e-6, torch.bfloat16: 2**-6}[dtype]
    for ops in pairs(dtype=dtype, activation=activation):
        found = ops.act_and_mul(gate_up)
        torch.testing.assert_close(found, (act * up).to(dtype), atol=3e-5, rtol=rtol)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_the_clamped_activation_is_that_of_gpt_oss(dtype):
    torch.manual_seed(0)
    gate_up = (9 * torch.randn(40, 192)).to(dtype)
    gate_up[0, :3] = torch.tensor([-1e4, 1e4, -0.0]).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    gate, up = gate.clamp(max=5.0), up.clamp(-5.0, 5.0)
    wanted = ((up + 1) * gate * torch.sigmoid(1.5 * gate)).to(dtype)
    rtol = {torch.float32: 2e-6, torch.bfloat16: 2**-5}[dtype]
    for ops in pairs(dtype=dtype, activation="clamped_swiglu", swiglu_alpha=1.5, swiglu_limit=5.0):
        torch.testing.assert_close(ops.act_and_mul(gate_up), wanted, atol=3e-5, rtol=rtol)
        bad = ops.act_and_mul(torch.full((1, 64), torch.nan).to(dtype))
        assert bad.isnan().all()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 8.0, 0.3])
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_embeddings_are_looked_up_bit_by_bit(dtype, scale, num_tokens):
    torch.manual_seed(0)
    table, ids = torch.randn(50, 64).to(dtype), torch.randint(0, 50, (num_tokens,))
    shape = shape_of(dtype=dtype)
    native, by_torch = (kind(shape).embed(table, ids, scale) for kind in (NativeOps, CpuOps))
    assert torch.equal(native, by_torch)
    assert torch.equal(by_torch, (table[ids].float() * scale).to(dtype))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("scale", "cap"), [(1.0, None), (0.125, None), (1.0, 30.0), (2.0, 0.5)])
@pytest.mark.parametrize("vocab_size", [7, 16, 50, 4096])
def test_logits_are_scaled_and_capped_in_float32(dtype, scale, cap, vocab_size):
    torch.manual_seed(0)
    product = (20 * torch.randn(30, vocab_size)).to(dtype)
    expected = product.double() * scale
    if cap:
        expected = cap * (expected / cap).tanh()
    before = product.clone()
    for kind in (NativeOps, CpuOps):
        logits = kind(shape_of(dtype=dtype)).finish_logits(product.clone(), scale, cap)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits.double(), expected, rtol=1e-6, atol=2e-7 * (cap or 1))
    assert torch.equal(product, before)


def test_the_choice_depends_on_the_model():
    assert type(make_ops(TINY)) is NativeOps
    assert type(make_ops(TINY, native=False)) is CpuOps
    for change in (
        {"dtype": torch.float16},
        {"head_dim": 24},
        {"hidden_size": 100},
        {"intermediate_size": 1000},
        {"head_dim": 272},
        {"num_q_heads": 256, "num_kv_heads": 1},
    ):
        shape = msgspec.structs.replace(TINY, **change)
        assert not can_be_native(shape)
        assert type(make_ops(shape)) is CpuOps


def test_without_llvmlite_everything_is_torch(monkeypatch):
    units.is_available.cache_clear()
    monkeypatch.setitem(sys.modules, "trouper.kernels.codegen.features", None)
    monkeypatch.delattr(codegen, "features")
    try:
        assert type(make_ops(TINY)) is CpuOps
        monkeypatch.setitem(sys.modules, "trouper.kernels.cpu.linear.lora", None)
        assert isinstance(make_lora([16], 32, 2, 8, torch.float32), PlainLoRA)
    finally:
        units.is_available.cache_clear()


def test_threads_process_each_item_once():
    ops = NativeOps(TINY)
    x = torch.randn(1000, 64)
    for num_threads in (1, 2, 5):
        seen = torch.full_like(x, torch.nan)
        weight = torch.ones(64)
        ops._fused_add_norm(
            len(x), x.data_ptr(), 64, 0, 0, weight.data_ptr(), seen.data_ptr(), 64, 64, ops._alpha, ops._eps,
            num_threads=num_threads,
        )  # fmt: skip
        assert torch.equal(seen, ops.norm(x, weight))
    assert repr(ops._fused_add_norm) == "<Kernel fused_add_norm_f32_rms>"
    assert [repr(x) for x in (ops, CpuOps(TINY))] == ["<NativeOps>", "<CpuOps>"]


def test_an_operation_without_an_implementation_is_named():
    with pytest.raises(NotImplementedError, match="Ops does not implement attend"):
        Ops(TINY).attend(torch.empty(0), torch.empty(0), None)
