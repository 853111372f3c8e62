"""The adapters' kernels against plain torch, and their law: a row does not depend on its neighbours."""

import numpy as np
import pytest
import torch

from trouper.kernels.codegen import units
from trouper.kernels.cpu.linear.by_torch import PlainLoRA
from trouper.kernels.cpu.linear.lora import NativeLoRA, can_adapt
from trouper.kernels.linear import AdapterRows, LowRank, RowTable

PARTS, NUM_IN, NUM_SLOTS, MAX_RANK = (64, 32, 32), 96, 5, 20
DTYPES = [torch.float32, torch.bfloat16]
pytestmark = pytest.mark.skipif(not units.can_multiply(), reason="no compiled kernels here")


def adapter(rank, seed, dtype, missing=()):
    generator = torch.Generator().manual_seed(seed)
    return [
        None
        if number in missing
        else LowRank(
            torch.randn((rank, NUM_IN), generator=generator).to(dtype) / 8,
            torch.randn((size, rank), generator=generator).to(dtype) / 4,
        )
        for number, size in enumerate(PARTS)
    ]


def loaded(dtype, kind=NativeLoRA):
    """Slots 1 to 4 of different ranks; 5 is empty."""
    found = (
        PlainLoRA(PARTS)
        if kind is PlainLoRA
        else NativeLoRA(PARTS, NUM_IN, NUM_SLOTS, MAX_RANK, dtype)
    )
    for slot, (rank, missing) in enumerate([(16, ()), (1, ()), (20, (1,)), (8, (0, 2))], 1):
        found.load(slot, adapter(rank, slot, dtype, missing))
    return found


def rows_of(slots):
    table = RowTable(128)
    table.fill(np.array(slots))
    return table


def added(weights, slots, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((len(slots), NUM_IN + 32), generator=generator).to(dtype)[:, :NUM_IN]
    y = torch.randn((len(slots), sum(PARTS)), generator=generator).to(dtype)
    weights.add_to(y, x, rows_of(slots))
    return y


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "slots", [[1], [0, 0], [2, 1, 0, 3, 3, 4, 1, 5, 3, 3, 3, 2], [3] * 23, [1, 3, 4] * 30]
)
def test_the_sum_is_that_of_torch(dtype, slots):
    expected = added(loaded(dtype, PlainLoRA), slots, dtype).float()
    found = added(loaded(dtype), slots, dtype).float()
    tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_batch(dtype):
    weights, slots = loaded(dtype), [2, 1, 0, 3, 3, 4, 1, 5, 3, 3, 3, 2]
    crowd = added(weights, slots, dtype)
    for row in range(len(slots)):
        alone = added(weights, [s if r == row else 0 for r, s in enumerate(slots)], dtype)
        assert alone[row].equal(crowd[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_does_not_depend_on_row_count(dtype):
    weights, slots = loaded(dtype), [1, 3, 4] * 30
    many = added(weights, slots, dtype)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((len(slots), NUM_IN + 32), generator=generator).to(dtype)[:, :NUM_IN]
    y = torch.randn((len(slots), sum(PARTS)), generator=generator).to(dtype)
    weights.add_to(y[:5], x[:5], rows_of(slots[:5]))
    assert y[:5].equal(many[:5])


def test_an_empty_slot_leaves_the_product_alone():
    weights = loaded(torch.float32)
    before = added(weights, [0, 0, 0], torch.float32)
    weights.clear(1)
    assert added(weights, [1, 5, 0], torch.float32).equal(before)


def test_a_slot_accepts_a_smaller_rank():
    weights, small = loaded(torch.float32), adapter(2, 9, torch.float32)
    weights.load(3, small)
    reference = PlainLoRA(PARTS)
    reference.load(3, small)
    torch.testing.assert_close(
        added(weights, [3, 3], torch.float32), added(reference, [3, 3], torch.float32)
    )


def test_blocks_have_up_to_four_rows():
    table = rows_of([2, 0, 1, 2, 2, 2, 2, 1])
    assert table.blocks[0, 0] == 3
    assert table.blocks[1:4].tolist() == [[1, 0, 2], [2, 2, 4], [2, 6, 1]]
    assert table.order[:7].tolist() == [2, 7, 0, 3, 4, 5, 6]


def test_read_rows_have_their_own_table():
    rows = AdapterRows(8)
    rows.begin_step(np.array([1, 1, 2]), np.array([1, 2]))
    assert rows.of(3).slots[:3].tolist() == [1, 1, 2]
    assert rows.of(2).slots[:2].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("parts", "num_in", "is_possible"),
    [((64,), 96, True), ((64, 24), 96, False), ((64,), 40, False), ((64,), 48, True)],
)
def test_parts_and_inputs_must_be_whole_registers(parts, num_in, is_possible):
    assert can_adapt(parts, num_in, torch.float32) is is_possible
