"""The coordinator's listener, to which hosts on other machines and the workers that they started connect.

The engine's own machine coordinates: hosts dial in, so only one address needs to be configured.

Laws:
  * No byte of a connection is read as a message before both sides have proved that they have the same key.
  * Connections without a proof make room for each other, by address, so silent clients keep no host
    out.
  * A host is registered from its hello to the end of its connection, one at a time for each machine.
  * A worker's connection is accepted for an order that expects it, and closed otherwise.
"""

import contextlib
import logging
import socket
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskStatus

from trouper.actors.executor.workers.launching import Exit
from trouper.actors.executor.workers.machines.authentication import (
    PROOF_S,
    UnprovenConnections,
    WrongKeyError,
    tune,
)
from trouper.actors.executor.workers.machines.channel import (
    Accepted,
    Channel,
    ChannelError,
    End,
    Ended,
    Failed,
    GiveUp,
    HostHello,
    Listen,
    Listens,
    Message,
    Refused,
    Start,
    Started,
    WorkerHello,
    first_message,
    protocol,
)
from trouper.actors.runtime.event_loop import Future
from trouper.errors import DeviceStartError

logger = logging.getLogger(__name__)
# Connections with an unfinished proof: 104 bytes each, for `PROOF_S` seconds.
MAX_UNPROVEN = 64
# Seconds for a worker to connect, and for a host to answer.
CONNECT_S = 30.0


class HostGoneError(DeviceStartError):
    """The host of a machine disconnected before it answered.

    Its workers have ended too, so the device is lost and will be restarted.
    """


class HostLink:
    """The coordinator's connection to the host of one machine.

    Questions are numbered by order and rank, and each waits for its own answer.
    """

    def __init__(self, node: int, address: str, channel: Channel) -> None:
        self.node, self.address = node, address
        # Addresses of other machines refused with the same number; few, since they must have the key.
        self.refused: set[str] = set()
        self._channel = channel
        # Open questions by kind, order and rank; at most one of a kind for each worker.
        self._asked: dict[tuple[str, int, int], Future[object]] = {}
        self._is_gone = False

    def __repr__(self) -> str:
        return f"<HostLink of node {self.node} at {self.address}, {len(self._asked)} open>"

    async def prepare(self, order: int) -> tuple[str, int]:
        """Ask the host to listen for stage links. Returns the address.

        Raises:
            DeviceStartError: the host cannot listen, does not answer, or has disconnected.
        """
        port = await self._answer_in_time(Listen(order), order)
        assert isinstance(port, int)
        return self.address, port

    async def start(self, start: Start) -> None:
        """Ask the host to start workers.

        Raises:
            DeviceStartError: the host cannot start them, does not answer, or has disconnected. After a refusal or a
                lost host no worker remains.
        """
        await self._answer_in_time(start, start.order)

    def give_up(self, order: int) -> None:
        """Ask the host to end everything that belongs to an order, now or later, without waiting."""
        self._send(GiveUp(order))

    async def end(self, order: int, rank: int, grace_s: float) -> Exit:
        """Ask the host to end a worker, and return how it ended. Workers of a lost host ended with it."""
        try:
            found = await self._ask(End(order, rank, grace_s), ("end", order, rank))
        except HostGoneError as error:
            return Exit(None, stderr=(str(error),), was_machine_lost=True)
        assert isinstance(found, Exit)
        return found

    async def _answer_in_time(self, message: Message, order: int) -> object:
        with anyio.move_on_after(CONNECT_S):
            return await self._ask(message, ("start", order, 0))
        raise DeviceStartError(f"node {self.node} did not answer within {CONNECT_S:g} s")

    async def _ask(self, message: Message, key: tuple[str, int, int]) -> object:
        self._asked[key] = future = Future()
        try:
            if self._is_gone:
                self._fail(future)
            else:
                self._send(message)
            return await future.wait()
        finally:
            if self._asked.get(key) is future:
                del self._asked[key]

    def _send(self, message: Message) -> None:
        """Send a message. A failure closes the connection, and its reader then reports the loss of the host."""
        try:
            self._channel.send(message)
        except OSError:
            self._channel.close()

    def note(self, message: Message) -> None:
        """Handle a message of the host: settle the question that it answers.

        Answers to questions that nothing waits for are ignored. Each answer settles one.
        """
        match message:
            case Listens(order, port):
                self._settle(("start", order, 0), port)
            case Started(order):
                self._settle(("start", order, 0), None)
            case Failed(order, text):
                if (future := self._asked.get(("start", order, 0))) is not None:
                    future.fail(DeviceStartError(f"node {self.node}: {text}"))
            case Ended(order, rank, ended):
                self._settle(("end", order, rank), ended)
            case _:
                logger.warning("node %d sent an unexpected %s", self.node, type(message).__name__)

    def lose(self) -> None:
        """Fail all open questions, because the host has disconnected.

        Its workers end without it, so nothing needs to be cleaned up there.
        """
        self._is_gone = True
        for future in self._asked.values():
            self._fail(future)

    def _settle(self, key: tuple[str, int, int], value: object) -> None:
        if (future := self._asked.get(key)) is not None:
            future.set(value)

    def _fail(self, future: Future[object]) -> None:
        future.fail(HostGoneError(f"node {self.node} at {self.address} is gone"))


class Coordinator:
    """Listener for other machines, and the registry of their hosts.

    Args:
        listener: a bound, listening socket; it is closed at the end.
        num_nodes: number of machines, including this one.
        num_workers: workers on each machine.
    """

    def __init__(
        self, listener: socket.socket, key: bytes, num_nodes: int = 1, num_workers: int = 1
    ) -> None:
        self._listener, self._key = listener, key
        self._num_nodes, self._num_workers = num_nodes, num_workers
        self._hosts: dict[int, HostLink] = {}
        # One future for each replica that waits for a host.
        self._arrived: deque[Future[None]] = deque()
        self._expected: dict[tuple[int, int], Future[socket.socket]] = {}
        self._num_orders = 0
        self._strangers = UnprovenConnections(MAX_UNPROVEN)

    def __repr__(self) -> str:
        return f"<Coordinator: {len(self._hosts)} hosts, {len(self._expected)} workers expected>"

    async def listen(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Accept connections until cancelled.

        Each must prove that it has the cluster key before anything of it is read.
        """
        with self._listener:
            self._listener.setblocking(False)
            async with anyio.create_task_group() as connections:
                task_status.started()
                while True:
                    await anyio.wait_readable(self._listener)
                    try:
                        connection, peer = self._listener.accept()
                    except OSError:
                        # There are no free descriptors, or the client has disconnected again.
                        await anyio.sleep(0.05)
                        continue
                    if not self._strangers.is_welcome(peer[0], anyio.current_time()):
                        connection.close()
                        continue
                    proving = anyio.CancelScope()
                    out = self._strangers.enter(proving, peer[0])
                    if isinstance(out, anyio.CancelScope):
                        out.cancel()
                    connections.start_soon(self._serve, connection, peer[0], proving)

    def next_order(self) -> int:
        """Return a new order number.

        Numbers are never reused, so late messages of an old order cannot be confused.
        """
        self._num_orders += 1
        return self._num_orders

    async def host(self, node: int) -> HostLink:
        """Wait until the host of a machine is connected, and return its link.

        It waits without a limit, because an operator may start the machines in any order.
        """
        if node not in self._hosts:
            logger.warning("waiting for node %d of %d", node, self._num_nodes)
        while node not in self._hosts:
            arrived: Future[None] = Future()
            self._arrived.append(arrived)
            await arrived.wait()
        return self._hosts[node]

    def expect(self, order: int, rank: int) -> None:
        """Accept the connection of a worker when it arrives; `worker` returns it.

        Connections of unexpected workers are closed.
        """
        self._expected[order, rank] = Future()

    async def worker(self, order: int, rank: int, name: str) -> socket.socket:
        """Wait for the connection of an expected worker.

        Its name is used in messages.  The caller owns the connection.

        Raises:
            DeviceStartError: the worker does not connect in time.
        """
        with anyio.move_on_after(CONNECT_S):
            connection = await self._expected[order, rank].wait()
            del self._expected[order, rank]
            return connection
        raise DeviceStartError(f"{name} did not connect within {CONNECT_S:g} s")

    def forget(self, order: int) -> None:
        """Stop expecting workers of this order, and close unfetched connections."""
        for key in [key for key in self._expected if key[0] == order]:
            future = self._expected.pop(key)
            if future.is_done:
                future.result().close()

    # Connections

    async def _serve(
        self, connection: socket.socket, address: str, proving: anyio.CancelScope
    ) -> None:
        """Authenticate a connection within the scope `proving`, then handle its first message."""
        connection.setblocking(False)
        channel = Channel(connection)
        hello: Message | None = None
        try:
            tune(connection)
            proving.deadline = anyio.current_time() + PROOF_S
            with proving:
                hello = await self._first_message(channel)
                self._strangers.note_proof(address)
            if hello is None:
                self._log_failure(address, "it sent nothing in time")
        except WrongKeyError:
            self._log_failure(address, "refused: it has a different TROUPER_CLUSTER_KEY")
        except (OSError, ChannelError) as error:
            self._log_failure(address, str(error))
        finally:
            self._strangers.leave(proving)
            if hello is None:
                channel.close()
        match hello:
            case None:
                pass
            case WorkerHello(order, rank):
                self._take_worker((order, rank), channel)
            case HostHello():
                await self._serve_host(hello, channel, address)
            case _:
                channel.close()

    def _log_failure(self, address: str, words: str) -> None:
        num_failures = self._strangers.note_failure(address, anyio.current_time())
        if num_failures is not None:
            more = (
                f" ({num_failures} connections since the last log line)" if num_failures > 1 else ""
            )
            logger.warning("connection from %s: %s%s", address, words, more)

    async def _first_message(self, channel: Channel) -> Message:
        """Exchange the first messages on a new connection; see `first_message`.

        Raises:
            OSError: the other side has hung up.
            WrongKeyError: it has another key.
            ChannelError: the received bytes are not a message.
        """
        talk = first_message(self._key)
        data, num_wanted = next(talk)
        while True:
            if data:
                channel.send_bytes(data)
            answer = await channel.receive_exactly(num_wanted)
            try:
                data, num_wanted = talk.send(answer)
            except StopIteration as end:
                return end.value

    def _take_worker(self, key: tuple[int, int], channel: Channel) -> None:
        future = self._expected.get(key)
        if future is None or future.is_done:
            channel.close()
        else:
            future.set(channel.detach())

    async def _serve_host(self, hello: HostHello, channel: Channel, address: str) -> None:
        """Read the messages of a host until it disconnects."""
        if (refusal := self._refusal(hello)) is not None:
            self._log_refusal(refusal, hello.node, address)
            with contextlib.suppress(OSError):
                channel.send(refusal)
            channel.close()
            return
        host = self._hosts[hello.node] = HostLink(hello.node, address, channel)
        logger.warning("node %d of %d is connected from %s", hello.node, self._num_nodes, address)
        while self._arrived:
            self._arrived.popleft().set(None)
        try:
            with contextlib.suppress(OSError):
                channel.send(Accepted())
            while (message := await channel.receive()) is not None:
                host.note(message)
        except ChannelError as error:
            logger.warning("node %d: %s", hello.node, error)
        finally:
            del self._hosts[hello.node]
            host.lose()
            channel.close()
            logger.warning("node %d of %d is gone", hello.node, self._num_nodes)

    def _log_refusal(self, refusal: Refused, node: int, address: str) -> None:
        """Log a refusal, once for a host that retries."""
        told = set[str]() if refusal.is_final else self._hosts[node].refused
        if address not in told:
            told.add(address)
            logger.warning("%s: %s", address, refusal.message)

    def _refusal(self, hello: HostHello) -> Refused | None:
        if hello.protocol != protocol():
            return Refused("it runs a different version of trouper", True)
        if hello.num_nodes != self._num_nodes or not 0 < hello.node < self._num_nodes:
            words = f"node {hello.node} of {hello.num_nodes}, but the coordinator expects {self._num_nodes} nodes"
            return Refused(words, True)
        if hello.num_workers != self._num_workers:
            words = f"node {hello.node} has {hello.num_workers} workers by its -pp, -tp and -dp, but the coordinator expects {self._num_workers}"
            return Refused(words, True)
        if hello.node in self._hosts:
            return Refused(f"node {hello.node} is already connected", False)
        return None


@asynccontextmanager
async def listening(coordinator: Coordinator) -> AsyncGenerator[None]:
    """Accept connections while the block runs. An exception of the block is raised as it is, not in an exception
    group.
    """
    problem: Exception | None = None
    async with anyio.create_task_group() as tasks:
        await tasks.start(coordinator.listen, name="coordinator")
        try:
            yield
        except Exception as error:
            problem = error
        tasks.cancel_scope.cancel()
    if problem is not None:
        raise problem
