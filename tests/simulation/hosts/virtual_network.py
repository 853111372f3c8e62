"""Machines, connections and their faults in trio's virtual time: sockets that real code uses without noticing.

A connection's bytes arrive after the slower machine's latency, in drawn pieces. A machine that is cut off neither sends nor receives, and
nobody is told: what a socket has asked of its system (`SO_KEEPALIVE`, `TCP_USER_TIMEOUT`) decides when it finds out, or that it never does.
"""

import errno
import math
import random
import socket
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple, Self

import anyio
import trio

from trouper.actors.executor.workers.machines import authentication

NEVER = math.inf
PROGRAM: ContextVar[str] = ContextVar("PROGRAM")  # that this task belongs to
MACHINE: ContextVar[str] = ContextVar("MACHINE")  # that it runs on
KEEP_ALIVE = socket.SOL_SOCKET, socket.SO_KEEPALIVE
SEND_BUFFER = socket.SOL_SOCKET, socket.SO_SNDBUF


class Arrival(NamedTuple):
    """Bytes that arrive at a moment; none are the end of the connection."""

    at_s: float
    data: bytes


class VirtualNetwork:
    """The machines, by their addresses."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.send_room = dice.choice((300, 4096, 2**18))  # of a socket with `SO_SNDBUF`
        self.latency_s: dict[str, float] = {}  # of machines that are slow now
        self._usual_s = dice.choice((0.0, 0.01, 0.2))
        self.frozen: set[str] = set()  # programs that are stopped; their systems go on
        self.sockets: set[VirtualSocket] = set()  # open
        self._cut_since: dict[str, float] = {}
        self._listeners: dict[str, VirtualListener] = {}

    def cut(self, address: str) -> None:
        """No byte reaches the machine or leaves it."""
        self._cut_since.setdefault(address, trio.current_time())
        for one in self.sockets:
            one.note_cut()
        self.tell_all()

    def heal(self, address: str) -> None:
        self._cut_since.pop(address, None)
        for one in self.sockets:
            one.note_heal()
        self.tell_all()

    def switch_off(self, address: str) -> None:
        """The machine is gone without a word; what runs on it is the caller's to end."""
        self.cut(address)
        for one in [one for one in self.sockets if one.here == address]:
            one.vanish()

    def thaw(self, program: str) -> None:
        self.frozen.discard(program)
        self.tell_all()

    def tell_all(self) -> None:
        for one in (*self.sockets, *self._listeners.values()):
            one.tell()

    def cut_s(self, here: str, there: str) -> float:
        """Since when nothing passes between two machines; `NEVER`: it does."""
        return min(self._cut_since.get(here, NEVER), self._cut_since.get(there, NEVER))

    def delay_s(self, here: str, there: str) -> float:
        return max(self.latency_s.get(address, self._usual_s) for address in (here, there))

    def listen(self, address: str) -> "VirtualListener":
        listener = self._listeners[address] = VirtualListener(self, address)
        return listener

    def forget(self, address: str) -> None:
        del self._listeners[address]

    async def connect(self, address: str) -> "VirtualSocket":
        """Connect from the machine on which this task runs.

        Raises:
            OSError: nothing listens there, or nothing answers.
        """
        here = MACHINE.get()
        await trio.sleep(2 * self.delay_s(here, address))
        if self.cut_s(here, address) < NEVER:
            await trio.sleep(authentication.PROOF_S)
            raise TimeoutError("timed out")
        if address not in self._listeners:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "nothing listens there")
        near = VirtualSocket(self, here, address, PROGRAM.get())
        far = VirtualSocket(self, address, here, "front")
        near.peer, far.peer = far, near
        self._listeners[address].offer(far)
        return near

    async def dial(self, address: tuple[str, int], key: bytes) -> "VirtualSocket":
        """Do what `proof.dial` does, which blocks."""
        while PROGRAM.get() in self.frozen:  # noqa: ASYNC110  # nothing tells of it
            await trio.sleep(1.0)
        connection = await self.connect(address[0])
        try:
            authentication.tune(connection)  # type: ignore[arg-type]
            with trio.fail_after(authentication.PROOF_S):
                greeting = await connection.read_exactly(authentication.GREETING_BYTES)
            sent, wanted = authentication.answer(key, greeting)
            await connection.write_all(sent)
            with trio.fail_after(authentication.PROOF_S):
                verdict = await connection.read_exactly(authentication.VERDICT_BYTES)
            if verdict != wanted:
                raise authentication.WrongKeyError(f"{address[0]}:{address[1]} has a different key")
        except trio.TooSlowError:
            connection.close()
            raise TimeoutError("timed out") from None
        except BaseException:
            connection.close()
            raise
        return connection


class _Waited:
    """What tasks wait for: it tells them to look again."""

    is_vanished = False

    def __init__(self) -> None:
        self._changed = trio.Event()
        self.is_closed = self._is_closing = False

    def tell(self) -> None:
        self._changed.set()

    def notify_closing(self) -> None:
        self._is_closing = True
        self.tell()

    async def wait(self, is_ready: Callable[[], bool], next_s: Callable[[], float]) -> None:
        while True:
            if self.is_vanished:
                await trio.sleep_forever()  # the task is ended with its machine
            if self.is_closed or self._is_closing:
                raise anyio.ClosedResourceError
            if is_ready():
                await trio.lowlevel.checkpoint()
                return
            if self._changed.is_set():
                self._changed = trio.Event()
            with trio.move_on_at(next_s()):
                await self._changed.wait()


class VirtualListener(_Waited):
    def __init__(self, network: VirtualNetwork, address: str) -> None:
        super().__init__()
        self._network, self._address = network, address
        self._offered: deque[VirtualSocket] = deque()

    def offer(self, connection: "VirtualSocket") -> None:
        self._offered.append(connection)
        self.tell()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closed = True
        self._network.forget(self._address)
        for connection in self._offered:
            connection.close()

    def setblocking(self, flag: bool) -> None:
        assert not flag

    async def wait_readable(self) -> None:
        await self.wait(lambda: bool(self._offered), lambda: NEVER)

    def accept(self) -> "tuple[VirtualSocket, tuple[str, int]]":
        connection = self._offered.popleft()
        return connection, (connection.there, 1)


class VirtualSocket(_Waited):
    """One end of a connection, as a socket that does not block."""

    peer: "VirtualSocket"

    def __init__(self, network: VirtualNetwork, here: str, there: str, program: str) -> None:
        super().__init__()
        self._network, self.here, self.there, self._program = network, here, there, program
        self._arrivals: deque[Arrival] = deque()
        self._options: dict[tuple[int, int], int] = {}
        self._error: OSError | None = None
        self._reset_s = self._unanswered_s = NEVER
        self._has_shut = False
        network.sockets.add(self)

    def __repr__(self) -> str:
        return f"<VirtualSocket of {self._program}, {self.here} to {self.there}>"

    def setblocking(self, flag: bool) -> None:
        assert not flag

    def setsockopt(self, level: int, name: int, value: int) -> None:
        self._options[level, name] = value

    def getsockname(self) -> tuple[str, int]:
        return self.here, 1

    # What the system finds out

    def note_cut(self) -> None:
        cut_s = self._network.cut_s(self.here, self.there)
        on_its_way = any(arrival.at_s > cut_s for arrival in self.peer._arrivals)
        if cut_s < NEVER and on_its_way:
            self._unanswered_s = min(self._unanswered_s, trio.current_time())

    def note_heal(self) -> None:
        if self._network.cut_s(self.here, self.there) == NEVER:
            looks = self._options.get(KEEP_ALIVE) or self._unanswered_s < NEVER
            if self.peer.is_vanished and looks:  # what is asked again is answered with a reset
                self._reset_s = trio.current_time() + 5 * self._network.dice.random()
            self._unanswered_s = NEVER

    def vanish(self) -> None:
        """The machine that it was on is gone."""
        self.is_vanished = self.is_closed = True
        self._network.sockets.discard(self)
        self.tell()

    def _gives_up_s(self) -> float:
        """When the system says that the other side is gone: never, if it was not asked to look."""
        cut_s = self._network.cut_s(self.here, self.there)
        if cut_s == NEVER or not self._options.get(KEEP_ALIVE):
            return self._reset_s
        tcp = socket.IPPROTO_TCP
        idle_s, interval_s, count = (
            self._options.get((tcp, option), default)
            for option, default in (
                (socket.TCP_KEEPIDLE, 7200),
                (socket.TCP_KEEPINTVL, 75),
                (socket.TCP_KEEPCNT, 9),
            )
        )
        unanswered_s = self._options.get((tcp, socket.TCP_USER_TIMEOUT), 900_000) / 1000
        return min(
            cut_s + idle_s + count * interval_s, self._unanswered_s + unanswered_s, self._reset_s
        )

    def _check(self) -> None:
        if self.is_closed:
            raise OSError(errno.EBADF, "closed")
        if self._error is None and trio.current_time() >= self._gives_up_s():
            self._error = TimeoutError(errno.ETIMEDOUT, "the other side is silent")
        if self._error is not None:
            raise self._error

    @property
    def _has_error(self) -> bool:
        return self._error is not None or trio.current_time() >= self._gives_up_s()

    @property
    def _is_frozen(self) -> bool:
        return self._program in self._network.frozen

    # Reading

    def _is_readable(self) -> bool:
        if self._is_frozen:
            return False
        return self._has_error or self._has_shut or self._next_arrival_s() <= trio.current_time()

    def _next_arrival_s(self) -> float:
        if not self._arrivals:
            return NEVER
        at_s = self._arrivals[0].at_s
        return at_s if at_s <= self._network.cut_s(self.here, self.there) else NEVER

    async def wait_readable(self) -> None:
        await self.wait(self._is_readable, self._wakes_s)

    def _wakes_s(self) -> float:
        if self._is_frozen:
            return NEVER
        now = trio.current_time()
        return min(t if t > now else NEVER for t in (self._next_arrival_s(), self._gives_up_s()))

    def recv(self, size: int) -> bytes:
        self._check()
        if self._has_shut:
            return b""
        if not self._is_readable():
            raise BlockingIOError
        at_s, data = self._arrivals[0]
        if data:
            taken = min(size, self._network.dice.choice((1, 7, len(data), len(data))))
            self._arrivals.popleft()
            if data[taken:]:
                self._arrivals.appendleft(Arrival(at_s, data[taken:]))
            self.peer.tell()
            return data[:taken]
        return b""

    # Writing

    def _room(self) -> int:
        limit = self._network.send_room if SEND_BUFFER in self._options else 2**18
        return limit - sum(len(arrival.data) for arrival in self.peer._arrivals)

    async def wait_writable(self) -> None:
        await self.wait(
            lambda: not self._is_frozen and (self._has_error or self._room() > 0), self._wakes_s
        )

    def send(self, data: Any) -> int:
        self._check()
        now, cut_s = trio.current_time(), self._network.cut_s(self.here, self.there)
        if cut_s == NEVER and self.peer.is_vanished:
            self._reset_s = min(self._reset_s, now + self._network.delay_s(self.here, self.there))
        elif self._has_shut or (cut_s == NEVER and self.peer.is_closed):
            raise BrokenPipeError(errno.EPIPE, "the other side is closed")
        size = min(len(data), self._room())
        if size <= 0:
            raise BlockingIOError
        if cut_s < NEVER:
            self._unanswered_s = min(self._unanswered_s, now)
        self._deliver(bytes(data[:size]))
        return size

    def _deliver(self, data: bytes) -> None:
        at_s = trio.current_time() + self._network.delay_s(self.here, self.there)
        arrivals = self.peer._arrivals
        arrivals.append(Arrival(max(at_s, arrivals[-1].at_s if arrivals else 0.0), data))
        self.peer.tell()

    def shutdown(self, how: int) -> None:
        self._end()
        self._has_shut = True
        self.tell()

    def _end(self) -> None:
        if not self._has_shut and not self.is_closed:
            self._deliver(b"")

    def close(self) -> None:
        self._end()
        self.is_closed = True
        self._network.sockets.discard(self)
        self.tell()

    # For what blocks in reality

    async def read_exactly(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            await self.wait_readable()
            more = self.recv(num_bytes - len(data))
            if not more:
                raise ConnectionError("the other side has hung up")
            data += more
        return data

    async def write_all(self, data: bytes) -> None:
        while data:
            await self.wait_writable()
            data = data[self.send(data) :]
