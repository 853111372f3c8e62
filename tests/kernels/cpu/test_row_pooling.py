import pytest
import torch

from trouper.kernels.codegen import units
from trouper.kernels.cpu.attention.varlen import Group
from trouper.kernels.cpu.fused.row_pooling import RowPooling


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize("kind", ["MEAN", "CLS", "LAST"])
def test_a_text_alone_is_pooled_to_the_bits_it_has_among_others(kind, dtype, native):
    if native and units.kind_of(dtype) is None:
        pytest.skip("this machine's kernels do not compute with it")
    rng = torch.Generator().manual_seed(1)
    groups = [Group(0, 1, 1), Group(1, 2, 7), Group(15, 1, 100)]
    # rows apart from each other, as a decoder's are
    hidden = (3 * torch.randn((115, 80), generator=rng)).to(dtype).narrow(1, 0, 48)
    pool = RowPooling(kind, dtype, 48, native=native)
    together = pool(hidden, groups)
    bounds = [(0, 1), (1, 8), (8, 15), (15, 115)]
    alone = [pool(hidden[a:b].clone(), [Group(0, 1, b - a)]) for a, b in bounds]
    assert torch.equal(together, torch.cat(alone))
    reduce = {"MEAN": lambda x: x.mean(0), "CLS": lambda x: x[0], "LAST": lambda x: x[-1]}[kind]
    wanted = torch.stack([reduce(hidden[a:b].double()) for a, b in bounds])
    torch.testing.assert_close(together.double(), wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("width", [4, 16], ids=["torch", "native"])
@pytest.mark.parametrize("kind", ["MEAN", "CLS", "LAST"])
def test_what_is_pooled_stays_when_the_next_pass_writes(kind, width):
    hidden = torch.ones((3, width))
    pooled = RowPooling(kind, torch.float32, width)(hidden, [Group(0, 1, 3)])
    hidden.zero_()
    assert torch.equal(pooled, torch.ones((1, width)))
