"""Memory that outlives its worker: what one process has written, the next one finds at the same place."""

import os

import pytest
import torch

from tests.executor.test_state_memory import SPECS
from trouper.actors.executor.steps.cache_memory import NOTHING, KeptMemory, StatePool


@pytest.fixture
def file():
    descriptor = os.memfd_create("test")
    yield descriptor
    os.close(descriptor)


def opened(file):
    return KeptMemory(os.dup(file))


def test_successor_finds_every_tensor(file):
    first = opened(file)
    tensors = first.empty((3, 5), torch.bfloat16), first.empty((2,), torch.int64)
    assert not tensors[0].any()
    tensors[0].fill_(1.5)
    tensors[1].fill_(-7)
    second = opened(file)
    again = second.empty((3, 5), torch.bfloat16), second.empty((2,), torch.int64)
    assert second.layout == first.layout
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(again, tensors, strict=True))


def test_layout_depends_on_shape_and_dtype(file):
    layouts = set()
    for shape, dtype in (((2, 3), torch.float32), ((3, 2), torch.float32), ((3, 2), torch.int32)):
        memory = opened(file)
        memory.empty(shape, dtype)
        layouts.add(memory.layout)
    assert len(layouts) == 3


def test_dropped_memory_is_empty_and_free(file):
    memory = opened(file)
    memory.empty((2**20,), torch.uint8).fill_(1)
    assert os.fstat(file).st_blocks * 512 >= 2**20
    memory.drop()
    assert os.fstat(file).st_blocks == 0
    assert not memory.empty((2**20,), torch.uint8).any()


def test_tensor_without_elements_needs_no_memory(file):
    assert opened(file).empty((0, 4), torch.float32).shape == (0, 4)


def test_snapshots_of_states_are_found_again(file):
    pool = StatePool(SPECS, 4, torch.float32, opened(file))
    pool.fill(0, 2.0)
    pool.finish([0], [16], saves=[(0, 3, 16)])
    again = StatePool(SPECS, 4, torch.float32, opened(file))
    again.spoil([0, 1])
    assert again.positions.tolist() == [NOTHING, NOTHING, 0, 16]
    again.copy(3, 1)
    assert again.positions[1] == 16
    for mixer in again.mixers.values():
        views = [view for view in mixer if isinstance(view, torch.Tensor)]
        assert views
        assert all((view[1] == 2.0).all() for view in views)
