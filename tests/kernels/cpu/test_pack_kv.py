"""Packing of keys and values: exact for all numbers, small for usual ones, and safe for damaged payloads."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trouper.kernels.cpu.pack_kv import KvCodec, can_pack, unpack_reference

pytestmark = pytest.mark.skipif(not can_pack(256), reason="kernels need AVX2")


def halves(values):
    return torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)


def packed(values):
    """Return a codec, and the payload and sizes of parts [parts, N]."""
    codec = KvCodec([values.shape])
    payload, sizes = codec.pack(values.reshape(-1).view(np.uint8))
    return codec, payload.copy(), sizes.copy()


def unpacked(codec, payload, sizes, values):
    found = np.zeros_like(values)
    assert codec.unpack(payload, sizes, found.reshape(-1).view(np.uint8))
    return found


@given(
    st.integers(0, 2**32 - 1), st.sampled_from((256, 384, 1024, 65536)), st.integers(1, 3),
    st.sampled_from(("usual", "wide", "any bits", "few", "zeros", "specials")),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_packing_is_exact(seed, length, parts, kind):
    rng = np.random.default_rng(seed)
    values = halves(rng.standard_normal((parts, length)).astype(np.float32))
    if kind == "wide":
        # About the number of exceptions at which a part is no longer packed.
        chosen = rng.random(values.shape) < rng.uniform(0, 0.3)
        values[chosen] = rng.integers(0, 2**16, int(chosen.sum()), dtype=np.uint16)
    elif kind == "any bits":
        values = rng.integers(0, 2**16, values.shape, dtype=np.uint16)
    elif kind == "few":
        values = rng.choice(values[0, :7], values.shape)
    elif kind == "zeros":
        values[:] = 0
    elif kind == "specials":
        values[rng.random(values.shape) < 0.01] = rng.choice([0x7F80, 0xFF80, 0x7FC0, 0x8000, 1])
    codec, payload, sizes = packed(values)
    assert len(payload) <= values.nbytes
    assert (unpacked(codec, payload, sizes, values) == values).all()
    assert (unpack_reference(payload, sizes, length) == values).all()


def test_usual_values_take_three_quarters():
    rng = np.random.default_rng(1)
    scales = np.exp(rng.standard_normal((16, 1, 64)))
    values = rng.standard_normal((16, 128, 64)) * scales
    _, payload, sizes = packed(halves(values.reshape(16, -1).astype(np.float32)))
    assert 0.75 < len(payload) / (2 * values.size) < 0.762
    assert len(sizes) == 16


def test_groups_of_other_widths_follow_each_other():
    rng = np.random.default_rng(2)
    values = halves(rng.standard_normal(2 * 512 + 3 * 256).astype(np.float32))
    codec, found = KvCodec([(2, 512), (3, 256)]), np.zeros_like(values)
    payload, sizes = codec.pack(values.view(np.uint8))
    assert codec.unpack(payload.copy(), sizes.copy(), found.view(np.uint8))
    assert (found == values).all()


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_damaged_payload_writes_only_its_values(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    values = halves(rng.standard_normal((2, 256)).astype(np.float32))
    values[rng.random(values.shape) < 0.02] = 0x3000
    codec, payload, sizes = packed(values)
    if data.draw(st.booleans()):
        payload[rng.integers(0, len(payload), 9)] = rng.integers(0, 256, 9)
    else:
        payload[:] = rng.integers(0, 256, len(payload))
    # The values between two guards.
    room = np.full(values.nbytes + 128, 77, np.uint8)
    assert codec.unpack(payload, sizes, room[64:-64])
    assert (room[:64] == 77).all()
    assert (room[-64:] == 77).all()


def test_impossible_sizes_are_refused():
    values = halves(np.random.default_rng(3).standard_normal((2, 256)).astype(np.float32))
    codec, payload, sizes = packed(values)
    room = np.zeros(values.nbytes, np.uint8)
    for changed in ([1, -1], [-2000, 2000], [200, -200], [0, 4], [2**31, 2**31]):
        wrong = (sizes.astype(np.int64) + changed).astype(np.uint32)
        assert not codec.unpack(payload, wrong, room)
    assert not codec.unpack(payload, sizes[:1], room)
    assert not codec.unpack(payload[:-1], sizes, room)
    assert not room.any()


@pytest.mark.parametrize("length", [0, 128, 255, 300, 65536 + 128])
def test_other_lengths_are_not_packed(length):
    assert not can_pack(length)
