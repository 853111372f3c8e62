"""Ragged batches over shuffled blocks: decode, prefill, and both for a mixed batch."""

import random

import pytest
import torch

from trouper.kernels.cuda.decode_attention import decode_attention
from trouper.kernels.cuda.prefill_attention import prefill_attention
from trouper.kernels.reference.paged_attention import paged_attention_reference

COLUMNS = {  # (start, count) of each sequence; those without tokens pad the batch
    "one token": [(0, 1)],
    "decode": [(0, 1), (63, 1), (0, 0), (64, 1), (150, 1)],
    "prefill": [(0, 63), (0, 2), (0, 17), (0, 0)],
    "chunks": [(32, 32), (127, 5), (1, 40)],
    "mixed": [(0, 5), (40, 1), (33, 30), (1, 2), (15, 1), (0, 0), (0, 0)],
}
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# query heads, KV heads, width
GEOMETRIES = [(4, 2, 64), (3, 1, 20), (5, 5, 8), (7, 1, 64)]
REAL_COLUMNS = {
    "decode": [(i * 37 % 8192, 1) for i in range(64)],
    "prefill": [(0, 2048), (0, 1000), (0, 333)],
    "mixed": [(0, 513), (4000, 1), (1024, 1024), (65, 1), (8000, 100)],
}
REAL_GEOMETRIES = [(16, 8, 128), (32, 8, 128), (9, 3, 64), (16, 8, 256), (32, 32, 96)]
real = [
    pytest.param(columns, heads, torch.bfloat16, marks=pytest.mark.gpu, id=f"real {name}-{heads}")
    for name, columns in REAL_COLUMNS.items()
    for heads in REAL_GEOMETRIES
]


class Case:
    """A cache full of NaN but for the tokens of the sequences, and a step over it."""

    def __init__(self, columns, heads, *, device, block_size=8, dtype=torch.float32, padding=3):
        torch.manual_seed(0)
        num_q, num_kv, width = heads
        self.columns, self.block_size = columns, block_size
        sizes = [-(-(start + count) // block_size) for start, count in columns]
        ids = list(range(1, sum(sizes) + 4))
        random.Random(0).shuffle(ids)
        cache = torch.full((2, num_kv, (len(ids) + 1) * block_size, width), torch.nan, dtype=dtype)
        # the columns' rows lie in the reverse order, with an unused one between
        blocks = torch.full((2 * len(columns), max(sizes) + 1), 2**30, dtype=torch.int32)
        self.slots, rows = [], []
        for i, ((start, count), size) in enumerate(zip(columns, sizes, strict=True)):
            row = 2 * (len(columns) - i) - 1
            table = [ids.pop() for _ in range(size)]
            blocks[row, :size] = torch.tensor(table)
            rows.append(row)
            slots = [
                table[p // block_size] * block_size + p % block_size for p in range(start + count)
            ]
            cache[:, :, slots] = torch.randn(2, num_kv, start + count, width).to(dtype)
            self.slots.append(slots)
        counts = torch.tensor([0, *(count for _, count in columns)])
        self.q = torch.randn(int(counts.sum()), num_q, width).to(dtype)
        self.cache = cache
        qkv = torch.full((len(self.q) + padding, num_q + 2 * num_kv, width), torch.nan, dtype=dtype)
        qkv[: len(self.q), :num_q] = self.q
        self.out = torch.full((len(qkv), num_q * width), torch.nan, dtype=dtype, device=device)
        self.arguments = (
            qkv.to(device)[:, :num_q],  # strided like q in qkv
            cache.to(device),
            counts.cumsum(0).int().to(device),
            torch.tensor(rows, dtype=torch.int32, device=device),
            torch.tensor([start for start, _ in columns], dtype=torch.int32, device=device),
            blocks.to(device),
        )

    def run(self, *, decodes=True, min_count=2, split=16, **options):
        common = {"block_size": self.block_size, "scale": 0.3, "out": self.out, **options}
        if decodes:
            longest = max(start + count for start, count in self.columns)
            decode_attention(*self.arguments, max_length=longest + 5, split=split, **common)
        prefill_attention(*self.arguments, min_count=min_count, **common)
        return self.out.cpu()

    def check(self, **options):
        self.out.fill_(torch.nan)
        found = self.run(**options)
        real = [
            (*column, slots)
            for column, slots in zip(self.columns, self.slots, strict=True)
            if slots
        ]
        starts, counts, slots = zip(*real, strict=True)
        scoring = {k: v for k, v in options.items() if k in ("window", "softcap")}
        expected = paged_attention_reference(
            self.q, self.cache, slots, starts, counts, scale=0.3, **scoring
        )
        tolerance = TOLERANCES[self.q.dtype]
        torch.testing.assert_close(found[: len(expected)], expected, atol=tolerance, rtol=tolerance)
        error = (found[: len(expected)] - expected).double().norm()
        assert error <= 5e-3 * expected.double().norm()
        assert found[len(expected) :].isnan().all()  # padding


small = [(columns, GEOMETRIES[0], torch.float32) for columns in COLUMNS.values()]


@pytest.mark.parametrize(("columns", "heads", "dtype"), small + real)
@pytest.mark.parametrize("options", [{}, {"window": 7}, {"softcap": 2.0, "window": 40}], ids=str)
def test_every_mix_of_columns_equals_the_reference(device, columns, heads, dtype, options):
    Case(columns, heads, device=device, dtype=dtype).check(**options)


@pytest.mark.parametrize("heads", GEOMETRIES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_heads_widths_and_dtypes(device, heads, dtype):
    Case([(5, 3), (30, 1)], heads, device=device, dtype=dtype).check()


@pytest.mark.parametrize("block_size", [1, 5, 16, 64])
def test_blocks_of_any_size(device, block_size):
    Case([(30, 20), (70, 1)], (2, 1, 16), device=device, block_size=block_size).check()


@pytest.mark.usefixtures("ordered_dots")
def test_prompt_rows_do_not_depend_on_chunks(device):
    whole = Case([(0, 90)], (4, 2, 16), device=device)
    expected = whole.run(decodes=False, min_count=1)[:90]
    q, cache, _, rows, _, blocks = whole.arguments
    for size in (1, 13, 64):
        found = []
        for start in range(0, 90, size):
            count = min(size, 90 - start)
            bounds, starts = (
                torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, count], [start])
            )
            chunk = q[start : start + count], cache, bounds, rows, starts, blocks
            found.append(prefill_attention(*chunk, block_size=8, scale=0.3).cpu())
        assert torch.equal(torch.cat(found), expected)


@pytest.mark.parametrize("columns", [[(200, 1)], [(20, 40)]], ids=["decode", "prefill"])
def test_a_sequence_does_not_depend_on_its_batch(device, columns):
    """The other sequences are longer and shorter, before and after it."""
    crowd = [(3, 1), (0, 9), *columns, (299, 1), (31, 17)]
    together = Case(crowd, (4, 2, 16), device=device)
    first = 10
    q, cache, _, rows, starts, blocks = together.arguments
    count = columns[0][1]
    alone = (
        q[first : first + count],
        cache,
        torch.tensor([0, count], dtype=torch.int32, device=device),
        rows[2:3],
        starts[2:3],
        blocks,
    )
    common = {"block_size": 8, "scale": 0.3}
    if count == 1:
        found = decode_attention(*alone, max_length=sum(columns[0]), split=16, **common)
    else:
        found = prefill_attention(*alone, **common)
    assert torch.equal(found.cpu(), together.run()[first : first + count])


def test_one_program_may_take_all_parts(device, monkeypatch):
    columns = [(150, 1), (3, 1), (63, 1)]
    expected = Case(columns, (4, 2, 64), device=device)
    expected.run()
    monkeypatch.setattr("trouper.kernels.cuda.decode_attention.MAX_PROGRAMS", 1)
    found = Case(columns, (4, 2, 64), device=device)
    found.run()
    assert torch.equal(found.out[:3], expected.out[:3])


def test_very_long_sequences_have_longer_parts(device, monkeypatch):
    monkeypatch.setattr("trouper.kernels.cuda.decode_attention.MAX_SPLITS", 3)
    Case([(130, 1), (47, 1), (48, 1)], (4, 2, 16), device=device).check()


def test_a_cache_may_lie_by_slot(device):
    case = Case([(30, 20), (70, 1)], (4, 2, 16), device=device)
    q, cache, *rest = case.arguments
    case.arguments = (q, cache.transpose(1, 2).contiguous().transpose(1, 2), *rest)
    case.check()


@pytest.mark.gpu
def test_a_cache_beyond_int32(device):
    """The offset of these slots in a layer's keys exceeds 2³¹ elements."""
    case = Case([(1000, 24), (700, 1)], (16, 8, 128), device=device, dtype=torch.bfloat16)
    q, cache, bounds, rows, starts, blocks = case.arguments
    num_slots = 2**31 // 128 // 8 * 9 // 8 // 8 * 8
    large = torch.full((2, 8, num_slots, 128), torch.nan, dtype=q.dtype, device=device)
    large[:, :, -cache.shape[2] :] = cache
    case.arguments = (q, large, bounds, rows, starts, blocks + (num_slots - cache.shape[2]) // 8)
    case.check()
