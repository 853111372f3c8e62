"""A machine without an engine: it waits for a front, starts the workers that it is told to, and ends them with it."""

import contextlib
import logging
import socket

import anyio
import anyio.to_thread

from trouper.actors.executor.devices.nodes.channel import (
    Channel,
    ChannelError,
    End,
    Ended,
    Failed,
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
from trouper.actors.executor.devices.nodes.group import WorkerGroup
from trouper.actors.executor.devices.nodes.proof import WrongKeyError, dial
from trouper.actors.executor.devices.place import PlaceFacts
from trouper.actors.executor.devices.worker_process import MODULE
from trouper.config.nodes import CLUSTER_KEY, NodesConfig
from trouper.errors import DeviceStartError, TrouperValidationError, invalid

logger = logging.getLogger(__name__)
DIAL_AGAIN_S = 1.0  # between two attempts to reach the front
MAX_GROUPS = 64  # crews that have workers here at once: one for each replica
MAX_WORDS = 2000  # of an error that is told to the front
Groups = dict[int, WorkerGroup]  # by order


class Host:
    """One machine of several that is not the front's.

    Args:
        place: its own paths of the model.
    """

    def __init__(
        self, nodes: NodesConfig, key: bytes, place: PlaceFacts, module: str = MODULE
    ) -> None:
        self._nodes, self._key = nodes, key
        self._place, self._module = place, module
        self._front = nodes.address, nodes.port

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
        groups: Groups = {}
        refused: Refused | None = None
        try:
            nodes = self._nodes
            channel.send(HostHello(protocol(), nodes.rank, nodes.num_nodes))
            logger.warning("node %d of %d serves the front", nodes.rank, nodes.num_nodes)
            async with anyio.create_task_group() as orders:
                while (message := await channel.receive()) is not None:
                    match message:
                        case Listen(order):
                            self._prepare(order, address, groups, channel)
                        case Start():
                            orders.start_soon(self._start, message, groups, channel)
                        case End():
                            orders.start_soon(self._end, message, groups, channel)
                        case Refused():
                            refused = message
                        case _:
                            raise ChannelError(f"a {type(message).__name__}")
                orders.cancel_scope.cancel()
        except (OSError, ChannelError) as error:
            logger.warning("the front: %s", error)
        finally:
            with anyio.CancelScope(shield=True):  # bounded: a kill takes no time
                for group in groups.values():
                    await anyio.to_thread.run_sync(group.kill)
            channel.close()
        if refused is None:
            logger.warning("the front is gone, and what it had started here")
        elif refused.is_final:
            raise invalid("node_rank", f"the front refuses it: {refused.message}")
        else:
            logger.warning("the front refuses this node for now: %s", refused.message)

    def _prepare(self, order: int, address: str, groups: Groups, channel: Channel) -> None:
        for number in [n for n, group in groups.items() if group.is_over]:
            del groups[number]
        idle = [n for n, group in groups.items() if not group.processes]
        if len(groups) >= MAX_GROUPS and idle:  # the front has given it up
            groups.pop(idle[0]).close()
        group = WorkerGroup(
            self._front, address, self._key, self._place.as_argument(), self._module
        )
        try:
            if len(groups) >= MAX_GROUPS:
                raise DeviceStartError(f"{MAX_GROUPS} crews have workers here")
            port = group.listen()
        except (OSError, DeviceStartError) as error:
            _tell(channel, Failed(order, str(error)))
        else:
            groups[order] = group
            _tell(channel, Listens(order, port))

    async def _start(self, start: Start, groups: Groups, channel: Channel) -> None:
        group = groups.get(start.order)
        try:
            if group is None:
                raise DeviceStartError("nothing has been prepared")
            await anyio.to_thread.run_sync(group.connect, start)
            group.spawn()  # in this thread, which lives as long as the host
        except DeviceStartError as error:
            if group is not None:
                await anyio.to_thread.run_sync(group.kill)
            _tell(channel, Failed(start.order, str(error)[:MAX_WORDS]))
        else:
            _tell(channel, Started(start.order))

    async def _end(self, end: End, groups: Groups, channel: Channel) -> None:
        group = groups.get(end.order)
        if group is not None:
            limiter = anyio.CapacityLimiter(1)  # not the threads in which others connect
            ended = await anyio.to_thread.run_sync(
                group.reap, end.rank, end.grace_s, limiter=limiter
            )
            _tell(channel, Ended(end.order, end.rank, shorten(ended)))


def _tell(channel: Channel, message: Message) -> None:
    """Answer the front; if it is gone, the task that receives finds its end."""
    with contextlib.suppress(OSError):
        channel.send(message)
