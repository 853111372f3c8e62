"""Memory of one step after the other."""

import gc

import torch

from trouper.kernels.codegen.recording import Arena, Lender


def grown(arena, num_rows):
    """What a chain of tensors leaves; all but two of them are freed on the way."""
    with Lender(arena):
        x = torch.empty((num_rows, 8), dtype=torch.bfloat16).fill_(1.0)
        for _ in range(9):
            x = x.new_empty(x.shape).copy_(x + 1)
            gc.collect(0)
    return x


def test_a_block_reuses_the_last_ones_memory():
    arena = Arena()
    first = grown(arena, 100)
    assert first.unique().tolist() == [10.0]
    num_blocks, where = len(arena.blocks), first.data_ptr()
    assert repr(arena) == f"<Arena of {2048 * num_blocks} bytes>"
    second = grown(arena, 128)
    assert len(arena.blocks) == num_blocks == 2
    assert {where, second.data_ptr()} <= set(arena.blocks)
    assert grown(arena, 129).shape == (129, 8)  # needs larger ones
    assert repr(arena) == f"<Arena of {(2048 + 4096) * num_blocks} bytes>"


def test_nothing_is_lent_outside_of_a_block():
    arena = Arena()
    torch.empty(100)
    assert repr(arena) == "<Arena of 0 bytes>"
    with Lender(arena):
        assert torch.empty((0, 4)).shape == (0, 4)
        assert torch.ones(3).new_empty((2, 2), dtype=torch.int64).dtype == torch.int64
