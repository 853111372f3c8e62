"""Read request bodies within a shared memory budget, and extract their long strings before they are parsed.

Joining all chunks at the end would block the event loop for 50 ms at 90 MB.  So bodies of at least `LARGE` bytes are copied chunk by chunk
into mapped memory, whose pages the kernel allocates when they are first written: a client cannot claim more memory than it has sent.  The
first write of a page takes 2.5 µs and a later one 0.4 µs (two Zen 3 cores, a virtual machine).  Copying 90 MB takes 57 ms into a new buffer
and 8 ms into a used one, so one used buffer is cached.

A parser holds the interpreter lock until it has finished: 0.2 s for 90 MB of base64, which no code needs as a Python string.  So `excerpt`
finds the ends of all strings with numpy, without the lock, and replaces each long string by a short reference.  The parser reads the rest.

Laws:
1. Every byte of a body counts against the budget until the body is decoded, or until the request ends if parts of it are used without a
   copy.
2. When the budget is exhausted, the largest unfinished body is refused, so that small requests succeed while large bodies trickle in.
3. After the start-up time, a body is refused if its average rate falls below a minimum.
4. Only strings without a backslash are extracted, so that the parser would find the same ends.  The caller replaces each reference by its
   string; if a reference remains, the caller parses the unchanged body.
"""

import mmap
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from types import TracebackType
from typing import Any, NamedTuple, Self
from uuid import uuid4

import anyio
import numpy as np

from trouper.frontends.server.shared.errors import HTTPError

# A shorter string is parsed in 50 µs.
LONG = 2**16
# The bytes to search in one turn of 0.2 ms.  Other threads run in between.
STEP = 2**20
PAUSE_S = 1e-4
# The limit of quotes and backslashes, which a Python loop visits in 5 ms.
MAX_MARKS = 2**16
QUOTE, BACKSLASH = b'"\\'


class Excerpt(NamedTuple):
    """Hold a body whose long strings are replaced by references, and the strings by reference.

    `rest` is valid JSON if the body is.
    """

    rest: bytes
    strings: dict[str, memoryview]


def excerpt(body: bytes | memoryview) -> Excerpt | None:
    """Extract the long strings of a body.  Returns None if it has none, or too many quotes.

    Strings with escapes stay in the body, because they need decoding.
    """
    marks = _marks(body)
    if marks is None:
        return None
    # Random, so that no client can forge a reference.
    view, name = memoryview(body), uuid4().hex
    parts: list[bytes] = []
    strings: dict[str, memoryview] = {}
    done = 0
    for begin, end in _plain_strings(view, marks):
        if end - begin > LONG:
            reference = f"{name}-{len(strings)}"
            strings[reference] = view[begin:end]
            parts += bytes(view[done:begin]), reference.encode()
            done = end
    if not strings:
        return None
    return Excerpt(b"".join((*parts, view[done:])), strings)


def _marks(body: bytes | memoryview) -> list[int] | None:
    """Return the positions of all quotes and backslashes, or None if there are more than `MAX_MARKS`."""
    characters = np.frombuffer(body, np.uint8)
    found: list[np.ndarray] = []
    num = 0
    for begin in range(0, len(characters), STEP):
        part = characters[begin : begin + STEP]
        found.append(np.flatnonzero((part == QUOTE) | (part == BACKSLASH)) + begin)
        num += len(found[-1])
        if num > MAX_MARKS:
            return None
        if begin:
            time.sleep(PAUSE_S)
    return np.concatenate(found).tolist() if found else []


def _plain_strings(view: memoryview, marks: list[int]) -> list[tuple[int, int]]:
    """Return (begin, end) of each string without a backslash, excluding the quotes."""
    found: list[tuple[int, int]] = []
    begin: int | None = None  # inside a string
    is_plain = True
    escaped = -1  # an escaped quote is no mark
    for at in marks:
        if at == escaped:
            continue
        if view[at] == BACKSLASH:
            escaped, is_plain = at + 1, False
        elif begin is None:
            begin, is_plain = at + 1, True
        else:
            if is_plain:
                found.append((begin, at))
            begin = None
    return found


# Copying this many bytes takes 0.1 ms.
LARGE = 2**20
# Bytes of the unused buffer that stay in memory.
KEPT = 2**27


class BodyBuffers:
    """Buffers for large bodies, `capacity` bytes each.  At most one unused buffer is kept.

    A buffer may contain bytes of an earlier body, so a user gets a view only of the bytes that it wrote.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free: deque[mmap.mmap] = deque(
            maxlen=1
        )  # filled by the thread that drops a last view

    def take(self) -> memoryview:
        """Return a buffer.  It returns to the pool when its last view is dropped.

        Buffers are memory maps of their own, so large bodies do not fragment the heap.
        """
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = mmap.mmap(-1, self.capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # An array, because a finalizer can be attached to it.
        held = np.frombuffer(buffer, np.uint8)
        weakref.finalize(held, self._give_back, buffer).atexit = False
        return held.data

    def _give_back(self, buffer: mmap.mmap) -> None:
        if self.capacity > KEPT:
            buffer.madvise(mmap.MADV_DONTNEED, KEPT)
        self._free.append(buffer)


class BodyMemory:
    """The budget of all bodies under way.

    Args:
        max_body: bytes of one body.
        budget: bytes of all of them; at least `max_body`.
        refuse: makes the refusal of a body that finds the budget exhausted.
    """

    def __init__(self, max_body: int, budget: int, refuse: Callable[[], HTTPError]) -> None:
        self.max_body = max_body
        self.budget = budget
        self.num_bytes = 0
        self.refuse = refuse
        self.buffers = BodyBuffers(max_body)
        self._open: set[Body] = set()

    def __repr__(self) -> str:
        return f"<BodyMemory {self.num_bytes} of {self.budget} bytes, {len(self._open)} bodies>"

    @property
    def num_bodies(self) -> int:
        """How many bodies are being read or decoded."""
        return len(self._open)

    def open(self) -> "Body":
        """Return an empty body, to be used as a context manager.

        It occupies nothing yet.  Leaving its `with` block returns its bytes to the budget.
        """
        body = Body(self)
        self._open.add(body)
        return body

    def claim(self, body: "Body", num_bytes: int) -> None:
        """Count received bytes.  Raises HTTPError if the budget is exhausted and no larger body can be refused instead.

        Refusing the largest body first protects many small requests from a few huge ones.
        """
        while self.num_bytes + num_bytes > self.budget:
            unread = [other for other in self._open if not other.is_complete]
            sizes = {other: other.size for other in unread} | {body: body.size + num_bytes}
            largest = max(sizes, key=lambda other: (sizes[other], other is body))
            if largest is body:
                raise self.refuse()
            largest.evict()
        self.num_bytes += num_bytes

    def release(self, body: "Body") -> None:
        """Give back what a body holds.  Idempotent.

        The bytes then belong to the budget again, although views of them may still exist for a moment.
        """
        if body in self._open:
            self._open.remove(body)
            self.num_bytes -= body.size


class Body:
    """One body: read by `read`, seen by `whole`, counted until `release` or the end of the `with` block.

    Small bodies are collected in bytes, and large ones in a buffer of their own, so they are copied only once.
    """

    def __init__(self, memory: BodyMemory) -> None:
        self.size = 0
        self.is_complete = False
        self._memory = memory
        self._small: bytes | bytearray = b""
        self._buffer: memoryview | None = None
        self._reading: anyio.CancelScope | None = None
        self._is_evicted = False

    def add(self, piece: bytes) -> None:
        """Append a chunk.  Raises HTTPError if the body is too large or the budget is exhausted.

        The size is checked for every chunk, because Content-Length may be missing or wrong.
        """
        end = self.size + len(piece)
        if self._is_evicted:
            raise self._memory.refuse()
        if end > self._memory.max_body:
            raise too_large(self._memory.max_body)
        self._memory.claim(self, len(piece))
        if self._buffer is None and self._small and end > LARGE:
            self._buffer = self._memory.buffers.take()
            self._buffer[: self.size] = self._small
            self._small = b""
        if self._buffer is not None:
            self._buffer[self.size : end] = piece
        elif self._small:
            if isinstance(self._small, bytes):
                self._small = bytearray(self._small)
            self._small += piece
        else:
            self._small = piece
        self.size = end

    async def read(
        self,
        receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
        *,
        timeout_s: float,
        start_timeout_s: float,
        min_rate: int,
    ) -> None:
        """Read to the end of the body.

        Args:
            timeout_s: for the whole body.
            start_timeout_s: for the first byte; `size / min_rate` is added to it as bytes come.
            min_rate: bytes a second.

        Raises:
            HTTPError: the body is too large or too slow, or the budget is exhausted.
            ClientGone: the client disconnected.
        """
        started = anyio.current_time()
        with anyio.CancelScope() as self._reading:
            while not self.is_complete:
                allowed_s = min(timeout_s, start_timeout_s + self.size / min_rate)
                self._reading.deadline = started + allowed_s
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                self.add(message.get("body", b""))
                self.is_complete = not message.get("more_body", False)
        if self._is_evicted:
            raise self._memory.refuse()
        if not self.is_complete:
            headers = ((b"connection", b"close"),)
            raise HTTPError(408, "body_timeout", "the body arrived too slowly", headers=headers)

    def whole(self) -> bytes | memoryview:
        """Return a view of the received bytes only.

        It is only valid after `read` has returned.  Large bodies are not copied.
        """
        return bytes(self._small) if self._buffer is None else self._buffer[: self.size]

    def evict(self) -> None:
        """Stop reading; `read` raises the refusal.

        Called on behalf of another body when the common budget of memory is exhausted.
        """
        self._is_evicted = True
        if self._reading is not None:
            self._reading.cancel()
        self.release()

    def release(self) -> None:
        """Count no more, and drop the bytes.  Views of them stay valid.  Idempotent."""
        self._memory.release(self)
        self._small, self._buffer = b"", None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


class ClientGone(Exception):
    """The client disconnected before it sent the complete request.

    It ends the handler silently, because no response can reach the client any more.
    """


def too_large(max_body: int) -> HTTPError:
    return HTTPError(413, "body_too_large", f"the body must have at most {max_body} bytes")
