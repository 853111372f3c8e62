"""prompt_embeds: good payloads are read as they are, all others refused without being run."""

import base64
import io
import struct
import sys
import zipfile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from trouper.actors.rendering.embeds import (
    decode_base64,
    decode_embeds,
    digests,
    from_tensor,
    max_payload_bytes,
)
from trouper.errors import TrouperValidationError

WIDTH, MAX_ROWS = 64, 32
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def saved(value, **options):
    file = io.BytesIO()
    torch.save(value, file, **options)
    return bytearray(file.getvalue())


def repacked(payload, change=lambda members: members, method=zipfile.ZIP_STORED):
    """The same zip, written by python, with other members."""
    with zipfile.ZipFile(io.BytesIO(payload)) as old:
        members = [(info.filename, old.read(info)) for info in old.infolist()]
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as new:
        for name, content in change(members):
            new.writestr(name, content)
    return bytearray(file.getvalue())


def decode(payload):
    return decode_embeds(payload, WIDTH, MAX_ROWS)


def as_tensor(embeds):
    flat = torch.frombuffer(bytearray(embeds.data), dtype=getattr(torch, embeds.dtype))
    return flat.view(embeds.num_rows, embeds.num_columns)


GOOD = {
    "plain": (lambda x: saved(x), lambda x: x),
    "one row": (lambda x: saved(x[:1].clone()), lambda x: x[:1]),
    "a slice of a larger storage": (lambda x: saved(x[3:9]), lambda x: x[3:9]),
    "a batch of one": (lambda x: saved(x[None]), lambda x: x),
    "requires_grad": (lambda x: saved(x.clone().requires_grad_()), lambda x: x),
    "safetensors": (lambda x: save({"x": x}), lambda x: x),
    "safetensors with a batch of one": (lambda x: save({"x": x[None]}, {"a": "b"}), lambda x: x),
    "written by python": (lambda x: repacked(saved(x)), lambda x: x),
}


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


def fill(count):
    return lambda members: members + [(f"archive/{i}", b"") for i in range(count)]


def sized_archive(**changes):
    """A good file whose central directory says something else of `data/0`, or whose end record does."""
    payload = saved(torch.zeros(4, WIDTH))
    entry = payload.rindex(b"archive/data/0") - 46
    for offset, value in changes.items():
        at = int(offset.removeprefix("at_"))
        struct.pack_into("<I", payload, entry + at, value)
    return payload


def pickled(old, new):
    """A good file with other bytes in its pickle."""

    def change(members):
        return [(name, text.replace(old, new)) for name, text in members]

    payload = saved(torch.zeros(4, WIDTH))
    changed = repacked(payload, change)
    assert changed != repacked(payload)
    return changed


def rows(count, **kwargs):
    return torch.zeros(count, WIDTH, **kwargs)


BAD = {
    "sparse COO": lambda: saved(rows(4).to_sparse()),
    "sparse COO, index out of range": lambda: saved(
        torch.sparse_coo_tensor([[10], [10]], [1.0], (3, 3), check_invariants=False)
    ),
    "sparse CSR": lambda: saved(torch.eye(3).to_sparse_csr()),
    "meta device": lambda: saved(rows(4, device="meta")),
    "expanded": lambda: saved(torch.zeros(1).expand(4, WIDTH)),
    "transposed": lambda: saved(torch.zeros(WIDTH, 4).t()),
    "every second column": lambda: saved(torch.zeros(4, 2 * WIDTH)[:, ::2]),
    "list": lambda: saved([rows(1)] * 20),
    "dict": lambda: saved({"a": rows(4)}),
    "parameter": lambda: saved(torch.nn.Parameter(rows(4))),
    "string": lambda: saved("x"),
    "int": lambda: saved(rows(4, dtype=torch.int32)),
    "bool": lambda: saved(rows(4, dtype=torch.bool)),
    "complex": lambda: saved(rows(4, dtype=torch.complex64)),
    "one dimension": lambda: saved(torch.zeros(WIDTH)),
    "batch of none": lambda: saved(torch.zeros(0, 4, WIDTH)),
    "batch of two": lambda: saved(torch.zeros(2, 4, WIDTH)),
    "no rows": lambda: saved(rows(0)),
    "wrong width": lambda: saved(torch.zeros(4, WIDTH + 1)),
    "too many rows": lambda: saved(rows(MAX_ROWS + 1)),
    "old format": lambda: saved(rows(4), _use_new_zipfile_serialization=False),
    "compressed": lambda: repacked(saved(rows(4)), method=zipfile.ZIP_DEFLATED),
    "big endian": lambda: repacked(
        saved(rows(4)), lambda m: [(n, b"big" if n.endswith("byteorder") else t) for n, t in m]
    ),
    "no pickle": lambda: repacked(saved(rows(4)), lambda m: m[1:]),
    "a huge pickle": lambda: repacked(
        saved(rows(4)), lambda m: [(m[0][0], m[0][1] + bytes(5000)), *m[1:]]
    ),
    "no data": lambda: repacked(saved(rows(4)), lambda m: [x for x in m if "data/0" not in x[0]]),
    "too many members": lambda: repacked(saved(rows(4)), fill(20)),
    "duplicate member": lambda: repacked(
        saved(rows(4)), lambda m: [*m, ("other/data/0", b"x" * 1024)]
    ),
    "directory: another size": lambda: sized_archive(at_24=2048),
    "directory: both sizes": lambda: sized_archive(at_20=2048, at_24=2048),
    "directory: 4 GiB": lambda: sized_archive(at_20=2**32 - 1, at_24=2**32 - 1),
    "directory: another place": lambda: sized_archive(at_42=2**31),
    "directory: a place of something else": lambda: sized_archive(at_42=0),
    "numel 2**31": lambda: pickled(b"M\x00\x01", b"\x8a\x05\x00\x00\x00\x80\x00"),
    "numel 2**63": lambda: pickled(b"M\x00\x01", b"\x8a\x09" + bytes(7) + b"\x80\x00"),
    "negative numel": lambda: pickled(b"M\x00\x01", b"J\xff\xff\xff\xff"),
    "a storage of its own": lambda: pickled(b"FloatStorage", b"EvilStorage "),
    "another module": lambda: pickled(b"ctorch\nFloatStorage", b"cos\nsystem"),
    "another function": lambda: pickled(b"_rebuild_tensor_v2", b"_rebuild_tensor_v3"),
    "more after the end": lambda: pickled(b"tq\nRq\x0b.", b"tq\nRq\x0b0."),
    "not a zip": lambda: b"hello" * 10,
    "nothing": lambda: b"",
    "a zip's beginning": lambda: b"PK\3\4",
    "too long": lambda: bytes(max_payload_bytes(WIDTH, MAX_ROWS) + 1),
    "safetensors of two": lambda: save({"a": rows(1), "b": rows(1)}),
    "safetensors of none": lambda: save({}),
    "safetensors of integers": lambda: save({"a": rows(1, dtype=torch.int64)}),
    "safetensors cut": lambda: save({"a": rows(4)})[:-1],
    "safetensors with a tail": lambda: save({"a": rows(4)}) + b"x",
    "safetensors of one dimension": lambda: save({"a": torch.zeros(WIDTH)}),
    "safetensors with a header of 2**63": lambda: struct.pack("<Q", 2**63) + b"{}",
    "safetensors nested": lambda: struct.pack("<Q", 40_000) + b"[" * 40_000,
}


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


def test_no_change_of_the_pickle_is_run_or_read_wrongly():
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
    monkeypatch.setattr("trouper.actors.rendering.embeds.BASE64_STEP", 8)
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


def test_a_tensor_of_the_same_process_is_taken_without_a_copy():
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
        3,
    ):
        with pytest.raises(TrouperValidationError, match="prompt_embeds"):
            from_tensor(bad, WIDTH, MAX_ROWS)


def test_digests_name_each_block_by_its_rows():
    x = torch.randn(10, WIDTH)
    names = digests(decode(saved(x)), 4)
    assert len(names) == len(set(names)) == 3
    assert digests(decode(saved(x[:8].clone())), 4) == names[:2]
    assert digests(decode(saved(x.double())), 4) != names


def test_decoding_touches_no_global_of_torch():
    invariants = torch.sparse.check_sparse_tensor_invariants
    before = invariants.is_enabled(), torch.get_default_dtype(), torch.get_default_device()
    for make in BAD.values():
        with pytest.raises(TrouperValidationError):
            decode(make())
    assert (
        invariants.is_enabled(), torch.get_default_dtype(), torch.get_default_device()
    ) == before  # fmt: skip
    assert "torch" not in sys.modules["trouper.actors.rendering.embeds"].__dict__
