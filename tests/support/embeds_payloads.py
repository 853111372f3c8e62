"""Make payloads of prompt_embeds, valid and invalid, like those of clients."""

import io
import math
import struct
import zipfile

import torch
from safetensors.torch import save

from trouper.actors.rendering.prompts.embeds import max_payload_bytes

WIDTH, MAX_ROWS = 64, 32
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def saved(value, **options):
    file = io.BytesIO()
    torch.save(value, file, **options)
    return bytearray(file.getvalue())


def repacked(payload, change=lambda members: members, method=zipfile.ZIP_STORED):
    """Rewrite a zip archive with other members."""
    with zipfile.ZipFile(io.BytesIO(payload)) as old:
        members = [(info.filename, old.read(info)) for info in old.infolist()]
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as new:
        for name, content in change(members):
            new.writestr(name, content)
    return bytearray(file.getvalue())


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


def fill(count):
    return lambda members: members + [(f"archive/{i}", b"") for i in range(count)]


def sized_archive(**changes):
    """Make a valid file, but with a false size of `data/0` in its central directory or its end record."""
    payload = saved(torch.zeros(4, WIDTH))
    entry = payload.rindex(b"archive/data/0") - 46
    for offset, value in changes.items():
        at = int(offset.removeprefix("at_"))
        struct.pack_into("<I", payload, entry + at, value)
    return payload


def pickled(old, new):
    """Make a valid file with other bytes in its pickle."""

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
    "NaN": lambda: saved(rows(4).fill_(math.nan)),
    "infinity in bfloat16": lambda: saved(rows(4, dtype=torch.bfloat16).fill_(-math.inf)),
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
