"""A machine without an engine: it waits for a front, starts the workers that it is told to, and ends them with it."""

import contextlib
import logging
import socket
from collections.abc import Callable
from functools import partial

import anyio
import anyio.to_thread

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
from trouper.actors.executor.workers.worker_process import MODULE, Exit
from trouper.config.parallel import CLUSTER_KEY, NodesConfig
from trouper.errors import DeviceStartError, TrouperValidationError, invalid

logger = logging.getLogger(__name__)
DIAL_AGAIN_S = 1.0  # between two attempts to reach the front
MAX_GROUPS = 64  # crews that have workers here at once: one for each replica
MAX_WORDS = 2000  # of an error that is told to the front


class Host:
    """One machine of several that is not the front's.

    Args:
        machine: its own paths of the model.
    """

    def __init__(
        self, nodes: NodesConfig, key: bytes, machine: MachineFacts, module: str = MODULE
    ) -> None:
        self._nodes, self._key = nodes, key
        self._machine, self._module = machine, module
        self._front = nodes.address, nodes.port
        self._refusal = ""  # that was logged, since a front took this machine last

    def __repr__(self) -> str:
        return f"<Host, node {self._nodes.rank} of {self._nodes.num_nodes}>"

    async def serve(self) -> None:
        """Serve one front after another, until it is cancelled.

        Raises:
            TrouperValidationError: the front has another key, another version or other numbers of machines.
        """
        where = f"{self._front[0]}:{self._front[1]}"
        logger.warning("node %d waits for the front at %s", self._nodes.rank, where)
        while True:
            connection = await self._dial()
            if connection is not None:
                await self._serve(connection)
            await anyio.sleep(DIAL_AGAIN_S)

    async def _dial(self) -> socket.socket | None:
        """Connect with the front; None: it is not there.

        Raises:
            TrouperValidationError: it has another key.
        """
        try:
            return await anyio.to_thread.run_sync(dial, self._front, self._key)
        except OSError:
            return None
        except WrongKeyError as error:
            raise TrouperValidationError(
                f"{CLUSTER_KEY}: the front at {error}", parameter=CLUSTER_KEY
            ) from None

    async def _serve(self, connection: socket.socket) -> None:
        """Follow one front's orders until it is gone; nothing of them outlives it."""
        connection.setblocking(False)
        channel = Channel(connection)
        address = connection.getsockname()[0]
        make_group = partial(
            WorkerGroup, self._front, address, self._key, self._machine.as_argument(), self._module
        )
        orders, nodes = Orders(channel, make_group), self._nodes
        try:
            channel.send(
                HostHello(protocol(), nodes.rank, nodes.num_nodes, self._machine.num_workers)
            )
            match await channel.receive():
                case Accepted():
                    self._refusal = ""
                    logger.warning("node %d of %d serves the front", nodes.rank, nodes.num_nodes)
                    await orders.follow()
                    logger.warning("the front is gone, and what it had started here")
                case Refused(message, is_final):
                    self._note_refusal(message, is_final)
                case None:  # it is gone again
                    pass
                case other:
                    raise ChannelError(f"a {type(other).__name__}")
        except (OSError, ChannelError) as error:
            logger.warning("the front: %s", error)
        finally:
            with anyio.CancelScope(shield=True):  # bounded: a kill takes no time
                await orders.end_all()
            channel.close()

    def _note_refusal(self, message: str, is_final: bool) -> None:
        """Log why the front does not take this machine, once until that changes.

        Raises:
            TrouperValidationError: it never will.
        """
        if is_final:
            raise invalid("node_rank", f"the front refuses it: {message}")
        if message != self._refusal:
            self._refusal = message
            logger.warning("the front refuses this node for now: %s", message)


class Orders:
    """The orders of one front, and the workers that they have started.

    Args:
        channel: to the front, which others close.
        make_group: makes a group of workers.
    """

    def __init__(self, channel: Channel, make_group: Callable[[], WorkerGroup]) -> None:
        self._channel, self._make_group = channel, make_group
        self._groups: dict[int, WorkerGroup] = {}  # by order, at most `MAX_GROUPS`
        self._starting: set[int] = set()  # orders whose groups a thread connects

    def __repr__(self) -> str:
        return f"<Orders: {self._groups}, {len(self._starting)} start>"

    async def follow(self) -> None:
        """Follow orders until the front is gone, or says what is none."""
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
                            raise ChannelError(f"a {type(message).__name__}")
            except ChannelError as error:  # here, where it is in no group of errors
                logger.warning("the front sent %s", error)
            tasks.cancel_scope.cancel()

    async def end_all(self) -> None:
        """End all workers, and close what listens for links."""
        for group in self._groups.values():
            await anyio.to_thread.run_sync(group.kill)

    def _prepare(self, order: int) -> None:
        for number in [n for n, group in self._groups.items() if group.is_over]:
            del self._groups[number]
        group = self._make_group()
        try:
            if len(self._groups) >= MAX_GROUPS:
                raise DeviceStartError(f"{MAX_GROUPS} crews have workers here")
            port = group.listen()
        except (OSError, DeviceStartError) as error:
            self._tell(Failed(order, str(error)))
        else:
            self._groups[order] = group
            self._tell(Listens(order, port))

    async def _start(self, start: Start) -> None:
        order, group = start.order, self._groups.get(start.order)
        if group is None:
            self._tell(Failed(order, "nothing has been prepared"))
            return
        self._starting.add(order)
        problem: str | None = "it is cancelled"
        try:
            await anyio.to_thread.run_sync(group.connect, start)
            if order not in self._groups:
                raise DeviceStartError("it has been given up")
            group.spawn()  # in this thread, which lives as long as the host
            problem = None
        except Exception as error:  # of this order alone, whatever it is
            if not isinstance(error, DeviceStartError):
                logger.exception("order %d", order)
            problem = str(error)[:MAX_WORDS]
        finally:
            self._starting.discard(order)
            if problem is not None:
                self._groups.pop(order, None)
                with anyio.CancelScope(shield=True):  # bounded, but a kill waits for the system
                    await anyio.to_thread.run_sync(group.kill)
        self._tell(Started(order) if problem is None else Failed(order, problem))

    async def _end(self, end: End) -> None:
        ended, group = Exit(None), self._groups.get(end.order)
        if group is not None:
            limiter = anyio.CapacityLimiter(1)  # not the threads in which others connect
            ended = await anyio.to_thread.run_sync(
                group.reap, end.rank, end.grace_s, limiter=limiter
            )
        self._tell(Ended(end.order, end.rank, shorten(ended)))

    async def _give_up(self, order: int) -> None:
        group = self._groups.get(order)
        if group is not None and order not in self._starting:
            await anyio.to_thread.run_sync(group.kill)
        self._groups.pop(order, None)  # its start, if there is one, ends by that

    def _tell(self, message: Message) -> None:
        """Answer the front; if it is gone, the task that receives finds its end."""
        with contextlib.suppress(OSError):
            self._channel.send(message)
