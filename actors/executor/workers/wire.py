"""The frames between an engine and its worker processes: kind (1 byte), length (4 bytes), msgpack.

A payload beyond `MAX_INLINE` bytes is written once into a memory file whose descriptor goes with the frame, so a prompt of
embeddings is not pushed through a socket buffer; to another machine it goes inline. Nothing is pickled: each kind has one type, and a frame that is
not of it is an error of the connection.
"""

import mmap
import os
import struct
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np

from trouper import errors
from trouper.actors.executor.device import DeviceInfo
from trouper.actors.executor.workers.model_files import FileSample
from trouper.actors.messages.controls import (
    LoadAdapter,
    ProbeDevice,
    Sleep,
    StartProfile,
    StopProfile,
    Wake,
)
from trouper.actors.messages.requests import (
    Grammar,
    GrammarReady,
    GrammarRules,
    PrepareGrammar,
    Vocabulary,
)
from trouper.actors.messages.steps import PoolDone, PoolPlan, StepDone, StepFailed, StepPlan
from trouper.config.resolve import EngineConfig
from trouper.errors import TrouperError, TrouperValidationError, UnsupportedFeatureError

HEADER = struct.Struct("<BI")
# Bytes of a frame that goes through the socket: the plans in flight (stages + 1), three calls, a grammar and the vocabulary, 7 * 30,000,
# fit into its buffer of 212,992 bytes, so that sending never waits.  A plan of 64 rows has 490 bytes, one with a prompt of 8,192 tokens 25,000.
MAX_INLINE = 30_000
MAX_FRAME = 2**32 - 1
MakeGrammar = Callable[[GrammarRules], Grammar]
PIECE_BYTES = 2**24  # of what is written at once
EMPTY_BYTES, BYTES_32 = b"\xc4\x00", struct.Struct(">BI")  # of msgpack
IN_FILE = 0x80  # in the kind: the payload lies in a memory file


class Load(msgspec.Struct, frozen=True):
    """Engine → worker, the first frame: what to load, and how deep to sleep then."""

    config: EngineConfig
    rank: int = 0
    sleep_level: int = 0
    woken: tuple[str, ...] = ()  # what of the memory is awake all the same
    profile: tuple[str, str] | None = None  # folder and prefix of a trace that is to be begun again
    files: tuple[FileSample, ...] = ()  # of the model, as they were when the engine started


WorkerAction = Sleep | Wake | LoadAdapter | StartProfile | StopProfile | ProbeDevice


class Call(msgspec.Struct, frozen=True):
    """Engine → worker: anything but a step, behind the plans already sent."""

    number: int
    action: WorkerAction


class Close(msgspec.Struct, frozen=True):
    """Engine → worker: give everything back and exit."""


class Prepare(msgspec.Struct, frozen=True):
    """Engine → worker, before its Load: import torch; no processors are to be bound first."""


class Loaded(msgspec.Struct, frozen=True):
    """Worker → engine: plans may come."""

    info: DeviceInfo


class Progress(msgspec.Struct, frozen=True):
    """Worker → engine: what it does while it starts."""

    phase: Literal["import", "weights"]


class LogRecord(msgspec.Struct, frozen=True):
    """Worker → engine: a line of its log."""

    name: str
    level: int
    message: str


class Returned(msgspec.Struct, frozen=True):
    """Worker → engine: a call has been done, or why not."""

    number: int
    error: "ErrorText | None" = None


class ErrorText(msgspec.Struct, frozen=True):
    """An exception in words: its class, by which an error of our own is raised again, and its message."""

    kind: str
    message: str
    parameter: str | None = None
    value: int | float | str | None = None


class Broken(msgspec.Struct, frozen=True):
    """Worker → engine, the last frame: it cannot go on, or could not start."""

    error: ErrorText


ToWorker = Prepare | Load | StepPlan | PoolPlan | PrepareGrammar | Call | Close | Vocabulary
FromWorker = (
    Loaded
    | Progress
    | LogRecord
    | StepDone
    | PoolDone
    | StepFailed
    | GrammarReady
    | Returned
    | Broken
)
Frame = ToWorker | FromWorker

# A kind is a place in this table: append, never reorder.
TYPES: tuple[type[Any], ...] = (
    Load, StepPlan, PoolPlan, Call, Close,
    Loaded, Progress, LogRecord, StepDone, PoolDone, StepFailed, Returned, Broken, Vocabulary, Prepare,
    PrepareGrammar, GrammarReady,
)  # fmt: skip
_KINDS = {kind: number for number, kind in enumerate(TYPES)}


class WireError(Exception):
    """The bytes of the other side are no frame of this protocol."""


class _Array(msgspec.Struct, array_like=True):
    """A numpy array on its way: its type, its shape and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def _encode_other(value: object) -> object:
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value)
        return _Array(array.dtype.str, array.shape, array.data.cast("B"))
    if isinstance(value, Grammar):
        return value.rules
    if isinstance(value, frozenset):
        return sorted(value)
    raise NotImplementedError(f"{type(value).__name__} does not cross a process")


def _decode_other(kind: type, value: Any, make_grammar: MakeGrammar | None = None) -> object:
    if kind is np.ndarray:
        array = msgspec.convert(value, _Array)
        return np.frombuffer(array.data, array.dtype).reshape(array.shape)
    if kind is Grammar and make_grammar is not None:
        return make_grammar(msgspec.convert(value, GrammarRules))
    raise NotImplementedError(f"{kind.__name__} does not cross a process")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_other)
_decoders = tuple(msgspec.msgpack.Decoder(kind, dec_hook=_decode_other) for kind in TYPES)
_WITH_GRAMMARS = (_KINDS[StepPlan], _KINDS[PrepareGrammar])


def describe_error(error: BaseException) -> ErrorText:
    """Put an exception into words."""
    if isinstance(error, TrouperValidationError):
        value = error.value if isinstance(error.value, int | float | str) else None
        return ErrorText(type(error).__name__, error.message, error.parameter, value)
    if isinstance(error, UnsupportedFeatureError):
        return ErrorText(type(error).__name__, str(error), error.parameter)
    return ErrorText(type(error).__name__, str(error))


def as_exception(text: ErrorText) -> Exception:
    """Make the exception again: one of our own by its class, any other as a `DeviceStartError` that names it."""
    kind = getattr(errors, text.kind, None)
    if kind is TrouperValidationError:
        return TrouperValidationError(text.message, parameter=text.parameter, value=text.value)
    if kind is UnsupportedFeatureError:
        return UnsupportedFeatureError(text.message, parameter=text.parameter)
    if isinstance(kind, type) and issubclass(kind, TrouperError):
        return kind(text.message)
    return errors.DeviceStartError(f"{text.kind}: {text.message}")


def encode(
    frame: Frame, num_workers: int = 1, *, is_inline: bool = False
) -> tuple[bytes, int | None]:
    """Encode a frame.

    Args:
        num_workers: of the device: of more workers, more plans may lie in a socket's buffer, and each has less room.
        is_inline: whether no descriptor can go with it.

    Returns:
        Its bytes, and the descriptor of a memory file that is to be sent with them, or None. The caller closes it.
    """
    kind = _KINDS[type(frame)]
    payload = _encoder.encode(frame)
    if len(payload) > MAX_FRAME:
        raise WireError(f"a {type(frame).__name__} of {len(payload)} bytes")
    if is_inline or len(payload) <= MAX_INLINE * 5 // (num_workers + 4):
        return HEADER.pack(kind, len(payload)) + payload, None
    file = os.memfd_create("trouper-frame", os.MFD_CLOEXEC)
    try:
        with open(file, "wb", closefd=False) as writer:
            writer.write(payload)
    except BaseException:
        os.close(file)
        raise
    return HEADER.pack(kind | IN_FILE, len(payload)), file


def encode_adapter(call: Call) -> tuple[bytes, int]:
    """Encode a call that brings an adapter; for a thread: gigabytes are written in pieces, and the interpreter is free meanwhile.

    The weights are the last value of the frame, so they are written behind the rest as they are, and never copied.
    """
    action = call.action
    assert isinstance(action, LoadAdapter)
    weights = action.files.weights
    bare = LoadAdapter(action.slot, msgspec.structs.replace(action.files, weights=b""))
    head = _encoder.encode(Call(call.number, bare))
    assert head.endswith(EMPTY_BYTES), "the weights are the last value"
    head = head.removesuffix(EMPTY_BYTES) + BYTES_32.pack(0xC6, len(weights))
    length = len(head) + len(weights)
    if length > MAX_FRAME:
        raise WireError(f"an adapter of {length} bytes")
    file = os.memfd_create("trouper-frame", os.MFD_CLOEXEC)
    try:
        with open(file, "wb", buffering=0, closefd=False) as writer:
            for piece in (head, weights):
                for start in range(0, len(piece), PIECE_BYTES):
                    writer.write(memoryview(piece)[start : start + PIECE_BYTES])
    except BaseException:
        os.close(file)
        raise
    return HEADER.pack(_KINDS[Call] | IN_FILE, length), file


def read_inline(data: bytes, file: int) -> bytes:
    """Make a frame that has its payload inline of one that has it in a memory file."""
    kind, length = HEADER.unpack(data)
    with mmap.mmap(file, length, prot=mmap.PROT_READ) as payload:
        return HEADER.pack(kind & ~IN_FILE, length) + payload[:]


class FrameReader:
    """Cuts a stream of bytes, and the descriptors that came with them, into frames.

    Descriptors of memory files belong to the reader until their frame is taken.

    Args:
        make_grammar: makes the grammar of a plan of its rules; None: no plans are read here, or none with grammars.
        max_inline: bytes of a payload that come with the frame.
    """

    def __init__(
        self, make_grammar: MakeGrammar | None = None, *, max_inline: int = MAX_INLINE
    ) -> None:
        self._max_inline = max_inline
        self._decoders = list(_decoders)
        if make_grammar is not None:
            hook = partial(_decode_other, make_grammar=make_grammar)
            for kind in _WITH_GRAMMARS:
                self._decoders[kind] = msgspec.msgpack.Decoder(TYPES[kind], dec_hook=hook)
        self._bytes = bytearray()
        self._files: deque[int] = deque()

    def __repr__(self) -> str:
        return f"<FrameReader: {len(self._bytes)} bytes, {len(self._files)} files>"

    def feed(self, data: bytes, files: list[int]) -> None:
        """Add what one read has brought."""
        self._bytes += data
        self._files.extend(files)

    def take(self) -> Frame | None:
        """Take the next whole frame; None until it has come.

        Raises:
            WireError: this is no frame, or its memory file is missing.
        """
        if len(self._bytes) < HEADER.size:
            return None
        tag, length = HEADER.unpack_from(self._bytes)
        kind, is_in_file = tag & ~IN_FILE, bool(tag & IN_FILE)
        if kind >= len(TYPES):
            raise WireError(f"unknown kind {kind}")
        if not is_in_file and length > self._max_inline:
            raise WireError(f"a {TYPES[kind].__name__} of {length} bytes without a file")
        end = HEADER.size + (0 if is_in_file else length)
        if len(self._bytes) < end:
            return None
        payload = self._read_file(length) if is_in_file else bytes(self._bytes[HEADER.size : end])
        del self._bytes[:end]
        try:
            return self._decoders[kind].decode(payload)
        except (msgspec.DecodeError, ValueError, TypeError) as error:
            raise WireError(f"not a {TYPES[kind].__name__}: {error}") from None

    def _read_file(self, length: int) -> memoryview:
        """Map the memory file; what is decoded refers to the mapping and keeps it."""
        if not self._files:
            raise WireError("a frame without its memory file")
        file = self._files.popleft()
        try:
            if os.fstat(file).st_size < length:
                raise WireError("a memory file that is too short")
            return memoryview(mmap.mmap(file, length, prot=mmap.PROT_READ))
        except OSError as error:
            raise WireError(f"a memory file cannot be read: {error}") from None
        finally:
            os.close(file)

    def close(self) -> None:
        """Close the memory files of frames that were not taken.  Idempotent."""
        while self._files:
            os.close(self._files.popleft())
