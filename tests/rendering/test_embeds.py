"""prompt_embeds: good payloads are read as they are, all others refused without being run."""

import base64
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from tests.support.embeds_payloads import BAD, DTYPES, GOOD, MAX_ROWS, WIDTH, rows, saved
from trouper.actors.engine.admission import embeds_bytes, estimate_tokens
from trouper.actors.messages.requests import Embeds
from trouper.actors.rendering.prompts.embeds import (
    ITEM_BYTES,
    decode_base64,
    decode_embeds,
    digests,
    from_tensor,
    max_payload_bytes,
)
from trouper.errors import TrouperValidationError


def decode(payload):
    return decode_embeds(payload, WIDTH, MAX_ROWS)


def as_tensor(embeds):
    flat = torch.frombuffer(bytearray(embeds.data), dtype=getattr(torch, embeds.dtype))
    return flat.view(embeds.num_rows, embeds.num_columns)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", GOOD)
def test_a_dense_matrix_is_read_as_it_is(kind, dtype):
    write, want = GOOD[kind]
    x = torch.randn(MAX_ROWS, WIDTH).to(dtype)
    embeds = decode(write(x))
    assert torch.equal(as_tensor(embeds), want(x))
    assert torch.equal(as_tensor(decode(bytes(write(x)))), want(x))
    assert f"torch.{embeds.dtype}" == str(dtype)


def test_the_result_is_a_view_of_the_payload():
    payload = saved(torch.zeros(4, WIDTH))
    embeds = decode(payload)
    embeds.data[0] = 7
    assert 7 in payload[-MAX_ROWS * WIDTH * 4 :]


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_everything_else_is_refused_by_name(kind):
    with pytest.raises(TrouperValidationError, match="prompt_embeds") as caught:
        decode(BAD[kind]())
    assert caught.value.parameter == "prompt_embeds"
    assert len(str(caught.value)) < 300


def test_a_file_that_is_cut_anywhere_is_refused():
    for payload in (saved(rows(4)), save({"x": rows(4)})):
        for i in range(64):
            with pytest.raises(TrouperValidationError):
                decode(payload[: len(payload) * i // 64])


def test_no_change_of_pickle_is_run_or_read_wrongly():
    """Each byte of the pickle set to each value: refused, or a matrix within the payload's own data."""
    payload = saved(torch.arange(4.0 * WIDTH).view(4, WIDTH))
    begin = payload.index(b"\x80\x02ctorch")
    for at in range(begin, payload.index(b".", begin + 140) + 1):
        for value in range(256):
            changed = bytearray(payload)
            changed[at] = value
            try:
                embeds = decode(changed)
            except TrouperValidationError:
                continue
            assert len(embeds.data) == embeds.num_rows * WIDTH * 4


@given(st.binary(max_size=300), st.sampled_from([b"", b"PK\3\4"]))
def test_random_bytes_are_refused(noise, head):
    with pytest.raises(TrouperValidationError):
        decode(head + noise)


@given(st.integers(0, 20_000), st.integers(0, 3), st.binary(max_size=3))
def test_a_damaged_file_is_refused_or_a_matrix(at, kind, noise):
    payload = saved(rows(4)) if kind % 2 else bytearray(save({"x": rows(4)}))
    at %= len(payload)
    payload[at : at + len(noise)] = noise
    try:
        embeds = decode(payload)
    except TrouperValidationError:
        return
    assert embeds.num_columns == WIDTH


def test_base64_is_checked_for_its_length_before_it_is_decoded():
    text = "A" * (4 * (max_payload_bytes(WIDTH, MAX_ROWS) // 3 + 1) + 1)
    with pytest.raises(TrouperValidationError, match="longer than any tensor"):
        decode_base64(text, WIDTH, MAX_ROWS)


@given(st.binary(max_size=1000))
def test_base64_is_read_whatever_its_length(data):
    assert decode_base64(base64.b64encode(data).decode(), WIDTH, MAX_ROWS) == data


def test_base64_of_several_pieces(monkeypatch):
    monkeypatch.setattr("trouper.actors.rendering.prompts.embeds.TURN", 8)
    data = bytes(range(100))
    text = base64.b64encode(data)
    assert decode_base64(text.decode(), WIDTH, MAX_ROWS) == data
    view = memoryview(text)
    assert decode_base64(view, WIDTH, MAX_ROWS) == data
    with pytest.raises(ValueError, match="released"):
        view.tobytes()
    for text in (
        "AAAAAA==AAAAAA==",
        "AAAAAA==AAAA",
        "AAAAA",
        "AA\nA",
        "ä" * 8,
        "A=======",
        "*" * 9,
    ):
        with pytest.raises(TrouperValidationError, match="not base64"):
            decode_base64(text, WIDTH, MAX_ROWS)


def test_tensor_of_same_process_is_taken_without_copy():
    x = torch.randn(1, 4, WIDTH, dtype=torch.bfloat16)
    embeds = from_tensor(x, WIDTH, MAX_ROWS)
    x[0, 0, 0] = 42
    assert torch.equal(as_tensor(embeds), x[0])
    for bad in (
        rows(4, dtype=torch.int32),
        rows(0),
        rows(33),
        torch.zeros(4),
        rows(4).to_sparse(),
        rows(4).numpy(),
        3,
    ):
        with pytest.raises(TrouperValidationError, match="prompt_embeds"):
            from_tensor(bad, WIDTH, MAX_ROWS)


HOLLOW = {
    "torch.sparse_coo": lambda: rows(4).to_sparse(),
    "torch.sparse_csr": lambda: rows(4).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([rows(2), rows(3)]),
    "meta": lambda: torch.empty(4, WIDTH, device="meta"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta", "ignore:The PyTorch API")
@pytest.mark.parametrize("word", HOLLOW)
def test_non_contiguous_tensor_kind_is_named(word):
    prompt = {"prompt_embeds": HOLLOW[word]()}
    assert embeds_bytes(prompt) >= 0
    assert estimate_tokens(prompt) >= 0
    with pytest.raises(TrouperValidationError, match=word) as caught:
        from_tensor(prompt["prompt_embeds"], WIDTH, MAX_ROWS)
    assert caught.value.parameter == "prompt_embeds"


def test_digests_name_each_block_by_its_rows():
    x = torch.randn(10, WIDTH)
    names = digests([decode(saved(x))], 4)
    assert len(names) == len(set(names)) == 3
    assert digests([decode(saved(x[:8].clone()))], 4) == names[:2]
    assert digests([decode(saved(x.double()))], 4) != names
    assert digests([], 4) == ()


def test_mixed_prompt_digests_depend_on_position_and_rows():
    def named(dtype="float32", **places):
        data = memoryview(bytes(range(16)))
        rows = 16 // (2 * ITEM_BYTES[dtype])
        return digests([Embeds(dtype, rows, 2, data, first) for first in places.values()], 4)

    one, two = named(a=5), named(a=6)
    assert [bool(name) for name in one] == [False, True]
    assert one[1] != two[1]
    assert [bool(name) for name in named(a=7)] == [False, True, True]  # across two blocks
    assert [bool(name) for name in named(a=1, b=9)] == [True, False, True]
    assert named(a=5) == named(a=5) != named(a=5, b=7)
    assert named("float16", a=4) != named("bfloat16", a=4)


def test_decoding_touches_no_global_of_torch():
    invariants = torch.sparse.check_sparse_tensor_invariants
    before = invariants.is_enabled(), torch.get_default_dtype(), torch.get_default_device()
    for make in BAD.values():
        with pytest.raises(TrouperValidationError):
            decode(make())
    assert (
        invariants.is_enabled(), torch.get_default_dtype(), torch.get_default_device()
    ) == before  # fmt: skip
    assert "torch" not in sys.modules["trouper.actors.rendering.prompts.embeds"].__dict__
