"""Encode and decode frames between an engine and its worker processes: kind (1 byte), length (4 bytes), msgpack.

A large payload, such as the embeddings of a prompt, is written once into a memory file instead of a socket buffer, and its
descriptor is sent with the frame. Frames to another machine are always inline. Nothing is pickled: each kind of frame has
one type, and bytes that do not decode to it are an error of the connection.
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
from trouper.actors.messages.steps import (
    PoolDone,
    PoolPlan,
    StepDone,
    StepFailed,
    StepPlan,
    TierAnswer,
    TierOrder,
)
from trouper.config.engine_config import EngineConfig
from trouper.errors import TrouperError, TrouperValidationError, UnsupportedFeatureError

HEADER = struct.Struct("<BI")
# Maximum bytes of an inline payload. The plans in flight (stages + 1), three calls, a grammar and the
# vocabulary, 7 * 30,000 bytes, fit into the socket's buffer of 212,992 bytes, so sending never waits. A plan
# of 64 entries has 490 bytes, a plan with a prompt of 8,192 tokens 25,000.
MAX_INLINE = 30_000
MAX_FRAME = 2**32 - 1
MakeGrammar = Callable[[GrammarRules], Grammar]
# Bytes written at a time.
PIECE_BYTES = 2**24
# Msgpack's empty byte string, and the header of a long one.
EMPTY_BYTES, BYTES_32 = b"\xc4\x00", struct.Struct(">BI")
# Flag of the kind byte: the payload is in a memory file.
IN_FILE = 0x80


class Load(msgspec.Struct, frozen=True):
    """Engine → worker, the first frame: what to load and the state to restore.

    `woken` names the parts of memory to load in spite of the sleep level, `profile` is the folder and prefix
    of a trace to start again, and `files` samples the model's files at the start of the engine.
    """

    config: EngineConfig
    rank: int = 0
    sleep_level: int = 0
    woken: tuple[str, ...] = ()
    profile: tuple[str, str] | None = None
    files: tuple[FileSample, ...] = ()


WorkerAction = Sleep | Wake | LoadAdapter | StartProfile | StopProfile | ProbeDevice


class Call(msgspec.Struct, frozen=True):
    """Engine → worker: an action other than a step, performed after the plans already sent."""

    number: int
    action: WorkerAction


class Close(msgspec.Struct, frozen=True):
    """Engine → worker: release everything and exit.

    The worker finishes the plans already sent, and the engine kills it if it takes too long.
    """


class Prepare(msgspec.Struct, frozen=True):
    """Engine → worker, before `Load`: import torch. Sent only if no processors must be bound first."""


class KeepMemory(msgspec.Struct, frozen=True):
    """Engine → worker, before `Load`: allocate the KV cache in the memory file sent with this frame, which outlives the worker.

    `FrameReader` sets `file` to the descriptor in the receiving process.
    """

    file: int = -1


class Loaded(msgspec.Struct, frozen=True):
    """Worker → engine: the worker is ready for plans.

    It contains the sizes that the scheduler needs, such as the number of KV blocks. `layout` describes the
    tensors in the memory file; only a worker with the same layout can use their contents.
    """

    info: DeviceInfo
    layout: str = ""


class Progress(msgspec.Struct, frozen=True):
    """Worker → engine: the current phase of its start, which the engine logs because loading may take minutes."""

    phase: Literal["import", "weights"]


class LogRecord(msgspec.Struct, frozen=True):
    """Worker → engine: a line of its log.

    The engine logs it under the same name and level, so workers need no log of their own.
    """

    name: str
    level: int
    message: str


class Returned(msgspec.Struct, frozen=True):
    """Worker → engine: a call was performed, or failed with this error. Answers have the numbers of their calls."""

    number: int
    error: "ErrorText | None" = None


class ErrorText(msgspec.Struct, frozen=True):
    """Represent an exception as data: its class name, by which trouper's own errors are restored, and its fields."""

    kind: str
    message: str
    parameter: str | None = None
    value: int | float | str | None = None
    code: str | None = None


class Broken(msgspec.Struct, frozen=True):
    """Worker → engine, the last frame: the error that ends the worker.

    A worker killed by a signal cannot send it; then its exit status shows the cause.
    """

    error: ErrorText


ToWorker = (
    KeepMemory
    | Prepare
    | Load
    | StepPlan
    | PoolPlan
    | PrepareGrammar
    | Call
    | Close
    | Vocabulary
    | TierOrder
)
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
    | TierAnswer
)
Frame = ToWorker | FromWorker

# The index in this table is the kind byte: append only, never reorder.
TYPES: tuple[type[Any], ...] = (
    Load, StepPlan, PoolPlan, Call, Close,
    Loaded, Progress, LogRecord, StepDone, PoolDone, StepFailed, Returned, Broken, Vocabulary, Prepare,
    PrepareGrammar, GrammarReady, KeepMemory, TierOrder, TierAnswer,
)  # fmt: skip
_KINDS = {kind: number for number, kind in enumerate(TYPES)}


class WireError(Exception):
    """Report bytes that are not a frame of this protocol.

    The worker then counts as lost, because the beginning of the next frame is unknown.
    """


class _Array(msgspec.Struct, array_like=True):
    """Represent a numpy array as dtype, shape and bytes."""

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
    raise NotImplementedError(f"{type(value).__name__} cannot be sent to another process")


def _decode_other(kind: type, value: Any, make_grammar: MakeGrammar | None = None) -> object:
    if kind is np.ndarray:
        array = msgspec.convert(value, _Array)
        return np.frombuffer(array.data, array.dtype).reshape(array.shape)
    if kind is Grammar and make_grammar is not None:
        return make_grammar(msgspec.convert(value, GrammarRules))
    raise NotImplementedError(f"{kind.__name__} cannot be sent to another process")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_other)
_decoders = tuple(msgspec.msgpack.Decoder(kind, dec_hook=_decode_other) for kind in TYPES)
_WITH_GRAMMARS = (_KINDS[StepPlan], _KINDS[PrepareGrammar])


def describe_error(error: BaseException) -> ErrorText:
    """Convert an exception to data: its class, message and, for our own errors, code, parameter and value."""
    name, code = type(error).__name__, getattr(error, "code", None)
    code = code if isinstance(code, str) else None
    if isinstance(error, TrouperValidationError):
        value = error.value if isinstance(error.value, int | float | str) else None
        return ErrorText(name, error.message, error.parameter, value, code)
    if isinstance(error, UnsupportedFeatureError):
        return ErrorText(name, str(error), error.parameter, code=code)
    return ErrorText(name, str(error), code=code)


def as_exception(text: ErrorText) -> Exception:
    """Restore an exception with its code: our own by its class, any other as a `DeviceStartError` that names its class.

    A subclass of `TrouperValidationError` or `UnsupportedFeatureError` may need other arguments, so it becomes
    its base class; the code still distinguishes it.
    """
    kind = getattr(errors, text.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, TrouperError)):
        return errors.DeviceStartError(f"{text.kind}: {text.message}")
    error: Any
    if issubclass(kind, TrouperValidationError):
        error = TrouperValidationError(text.message, parameter=text.parameter, value=text.value)
    elif issubclass(kind, UnsupportedFeatureError):
        error = UnsupportedFeatureError(text.message, parameter=text.parameter)
    else:
        error = kind(text.message)
    if text.code is not None:
        error.code = text.code
    return error


def encode(
    frame: Frame, num_workers: int = 1, *, is_inline: bool = False
) -> tuple[bytes, int | None]:
    """Encode a frame.

    Args:
        num_workers: the workers of the device. With more workers, more plans may be queued in each socket, so
            inline payloads must be smaller.
        is_inline: never use a memory file, because the connection cannot carry descriptors.

    Returns:
        The bytes to send, and the descriptor of a memory file to send with them or None. The caller closes
            it.
    """
    kind = _KINDS[type(frame)]
    payload = _encoder.encode(frame)
    if len(payload) > MAX_FRAME:
        raise WireError(
            f"a {type(frame).__name__} of {len(payload)} bytes is too long (maximum {MAX_FRAME})"
        )
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
    """Encode a call that carries an adapter. Run it in a thread, because it may write gigabytes; it releases the interpreter
    lock meanwhile.

    The weights are the last value of the frame, so they are appended to the encoded rest without a copy.
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
        raise WireError(f"an adapter of {length} bytes is too long (maximum {MAX_FRAME})")
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
    """Convert a frame with a memory file to one with an inline payload."""
    kind, length = HEADER.unpack(data)
    with mmap.mmap(file, length, prot=mmap.PROT_READ) as payload:
        return HEADER.pack(kind & ~IN_FILE, length) + payload[:]


class FrameReader:
    """Split a stream of bytes, and the descriptors received with them, into frames. It owns the descriptors of
    frames not taken yet.

    Args:
        make_grammar: creates a grammar from its rules; None if no frame contains grammars.
        max_inline: maximum bytes of an inline payload.
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
        """Add the bytes and descriptors of one read.

        Descriptors arrive with the first byte of their frame, in the same order. Frames may be divided anywhere.
        """
        self._bytes += data
        self._files.extend(files)

    def take(self) -> Frame | None:
        """Take the next complete frame, or return None.

        Raises:
            WireError: the bytes are not a frame, or its memory file is missing.
        """
        if len(self._bytes) < HEADER.size:
            return None
        tag, length = HEADER.unpack_from(self._bytes)
        kind, is_in_file = tag & ~IN_FILE, bool(tag & IN_FILE)
        if kind >= len(TYPES):
            raise WireError(f"unknown kind of frame: {kind}")
        if not is_in_file and length > self._max_inline:
            raise WireError(
                f"a {TYPES[kind].__name__} of {length} bytes must be sent in a memory file"
            )
        end = HEADER.size + (0 if is_in_file else length)
        if len(self._bytes) < end:
            return None
        payload = self._read_file(length) if is_in_file else bytes(self._bytes[HEADER.size : end])
        del self._bytes[:end]
        if kind == _KINDS[KeepMemory]:
            return KeepMemory(self._take_file())
        try:
            return self._decoders[kind].decode(payload)
        except (msgspec.DecodeError, ValueError, TypeError) as error:
            raise WireError(
                f"a frame cannot be decoded as {TYPES[kind].__name__}: {error}"
            ) from None

    def _read_file(self, length: int) -> memoryview:
        """Map the memory file. Decoded values refer to the mapping and keep it alive."""
        file = self._take_file()
        try:
            if os.fstat(file).st_size < length:
                raise WireError("the memory file of a frame is too short")
            return memoryview(mmap.mmap(file, length, prot=mmap.PROT_READ))
        except OSError as error:
            raise WireError(f"the memory file of a frame cannot be read: {error}") from None
        finally:
            os.close(file)

    def _take_file(self) -> int:
        if not self._files:
            raise WireError("the memory file of a frame is missing")
        return self._files.popleft()

    def close(self) -> None:
        """Close the memory files of frames that were never taken. No frame can be taken afterwards. Idempotent."""
        while self._files:
            os.close(self._files.popleft())
