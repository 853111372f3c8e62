"""KV memory in groups of layers: how many bytes a token takes, and blocks that are copied in every group."""

from types import SimpleNamespace

import torch

from trouper.actors.executor.models.decoder import KVCacheSpec
from trouper.actors.executor.steps.cache_memory import KVCache, num_kv_blocks
from trouper.config.engine_config import SchedulerConfig

WIDE = KVCacheSpec(num_layers=2, num_heads=4, head_dim=8, keys=(None,))
NARROW = KVCacheSpec(num_layers=3, num_heads=1, head_dim=16, keys=(64,))


def test_token_takes_keys_and_values_of_every_layer():
    assert WIDE.token_size == 2 * 2 * 4 * 8
    cache = KVCache.allocate([WIDE, NARROW], num_blocks=5, block_size=4, empty=torch.zeros)
    assert cache.num_bytes == 5 * 4 * (WIDE.token_size + NARROW.token_size) * 4
    assert [tuple(layer.shape) for layer in cache.layers] == [(2, 4, 20, 8)] * 2 + [
        (2, 1, 20, 16)
    ] * 3


def test_block_copies_cover_all_layers_in_order():
    cache = KVCache.allocate([WIDE, NARROW], num_blocks=4, block_size=2, empty=torch.zeros)
    for layer in cache.layers:
        layer.copy_(torch.arange(4).repeat_interleave(2).view(1, 1, 8, 1))
    cache.copy_blocks(((1, 2), (2, 3)))
    for layer in cache.layers:
        assert layer[0, 0, :, 0].tolist() == [0, 0, 1, 1, 1, 1, 1, 1]


def test_one_sequence_of_odd_size_fits_groups():
    """Its blocks are no multiple of the groups, and all of them are needed."""
    scheduler = SchedulerConfig(max_model_len=340, max_num_scheduled_tokens=16, max_num_seqs=1)
    config = SimpleNamespace(
        block_size=32, max_model_len=340, scheduler=scheduler, media=None, num_blocks=None, device="cpu",
        kv_cache_bytes=2**30, is_length_open=False,
    )  # fmt: skip
    keys, windows = ((None, 0), (7, 1)), (None, 7)
    spec = KVCacheSpec(num_layers=2, num_heads=1, head_dim=16, keys=keys, windows=windows)
    # 11 blocks of the layers that see all tokens and 3 of the others.
    assert num_kv_blocks(config, [spec], 4) == 14 + 1
    config.max_model_len = 370
    assert num_kv_blocks(config, [spec], 4) == 16 + 1
