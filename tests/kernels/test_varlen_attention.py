import pytest
import torch

from trouper.kernels import varlen_attention as kernel
from trouper.kernels.varlen_attention import (
    Group,
    varlen_attention,
    varlen_attention_reference,
)

CASES = {
    "one": [(1, 1)], "equal": [(3, 7)], "mixed": [(2, 1), (1, 5), (3, 40), (1, 301)],
}  # fmt: skip


def groups_of(case):
    groups, first = [], 0
    for num, length in CASES[case]:
        groups.append(Group(first, num, length))
        first += num * length
    return groups, first


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("window", "has_bias"), [(None, False), (3, False), (64, False), (None, True)]
)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 4e-2)], ids=str
)
def test_it_equals_the_reference(case, window, has_bias, dtype, tolerance):
    torch.manual_seed(0)
    groups, num_tokens = groups_of(case)
    qkv = torch.randn(num_tokens, 3, 4, 16).to(dtype)
    bias = torch.randn(1, 4, 310, 310).to(dtype) if has_bias else None
    how = {"scale": 0.25, "window": window, "bias": bias}
    want = varlen_attention_reference(qkv, groups, **how)
    got = varlen_attention(qkv, groups, **how)
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


def test_windows_are_cut_into_tiles_of_any_size(monkeypatch):
    torch.manual_seed(0)
    groups, num_tokens = groups_of("mixed")
    qkv = torch.randn(num_tokens, 3, 2, 8)
    want = varlen_attention_reference(qkv, groups, scale=0.3, window=5)
    for size in (1, 7, 64):
        monkeypatch.setattr(kernel, "QUERY_TILE", size)
        got = varlen_attention(qkv, groups, scale=0.3, window=5)
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


def test_sequences_do_not_see_each_other():
    torch.manual_seed(0)
    qkv = torch.randn(10, 3, 2, 8)
    both = varlen_attention(qkv, [Group(0, 2, 5)], scale=0.3)
    alone = varlen_attention(qkv[5:], [Group(0, 1, 5)], scale=0.3)
    torch.testing.assert_close(both[5:], alone)
