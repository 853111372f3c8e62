"""The program of a machine without an engine: it connects to a coordinator, starts the workers of its orders,
and ends them with it.

A host keeps no state between coordinators. When the connection ends, everything started for it is killed, so
a new coordinator finds a clean machine.
"""

import contextlib
import logging
import socket
from collections.abc import Callable
from functools import partial

import anyio
import anyio.to_thread

from trouper.actors.executor.workers.launching import MODULE, Exit
from trouper.actors.executor.workers.machines.authentication import WrongKeyError, dial
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
    protocol,
    shorten,
)
from trouper.actors.executor.workers.machines.worker_group import WorkerGroup
from trouper.actors.executor.workers.model_files import MachineFacts
from trouper.config.parallel import CLUSTER_KEY, NodesConfig
from trouper.errors import DeviceStartError, TrouperValidationError, invalid

logger = logging.getLogger(__name__)
# Seconds between two attempts to reach the coordinator.
DIAL_AGAIN_S = 1.0
# Groups of workers on this machine at a time, one for each replica.
MAX_GROUPS = 64
# Characters of an error sent to the coordinator.
MAX_WORDS = 2000


class Host:
    """One of several machines, other than the coordinator's.

    Args:
        machine: paths of the model on this machine.
    """

    def __init__(
        self, nodes: NodesConfig, key: bytes, machine: MachineFacts, module: str = MODULE
    ) -> None:
        self._nodes, self._key = nodes, key
        self._machine, self._module = machine, module
        self._coordinator = nodes.address, nodes.port
        # The last logged refusal, reset when a coordinator accepts this machine.
        self._refusal = ""

    def __repr__(self) -> str:
        return f"<Host, node {self._nodes.rank} of {self._nodes.num_nodes}>"

    async def serve(self) -> None:
        """Serve one coordinator after another until cancelled.

        Raises:
            TrouperValidationError: the coordinator has a different key, version or number of machines.
        """
        where = f"{self._coordinator[0]}:{self._coordinator[1]}"
        logger.warning("node %d waits for the coordinator at %s", self._nodes.rank, where)
        while True:
            connection = await self._dial()
            if connection is not None:
                await self._serve(connection)
            await anyio.sleep(DIAL_AGAIN_S)

    async def _dial(self) -> socket.socket | None:
        """Connect to the coordinator. Returns None if it cannot be reached.

        Raises:
            TrouperValidationError: it has a different key.
        """
        try:
            return await anyio.to_thread.run_sync(dial, self._coordinator, self._key)
        except OSError:
            return None
        except WrongKeyError as error:
            raise TrouperValidationError(
                f"{CLUSTER_KEY}: the coordinator at {error}", parameter=CLUSTER_KEY
            ) from None

    async def _serve(self, connection: socket.socket) -> None:
        """Follow the orders of one coordinator until it disconnects. Nothing that it started survives."""
        connection.setblocking(False)
        channel = Channel(connection)
        address = connection.getsockname()[0]
        make_group = partial(
            WorkerGroup,
            self._coordinator,
            address,
            self._key,
            self._machine.as_argument(),
            self._module,
        )
        orders, nodes = Orders(channel, make_group), self._nodes
        try:
            channel.send(
                HostHello(protocol(), nodes.rank, nodes.num_nodes, self._machine.num_workers)
            )
            match await channel.receive():
                case Accepted():
                    self._refusal = ""
                    logger.warning(
                        "node %d of %d serves the coordinator", nodes.rank, nodes.num_nodes
                    )
                    await orders.follow()
                    logger.warning(
                        "the coordinator is gone; its workers on this machine were ended"
                    )
                case Refused(message, is_final):
                    self._note_refusal(message, is_final)
                case None:
                    pass
                case other:
                    raise ChannelError(f"unexpected message {type(other).__name__}")
        except (OSError, ChannelError) as error:
            logger.warning("the coordinator: %s", error)
        finally:
            # Bounded, since killing processes takes no time.
            with anyio.CancelScope(shield=True):
                await orders.end_all()
            channel.close()

    def _note_refusal(self, message: str, is_final: bool) -> None:
        """Log a refusal once until it changes.

        Raises:
            TrouperValidationError: the refusal is final.
        """
        if is_final:
            raise invalid("node_rank", f"the coordinator refuses this machine: {message}")
        if message != self._refusal:
            self._refusal = message
            logger.warning("the coordinator refuses this node for now: %s", message)


class Orders:
    """The orders of one coordinator and the workers that they started.

    Args:
        channel: connection to the coordinator, closed by the caller.
        make_group: creates an empty group of workers.
    """

    def __init__(self, channel: Channel, make_group: Callable[[], WorkerGroup]) -> None:
        self._channel, self._make_group = channel, make_group
        # Groups by order, at most `MAX_GROUPS`.
        self._groups: dict[int, WorkerGroup] = {}
        # Orders with groups being connected in a thread.
        self._starting: set[int] = set()

    def __repr__(self) -> str:
        return f"<Orders: {self._groups}, {len(self._starting)} start>"

    async def follow(self) -> None:
        """Follow orders until the coordinator disconnects or sends an invalid message.

        Workers of unfinished orders are ended by the caller.
        """
        async with anyio.create_task_group() as tasks:
            try:
                while (message := await self._channel.receive()) is not None:
                    match message:
                        case Listen(order):
                            self._prepare(order)
                        case Start():
                            tasks.start_soon(self._start, message)
                        case End():
                            tasks.start_soon(self._end, message)
                        case GiveUp(order):
                            tasks.start_soon(self._give_up, order)
                        case _:
                            raise ChannelError(f"an unexpected {type(message).__name__}")
            except ChannelError as error:  # here, where it is in no group of errors
                logger.warning("the coordinator sent %s", error)
            tasks.cancel_scope.cancel()

    async def end_all(self) -> None:
        """End all workers of all orders, and close all listeners for links.

        Used when the coordinator has disconnected, since nothing would end them later.
        """
        for group in self._groups.values():
            await anyio.to_thread.run_sync(group.kill)

    def _prepare(self, order: int) -> None:
        for number in [n for n, group in self._groups.items() if group.is_over]:
            del self._groups[number]
        group = self._make_group()
        try:
            if len(self._groups) >= MAX_GROUPS:
                raise DeviceStartError(
                    f"this machine already runs workers of {MAX_GROUPS} replicas (maximum)"
                )
            port = group.listen()
        except (OSError, DeviceStartError) as error:
            self._tell(Failed(order, str(error)))
        else:
            self._groups[order] = group
            self._tell(Listens(order, port))

    async def _start(self, start: Start) -> None:
        order, group = start.order, self._groups.get(start.order)
        if group is None:
            self._tell(Failed(order, "the order was not prepared on this machine"))
            return
        self._starting.add(order)
        problem: str | None = "the start was cancelled"
        try:
            await anyio.to_thread.run_sync(group.connect, start)
            if order not in self._groups:
                raise DeviceStartError("the order was cancelled")
            # In this thread, which lives as long as the host.
            group.spawn()
            problem = None
        # Any error fails this order only.
        except Exception as error:
            if not isinstance(error, DeviceStartError):
                logger.exception("order %d", order)
            problem = str(error)[:MAX_WORDS]
        finally:
            self._starting.discard(order)
            if problem is not None:
                self._groups.pop(order, None)
                # Bounded, though the system may take a moment to kill a process.
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(group.kill)
        self._tell(Started(order) if problem is None else Failed(order, problem))

    async def _end(self, end: End) -> None:
        ended, group = Exit(None), self._groups.get(end.order)
        if group is not None:
            # Not the threads in which other groups connect.
            limiter = anyio.CapacityLimiter(1)
            ended = await anyio.to_thread.run_sync(
                group.reap, end.rank, end.grace_s, limiter=limiter
            )
        self._tell(Ended(end.order, end.rank, shorten(ended)))

    async def _give_up(self, order: int) -> None:
        group = self._groups.get(order)
        if group is not None and order not in self._starting:
            await anyio.to_thread.run_sync(group.kill)
        # A start in progress ends when it finds its group removed.
        self._groups.pop(order, None)

    def _tell(self, message: Message) -> None:
        """Answer the coordinator. If it has disconnected, the receiving task finds the end of the connection."""
        with contextlib.suppress(OSError):
            self._channel.send(message)
