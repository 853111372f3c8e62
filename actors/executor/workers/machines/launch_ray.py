"""Starts the workers of a device where Ray has resources for them.

Ray reserves bundles, each with room for all ranks of a stage because these share memory, and runs one small
actor in each bundle. The actor starts our own worker processes; no step passes through Ray. The end of a
worker's connection shows its death, earlier than Ray reports a lost machine. Each start reserves new bundles,
wherever there is room by then.
"""

import contextlib
import os
import secrets
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from trouper.actors.executor.workers.launching import Exit, Peer, WorkersLauncher
from trouper.actors.executor.workers.machines.authentication import serve_at
from trouper.actors.executor.workers.machines.channel import Start
from trouper.actors.executor.workers.machines.coordinator import Coordinator, listening
from trouper.actors.executor.workers.machines.launch_hosts import (
    BACKLOG,
    HostsLauncher,
    connected_peers,
)
from trouper.actors.executor.workers.machines.worker_group import END_S, WorkerGroup
from trouper.actors.executor.workers.model_files import MachineFacts
from trouper.config.engine_config import EngineConfig
from trouper.config.parallel import NodesConfig
from trouper.errors import DeviceStartError

# Seconds for Ray to reserve bundles.
RESERVE_S = 60.0
# Seconds between two checks of the reservation.
LOOK_S = 0.5
# Seconds for an actor to answer; its process first imports this module.
ANSWER_S = 60.0


class RayHost:
    """The actor of a bundle. Ray calls its methods one after another, in the main thread of a process of its
    own.
    """

    def __init__(self, coordinator: tuple[str, int], key: bytes, num_cpus: int) -> None:
        self._coordinator, self._key = coordinator, key
        self._group: WorkerGroup | None = None
        # Ray sets this to the cores of the whole bundle; each worker needs its own share.
        os.environ["OMP_NUM_THREADS"] = str(num_cpus)

    def listen(self) -> tuple[str, int]:
        """Listen for stage links.  Returns the address of the machine in Ray's network, and the port."""
        address = import_module("ray").util.get_node_ip_address()
        # Ray divides the cores.
        facts = MachineFacts(num_workers=1)
        self._group = WorkerGroup(self._coordinator, address, self._key, facts.as_argument())
        return address, self._group.listen()

    def start(self, order: bytes) -> str | None:
        """Start the workers of an encoded `Start`. Returns the error, or None."""
        assert self._group is not None
        try:
            self._group.connect(msgspec.msgpack.decode(order, type=Start))
            self._group.spawn()
        except DeviceStartError as error:
            self._group.kill()
            return str(error)
        return None

    def reap(self, rank: int, grace_s: float) -> bytes:
        """Wait up to `grace_s` seconds for a worker to exit, then kill it. Returns its encoded `Exit`."""
        assert self._group is not None
        return msgspec.msgpack.encode(self._group.reap(rank, grace_s))


class RayGroup:
    """The workers that one Ray actor starts, as a `GroupPort`.

    The actor takes the place of a host, and Ray the place of the connection to it.
    """

    def __init__(self, ray: Any, actor: Any, coordinator: Coordinator, number: int) -> None:
        self._ray, self._actor, self._coordinator, self._number = ray, actor, coordinator, number

    async def prepare(self) -> tuple[str, int]:
        return await self._answer(self._actor.listen)

    async def start(self, start: Start) -> list[Peer]:
        problem = await self._answer(self._actor.start, msgspec.msgpack.encode(start))
        if problem is not None:
            raise DeviceStartError(f"bundle {self._number} of Ray: {problem}")
        return await connected_peers(
            self._coordinator, start, self._end, f"in bundle {self._number} of Ray"
        )

    def close(self) -> None:
        # The actor ends with its bundle, which the launcher releases.
        pass

    async def _end(self, rank: int, grace_s: float) -> Exit:
        try:
            data = await self._answer(self._actor.reap, rank, grace_s, limit_s=grace_s + END_S)
        except DeviceStartError as error:
            return Exit(None, stderr=(str(error),), was_machine_lost=True)
        return msgspec.msgpack.decode(data, type=Exit)

    async def _answer(self, method: Any, *args: object, limit_s: float = ANSWER_S) -> Any:
        """Call a method of the actor and wait for its answer, in a thread: both may take a round trip.

        Raises:
            DeviceStartError: its machine is lost, or it does not answer.
        """

        def ask() -> object:
            return self._ray.get(method.remote(*args), timeout=limit_s)

        try:
            return await anyio.to_thread.run_sync(ask, abandon_on_cancel=True)
        except self._ray.exceptions.RayError as error:
            kind = type(error).__name__
            raise DeviceStartError(f"bundle {self._number} of Ray is gone: {kind}") from None


class RayLauncher:
    """`WorkersLauncher` of one replica, which owns the bundles of its last start."""

    def __init__(
        self, ray: Any, config: EngineConfig, nodes: NodesConfig, replica: int, coordinator: Coordinator,
        address: tuple[str, int], key: bytes,
    ) -> None:  # fmt: skip
        self._ray, self._coordinator = ray, coordinator
        self._address, self._key, self._num_cpus = address, key, nodes.cpus_per_worker
        num_ranks = config.tensor_parallel_size
        self._bundle = {"CPU": num_ranks * nodes.cpus_per_worker}
        bundles = {
            stage: tuple(range(stage * num_ranks, (stage + 1) * num_ranks))
            for stage in range(config.num_stages)
        }
        self._num_bundles = len(bundles)
        self._launcher = HostsLauncher(config, bundles, replica, coordinator, self._make_group)
        # A placement group of Ray.
        self._bundles: Any = None
        self._actors: list[Any] = []

    def __repr__(self) -> str:
        return f"<RayLauncher of {self._num_bundles} x {self._bundle}>"

    async def __call__(self) -> Sequence[Peer]:
        await self.release()
        try:
            await self._find_bundles()
            return await self._launcher()
        except BaseException:
            await self.release()  # noqa: ASYNC102  # shielded inside
            raise

    async def release(self) -> None:
        """Release the bundles, and end everything that runs in them.

        Idempotent. Errors of lost machines are ignored.
        """
        actors, bundles = self._actors, self._bundles
        self._actors, self._bundles = [], None

        def give_back() -> None:
            # A lost machine took its actors with it.
            lost = contextlib.suppress(self._ray.exceptions.RayError)
            for actor in actors:
                with lost:
                    self._ray.kill(actor)
            if bundles is not None:
                with lost:
                    self._ray.util.remove_placement_group(bundles)

        # Bounded, since neither call waits.
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(give_back)

    async def _find_bundles(self) -> None:
        """Reserve bundles and start an actor in each.

        Raises:
            DeviceStartError: Ray has no room, or has ended.
        """
        try:
            await anyio.to_thread.run_sync(self._ask_for_bundles)
            is_there = False
            with anyio.move_on_after(RESERVE_S):
                while not is_there:
                    is_there = await anyio.to_thread.run_sync(self._bundles.wait, LOOK_S)
            if is_there:
                await anyio.to_thread.run_sync(self._start_actors)
                return
            free = await anyio.to_thread.run_sync(self._ray.available_resources)
        except self._ray.exceptions.RayError as error:
            raise DeviceStartError(
                f"Ray cannot reserve resources: {type(error).__name__}"
            ) from None
        wanted = f"{self._num_bundles} x {{CPU: {self._bundle['CPU']}}}"
        raise DeviceStartError(
            f"Ray has no room: the workers need {wanted}, but only {free.get('CPU', 0):g} CPUs are free"
        )

    def _ask_for_bundles(self) -> None:
        bundles = [self._bundle] * self._num_bundles
        self._bundles = self._ray.util.placement_group(bundles, strategy="PACK")

    def _start_actors(self) -> None:
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        for index in range(self._num_bundles):
            actor_class = self._ray.remote(RayHost).options(
                num_cpus=self._bundle["CPU"],
                scheduling_strategy=strategy(self._bundles, placement_group_bundle_index=index),
            )
            self._actors.append(actor_class.remote(self._address, self._key, self._num_cpus))

    async def _make_group(self, place: int, order: int) -> RayGroup:
        return RayGroup(self._ray, self._actors[place], self._coordinator, place)


@asynccontextmanager
async def open_ray(
    config: EngineConfig, nodes: NodesConfig
) -> AsyncGenerator[Callable[[int], WorkersLauncher]]:
    """Use the Ray cluster of this process, or join one, while the block runs. Yields a function that returns the
    launcher of a replica's workers.

    Raises:
        DeviceStartError: there is no cluster, or no free port on this machine.
    """
    ray: Any = import_module("ray")
    import_module("ray.util.scheduling_strategies")
    was_there = ray.is_initialized()
    if not was_there:
        await anyio.to_thread.run_sync(_join, ray)
    # The key of this engine only.
    key = secrets.token_bytes(32)
    launchers: list[RayLauncher] = []
    try:
        listener = _listen(ray.util.get_node_ip_address())
        coordinator, address = Coordinator(listener, key), listener.getsockname()[:2]

        def launcher_of(replica: int) -> WorkersLauncher:
            launchers.append(RayLauncher(ray, config, nodes, replica, coordinator, address, key))
            return launchers[-1]

        async with listening(coordinator):
            yield launcher_of
    finally:
        # Bounded, since these calls do not wait for resources.
        with anyio.CancelScope(shield=True):
            for launcher in launchers:
                await launcher.release()
            if not was_there:
                await anyio.to_thread.run_sync(ray.shutdown)


def _listen(address: str) -> socket.socket:
    """Listen for workers at any free port.

    Raises:
        DeviceStartError: the address does not exist, or no port is free.
    """
    try:
        return serve_at((address, 0), BACKLOG)
    except OSError as error:
        raise DeviceStartError(f"cannot listen at {address}: {error}") from None


def _join(ray: Any) -> None:
    """Join the cluster of this machine or of RAY_ADDRESS. Runs in a thread, where Ray does not install signal
    handlers.

    Raises:
        DeviceStartError: there is no cluster.
    """
    try:
        ray.init(address="auto", logging_level="error")
    except ConnectionError:
        raise DeviceStartError(
            "no cluster of Ray: run `ray start --head` here, or set RAY_ADDRESS"
        ) from None
