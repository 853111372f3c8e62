"""`prompt_embeds`: the bytes that clients send, read strictly.  Pure, without torch.

Laws.  Nothing is unpickled and nothing inflated: a torch.save file is a zip of stored members, its pickle
is *parsed* and must spell exactly one dense tensor.  Every size is checked before memory is taken for
it.  The result is a view of the payload, and no global state is touched, so any number may be decoded
at once.
"""

import hashlib
import pickletools
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any, cast

import msgspec
import numpy as np
import pybase64

from trouper.actors.messages.requests import Embeds, EmbedsDtype
from trouper.errors import invalid

ITEM_BYTES: dict[EmbedsDtype, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
# The bits of a number as an integer, and those of its exponent: all are set in NaN and infinity alone.
EXPONENTS: dict[EmbedsDtype, tuple[str, int]] = {
    "float32": ("<u4", 0x7F800000), "float16": ("<u2", 0x7C00), "bfloat16": ("<u2", 0x7F80),
    "float64": ("<u8", 0x7FF0 << 48),
}  # fmt: skip
PIECE_NUMBERS = 2**18  # that are looked at at once
STORAGES: dict[str, EmbedsDtype] = {
    "FloatStorage": "float32", "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16", "DoubleStorage": "float64",
}  # fmt: skip
SAFETENSORS_DTYPES: dict[str, EmbedsDtype] = {
    "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"
}  # fmt: skip
MAX_ITEM_BYTES = 8
MAX_OVERHEAD_BYTES = 64 * 2**10
MAX_PICKLE_BYTES = 4096
MAX_MEMBERS = 16
# After so many bytes (hashed in 0.6 ms, decoded in 0.2) a thread sleeps for a moment: one that computes on is given
# whole slices of a shared processor, 3 ms each, for which the event loop would have to wait.
TURN = 2**20
PAUSE_S = 1e-4


def digests(prompt: Sequence[Embeds], block_size: int) -> tuple[bytes, ...]:
    """Hash the rows of each block, as its name in the prefix cache; the hash of a block without rows is empty."""
    hashes: dict[int, Any] = {}
    for embeds in prompt:
        row_bytes = embeds.num_columns * ITEM_BYTES[embeds.dtype]
        row = turn = 0
        while row < embeds.num_rows:
            block, offset = divmod(embeds.first + row, block_size)
            num = min(block_size - offset, embeds.num_rows - row)
            found = hashes.setdefault(block, hashlib.sha256())
            found.update(f"{embeds.dtype} {offset} {num} ".encode())
            found.update(embeds.data[row * row_bytes : (row + num) * row_bytes])
            row += num
            if row * row_bytes // TURN > turn:
                turn = row * row_bytes // TURN
                time.sleep(PAUSE_S)
    num_blocks = max(hashes, default=-1) + 1
    return tuple(hashes[i].digest() if i in hashes else b"" for i in range(num_blocks))


def decode_base64(text: str | memoryview, num_columns: int, max_rows: int) -> memoryview:
    """The payload that a request carries as text; a view of text is released, its memory with it.

    Raises:
        TrouperValidationError: not base64, or longer than any admissible payload (checked first).
    """
    try:
        return _decoded(text, num_columns, max_rows)
    except _RefusedError as error:
        raise invalid("prompt_embeds", str(error)) from None
    except ValueError:
        raise invalid("prompt_embeds", "not base64") from None
    finally:
        if isinstance(text, memoryview):
            text.release()


def _decoded(text: str | memoryview, num_columns: int, max_rows: int) -> memoryview:
    if len(text) > 4 * (max_payload_bytes(num_columns, max_rows) // 3 + 1):
        raise _RefusedError(f"longer than any tensor of [{max_rows}, {num_columns}]")
    # Large arrays have large pages: 64 MB are freed in 0.4 ms, which may be on the event loop, not in 4.
    payload = np.empty(3 * (len(text) // 4), np.uint8)
    filled = 0
    for begin in range(0, len(text), TURN):
        if begin:
            time.sleep(PAUSE_S)
        if filled % 3:
            raise _RefusedError("not base64: padding inside")
        piece = pybase64.b64decode(text[begin : begin + TURN], validate=True)
        payload[filled : filled + len(piece)] = np.frombuffer(piece, np.uint8)
        filled += len(piece)
    return payload.data[:filled]


def max_payload_bytes(num_columns: int, max_rows: int) -> int:
    return max_rows * num_columns * MAX_ITEM_BYTES + MAX_OVERHEAD_BYTES


def decode_embeds(
    payload: bytes | bytearray | memoryview, num_columns: int, max_rows: int
) -> Embeds:
    """A torch.save file or a raw safetensors file that holds one floating matrix.

    Args:
        num_columns: the model's hidden size.
        max_rows: tokens that a prompt may have.

    Raises:
        TrouperValidationError: anything else; `parameter` is `prompt_embeds`.
    """
    if len(payload) > max_payload_bytes(num_columns, max_rows):
        raise invalid("prompt_embeds", f"longer than any tensor of [{max_rows}, {num_columns}]")
    view = memoryview(payload)
    try:
        is_zip = payload[:4] == b"PK\3\4"
        found = _read_torch_file(view) if is_zip else _read_safetensors(view)
    except _RefusedError as error:
        raise invalid("prompt_embeds", str(error)) from None
    if found.num_columns != num_columns or not 1 <= found.num_rows <= max_rows:
        raise invalid(
            "prompt_embeds",
            f"the shape must be [1 to {max_rows}, {num_columns}], "
            f"not [{found.num_rows}, {found.num_columns}]",
        )
    _check_finite(found)
    return found


def from_tensor(tensor: Any, num_columns: int, max_rows: int) -> Embeds:
    """A torch tensor of the caller's own process.

    Raises:
        TrouperValidationError: not a dense floating matrix of the model's width.
    """
    of_torch, _, dtype = str(getattr(tensor, "dtype", "")).rpartition(".")
    if of_torch != "torch" or dtype not in ITEM_BYTES:
        raise invalid(
            "prompt_embeds",
            "must be a floating point tensor, or the bytes of one",
            type(tensor).__name__,
        )
    layout = "nested" if tensor.is_nested else str(tensor.layout)
    if layout != "torch.strided":
        raise invalid("prompt_embeds", f"must be dense, and its layout is {layout}")
    if tensor.device.type == "meta":
        raise invalid("prompt_embeds", "is on the device meta, so it has no numbers")
    if tensor.ndim == 3 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.ndim != 2 or tensor.shape[1] != num_columns or not 1 <= tensor.shape[0] <= max_rows:
        shape = list(tensor.shape)
        raise invalid(
            "prompt_embeds", f"the shape must be [1 to {max_rows}, {num_columns}], not {shape}"
        )
    numbers = tensor.detach().cpu().contiguous()
    uint8 = numbers.new_empty(0).byte().dtype  # as bytes: numpy has no bfloat16
    data = memoryview(numbers.view(uint8).numpy()).cast("B")
    found = Embeds(dtype, tensor.shape[0], num_columns, data)
    _check_finite(found)
    return found


def _check_finite(embeds: Embeds) -> None:
    """Refuse NaN and infinity, because the model's logits would be NaN.

    The exponent is looked at, since numpy has no bfloat16; in pieces, so that little memory is taken.

    Raises:
        TrouperValidationError: a number is not finite.
    """
    of_bits, exponent = EXPONENTS[embeds.dtype]
    bits, mask = np.frombuffer(embeds.data, of_bits), np.dtype(of_bits).type(exponent)
    for start in range(0, len(bits), PIECE_NUMBERS):
        is_bad = (bits[start : start + PIECE_NUMBERS] & mask) == mask
        if is_bad.any():
            row = (start + int(is_bad.argmax())) // embeds.num_columns
            raise invalid("prompt_embeds", f"row {row} holds a number that is not finite")


class _RefusedError(ValueError):
    """Refusal of a payload; its text is shown to the client."""


# torch.save


class _Member(msgspec.Struct, frozen=True):
    start: int  # of its bytes, in the payload
    size: int


def _read_torch_file(payload: memoryview) -> Embeds:
    members = _index_members(payload)
    order = members.get("byteorder")
    if order is not None and bytes(payload[order.start : order.start + order.size]) != b"little":
        raise _RefusedError("the byte order must be little")
    pickled = members.get("data.pkl")
    if pickled is None or pickled.size > MAX_PICKLE_BYTES:
        raise _RefusedError("not a torch.save file")
    found = _Pickle(bytes(payload[pickled.start : pickled.start + pickled.size])).tensor()
    item = ITEM_BYTES[found.dtype]
    data = members.get(f"data/{found.key}")
    num_used = found.num_rows * found.num_columns
    if data is None or data.size != found.num_stored * item:
        raise _RefusedError("the storage has another size than the pickle says")
    if found.offset + num_used > found.num_stored:
        raise _RefusedError("the tensor exceeds its storage")
    start = data.start + found.offset * item
    numbers = payload[start : start + num_used * item]
    return Embeds(found.dtype, found.num_rows, found.num_columns, numbers)


def _index_members(payload: memoryview) -> dict[str, _Member]:
    """The members of the zip by name, without the folder that torch puts them in."""
    end = len(payload) - 22
    if end < 0:
        raise _RefusedError("truncated")
    signature, disk, start_disk, num_here, count, size, first, comment = struct.unpack_from(
        "<IHHHHIIH", payload, end
    )
    if signature != 0x06054B50 or comment or disk or start_disk or num_here != count:
        raise _RefusedError("neither a torch.save file nor safetensors")
    if not 1 <= count <= MAX_MEMBERS or size > MAX_OVERHEAD_BYTES or first + size > end:
        raise _RefusedError("its directory is too long")
    members: dict[str, _Member] = {}
    at = first
    for _ in range(count):
        if at + 46 > first + size:
            raise _RefusedError("its directory is cut")
        (signature, _, _, flags, method, _, _, _, packed, plain, *lengths, _, _, _, local) = (
            struct.unpack_from("<IHHHHHHIIIHHHHHII", payload, at)
        )
        name = bytes(payload[at + 46 : at + 46 + lengths[0]])
        at += 46 + sum(lengths)
        if signature != 0x02014B50 or method or packed != plain or flags & ~0x0808:
            raise _RefusedError("members must be stored plainly")
        start = _check_local_header(payload, local, name, plain)
        if start + plain > first:
            raise _RefusedError("truncated")
        key = name.decode("utf-8", "replace").partition("/")[2]
        if key in members:
            raise _RefusedError("two members of one name")
        members[key] = _Member(start, plain)
    if at != first + size:
        raise _RefusedError("its directory has another size")
    return members


def _check_local_header(payload: memoryview, at: int, name: bytes, size: int) -> int:
    """Find the first byte of a member, and refuse a header that differs from the directory."""
    if at + 30 > len(payload):
        raise _RefusedError("truncated")
    signature, _, flags, method, _, _, _, packed, plain, name_length, extra_length = (
        struct.unpack_from("<IHHHHHIIIHH", payload, at)
    )
    sizes = (0, 0) if flags & 8 else (size, size)  # flag 8: they follow the data
    if signature != 0x04034B50 or method or flags & ~0x0808 or (packed, plain) != sizes:
        raise _RefusedError("a member contradicts the directory")
    if bytes(payload[at + 30 : at + 30 + name_length]) != name:
        raise _RefusedError("a member contradicts the directory")
    return at + 30 + name_length + extra_length


class _Tensor(msgspec.Struct, frozen=True):
    """Tensor as the pickle describes it: dtype, storage, offset and shape."""

    dtype: EmbedsDtype
    key: str
    num_stored: int
    offset: int
    num_rows: int
    num_columns: int


class _Pickle:
    """Walks the opcodes; anything but the expected next one is refused."""

    # The notes that a pickler takes; reading one back would need GET, which is not expected.
    NOTES = frozenset({"BINPUT", "LONG_BINPUT", "PROTO", "FRAME", "MEMOIZE"})
    INTEGERS = frozenset({"BININT1", "BININT2", "BININT", "LONG1"})

    def __init__(self, pickled: bytes) -> None:
        self._ops = self._read(pickled)

    def _read(self, pickled: bytes) -> Iterator[tuple[str, Any]]:
        try:
            for op, argument, _ in pickletools.genops(pickled):
                if op.name not in self.NOTES:
                    yield op.name, argument
        except Exception:  # pickletools is not made for hostile bytes
            raise _RefusedError("not a pickle") from None

    def _expect(self, *names: str, argument: str | None = None) -> Any:
        name, value = next(self._ops, ("nothing", None))
        if name not in names or (argument is not None and value != argument):
            raise _RefusedError(f"must be one dense tensor (found {name})")
        return value

    def _integer(self) -> int:
        return self._checked(self._expect(*self.INTEGERS))

    def _checked(self, value: int) -> int:
        if not 0 <= value < 2**31:
            raise _RefusedError("a number is out of range")
        return value

    def _sizes(self) -> tuple[int, ...]:
        """Two or three integers and the tuple of them."""
        sizes = [self._integer(), self._integer()]
        name, value = next(self._ops, ("nothing", None))
        if name in self.INTEGERS:
            sizes.append(self._checked(cast("int", value)))
            self._expect("TUPLE3")
        elif name != "TUPLE2":
            raise _RefusedError("must have two dimensions")
        return tuple(sizes)

    def tensor(self) -> _Tensor:
        self._expect("GLOBAL", argument="torch._utils _rebuild_tensor_v2")
        self._expect("MARK")
        self._expect("MARK")
        self._expect("BINUNICODE", argument="storage")
        module, _, storage = self._expect("GLOBAL").partition(" ")
        if module != "torch" or storage not in STORAGES:
            raise _RefusedError("the dtype must be float32, float16, bfloat16 or float64")
        key = self._expect("BINUNICODE")
        self._expect("BINUNICODE")  # the device that it was on
        num_stored = self._integer()
        self._expect("TUPLE")
        self._expect("BINPERSID")
        offset, shape, stride = self._integer(), self._sizes(), self._sizes()
        self._expect("NEWFALSE", "NEWTRUE")  # requires_grad
        self._expect("GLOBAL", argument="collections OrderedDict")
        for name in ("EMPTY_TUPLE", "REDUCE", "TUPLE", "REDUCE", "STOP"):
            self._expect(name)
        if len(shape) != len(stride) or (len(shape) == 3 and shape[0] != 1):
            raise _RefusedError("must have two dimensions")
        num_rows, num_columns = shape[-2:]
        if stride[-1] != 1 or (num_rows > 1 and stride[-2] != num_columns):
            raise _RefusedError("must be contiguous")
        return _Tensor(STORAGES[storage], key, num_stored, offset, num_rows, num_columns)


# safetensors


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def _read_safetensors(payload: memoryview) -> Embeds:
    if len(payload) < 8:
        raise _RefusedError("neither a torch.save file nor safetensors")
    (length,) = struct.unpack_from("<Q", payload)
    if not 2 <= length <= MAX_OVERHEAD_BYTES or 8 + length > len(payload):
        raise _RefusedError("neither a torch.save file nor safetensors")
    try:
        header = msgspec.json.decode(payload[8 : 8 + length], type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        (raw,) = header.values()
        entry = msgspec.json.decode(raw, type=_Entry)
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise _RefusedError("safetensors must hold one tensor") from None
    dtype, shape = SAFETENSORS_DTYPES.get(entry.dtype), entry.shape
    if dtype is None:
        raise _RefusedError("the dtype must be F32, F16, BF16 or F64")
    if len(shape) == 3 and shape[0] == 1:
        shape = shape[1:]
    if len(shape) != 2 or min(shape) < 0:
        raise _RefusedError("must have two dimensions")
    data = payload[8 + length :]
    size = shape[0] * shape[1] * ITEM_BYTES[dtype]
    if entry.data_offsets != (0, size) or len(data) != size:
        raise _RefusedError("the data has another size than its shape")
    return Embeds(dtype, shape[0], shape[1], data)
