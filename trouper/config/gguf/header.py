"""Read the header of a GGUF file: its metadata, and the location of its tensors.  Tensors are not read.

    magic "GGUF", version 2 or 3, number of tensors, number of keys     u32 u32 u64 u64, little endian
    keys        name, type, value       a string is u64 length + bytes, an array u32 type + u64 count + values
    tensors     name, u32 dimensions, u64 each, innermost first, u32 type, u64 offset
    padding to the alignment, then the tensors, each at its offset from here

Law: a count, a length or an offset is compared with the rest of the file before memory is allocated for it, so a header
takes at most a few times its own bytes, whatever it contains.
"""

import math
import mmap
import os
import re
import stat
import struct
from array import array
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

import msgspec

from trouper.errors import TrouperValidationError, UnsupportedFeatureError, invalid
from trouper.extras import install_hint

if TYPE_CHECKING:
    # Functions import numpy when they run, so that `trouper --help` starts fast.
    import numpy as np

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_ITEMS = 2**24  # of an array: the largest vocabulary
MAX_NAMES = 2**16  # keys, and tensors
MAX_DIMENSIONS = 4
MAX_FILES = 1000  # of a split
SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
STRING, ARRAY = 8, 9
LENGTH = struct.Struct("<Q")  # of a string
SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
T = TypeVar("T")


class TensorType(NamedTuple):
    """A storage format: blocks of `length` numbers in `num_bytes` bytes."""

    name: str
    length: int
    num_bytes: int
    # The bytes of a number after loading with bfloat16: integer, scale and minimum.
    held: float


# By the number in the file.
TENSOR_TYPES = {
    0: TensorType("F32", 1, 4, 2),
    1: TensorType("F16", 1, 2, 2),
    2: TensorType("Q4_0", 32, 18, 0.5625),
    3: TensorType("Q4_1", 32, 20, 0.625),
    6: TensorType("Q5_0", 32, 22, 0.6875),
    7: TensorType("Q5_1", 32, 24, 0.75),
    8: TensorType("Q8_0", 32, 34, 1.0625),
    10: TensorType("Q2_K", 256, 84, 0.640625),
    11: TensorType("Q3_K", 256, 110, 0.5703125),
    12: TensorType("Q4_K", 256, 144, 0.578125),
    13: TensorType("Q5_K", 256, 176, 0.703125),
    14: TensorType("Q6_K", 256, 210, 0.8203125),
    16: TensorType("IQ2_XXS", 256, 66, 1.125),
    17: TensorType("IQ2_XS", 256, 74, 1.25),
    18: TensorType("IQ3_XXS", 256, 98, 1.125),
    19: TensorType("IQ1_S", 256, 50, 1.125),
    20: TensorType("IQ4_NL", 32, 18, 1.0625),
    21: TensorType("IQ3_S", 256, 110, 1.125),
    22: TensorType("IQ2_S", 256, 82, 1.25),
    23: TensorType("IQ4_XS", 256, 136, 1.125),
    29: TensorType("IQ1_M", 256, 56, 1.25),
    30: TensorType("BF16", 1, 2, 2),
    34: TensorType("TQ1_0", 256, 54, 0.5625),
    35: TensorType("TQ2_0", 256, 66, 0.5625),
    39: TensorType("MXFP4", 32, 17, 0.5625),
}
UNREAD_TYPES = {
    9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
# These formats need the tables of the package `gguf`.
GRID_TYPES = {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"}


class GgufTensor(NamedTuple):
    """The location of a tensor in a GGUF file.

    The data are not read.  `type` gives the storage format, from which the number of bytes follows.
    """

    file: Path
    offset: int  # from the file's start
    shape: tuple[int, ...]  # outermost first
    type: TensorType

    @property
    def num_bytes(self) -> int:
        """The number of bytes in the file."""
        return math.prod(self.shape) // self.type.length * self.type.num_bytes


class GgufStrings(msgspec.Struct, frozen=True):
    """An array of strings as in the file, not decoded: only a reader of tokens or merges decodes them."""

    # The strings, each after its length in eight bytes.
    content: bytes
    # The end of each string in `content`.
    ends: "array[int]"

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, i: int) -> str:
        """Decode one string.  Invalid UTF-8 becomes replacement characters."""
        begin = self.ends[i - 1] if i else 0
        return self.content[begin + LENGTH.size : self.ends[i]].decode(errors="replace")

    def decoded(self) -> list[str]:
        """Decode all strings.

        Raises:
            UnicodeDecodeError: a string is not UTF-8.
        """
        content, size = self.content, LENGTH.size
        begins = [0, *self.ends]
        return [content[b + size : e].decode() for b, e in zip(begins, self.ends, strict=False)]


class Gguf(msgspec.Struct, frozen=True):
    """The header of a model: of one file, or of all files of a split.

    Values of `metadata` have the file's own types; `get` and `need` convert and check them.  Long
    arrays of strings stay undecoded.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def get(self, key: str, kind: type[T]) -> T | None:
        """Return a value of the metadata, or None if the key is absent.

        Raises:
            TrouperValidationError: the value has another type.
        """
        value = self.metadata.get(key)
        if value is None:
            return None
        try:
            if isinstance(value, GgufStrings):
                value = value.decoded()
            return msgspec.convert(value, kind)
        except UnicodeDecodeError:
            rule = f"{self.path.name}: {key}: not UTF-8"
            raise invalid("model", rule, str(self.path)) from None
        except msgspec.ValidationError as error:
            raise invalid("model", f"{self.path.name}: {key}: {error}", str(self.path)) from None

    def need(self, key: str, kind: type[T]) -> T:
        """Return a value of the metadata that the file must have, converted to `kind`.

        Raises:

            TrouperValidationError: the key is absent, or the value has another type.
        """
        value = self.get(key, kind)
        if value is None:
            raise invalid("model", f"{self.path.name}: lacks the key {key!r}", str(self.path))
        return value


def is_gguf(path: str | Path) -> bool:
    """Return whether a path is a GGUF file: by its name, or else by its first bytes."""
    path = Path(path)
    return not path.is_dir() if path.suffix == ".gguf" else has_magic(path)


def has_magic(path: Path) -> bool:
    """Return whether a file starts like a GGUF file.  Returns False if it cannot be read."""
    try:
        with open(path, "rb", opener=_open_now) as file:
            return stat.S_ISREG(os.fstat(file.fileno()).st_mode) and file.read(4) == MAGIC
    except (OSError, ValueError):  # ValueError: invalid path
        return False


def _open_now(path: str, flags: int) -> int:
    """Open a file without waiting for the writer of a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def read_gguf(path: Path) -> Gguf:
    """Read the header of a file, and the headers of all files of a split.

    Raises:
        TrouperValidationError: the file is not a GGUF file, or contradicts itself; the message names the place.
        UnsupportedFeatureError: the type of a tensor is not supported.
    """
    whole = _read_file(path)
    count = whole.get("split.count", int) or 1
    if count == 1:
        return whole
    split = SPLIT.fullmatch(path.name)
    if split is None or int(split[3]) != count or int(split[2]) != 1 or not 1 < count <= MAX_FILES:
        rule = f"{path.name}: must be the first of {count} files, NAME-00001-of-{count:05}.gguf"
        raise invalid("model", rule, str(path))
    tensors = dict(whole.tensors)
    for number in range(2, count + 1):
        other = path.with_name(f"{split[1]}-{number:05}-of-{count:05}.gguf")
        for name, tensor in _read_file(other).tensors.items():
            if name in tensors:
                raise invalid("model", f"{other.name}: {name} is in two files", str(other))
            tensors[name] = tensor
    return Gguf(path, whole.metadata, tensors)


def _read_file(path: Path) -> Gguf:
    try:
        with open(path, "rb", buffering=0, opener=_open_now) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise invalid("model", f"{path.name} is not a regular file", str(path))
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _Reader(path, content).read()
    except (OSError, ValueError) as error:  # ValueError: empty file
        if isinstance(error, TrouperValidationError):
            raise
        raise invalid("model", f"{path.name} cannot be read: {error}", str(path)) from None


class _Reader:
    """A position in the header of one file."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self._path, self._content, self._at, self._size = path, content, 0, len(content)

    def read(self) -> Gguf:
        if self._size < 24 or self._content[:4] != MAGIC:
            self._refuse("is not a GGUF file (magic)")
        version = self._number(4, 4)
        if version not in VERSIONS:
            is_swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            self._refuse("is big endian" if is_swapped else f"version {version}, not 2 or 3")
        num_tensors, num_keys = self._number(8, 8), self._number(16, 8)
        self._at = 24
        # The header entry of a tensor takes at least 8 + 4 + 8 + 4 + 8 bytes, and that of a key 8 + 4 + 1.
        self._check_count(num_tensors, 32, MAX_NAMES, "tensors")
        self._check_count(num_keys, 13, MAX_NAMES, "keys")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string("a key")
            if key in metadata:
                self._refuse(f"has the key {key[:80]!r} twice")
            metadata[key] = self._value(self._int("<I"), key)
        entries = [self._entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 8 <= alignment <= 2**20 or alignment % 8:
            self._refuse(f"general.alignment: {str(alignment)[:40]}, not a multiple of 8")
        begin = -(-self._at // alignment) * alignment
        return Gguf(self._path, metadata, self._placed(entries, begin, alignment))

    def _placed(
        self,
        entries: list[tuple[str, tuple[int, ...], TensorType, int]],
        begin: int,
        alignment: int,
    ) -> dict[str, GgufTensor]:
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in entries:
            if name in tensors:
                self._refuse(f"has the tensor {name[:80]!r} twice")
            if offset % alignment:
                self._refuse(f"{name[:80]}: offset {offset} is not a multiple of {alignment}")
            tensors[name] = GgufTensor(self._path, begin + offset, shape, kind)
        end = begin
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
            if tensor.offset < end:
                self._refuse(f"{name[:80]}: overlaps another tensor")
            end = tensor.offset + tensor.num_bytes
            if end > self._size:
                self._refuse(f"{name[:80]}: ends at byte {end} of {self._size}: truncated")
        return tensors

    def _entry(self) -> tuple[str, tuple[int, ...], TensorType, int]:
        name = self._string("a tensor's name")
        num_dimensions = self._int("<I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            self._refuse(f"{name[:80]}: {num_dimensions} dimensions")
        shape = tuple(self._int("<Q") for _ in range(num_dimensions))[::-1]
        number, offset = self._int("<I"), self._int("<Q")
        kind = TENSOR_TYPES.get(number)
        if kind is None:
            if number not in UNREAD_TYPES:
                self._refuse(f"{name[:80]}: unknown type {number}")
            known = ", ".join(each.name for each in TENSOR_TYPES.values())
            raise UnsupportedFeatureError(
                f"{self._path.name}: {name[:80]} is of type {UNREAD_TYPES[number]}; {known} are read",
                parameter="model",
            )
        if kind.name in GRID_TYPES and find_spec("gguf") is None:
            raise UnsupportedFeatureError(
                f"{self._path.name}: {name[:80]} is of type {kind.name}, which needs the package gguf: {install_hint('gguf')}",
                parameter="model",
            )
        if min(shape) < 1 or max(shape) > self._size or shape[-1] % kind.length:
            self._refuse(f"{name[:80]}: shape {list(shape)} of {kind.name}")
        return name, shape, kind, offset

    def _value(self, kind: int, key: str) -> Any:
        if kind == STRING:
            return self._string(key)
        if kind == ARRAY:
            return self._array(key)
        if kind not in SCALARS:
            self._refuse(f"{key[:80]}: unknown type {kind} of a value")
        return self._scalars(kind, 1, key)[0].item()

    def _array(self, key: str) -> Any:
        """Read strings without decoding, and numbers as an array, because lists of numbers take ten times as much memory."""
        kind, count = self._int("<I"), self._int("<Q")
        if kind == STRING:
            self._check_count(count, 8, MAX_ITEMS, key[:80])
            return self._strings(count, key)
        if kind not in SCALARS:
            self._refuse(f"{key[:80]}: an array of type {kind}")
        self._check_count(count, int(SCALARS[kind][2:] or 1), MAX_ITEMS, key[:80])
        return self._scalars(kind, count, key)

    def _strings(self, count: int, key: str) -> GgufStrings:
        """Find the ends of strings; the length of each string determines the start of the next."""
        unpack, content, size = LENGTH.unpack_from, self._content, LENGTH.size
        first, last = self._at, self._size - size
        ends, at = array("Q"), self._at
        for _ in range(count):
            if at <= last:
                at += size + unpack(content, at)[0]
                if at <= self._size:
                    ends.append(at - first)
                    continue
            self._refuse(f"{key[:80]}: ends within its strings: truncated")
        return GgufStrings(self._bytes(at - first, key), ends)

    def _scalars(self, kind: int, count: int, key: str) -> "np.ndarray":
        import numpy as np

        dtype = np.dtype(SCALARS[kind])
        content = self._bytes(count * dtype.itemsize, key)
        return np.frombuffer(content, "<u1" if kind == 7 else dtype).astype(dtype, copy=False)

    def _string(self, of: str) -> str:
        try:
            return self._bytes(self._int("<Q"), of).decode()
        except UnicodeDecodeError:
            self._refuse(f"{of[:80]}: not UTF-8")

    def _int(self, form: str) -> int:
        size = struct.calcsize(form)
        self._at += size
        if self._at > self._size:
            self._refuse("ends within its header: truncated")
        return struct.unpack_from(form, self._content, self._at - size)[0]

    def _bytes(self, count: int, of: str) -> bytes:
        first = self._at
        if count > self._size - first:
            self._refuse(f"{of[:80]}: {count} bytes at byte {first} of {self._size}: truncated")
        self._at = first + count
        return self._content[first : self._at]

    def _number(self, at: int, size: int) -> int:
        return int.from_bytes(self._content[at : at + size], "little")

    def _check_count(self, count: int, item_bytes: int, most: int, of: str) -> None:
        if count > most or count * item_bytes > self._size - self._at:
            self._refuse(f"{of}: {count} of them in a file of {self._size} bytes")

    def _refuse(self, what: str) -> NoReturn:
        raise invalid("model", f"{self._path.name}: {what}", str(self._path))
