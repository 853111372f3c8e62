import pytest
import torch

from trouper.kernels.cuda.qk_norm_rope_kv_write import (
    qk_norm_rope_kv_write_,
    qk_norm_rope_kv_write_reference,
)
from trouper.kernels.reference.norms import rms_norm_heads_, rope_, rope_table, rotation_of

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}
# tokens, q heads, KV heads, head width, rotated width
SHAPES = [
    (0, 4, 2, 16, 16),
    (1, 1, 1, 2, 2),
    (3, 6, 2, 80, 20),
    (5, 9, 3, 64, 64),
    (3, 4, 4, 24, 0),
]
REAL = [(257, 16, 8, 128, 128), (2048, 32, 8, 128, 128), (1000, 16, 8, 256, 256)]


def make(num_tokens, num_q, num_kv, width, rotated, dtype):
    torch.manual_seed(0)
    qkv = torch.randn(num_tokens, num_q + 2 * num_kv, width).to(dtype)
    cache = torch.full((2, num_kv, 2 * num_tokens + 8, width), torch.nan, dtype=dtype)
    slots = torch.randperm(cache.shape[2])[:num_tokens].int()
    positions = torch.randint(0, 100, (num_tokens,)).int()
    inverse = 10_000 ** -(torch.arange(0, rotated, 2) / max(rotated, 1))
    table = rope_table(inverse, 100, 1.0, dtype) if rotated else None
    norm = torch.randn(num_q + num_kv, width).to(dtype)
    return qkv, cache, positions, slots, norm, table


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("more", [{}, {"is_norm_last": True}, {"query_scale": 0.5}], ids=str)
@pytest.mark.parametrize("shape", SHAPES + [pytest.param(s, marks=pytest.mark.gpu) for s in REAL])
def test_it_equals_the_reference_with_padding(device, dtype, has_norm, shape, more):
    qkv, cache, positions, slots, norm, table = make(*shape, dtype)
    slots[1::3] = -1
    options = {"norm_ND": norm if has_norm else None, "table_P2R": table, "eps": 1e-6}
    if "query_scale" in more:
        options["query_table_P2R"] = None if table is None else table * more["query_scale"]
    else:
        options |= more
    q, expected = qk_norm_rope_kv_write_reference(qkv, cache, positions, slots, **options)
    options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    found, found_cache = qkv.to(device, copy=True), cache.to(device)
    qk_norm_rope_kv_write_(found, found_cache, positions.to(device), slots.to(device), **options)
    found, tolerance = found.cpu(), TOLERANCES[dtype]
    num_q, is_real = shape[1], slots >= 0
    torch.testing.assert_close(found[is_real, :num_q], q[is_real], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(
        found_cache.cpu(), expected, atol=tolerance, rtol=tolerance, equal_nan=True
    )
    assert torch.equal(found[:, num_q:], qkv[:, num_q:])
    assert torch.equal(found[~is_real], qkv[~is_real])


def test_cache_may_be_ordered_by_slot_or_head(device):
    qkv, cache, positions, slots, norm, table = (
        x.to(device) for x in make(4, 2, 2, 8, 8, torch.float32)
    )
    by_slot = cache.transpose(1, 2).contiguous().transpose(1, 2)
    for where in (cache, by_slot):
        qk_norm_rope_kv_write_(
            qkv.clone(), where, positions, slots, norm_ND=norm, table_P2R=table, eps=1e-6
        )
    torch.testing.assert_close(cache, by_slot, atol=0, rtol=0, equal_nan=True)


def test_the_reference_equals_the_cpus_separate_operations():
    qkv, cache, positions, slots, norm, table = make(7, 4, 2, 16, 8, torch.float32)
    q, written = qk_norm_rope_kv_write_reference(
        qkv, cache, positions, slots, norm_ND=norm, table_P2R=table, eps=1e-6
    )
    heads = qkv[:, :6].clone()
    rms_norm_heads_(heads, norm, 1e-6)
    rope_(heads, rotation_of(table, positions))
    torch.testing.assert_close(q, heads[:, :4])
    torch.testing.assert_close(written[0][:, slots.long()], heads[:, 4:].transpose(0, 1))
    torch.testing.assert_close(written[1][:, slots.long()], qkv[:, 6:].transpose(0, 1))
