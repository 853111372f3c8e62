import pytest
import torch

from trouper.kernels.reference.kv_write import kv_write_, kv_write_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "width"), [(0, 2, 4), (1, 1, 1), (5, 3, 16), (33, 8, 24)]
)
def test_each_token_lands_in_its_slot_and_nothing_else_changes(dtype, num_tokens, num_heads, width):
    torch.manual_seed(0)
    cache = torch.full((2, num_heads, 64, width), torch.nan, dtype=dtype)
    qkv = torch.randn(num_tokens, 2 + 2 * num_heads, width).to(dtype)
    kv = qkv.narrow(1, 2, 2 * num_heads).unflatten(1, (2, num_heads))  # strided
    slots = torch.randperm(64)[:num_tokens]
    expected = kv_write_reference(cache, kv, slots)
    kv_write_(cache, kv, slots)
    torch.testing.assert_close(cache, expected, equal_nan=True, atol=0, rtol=0)
    assert int(cache.isnan().sum()) == 2 * num_heads * width * (64 - num_tokens)
