import pytest
import torch

from trouper.kernels.codegen import units
from trouper.kernels.cpu.attention import varlen as kernel
from trouper.kernels.cpu.attention.varlen import (
    ROWS,
    Group,
    attend_both_ways,
    is_native,
    tiles_of,
    varlen_attention,
    varlen_attention_reference,
)

pytestmark = pytest.mark.usefixtures("unit")
CASES = {
    "one": [(1, 1)], "equal": [(3, 7)], "mixed": [(2, 1), (1, 5), (3, 40), (1, 301)],
}  # fmt: skip


def groups_of(case):
    groups, first = [], 0
    for num, length in CASES[case]:
        groups.append(Group(first, num, length))
        first += num * length
    return groups, first


@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("window", "has_bias"), [(None, False), (3, False), (64, False), (None, True)]
)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 4e-2)], ids=str
)
def test_it_equals_the_reference(case, window, has_bias, dtype, tolerance, native):
    if native and not is_native(dtype, 32):
        pytest.skip("this machine's kernels do not compute with it")
    torch.manual_seed(0)
    groups, num_tokens = groups_of(case)
    qkv = torch.randn(num_tokens, 3, 4, 32).to(dtype)
    bias = torch.randn(4, 2 * 310 + ROWS) if has_bias else None
    how = {"scale": 0.25, "window": window, "bias": bias}
    want = varlen_attention_reference(qkv, groups, **how)
    got = varlen_attention(qkv, groups, tiles=tiles_of(groups) if native else None, **how)
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize(("window", "has_bias"), [(None, False), (150, False), (None, True)])
def test_tokens_behind_the_keys_are_invisible(window, has_bias, native):
    if native and not is_native(torch.float32, 32):
        pytest.skip("this machine's kernels do not compute with it")
    torch.manual_seed(0)
    groups = [Group(0, 2, 40, 13), Group(80, 1, 40, 3), Group(120, 1, 200, 70), Group(320, 1, 9)]
    qkv = torch.randn(329, 3, 4, 32)
    bias = torch.randn(4, 2 * 210 + ROWS) if has_bias else None
    how = {"scale": 0.25, "window": window, "bias": bias}
    want = varlen_attention_reference(qkv, groups, **how)
    assert want.isfinite().all()
    got = varlen_attention(qkv, groups, tiles=tiles_of(groups) if native else None, **how)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
    qkv[13:40, 1:] = torch.nan
    got = varlen_attention(qkv, groups, tiles=tiles_of(groups) if native else None, **how)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


def test_windows_are_cut_into_tiles_of_any_size(monkeypatch):
    torch.manual_seed(0)
    groups, num_tokens = groups_of("mixed")
    qkv = torch.randn(num_tokens, 3, 2, 8)
    want = varlen_attention_reference(qkv, groups, scale=0.3, window=5)
    for size in (1, 7, 64):
        monkeypatch.setattr(kernel, "QUERY_TILE", size)
        got = varlen_attention(qkv, groups, scale=0.3, window=5)
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
def test_sequences_do_not_see_each_other(native):
    torch.manual_seed(0)
    qkv = torch.randn(140, 3, 2, 16)
    both, one = [Group(0, 2, 70)], [Group(0, 1, 70)]
    tiles = [tiles_of(groups) if native else None for groups in (both, one)]
    together = varlen_attention(qkv, both, scale=0.3, tiles=tiles[0])
    alone = varlen_attention(qkv[70:], one, scale=0.3, tiles=tiles[1])
    assert torch.equal(together[70:], alone)


@pytest.mark.parametrize("layout", ["tokens", "heads", "joined"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 4e-2)], ids=str
)
def test_separate_projections_equal_joined_ones(layout, dtype, tolerance):
    if not is_native(dtype, 32):
        pytest.skip("this machine's kernels do not compute with it")
    torch.manual_seed(0)
    qkv = torch.randn(2 * 70, 3, 4, 32).to(dtype)
    parts = [part.view(2, 70, 4, 32) for part in qkv.unbind(1)]
    if layout == "tokens":
        parts = [part.contiguous() for part in parts]
    if layout == "heads":
        parts = [part.transpose(1, 2).contiguous().transpose(1, 2) for part in parts]
    got = attend_both_ways(*parts, scale=0.25)
    want = varlen_attention_reference(qkv, [Group(0, 2, 70)], scale=0.25)
    torch.testing.assert_close(got.reshape(140, -1), want, atol=tolerance, rtol=tolerance)


def test_sequences_of_one_token_with_the_heads_in_front():
    if not is_native(torch.float32, 32):
        pytest.skip("this machine's kernels do not compute with it")
    qkv = torch.randn(3, 3, 4, 32)
    # A contiguous tensor whose stride of the tokens is that of the heads.
    parts = [part.view(3, 4, 1, 32).transpose(1, 2) for part in qkv.transpose(0, 1).contiguous()]
    got = attend_both_ways(*parts, scale=0.25)
    want = varlen_attention_reference(qkv, [Group(0, 3, 1)], scale=0.25)
    torch.testing.assert_close(got.reshape(3, -1), want)


def test_the_choice_is_by_dtype_and_width():
    assert is_native(torch.float32, 32) == units.is_available()
    assert not any(is_native(torch.float32, width) for width in (8, 24, 512))
    assert not is_native(torch.float16, 32)
