import pytest
import torch

from trouper.kernels.reference.norms import (
    kv_write_,
    kv_write_reference,
    rope_,
    rope_reference,
    rope_table,
    rotation_of,
)


def frequencies(width, theta=10_000.0):
    return theta ** -(torch.arange(0, width, 2) / width)


@pytest.mark.parametrize(("width", "rotated"), [(2, 2), (16, 16), (64, 32), (128, 128), (80, 20)])
@pytest.mark.parametrize(
    ("dtype", "atol"), [(torch.float32, 2e-4), (torch.bfloat16, 6e-2)], ids=str
)
@pytest.mark.parametrize("num_tokens", [0, 1, 17])
def test_it_equals_the_product_of_complex_numbers(width, rotated, dtype, atol, num_tokens):
    torch.manual_seed(0)
    inverse = frequencies(rotated)
    positions = torch.randint(0, 1000, (num_tokens,))
    table = rope_table(inverse, 1000, 1.25, dtype)
    qkv = torch.randn(num_tokens, 5, width).to(dtype)
    heads = qkv.narrow(1, 0, 3)  # strided like q and k in qkv
    expected = rope_reference(heads, positions, inverse, 1.25)
    untouched = qkv[:, 3:].clone()
    rope_(heads, rotation_of(table, positions))
    torch.testing.assert_close(heads, expected, atol=atol, rtol=0)
    assert torch.equal(qkv[:, 3:], untouched)


def test_the_reference_keeps_what_attention_depends_on():
    """Scores depend on the distance of the positions only."""
    inverse = frequencies(32)
    q, k = torch.randn(2, 1, 1, 32).double()

    def score(p, r):
        return rope_reference(q, torch.tensor([p]), inverse) @ rope_reference(
            k, torch.tensor([r]), inverse
        ).transpose(1, 2)

    torch.testing.assert_close(score(5, 3), score(105, 103))
    assert not torch.allclose(score(5, 3), score(5, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "width"), [(0, 2, 4), (1, 1, 1), (5, 3, 16), (33, 8, 24)]
)
def test_each_token_is_written_to_its_slot(dtype, num_tokens, num_heads, width):
    torch.manual_seed(0)
    cache = torch.full((2, num_heads, 64, width), torch.nan, dtype=dtype)
    qkv = torch.randn(num_tokens, 2 + 2 * num_heads, width).to(dtype)
    kv = qkv.narrow(1, 2, 2 * num_heads).unflatten(1, (2, num_heads))  # strided
    slots = torch.randperm(64)[:num_tokens]
    expected = kv_write_reference(cache, kv, slots)
    kv_write_(cache, kv, slots)
    torch.testing.assert_close(cache, expected, equal_nan=True, atol=0, rtol=0)
    assert int(cache.isnan().sum()) == 2 * num_heads * width * (64 - num_tokens)
