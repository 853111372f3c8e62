"""Starts the workers of a device on several machines through their hosts.

Every machine has the same number of workers, and those of a replica are consecutive, so a replica stays on
one machine if the numbers allow. Workers of one machine share rings; workers on different machines are linked
by TCP connections, which the machine with the later ranks dials.
"""

import errno
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol

import anyio
import anyio.to_thread

from trouper.actors.executor.worker_links import link_ends
from trouper.actors.executor.workers.launching import (
    Exit,
    Launcher,
    Peer,
    WorkersLauncher,
    end_all,
    launch,
    launch_all,
    shared_sizes,
)
from trouper.actors.executor.workers.machines.authentication import serve_at
from trouper.actors.executor.workers.machines.channel import Start
from trouper.actors.executor.workers.machines.coordinator import (
    Coordinator,
    HostGoneError,
    HostLink,
    listening,
)
from trouper.actors.executor.workers.machines.worker_group import (
    END_S,
    RemotePeer,
    WorkerGroup,
    outer_links,
)
from trouper.config.engine_config import EngineConfig
from trouper.config.parallel import NodesConfig, cluster_key, is_every_address
from trouper.errors import DeviceStartError, invalid

BACKLOG = 128
# Lost hosts tolerated in one start, so a host that dies of every order is not retried forever.
MAX_HOSTS_LOST = 3


class GroupPort(Protocol):
    """The workers of an order on one machine, as the coordinator starts them."""

    async def prepare(self) -> tuple[str, int]:
        """Listen for stage links.

        Returns the address at which other machines can dial. It precedes `start` on all machines.
        """
        ...

    async def start(self, start: Start) -> list[Peer]:
        """Start the workers, and return their connections by rank.

        The listeners of all machines exist by then, so links can be dialled.
        """
        ...

    def close(self) -> None:
        """Release what was prepared, unless it has been started. Idempotent."""
        ...


class LocalGroup:
    """The workers on the coordinator's own machine.

    They are started without a host, with the same steps as on the other machines.
    """

    def __init__(self, coordinator: tuple[str, int], key: bytes, launcher: Launcher) -> None:
        self._group = WorkerGroup(coordinator, coordinator[0], key)
        self._address, self._launcher = coordinator[0], launcher

    async def prepare(self) -> tuple[str, int]:
        return self._address, self._group.listen()

    async def start(self, start: Start) -> list[Peer]:
        try:
            files = await anyio.to_thread.run_sync(self._group.connect_links, start)
        except OSError as error:
            raise DeviceStartError(f"cannot connect the stages: {error}") from None
        return await launch_all(self._launcher, start.first_number, start.ranks, files)

    def close(self) -> None:
        self._group.close()


class HostGroup:
    """The workers on the machine of a host.

    Each step is an order to the host, and waits for its answer. A lost host is an error of each step.
    """

    def __init__(self, coordinator: Coordinator, host: HostLink, order: int) -> None:
        self._coordinator, self._host, self._order = coordinator, host, order
        self._has_started = False

    async def prepare(self) -> tuple[str, int]:
        return await self._host.prepare(self._order)

    async def start(self, start: Start) -> list[Peer]:
        await self._host.start(start)
        end = partial(self._host.end, start.order)
        peers = await connected_peers(self._coordinator, start, end, f"on node {self._host.node}")
        self._has_started = True
        return peers

    def close(self) -> None:
        if not self._has_started:
            self._host.give_up(self._order)


async def connected_peers(
    coordinator: Coordinator, start: Start, end: Callable[[int, float], Awaitable[Exit]], where: str
) -> list[Peer]:
    """Wait for the connections of workers started on another machine.

    Args:
        end: asks the machine to end the worker of a rank.
        where: location of the workers, for messages.

    Raises:
        DeviceStartError: a worker does not connect; all are ended.
    """
    peers: list[Peer] = []
    try:
        for rank in start.ranks:
            name = f"worker {start.first_number + rank} {where}"
            connection = await coordinator.worker(start.order, rank, name)
            peers.append(RemotePeer(connection, partial(end, rank), name, where))
    except BaseException:
        await end_all(peers)  # noqa: ASYNC102  # shielded inside
        with anyio.CancelScope(shield=True), anyio.move_on_after(END_S):
            for rank in start.ranks[len(peers) :]:
                await end(rank, 0.0)  # noqa: ASYNC102  # shielded and bounded
        raise
    return peers


class HostsLauncher:
    """`WorkersLauncher` of one replica on several machines.

    Args:
        ranks: the ranks on each machine, or in each bundle of Ray.
        make_group: creates the group of a machine for an order.
    """

    def __init__(
        self,
        config: EngineConfig,
        ranks: Mapping[int, tuple[int, ...]],
        replica: int,
        coordinator: Coordinator,
        make_group: Callable[[int, int], Awaitable[GroupPort]],
    ) -> None:
        self._coordinator, self._make_group = coordinator, make_group
        self._first_number = replica * config.workers_per_replica
        self._ranks = ranks
        self._sizes = shared_sizes(config) if config.workers_per_replica > 1 else None

    def __repr__(self) -> str:
        return f"<HostsLauncher of {self._ranks}>"

    async def __call__(self) -> Sequence[Peer]:
        num_lost = 0
        while True:
            order = self._coordinator.next_order()
            try:
                return await self._start(order)
            except HostGoneError:
                num_lost += 1
                if num_lost == MAX_HOSTS_LOST:
                    raise
            finally:
                # The next order waits until the host is back.
                self._coordinator.forget(order)

    async def release(self) -> None:
        # Nothing is reserved between two starts.
        pass

    async def _start(self, order: int) -> Sequence[Peer]:
        groups = [await self._make_group(node, order) for node in self._ranks]
        starts = [
            Start(order, ranks, self._first_number, self._sizes) for ranks in self._ranks.values()
        ]
        for start in starts:
            for rank in start.ranks:
                self._coordinator.expect(order, rank)
        try:
            addresses = [await group.prepare() for group in groups]
            return await self._start_all(groups, with_dials(starts, addresses))
        finally:
            for group in groups:
                group.close()

    async def _start_all(
        self, groups: Sequence[GroupPort], starts: Sequence[Start]
    ) -> Sequence[Peer]:
        """Start all groups concurrently. If one fails, all workers are ended."""
        peers: dict[int, Peer] = {}
        errors: list[DeviceStartError] = []

        async def start_one(group: GroupPort, start: Start) -> None:
            try:
                started = await group.start(start)
                peers.update(zip(start.ranks, started, strict=True))
            except DeviceStartError as error:
                errors.append(error)

        try:
            async with anyio.create_task_group() as tasks:
                for group, start in zip(groups, starts, strict=True):
                    tasks.start_soon(start_one, group, start)
            if errors:
                raise errors[0]
        except BaseException:
            await end_all(list(peers.values()))  # noqa: ASYNC102  # shielded inside
            raise
        return [peers[rank] for rank in sorted(peers)]


def ranks_by_node(
    config: EngineConfig, nodes: NodesConfig, replica: int
) -> dict[int, tuple[int, ...]]:
    """Return the ranks of a replica on each machine, in the order of both."""
    found: dict[int, tuple[int, ...]] = {}
    num_ranks, num_stages = config.tensor_parallel_size, config.num_stages
    for stage in range(num_stages):
        number = replica * num_stages + stage
        node = nodes.node_of(number, num_stages * config.data_parallel_size)
        ranks = range(stage * num_ranks, (stage + 1) * num_ranks)  # which share memory
        found[node] = (*found.get(node, ()), *ranks)
    return found


def with_dials(starts: Sequence[Start], addresses: Sequence[tuple[str, int]]) -> list[Start]:
    """Assign to each group the links that it dials: those to earlier groups.

    The first group dials none and each other group dials only groups that do not wait for it, so no cycle of
    waiting can form.
    """
    group_of = {rank: i for i, start in enumerate(starts) for rank in start.ranks}
    found: list[Start] = []
    for i, start in enumerate(starts):
        dials: dict[str, tuple[str, int]] = {}
        for link in () if start.sizes is None else link_ends(start.sizes):
            ends = {group_of[link.sender], group_of[link.receiver]}
            if link.name in outer_links(start) and max(ends) == i:
                dials[link.name] = addresses[min(ends)]
        found.append(Start(start.order, start.ranks, start.first_number, start.sizes, dials))
    return found


def listen(nodes: NodesConfig) -> socket.socket:
    """Listen for hosts at the coordinator's address only.

    Raises:
        TrouperValidationError: the address or port cannot be used, or the address means all addresses of
            the machine.
    """
    try:
        listener = serve_at((nodes.address, nodes.port), BACKLOG)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise invalid(
                "master_port", f"cannot listen on this port: {error.strerror}", nodes.port
            ) from None
        raise invalid(
            "master_addr", f"is not an address of this machine: {error.strerror}", nodes.address
        ) from None
    if is_every_address(listener.getsockname()[0]):
        listener.close()
        raise invalid(
            "master_addr", "must be one address, not all addresses of this machine", nodes.address
        )
    return listener


@asynccontextmanager
async def open_nodes(
    config: EngineConfig, nodes: NodesConfig, launcher: Launcher = launch
) -> AsyncGenerator[Callable[[int], WorkersLauncher]]:
    """Listen for the other machines while the block runs. Yields a function that returns the launcher of a
    replica's workers.
    """
    key = cluster_key()
    coordinator = Coordinator(listener := listen(nodes), key, nodes.num_nodes, config.num_workers)
    address = nodes.address, listener.getsockname()[1]

    async def make_group(node: int, order: int) -> GroupPort:
        if node == 0:
            return LocalGroup(address, key, launcher)
        return HostGroup(coordinator, await coordinator.host(node), order)

    async with listening(coordinator):
        yield lambda replica: HostsLauncher(
            config, ranks_by_node(config, nodes, replica), replica, coordinator, make_group
        )
