"""Many HTTP clients in one thread, on connections that are used again.

They share the machine with the server, so they do next to nothing: a frame is counted, not read.
"""

import heapq
import re
import selectors
import socket
from collections import Counter
from collections.abc import Callable
from itertools import count
from time import perf_counter

FRAME = b"data: {"
END = b"\n\r\n0\r\n\r\n"  # of a stream in chunks, and of nothing inside one
LENGTH = re.compile(rb"content-length: (\d+)\r\n(?:.+\r\n)*\r\n")
MAX_HEAD = 1024


class Call:
    """One request on its connection; moments are seconds on the client's clock."""

    def __init__(self, kind: str, on_end: "Callable[[Call], object]", wire: socket.socket) -> None:
        self.kind = kind  # what its frames are counted under
        self.on_end = on_end
        self.wire = wire
        self.unsent = b""
        self.answer = bytearray()
        self.outcome = "open"  # then the status, or "cut"
        self.sent = perf_counter()
        self.first = self.ended = 0.0  # byte, and the last one

    def is_whole(self) -> bool:
        if self.answer.endswith(END):
            return True
        head = LENGTH.search(self.answer, 0, MAX_HEAD)
        return head is not None and len(self.answer) >= head.end() + int(head.group(1))


class Callers:
    """Owns the connections."""

    def __init__(self, port: int) -> None:
        self.num_frames: Counter[str] = Counter()  # by kind of call
        self.num_open = 0
        self._port = port
        self._selector = selectors.DefaultSelector()
        self._idle: list[socket.socket] = []
        self._timers: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = count()

    def call(self, request: bytes, kind: str, on_end: Callable[[Call], object]) -> Call:
        """`on_end` hears of its end, unless it is dropped."""
        if self._idle:
            call = Call(kind, on_end, self._idle.pop())
        else:
            call = Call(kind, on_end, socket.socket())
            call.wire.setblocking(False)
            call.wire.connect_ex(("127.0.0.1", self._port))
            self._selector.register(call.wire, selectors.EVENT_WRITE)
        call.unsent = request
        self._selector.modify(call.wire, selectors.EVENT_WRITE, (call.wire, call))
        self.num_open += 1
        return call

    def drop(self, call: Call) -> None:
        """Disconnect, whatever has come; nothing when it has ended."""
        if call.outcome == "open":
            self._end(call, "dropped", keeps=False)

    def later(self, moment: float, act: Callable[[], object]) -> None:
        heapq.heappush(self._timers, (moment, next(self._numbers), act))

    def run(self, end: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Until a moment, or until it is over."""
        while (now := perf_counter()) < end and not is_over():
            while self._timers and self._timers[0][0] <= now:
                heapq.heappop(self._timers)[2]()
            due = min(end, self._timers[0][0]) if self._timers else end
            for key, events in self._selector.select(max(0.0, due - perf_counter())):
                wire, call = key.data
                self._turn(wire, call, events)

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            self._close(key.data[0])
        self._selector.close()

    def _turn(self, wire: socket.socket, call: Call | None, events: int) -> None:
        if call is None:  # the server has closed an idle one
            self._idle.remove(wire)
            self._close(wire)
            return
        if call.outcome != "open":  # dropped in this turn
            return
        try:
            if events & selectors.EVENT_WRITE:
                call.unsent = call.unsent[wire.send(call.unsent) :]
                if not call.unsent:
                    self._selector.modify(wire, selectors.EVENT_READ, (wire, call))
                return
            piece = wire.recv(2**16)
        except OSError:
            piece = b""
        if not piece:
            self._end(call, "cut", keeps=False)
            return
        call.first = call.first or perf_counter()
        begin = max(0, len(call.answer) - len(FRAME) + 1)
        call.answer += piece
        self.num_frames[call.kind] += call.answer.count(FRAME, begin)
        if call.is_whole():
            self._end(
                call, call.answer[9:12].decode(), keeps=b"connection: close" not in call.answer
            )

    def _end(self, call: Call, outcome: str, *, keeps: bool) -> None:
        call.outcome, call.ended = outcome, perf_counter()
        self.num_open -= 1
        if keeps:
            self._selector.modify(call.wire, selectors.EVENT_READ, (call.wire, None))
            self._idle.append(call.wire)
        else:
            self._close(call.wire)
        if outcome != "dropped":
            call.on_end(call)

    def _close(self, wire: socket.socket) -> None:
        self._selector.unregister(wire)
        wire.close()
