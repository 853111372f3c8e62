"""Adapters on a GPU equal plain torch, and each row is independent of the others."""

import numpy as np
import pytest
import torch

from trouper.kernels.cpu.linear.by_torch import PlainLoRA
from trouper.kernels.cuda.lora import BLOCK_ROWS, DeviceRows, TritonLoRA, max_blocks
from trouper.kernels.linear import LowRank, RowTable

PARTS, NUM_SLOTS, MAX_RANK = (160, 32, 24), 5, 40
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
# The ranks of slots 1 to 4, and the parts that they do not change; slot 5 is empty.
ADAPTERS = ((16, ()), (1, ()), (40, (1,)), (8, (0, 2)))


def adapter(rank, seed, num_in, dtype, missing):
    generator = torch.Generator().manual_seed(seed)
    return [
        None
        if number in missing
        else LowRank(
            torch.randn((rank, num_in), generator=generator).to(dtype) / num_in**0.5,
            torch.randn((size, rank), generator=generator).to(dtype) / rank**0.5,
        )
        for number, size in enumerate(PARTS)
    ]


def poisoned(device):
    def empty(shape, dtype):
        fill = torch.nan if dtype.is_floating_point else -(2**30)
        return torch.full(tuple(shape), fill, dtype=dtype, device=device)

    return empty


def weights_of(num_in, dtype, device):
    """Return Triton's adapters, in memory filled with NaN before, and torch's."""
    empty = poisoned(device)
    found = TritonLoRA(PARTS, num_in, NUM_SLOTS, MAX_RANK, empty=empty, dtype=dtype)
    expected = PlainLoRA(PARTS)
    for slot, (rank, missing) in enumerate(ADAPTERS, 1):
        parts = adapter(rank, slot, num_in, dtype, missing)
        found.load(slot, parts)
        expected.load(slot, parts)
    return found, expected


def table_of(slots, block_rows=BLOCK_ROWS):
    table = RowTable(len(slots), block_rows)
    table.fill(np.array(slots))
    return table


def device_rows(slots, device):
    table = table_of(slots)
    order = torch.from_numpy(table.order).int().to(device)
    return DeviceRows(order, torch.from_numpy(table.blocks).int().to(device), len(ADAPTERS) + 1)


def tensors(num_rows, num_in, dtype, device):
    torch.manual_seed(0)
    x = torch.randn(num_rows, num_in + 8).to(dtype)[:, :num_in]  # strided
    return x.to(device), torch.randn(num_rows, sum(PARTS)).to(dtype).to(device)


MIXTURES = {
    "one": [1],
    "none": [0, 0],
    "mixed": [2, 1, 0, 3, 3, 4, 1, 5, 3, 3, 3, 2],
    "two blocks of one": [3] * 23,
    "many": [1, 3, 4] * 15,
}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("num_in", "mixture"),
    [
        *((40, name) for name in MIXTURES),
        (1100, "mixed"),  # two sums
        *(pytest.param(4096, name, marks=pytest.mark.gpu) for name in MIXTURES),
    ],
)
def test_the_sum_is_that_of_torch(num_in, mixture, dtype, device):
    slots = MIXTURES[mixture]
    weights, reference = weights_of(num_in, dtype, device)
    x, y = tensors(len(slots), num_in, dtype, device)
    expected = y.cpu().clone()
    reference.add_to(expected, x.cpu(), table_of(slots))
    weights.add_to(y, x, device_rows(slots, device))
    torch.testing.assert_close(y.cpu(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.usefixtures("ordered_dots")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_row_does_not_depend_on_other_adapters(dtype, device):
    slots = [3, 1, 0, 2, 3, 4, 1, 3] + [3] * 14
    weights, _ = weights_of(72, dtype, device)
    x, y = tensors(len(slots), 72, dtype, device)
    before = y.clone()
    weights.add_to(y, x, device_rows(slots, device))
    for row in (0, 2, 3, 5, 21):
        alone = before[row : row + 1].clone()
        weights.add_to(alone, x[row : row + 1], device_rows(slots[row : row + 1], device))
        assert torch.equal(alone, y[row : row + 1])


def test_an_emptied_slot_accepts_a_smaller_adapter(device):
    weights, _ = weights_of(40, torch.float32, device)
    x, y = tensors(2, 40, torch.float32, device)
    before, rows = y.clone(), device_rows([3, 3], device)
    weights.clear(3)
    weights.add_to(y, x, rows)
    assert torch.equal(y, before)
    parts, reference = adapter(3, 9, 40, torch.float32, (2,)), PlainLoRA(PARTS)
    weights.load(3, parts)
    reference.load(3, parts)
    weights.add_to(y, x, rows)
    expected = before.cpu()
    reference.add_to(expected, x.cpu(), table_of([3, 3]))
    torch.testing.assert_close(y.cpu(), expected, atol=1e-5, rtol=1e-5)


def test_a_step_without_adapters_launches_nothing(device):
    weights, _ = weights_of(40, torch.float32, device)
    x, y = tensors(3, 40, torch.float32, device)
    before = y.clone()
    weights.add_to(y, x, None)
    assert torch.equal(y, before)


@pytest.mark.parametrize("num_loras", [1, 2, 7])
@pytest.mark.parametrize("num_rows", [1, 5, 16, 17, 100])
def test_no_mixture_has_more_blocks_than_the_bound(num_loras, num_rows):
    worst = 0
    for counts in (np.ones(num_loras), np.full(num_loras, 17), np.arange(num_loras) * 16 + 1):
        slots = np.repeat(np.arange(num_loras) + 1, counts.astype(int))[:num_rows]
        rest = np.full(num_rows - len(slots), num_loras)
        worst = max(worst, int(table_of(np.append(slots, rest)).blocks[0, 0]))
    assert worst <= max_blocks(num_rows, num_loras)
