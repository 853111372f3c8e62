"""Ragged batches over shuffled blocks, against a float64 reference that gathers everything."""

import random

import numpy as np
import pytest
import torch

from trouper.kernels.reference.norms import kv_write_
from trouper.kernels.reference.paged_attention import (
    mask_tensors,
    paged_attention,
    paged_attention_reference,
    plan_attention,
    slot_runs,
)

COLUMNS = {  # (start, count) of each sequence
    "one token": [(0, 1)],
    "decode": [(0, 1), (63, 1), (64, 1), (17, 1)],
    "prefill": [(0, 63), (0, 2), (0, 17)],
    "mixed": [(0, 5), (40, 1), (33, 30), (1, 2), (15, 1)],
}
TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 2e-2}


class Case:
    """A step, and a cache with NaN everywhere except for the tokens of its sequences."""

    def __init__(self, columns, *, block_size, heads=(4, 2), width=16, dtype=torch.float32, seed=0):
        torch.manual_seed(seed)
        self.columns, self.block_size = columns, block_size
        num_blocks = sum(-(-(s + c) // block_size) for s, c in columns) + 3
        ids = list(range(1, num_blocks))
        random.Random(seed).shuffle(ids)
        num_q, num_kv = heads
        self.cache = torch.full((2, num_kv, num_blocks * block_size, width), torch.nan, dtype=dtype)
        self.tables, self.slots = [], []
        for start, count in columns:
            table = [ids.pop() for _ in range(-(-(start + count) // block_size))]
            self.tables.append(np.array(table))
            self.slots.append(
                [table[p // block_size] * block_size + p % block_size for p in range(start + count)]
            )
            self.cache[:, :, self.slots[-1]] = torch.randn(2, num_kv, start + count, width).to(
                dtype
            )
        qkv = torch.randn(sum(c for _, c in columns), num_q + 2 * num_kv, width).to(dtype)
        self.q = qkv[:, :num_q]
        kv = qkv[:, num_q:].unflatten(1, (2, num_kv))
        self.k, self.v = kv.unbind(1)
        fresh = [s for where, (_, c) in zip(self.slots, columns, strict=True) for s in where[-c:]]
        kv_write_(self.cache, kv, torch.tensor(fresh))

    def check(self, *, window=None, softcap=None, max_tile=None):
        starts, counts = zip(*self.columns, strict=True)
        tiles = plan_attention(
            self.tables,
            starts,
            counts,
            block_size=self.block_size,
            window=window,
            max_tile=max_tile,
        )
        masks = mask_tensors(tiles, self.q.dtype)
        found = paged_attention(
            self.q, self.k, self.v, self.cache, tiles, masks, scale=0.3, softcap=softcap
        )
        expected = paged_attention_reference(
            self.q,
            self.cache,
            self.slots,
            starts,
            counts,
            scale=0.3,
            softcap=softcap,
            window=window,
        )
        tolerance = TOLERANCES[self.q.dtype]
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("columns", COLUMNS.values(), ids=COLUMNS)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 7, 16, 40, 1000])
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_every_mix_of_columns_equals_the_reference(columns, softcap, window, block_size):
    Case(columns, block_size=block_size).check(window=window, softcap=softcap)


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (8, 8), (6, 2)])
@pytest.mark.parametrize("width", [8, 64, 80])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_heads_widths_and_dtypes(heads, width, dtype):
    case = Case(COLUMNS["mixed"], block_size=8, heads=heads, width=width, dtype=dtype)
    case.check()
    case.check(window=9)
    case.check(softcap=3.0, max_tile=4)


def test_step_that_reads_no_token_has_no_rows():
    cache, q = torch.full((2, 2, 16, 8), torch.nan), torch.empty(0, 6, 8)
    fresh = (torch.empty(0, 2, 8) for _ in range(2))
    assert paged_attention(q, *fresh, cache, [], {}, scale=0.3).shape == (0, 48)


@pytest.mark.parametrize("max_tile", [1, 2, 7])
def test_tiles_do_not_change_the_result(max_tile):
    Case(COLUMNS["mixed"], block_size=4).check(max_tile=max_tile)
    Case(COLUMNS["mixed"], block_size=4).check(max_tile=max_tile, window=11)


def test_consecutive_blocks_are_one_run_whatever_their_order():
    slots, lengths = slot_runs(np.array([7, 6, 5, 2]), 0, 31, 8, in_order=False)
    assert (slots, lengths) == ([16, 40], [7, 24])  # block 2 ends the sequence and is not full
    slots, lengths = slot_runs(np.array([7, 6, 5, 2]), 0, 31, 8, in_order=True)
    assert (slots, lengths) == ([56, 48, 40, 16], [8, 8, 8, 7])
    slots, lengths = slot_runs(np.array([4, 5, 6]), 3, 20, 8, in_order=True)
    assert (slots, lengths) == ([35], [17])


@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_single_query_does_not_depend_on_adjacent_blocks(dtype, window):
    torch.manual_seed(0)
    num_kv, width, size, start = 2, 16, 128, 300
    k, v = torch.randn(2, num_kv, start + 1, width).to(dtype)
    q = torch.randn(1, 3 * num_kv, width).to(dtype)
    found = []
    for blocks in ([1, 2, 3], [0, 2, 3], [3, 1, 0]):
        cache = torch.full((2, num_kv, 4 * size, width), torch.nan, dtype=dtype)
        for i, block in enumerate(blocks):
            of_block = slice(i * size, min((i + 1) * size, start + 1))
            slots = slice(block * size, block * size + of_block.stop - of_block.start)
            cache[:, :, slots] = torch.stack((k, v))[:, :, of_block]
        tiles = plan_attention([np.array(blocks)], [start], [1], block_size=size, window=window)
        fresh = (x[:, -1:].transpose(0, 1) for x in (k, v))
        found.append(paged_attention(q, *fresh, cache, tiles, {}, scale=0.3))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_window_trims_a_single_querys_runs():
    (tile,) = plan_attention([np.arange(10)], [79], [1], block_size=8, window=5)
    ((slot, length, num_queries, mask),) = tile.runs
    assert (slot, length, num_queries, mask) == (75, 5, 1, None)


def test_a_short_sequence_needs_no_window_mask():
    tiles = plan_attention([np.array([3, 1, 2])], [8], [8], block_size=8, window=16)
    assert [run.mask for tile in tiles for run in tile.runs] == [None]
    tiles = plan_attention([np.array([3, 1, 2])], [8], [8], block_size=8, window=15)
    assert tiles[0].runs[0].mask is not None


def test_the_reference_equals_torchs_attention_for_one_sequence():
    q, kv = torch.randn(9, 4, 8), torch.randn(2, 4, 9, 8)
    found = paged_attention_reference(q, kv, [list(range(9))], [0], [9], scale=8**-0.5)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), kv[0], kv[1], is_causal=True
    )
    torch.testing.assert_close(found, expected.transpose(0, 1).flatten(1))
