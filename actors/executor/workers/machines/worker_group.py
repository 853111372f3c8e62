"""The workers of one order on one machine: their links, processes and end.

`WorkerGroup` starts the workers. Those on one machine share rings. Links to other machines are TCP connections that
this module opens or accepts (`LinkAcceptor`) and the workers inherit, so workers need neither key nor address. Handshakes run
concurrently, so a silent or deliberately slow client delays no other. `RemotePeer` is a worker on another machine as the engine sees it.

The code is synchronous because both our own host and an actor of Ray use it, and because it runs in the thread that connects
a group.
"""

import selectors
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from time import monotonic

import anyio

from trouper.actors.executor.worker_links import close_files, create_shared_files, link_ends
from trouper.actors.executor.workers.launching import (
    CLOSED,
    MODULE,
    READ_BYTES,
    SEND_BUFFER,
    Exit,
    WorkerProcess,
)
from trouper.actors.executor.workers.machines.authentication import (
    PROOF_S,
    UnprovenConnections,
    WrongKeyError,
    dial,
    serve_at,
    tune,
)
from trouper.actors.executor.workers.machines.channel import (
    ChannelError,
    LinkHello,
    Message,
    Start,
    WorkerHello,
    encode,
    first_message,
)
from trouper.actors.executor.workers.wire import MAX_FRAME, read_inline
from trouper.errors import DeviceStartError

# Seconds for all other machines to dial.
LINKS_S = 2 * PROOF_S
MAX_HEARD = (
    64  # connections that are heard at once, with at most 1 KiB each; beyond it one makes room
)


class LinkAcceptor:
    """Accepts the links of one order that other machines dial.

    Args:
        listener: the listening socket, which the caller closes.
        awaited: the names of the links.
    """

    def __init__(
        self, listener: socket.socket, key: bytes, order: int, awaited: Collection[str]
    ) -> None:
        self._listener, self._key, self._order = listener, key, order
        self._awaited = set(awaited)
        self._heard: dict[socket.socket, PendingHello] = {}
        self._strangers = UnprovenConnections(MAX_HEARD)
        self._found: dict[str, socket.socket] = {}
        self._selector = selectors.DefaultSelector()

    def __repr__(self) -> str:
        return f"<LinkAcceptor: {len(self._heard)} heard, {sorted(self._awaited)} awaited>"

    def accept_all(self) -> dict[str, int]:
        """Wait for all links, for at most `LINKS_S` seconds.

        Returns their descriptors by name.  Each must prove that it has the cluster key.

        Raises:
            OSError: a link was not dialled in time.
        """
        end_s = monotonic() + LINKS_S
        self._listener.setblocking(False)
        try:
            self._selector.register(self._listener, selectors.EVENT_READ)
            while self._awaited:
                if (left_s := end_s - monotonic()) <= 0:
                    names = ", ".join(sorted(self._awaited))
                    raise TimeoutError(f"links not dialled within {LINKS_S:g} s: {names}")
                for ready, _ in self._selector.select(left_s):
                    if ready.data is None:
                        self._accept()
                    elif ready.data.connection in self._heard:
                        self._hear(ready.data)
            return {name: link.detach() for name, link in self._found.items()}
        finally:
            self._selector.close()
            for connection in (*self._heard, *self._found.values()):
                connection.close()

    def _accept(self) -> None:
        try:
            connection, peer = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        try:
            hearing = PendingHello(connection, self._key)
        except OSError:
            connection.close()
            return
        if isinstance(out := self._strangers.enter(connection, peer[0]), socket.socket):
            self._stop_hearing(out).close()
        self._selector.register(connection, selectors.EVENT_READ, hearing)
        self._heard[connection] = hearing

    def _hear(self, hearing: "PendingHello") -> None:
        try:
            hello = hearing.read()
        except BlockingIOError:
            return
        except (OSError, ChannelError, WrongKeyError):
            self._stop_hearing(hearing.connection).close()
            return
        if hello is None:
            return
        link = self._stop_hearing(hearing.connection)
        match hello:
            case LinkHello(self._order, name) if name in self._awaited:
                self._awaited.remove(name)
                self._found[name] = link
            case _:
                link.close()

    def _stop_hearing(self, connection: socket.socket) -> socket.socket:
        del self._heard[connection]
        self._strangers.leave(connection)
        self._selector.unregister(connection)
        return connection


class PendingHello:
    """A connection with an incomplete handshake or first message.

    Several are read at the same time, so a slow client delays no other. It is dropped after a time limit.
    """

    def __init__(self, connection: socket.socket, key: bytes) -> None:
        connection.setblocking(False)
        tune(connection)
        self.connection = connection
        self._talk = first_message(key)
        self._data = b""
        self._num_wanted = self._say(*next(self._talk))

    def __repr__(self) -> str:
        return f"<PendingHello of {len(self._data)} of {self._num_wanted} bytes>"

    def read(self) -> Message | None:
        """Read the received bytes. Returns the first message when it is complete, else None.

        Raises:
            OSError: the other side has hung up.
            WrongKeyError: it has a different key.
            ChannelError: its bytes are not a message.
        """
        more = self.connection.recv(self._num_wanted - len(self._data))
        if not more:
            raise ConnectionError("the other side has hung up")
        self._data += more
        if len(self._data) < self._num_wanted:
            return None
        data, self._data = self._data, b""
        try:
            self._num_wanted = self._say(*self._talk.send(data))
        except StopIteration as end:
            return end.value
        return None

    def _say(self, data: bytes, num_wanted: int) -> int:
        """Send bytes, for which a new connection has room. Returns the number of bytes to read next."""
        if data:
            self.connection.send(data)
        if num_wanted == 0:
            next(self._talk)
        return num_wanted


# Seconds to wait for the report that a worker has ended, beyond its grace period.
END_S = 5.0
# Frames queued for room in the system's buffer: plans in flight (stages + 1, at most 65), three calls and a
# vocabulary. Restoring 256 adapters adds one at a time, since each is sent after the previous one is loaded.
MAX_WAITING = 128


class RemotePeer:
    """`Peer` of a worker on another machine. Frames that do not fit into the system's buffer are queued and sent
    by the task that receives.

    Args:
        connection: socket to the worker; the peer closes it.
        end: asks the worker's machine to end it.
        name: of the worker, for messages.
        where: location of the worker, for messages.
    """

    # TCP carries no descriptors, so every payload is inline.
    max_inline = MAX_FRAME
    pid = 0

    def __init__(
        self,
        connection: socket.socket,
        end: Callable[[float], Awaitable[Exit]],
        name: str,
        where: str = "",
    ) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        self._socket = connection
        self._end, self._name, self.where = end, name, where
        self._waiting: deque[memoryview] = deque()
        # Surrounds a wait for bytes, which `send` cancels when the wait must include room for queued frames.
        self._reading = anyio.CancelScope()
        self._exit: Exit | None = None

    def __repr__(self) -> str:
        return f"<RemotePeer: {self._name}, {len(self._waiting)} frames wait>"

    def send(self, data: bytes, file: int | None) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self._socket.shutdown(socket.SHUT_RDWR)
            raise BlockingIOError("the worker does not read")
        whole = data if file is None else read_inline(data, file)
        self._waiting.append(memoryview(whole))
        if len(self._waiting) == 1 and not self._send_some():
            self._reading.cancel()

    async def receive(self) -> tuple[bytes, list[int]]:
        while True:
            try:
                data = self._socket.recv(READ_BYTES)
            except BlockingIOError:
                await self._wait()
            except OSError:
                return CLOSED
            else:
                return data, []

    async def end(self, grace_s: float) -> Exit:
        if self._exit is not None:
            return self._exit
        found = Exit(None, stderr=(f"{self._name} does not answer",), was_machine_lost=True)
        # Bounded by the grace period and `END_S`.
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(grace_s):
                await self._flush()
            with anyio.move_on_after(grace_s + END_S):
                found = await self._end(grace_s)
        self._exit = found
        anyio.notify_closing(self._socket)
        self._socket.close()
        return found

    async def _flush(self) -> None:
        """Send all queued frames, if the worker still reads."""
        try:
            while not self._send_some():
                await anyio.wait_writable(self._socket)
        except OSError:
            pass

    def _send_some(self) -> bool:
        """Send as many queued bytes as the system accepts. Returns whether the queue is empty.

        Raises:
            OSError: the worker has ended.
        """
        while self._waiting:
            try:
                num_sent = self._socket.send(self._waiting[0])
            except BlockingIOError:
                return False
            if num_sent < len(self._waiting[0]):
                self._waiting[0] = self._waiting[0][num_sent:]
            else:
                self._waiting.popleft()
        return True

    async def _wait(self) -> None:
        """Wait for bytes to read, or, with queued frames, for room to send them."""
        if not self._waiting:
            with anyio.CancelScope() as self._reading:
                await anyio.wait_readable(self._socket)
            return

        async def wait_readable() -> None:
            await anyio.wait_readable(self._socket)
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait_readable)
            await anyio.wait_writable(self._socket)
            tasks.cancel_scope.cancel()
        try:
            self._send_some()
        except OSError:
            # The next read finds the end of the connection.
            self._waiting.clear()


# Connections waiting to be accepted: the links of one group.
BACKLOG = 64


class WorkerGroup:
    """The workers of one order on this machine. Call `listen`, `connect` and `spawn` in this order, then `reap`
    for each worker.

    Args:
        coordinator: address and port of the coordinator.
        address: address at which other machines reach this one.
        machine: encoded `MachineFacts` for the workers.
    """

    def __init__(
        self,
        coordinator: tuple[str, int],
        address: str,
        key: bytes,
        machine: bytes = b"",
        module: str = MODULE,
    ) -> None:
        self._coordinator, self._key = coordinator, key
        self._machine, self._module = machine, module
        self._address = address
        self._listener: socket.socket | None = None
        self._controls: list[socket.socket] = []
        self._files: list[tuple[int, ...]] = []
        self._ranks: tuple[int, ...] = ()
        self._first_number = 0
        # Processes by rank.
        self.processes: dict[int, WorkerProcess] = {}

    def __repr__(self) -> str:
        return f"<WorkerGroup of {list(self.processes)}>"

    def listen(self) -> int:
        """Listen for the links of other machines. Returns the port.

        Raises:
            OSError: the address cannot be bound.
        """
        self._listener = serve_at((self._address, 0), BACKLOG)
        return self._listener.getsockname()[1]

    def connect(self, start: Start) -> None:
        """Connect the workers to the coordinator and to their neighbours. Blocks.

        Raises:
            DeviceStartError: the coordinator or another machine does not answer, or there is no memory for
                rings.
        """
        try:
            for rank in start.ranks:
                control = dial(self._coordinator, self._key)
                self._controls.append(control)
                control.sendall(encode(WorkerHello(start.order, rank)))
                control.settimeout(None)
            self._files = self.connect_links(start)
        except (OSError, WrongKeyError) as error:
            raise DeviceStartError(
                f"cannot connect the workers of {self._address}: {error}"
            ) from None
        self._ranks, self._first_number = start.ranks, start.first_number

    def connect_links(self, start: Start) -> list[tuple[int, ...]]:
        """Create the rings between ranks on this machine and their connections to other machines. Blocks.

        Returns:
            The descriptors that each rank inherits, which the caller closes.

        Raises:
            OSError: another machine does not answer.
            DeviceStartError: there is no memory for rings.
        """
        if start.sizes is None:
            return [() for _ in start.ranks]
        made: dict[str, int] = {}
        try:
            for name, address in start.dials.items():
                with dial(address, self._key) as link:
                    link.sendall(encode(LinkHello(start.order, name)))
                    made[name] = link.detach()
            awaited = outer_links(start) - made.keys()
            if awaited:
                assert self._listener is not None, (
                    "the coordinator has us start before it has us listen"
                )
                made |= LinkAcceptor(self._listener, self._key, start.order, awaited).accept_all()
            return create_shared_files(start.sizes, start.ranks, made)
        except BaseException:
            close_files([tuple(made.values())])
            raise

    def spawn(self) -> None:
        """Start the processes, in a thread that lives as long as they do.

        Raises:
            DeviceStartError: the system refused.
        """
        try:
            for rank, control, files in zip(self._ranks, self._controls, self._files, strict=True):
                name = f"worker {self._first_number + rank}"
                self.processes[rank] = WorkerProcess(
                    control, name, self._module, files=files, machine=self._machine
                )
        finally:
            self.close()

    def reap(self, rank: int, grace_s: float) -> Exit:
        """Wait up to `grace_s` seconds for a worker to exit, then kill it. Blocks."""
        process = self.processes.get(rank)
        return Exit(None) if process is None else process.reap(grace_s)

    @property
    def is_over(self) -> bool:
        """Whether the workers have run and all have ended.

        The listeners and descriptors of the group can then be closed.
        """
        return bool(self.processes) and all(p.is_reaped for p in self.processes.values())

    def kill(self) -> None:
        """Kill all workers, and close everything of the group.

        Blocks until the system has ended them.  Idempotent.
        """
        for process in self.processes.values():
            process.reap(0.0)
        self.close()

    def close(self) -> None:
        """Close listener, connections and descriptors that the workers inherited or will not inherit.
        Idempotent.
        """
        if self._listener is not None:
            self._listener.close()
        for control in self._controls:
            control.close()
        close_files(self._files)
        self._listener, self._controls, self._files = None, [], []


def outer_links(start: Start) -> set[str]:
    """Return the names of the links between this group and ranks on other machines."""
    if start.sizes is None:
        return set()
    links = link_ends(start.sizes)
    return {x.name for x in links if (x.sender in start.ranks) != (x.receiver in start.ranks)}
