"""Vision towers run in slices: where they stop, what an error or an abandoned image leaves, and which items share the work."""

import threading
from math import inf

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trouper.actors.executor.media import tower as tower_module
from trouper.actors.executor.media.encoder import GIVE_BACK_ITEMS, MediaEncoder, WholeItem
from trouper.actors.executor.media.tower import (
    SlicedLinear,
    SlicedWork,
    Slices,
    TowerFunctions,
    slice_layers,
)
from trouper.actors.messages.media import MediaItem
from trouper.kernels.linear import LinearConfig
from trouper.kernels.select import make_linear


class Tower:
    """Compute two rows of an item in three slices."""

    def __init__(self) -> None:
        self.slices = Slices()
        self.begun: list[bytes] = []
        self.num_steps = 0

    num_bytes = 0

    def begin(self, item: MediaItem) -> SlicedWork:
        return self.slices.begin(lambda: self.rows(item))

    def rows(self, item: MediaItem) -> torch.Tensor:
        self.begun.append(item.key)
        for _ in range(2):
            self.num_steps += 1
            self.slices.pause()
        if item.key == b"bad":
            raise RuntimeError("a defect")
        return torch.full((2, 4), float(item.key[0]))


@pytest.fixture
def tower():
    return Tower()


@pytest.fixture
def encoder(tower):
    encoder = MediaEncoder(lambda: tower, 1 << 20)
    encoder.load()
    yield encoder
    encoder.sleep(2)


def whole(encoder, key=b"a"):
    return WholeItem(MediaItem(key, "image", (), 2, ((0, 2),)), encoder)


def test_each_slice_reaches_the_next_pause(encoder, tower):
    item = whole(encoder)
    assert [encoder.advance([item], 0) for _ in range(3)] == [0, 0, 1]
    assert tower.num_steps == 2
    assert item.rows().tolist() == [[97.0] * 4] * 2


def test_enough_time_encodes_several_items(encoder, tower):
    items = [whole(encoder, key) for key in (b"a", b"b")]
    assert encoder.advance(items, inf) == 2
    assert tower.begun == [b"a", b"b"]


def test_equal_items_are_encoded_once(encoder, tower):
    first, second = whole(encoder), whole(encoder)
    encoder.advance([first], 0)
    encoder.advance([second], inf)
    assert first.is_ready()
    assert torch.equal(first.rows(), second.rows())
    assert tower.begun == [b"a"]


def test_a_begun_item_ends_before_another_begins(encoder, tower):
    first, second = whole(encoder), whole(encoder, b"b")
    encoder.advance([first], 0)
    assert encoder.advance([second], inf) == 1
    assert tower.begun == [b"a", b"b"]
    assert first.is_ready()


def test_rows_are_read_without_the_last_slices(encoder, tower):
    item, other = whole(encoder), whole(encoder, b"b")
    encoder.advance([item], 0)
    assert other.rows()[0, 0] == 98
    assert item.rows()[0, 0] == 97
    assert tower.begun == [b"a", b"b"]


def test_an_error_appears_when_rows_are_read(encoder, tower):
    item = whole(encoder, b"bad")
    assert encoder.advance([item], inf) == 1
    with pytest.raises(RuntimeError, match="a defect"):
        item.rows()
    assert encoder.advance([whole(encoder)], inf) == 1


def test_sleep_ends_the_thread_of_an_item(encoder, tower):
    item = whole(encoder)
    encoder.advance([item], 0)
    (thread,) = (each for each in threading.enumerate() if each.name == "trouper-tower")
    encoder.sleep(1)
    assert not thread.is_alive()
    assert encoder.advance([whole(encoder)], inf) == 1


def test_rows_beyond_the_cache_stay_with_their_sequence(tower):
    encoder = MediaEncoder(lambda: tower, 0)
    encoder.load()
    item = whole(encoder)
    encoder.advance([item], inf)
    assert item.rows()[0, 0] == 97
    assert tower.begun == [b"a"]


def test_freed_memory_goes_back_after_many_items(tower):
    calls = []
    encoder = MediaEncoder(lambda: tower, 1 << 20, lambda: calls.append(len(tower.begun)))
    encoder.load()
    encoder.advance([whole(encoder, b"%d" % i) for i in range(2 * GIVE_BACK_ITEMS + 1)], inf)
    assert calls == [GIVE_BACK_ITEMS, 2 * GIVE_BACK_ITEMS]


class Layer(nn.Module):
    """Mix the tokens of a tile where the mask allows it."""

    def forward(self, hidden, attention_mask=None):
        if attention_mask is None:
            return hidden.mean(1, keepdim=True) + hidden
        return hidden * attention_mask[:, 0, 0, :, None]


def test_layers_compute_each_tile_alone():
    model, hidden = nn.ModuleList([Layer(), Layer()]), torch.randn(3, 4, 5)
    mask = torch.rand(3, 1, 1, 4)
    wanted = [layer(hidden) for layer in model], model[0](hidden, attention_mask=mask)
    slices = Slices()
    slice_layers(model, slices)
    num_pauses = 0

    def count():
        nonlocal num_pauses
        num_pauses += 1

    slices.pause = count
    assert all(torch.equal(a, layer(hidden)) for a, layer in zip(wanted[0], model, strict=True))
    assert torch.equal(wanted[1], model[0](hidden, attention_mask=mask))
    assert num_pauses == 9


def test_products_pause_between_groups_of_rows():
    slices, plain, x = Slices(), nn.Linear(8, 16), torch.randn(5, 3, 8)
    method = make_linear(plain.weight.data, None, LinearConfig())
    method.bias = plain.bias.data
    linear = SlicedLinear(method, plain.weight, slices)
    linear._num_rows = 4
    work = slices.begin(lambda: linear(x))
    num_slices = 1
    while not work.advance(0):
        num_slices += 1
    assert num_slices == 5
    # Torch's own product of four rows may differ from that of fifteen in the last bit.
    assert torch.allclose(work.result(), plain(x), atol=1e-6)


CALLS = {
    "plain": ((2, 3, 70, 32), {}, True),
    "heads of 72": ((1, 2, 33, 72), {}, True),
    "scale": ((1, 2, 9, 16), {"scale": 0.7}, True),
    "mask of true": ((1, 2, 9, 16), {"attn_mask": torch.ones(1, 1, 9, 9, dtype=torch.bool)}, True),
    "mask of zeros": ((1, 2, 9, 16), {"attn_mask": torch.zeros(1, 1, 9, 9)}, True),
    "mask": ((1, 2, 9, 16), {"attn_mask": torch.ones(9, 9, dtype=torch.bool).tril()}, False),
    "causal": ((1, 2, 9, 16), {"is_causal": True}, False),
    "three dimensions": ((2, 9, 16), {}, False),
    "nothing": ((1, 2, 0, 16), {}, False),
}


@pytest.mark.parametrize("case", CALLS)
def test_towers_attend_by_kernels_where_possible(case, monkeypatch):
    shape, options, is_served = CALLS[case]
    torch.manual_seed(0)
    parts = [torch.randn(shape) for _ in range(3)]
    served = []

    def attend(*args):
        served.append(args)
        return attend_both_ways(*args)

    attend_both_ways = tower_module.attend_both_ways
    monkeypatch.setattr(tower_module, "attend_both_ways", attend)
    wanted = F.scaled_dot_product_attention(*parts, **options)
    with TowerFunctions():
        found = F.scaled_dot_product_attention(*parts, **options)
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-5)
    assert bool(served) == (is_served and tower_module.is_native(torch.float32, 16))


@pytest.mark.parametrize(("width", "has_bias"), [(32, True), (32, False), (24, True)])
def test_towers_norm_layers_by_kernels(width, has_bias):
    torch.manual_seed(0)
    norm, x = nn.LayerNorm(width, eps=1e-3, bias=has_bias), torch.randn(2, width, 5).mT
    norm.weight.data.normal_()
    with torch.inference_mode(), TowerFunctions():
        found, empty = norm(x), norm(x[:0])
    torch.testing.assert_close(found, F.layer_norm(x, (width,), norm.weight, norm.bias, 1e-3))
    assert empty.shape == (0, 5, width)


def test_towers_attend_over_other_keys_by_torch():
    torch.manual_seed(0)
    query, keys, values = (
        torch.randn(1, 4, 5, 16),
        torch.randn(1, 2, 9, 16),
        torch.randn(1, 2, 9, 16),
    )
    with TowerFunctions():
        found = F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
        activated = F.gelu(query, approximate="tanh")
    assert found.equal(F.scaled_dot_product_attention(query, keys, values, enable_gqa=True))
    torch.testing.assert_close(activated, F.gelu(query, approximate="tanh"))
