"""How a text is pooled does not depend on who is beside it."""

import pytest
import torch

from trouper.actors.executor.heads import pool
from trouper.kernels.varlen_attention import Group


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["MEAN", "CLS", "LAST"])
def test_a_text_alone_is_pooled_to_the_bits_it_has_among_others(kind, dtype):
    rng = torch.Generator().manual_seed(1)
    groups = [Group(0, 1, 1), Group(1, 2, 7), Group(15, 1, 100)]
    hidden = (3 * torch.randn((115, 48), generator=rng)).to(dtype)
    together = pool(hidden, groups, kind)
    bounds = [(0, 1), (1, 8), (8, 15), (15, 115)]
    alone = [pool(hidden[a:b].clone(), [Group(0, 1, b - a)], kind) for a, b in bounds]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("kind", ["MEAN", "CLS", "LAST"])
def test_what_is_pooled_stays_when_the_next_pass_writes(kind):
    hidden = torch.ones((3, 4))
    pooled = pool(hidden, [Group(0, 1, 3)], kind)
    hidden.zero_()
    assert torch.equal(pooled, torch.ones((1, 4)))
