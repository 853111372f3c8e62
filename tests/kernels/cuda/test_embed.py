import numpy as np
import pytest
import torch

from trouper.actors.executor.steps.batch import make_batch
from trouper.actors.executor.steps.request_slots import RequestSlots
from trouper.actors.messages.requests import SequenceId
from trouper.actors.messages.steps import NewSequence, Sampling, StepPlan
from trouper.kernels.cuda.embed import Embedded, embed, embed_reference

# (row, start, count) of each column; those without tokens pad the batch
COLUMNS = {
    "one": [(0, 0, 1)],
    "mixed": [(3, 0, 5), (1, 7, 1), (0, 2, 6), (4, 11, 1), (0, 0, 0), (0, 0, 0)],
    "nothing": [(0, 0, 0)],
}
DTYPES = [torch.float32, torch.bfloat16]


def arguments(columns, width, dtype, *, max_len=16, block_size=4):
    torch.manual_seed(0)
    rows, starts, counts = (torch.tensor(x, dtype=torch.int32) for x in zip(*columns, strict=True))
    bounds = torch.cat((torch.zeros(1), counts.cumsum(0))).int()
    num_rows = int(rows.max()) + 1
    tokens = torch.randint(0, 50, (num_rows, max_len + 1), dtype=torch.int32)
    num_blocks = max_len // block_size
    blocks = 1 + torch.randperm(num_rows * num_blocks).view(num_rows, num_blocks).int()
    return bounds, rows, starts, tokens, blocks, torch.randn(50, width).to(dtype)


@pytest.mark.parametrize("columns", COLUMNS.values(), ids=COLUMNS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 63, 64, pytest.param(4096, marks=pytest.mark.gpu)])
def test_it_equals_the_reference_with_and_without_padding(device, columns, dtype, width):
    plan = arguments(columns, width, dtype)
    for num_tokens in (int(plan[0][-1]), 16):
        options = {"num_tokens": num_tokens, "block_size": 4, "alpha": 1.5}
        expected = embed_reference(*plan, **options)
        out = Embedded(
            torch.full((num_tokens, width), torch.nan, dtype=dtype, device=device),
            *torch.full((2, num_tokens), -7, dtype=torch.int32, device=device),
        )
        found = embed(*(x.to(device) for x in plan), out=out, **options)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(
                a.cpu(), b, atol=0, rtol=2**-7 if a.is_floating_point() else 0
            )


def test_the_reference_equals_the_cpu_path():
    columns = [column for column in COLUMNS["mixed"] if column[2]]
    bounds, row_ids, starts, tokens, blocks, embedding = arguments(columns, 8, torch.float32)
    rows = RequestSlots(5, 16, 4)
    for row in range(5):
        ids, blocks_of = tokens[row, :16].tolist(), blocks[row].tolist()
        rows.place(NewSequence(row, SequenceId(row), tuple(ids), 16, tuple(blocks_of), Sampling()))
    counts = np.diff(bounds.numpy()).tolist()
    columns = row_ids.tolist(), starts.tolist(), counts
    plan = StepPlan(0, 0, *map(tuple, columns), (1,) * len(counts))
    batch = make_batch(plan, rows, (), plan_attention=lambda *_: None)
    found = embed_reference(
        bounds,
        row_ids,
        starts,
        tokens,
        blocks,
        embedding,
        num_tokens=len(batch.tokens.ids_T),
        block_size=4,
    )
    assert found.positions.tolist() == batch.tokens.positions_T.tolist()
    assert found.slots.tolist() == batch.tokens.slots_T.tolist()
    assert torch.equal(found.x, embedding[batch.tokens.ids_T])
