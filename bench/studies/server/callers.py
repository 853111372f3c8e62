"""Run many HTTP clients in one thread, on reused connections.

The clients share the machine with the server, so they must cost little: frames are counted but not parsed or stored,
and connections are checked twice per millisecond. Clients on other machines would not wake a core of the server 6,500
times a second either. The measured latencies are therefore up to half a millisecond too long. Like other clients, they
repeat a request on a new connection if an idle connection was closed by the server before any answer.
"""

import heapq
import re
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable
from itertools import count
from time import perf_counter

LOOK_S = 0.0005
FRAME = b"data: {"
# The end of a chunked stream.  It occurs nowhere inside one.
END = b"\n\r\n0\r\n\r\n"
LENGTH = re.compile(rb"content-length: (\d+)\r\n")
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class ClientCall:
    """One request of a client, with its outcome.

    `sent`, `first` and `ended` are readings of the client's clock in seconds: the request, the first and the last byte.
    """

    __slots__ = ("ended", "first", "kind", "on_end", "outcome", "request", "sent", "wire")

    def __init__(self, kind: str, on_end: "Callable[[ClientCall], object]", request: bytes) -> None:
        # The kind under which its frames are counted.
        self.kind = kind
        self.on_end = on_end
        self.request = request
        # The connection, while it is open.
        self.wire: Wire | None = None
        # At the end the HTTP status, "cut" (closed by the server) or "dropped" (by the client).
        self.outcome = "open"
        self.sent = perf_counter()
        self.first = self.ended = 0.0


class Wire:
    """A connection with at most one call at a time.

    Counts the frames of a chunked answer, and the occurrences of `mark` in an answer with a Content-Length.
    """

    __slots__ = (
        "call", "head", "is_new", "is_writing", "mark", "num_due", "socket", "tail", "unsent"
    )  # fmt: skip

    def __init__(self, mark: bytes | None = None) -> None:
        self.mark = mark
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self.call: ClientCall | None = None
        # True until the first byte is received.  Only a used connection can have been closed while it was idle.
        self.is_new = True
        # Whether the selector also watches for a writable socket.
        self.is_writing = False
        self.unsent = b""
        # Status line and headers, empty until they are complete.
        self.head = b""
        # Bytes of the body still to come, or negative for a chunked body.
        self.num_due = 0
        # The last bytes read, in which a mark or the end of the stream may begin.
        self.tail = b""

    def begin(self, call: ClientCall) -> None:
        self.call = call
        self.unsent = call.request
        self.head = self.tail = b""

    def read(self, piece: bytes) -> int:
        """Parse received bytes. Returns the number of frames or marks completed by them."""
        if not self.head:
            whole = self.tail + piece
            head, end, piece = whole.partition(b"\r\n\r\n")
            if not end:
                self.tail = whole
                return 0
            length = LENGTH.search(head + b"\r\n")
            self.head, self.tail = head, b""
            self.num_due = -1 if length is None else int(length.group(1))
        if self.num_due >= 0:
            self.num_due -= len(piece)
            if self.mark is None:
                return 0
        mark = FRAME if self.num_due < 0 or self.mark is None else self.mark
        # A mark split between two pieces begins within the last bytes of the first one.
        kept = len(mark) - 1
        whole = self.tail + piece
        num = whole.count(mark, max(0, len(self.tail) - kept))
        self.tail = whole[-max(len(END), kept) :]
        return num

    @property
    def is_whole(self) -> bool:
        return bool(self.head) and (self.num_due == 0 or self.tail.endswith(END))


class Callers:
    """Run clients of one server, and own their connections.

    `num_frames` counts the frames of chunked answers, and the occurrences of `mark` in answers with a Content-Length.
    """

    def __init__(self, port: int, mark: bytes | None = None) -> None:
        self._mark = mark
        self.num_frames: Counter[str] = Counter()  # by kind of call
        self.num_open = 0
        # The number of connections ever opened.
        self.num_connections = 0
        self._port = port
        self._selector = selectors.DefaultSelector()
        self._idle: list[Wire] = []
        self._timers: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = count()

    def call(self, request: bytes, kind: str, on_end: Callable[[ClientCall], object]) -> ClientCall:
        """Send a request on an idle or a new connection.

        `on_end` is called when the call ends, unless it is dropped. Pass the returned call to `drop` to disconnect.
        """
        call = ClientCall(kind, on_end, request)
        self.num_open += 1
        self._begin(call, self._idle.pop() if self._idle else self._connect())
        return call

    def drop(self, call: ClientCall) -> None:
        """Disconnect in the middle of an answer, like an impatient client. Does nothing if the call has ended."""
        if call.outcome == "open":
            self._end(call, "dropped", keeps=False)

    def later(self, moment: float, act: Callable[[], object]) -> None:
        heapq.heappush(self._timers, (moment, next(self._numbers), act))

    def run_until(self, end: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Run the callers until the clock reaches `end`, or until `is_over` returns true."""
        while (now := perf_counter()) < end and not is_over():
            while self._timers and self._timers[0][0] <= now:
                heapq.heappop(self._timers)[2]()
            due = min(end, self._timers[0][0]) if self._timers else end
            for key, events in self._selector.select(max(0.0, due - perf_counter())):
                self._turn(key.data, events)
            time.sleep(LOOK_S)

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            self._close(key.data)
        self._selector.close()

    def _connect(self) -> Wire:
        wire = Wire(self._mark)
        wire.socket.connect_ex(("127.0.0.1", self._port))
        self._selector.register(wire.socket, READ, wire)
        self.num_connections += 1
        return wire

    def _begin(self, call: ClientCall, wire: Wire) -> None:
        call.wire = wire
        wire.begin(call)
        self._write(call, wire)

    def _turn(self, wire: Wire, events: int) -> None:
        call = wire.call
        if call is None:
            # An idle connection becomes readable when the server closes it.  Any other one was dropped
            # earlier in this round of the selector.
            if wire in self._idle:
                self._idle.remove(wire)
                self._close(wire)
            return
        if events & WRITE:
            self._write(call, wire)
        if events & READ and wire.call is call:
            self._read(call, wire)

    def _write(self, call: ClientCall, wire: Wire) -> None:
        try:
            wire.unsent = wire.unsent[wire.socket.send(wire.unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self._lose(call, wire)
            return
        if bool(wire.unsent) != wire.is_writing:
            wire.is_writing = bool(wire.unsent)
            self._selector.modify(wire.socket, READ | WRITE if wire.unsent else READ, wire)

    def _read(self, call: ClientCall, wire: Wire) -> None:
        try:
            piece = wire.socket.recv(2**16)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if not piece:
            self._lose(call, wire)
            return
        call.first = call.first or perf_counter()
        wire.is_new = False
        self.num_frames[call.kind] += wire.read(piece)
        if wire.is_whole:
            self._end(call, wire.head[9:12].decode(), keeps=b"connection: close" not in wire.head)

    def _lose(self, call: ClientCall, wire: Wire) -> None:
        """Handle a connection closed by the server: end the call, or repeat it if an idle connection was closed."""
        if wire.is_new or call.first:
            self._end(call, "cut", keeps=False)
        else:
            self._close(wire)
            self._begin(call, self._connect())

    def _end(self, call: ClientCall, outcome: str, *, keeps: bool) -> None:
        wire, call.wire = call.wire, None
        assert wire is not None
        call.outcome, call.ended = outcome, perf_counter()
        self.num_open -= 1
        wire.call = None
        if keeps:
            self._idle.append(wire)
        else:
            self._close(wire)
        if outcome != "dropped":
            call.on_end(call)

    def _close(self, wire: Wire) -> None:
        wire.call = None
        self._selector.unregister(wire.socket)
        wire.socket.close()
