"""Machines with workers under a real engine, front and hosts, in virtual time, with the faults of machines and networks.

    python -m tests.simulation.hosts.hosts_world --seconds 60

What runs as it is: the engine, `ProcessDevice`, `HostsLauncher`, `RemotePeer`, `Coordinator` with its proofs, `Host`, and every message. Simulated are sockets
(`virtual_network.py`) and the part of a place that blocks: its workers are tasks that answer frames. Faults come while requests run: a machine cut off for a while,
switched off and on, its host killed or stopped, its network slow, a worker killed, a second host of the same number, hosts with another key,
strangers. Then all is well again: each request must end with the tokens that it has alone, and nothing may be left.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any
from unittest.mock import patch

import msgspec
import trio

from tests.simulation.scheduling import run_deterministically
from tests.simulation.simulated_device import SimulatedDevice, simulated_tokens
from tests.simulation.turns import SimulationFault, run_for_seconds
from tests.support.engines import InlineThreads, engine_config
from trouper.actors.engine.wiring import Engine, open_engine
from trouper.actors.executor.devices.process import ProcessDevice
from trouper.actors.executor.workers.machines import (
    authentication,
    channel,
    coordinator,
    host,
    launch_hosts,
    worker_group,
)
from trouper.actors.messages.steps import Sampling
from trouper.errors import RetryableRequestError
from trouper.params import SamplingParams

from .hosts_places import (
    BLOCK_SIZE,
    FRONT,
    KEY,
    NUM_BLOCKS,
    STRANGER,
    RunningHost,
    VirtualAnyio,
    VirtualGroup,
    VirtualWorker,
    WatchedCoordinator,
)
from .hosts_scenario import FAULTS_S, VOCABULARY, HostsScenario, MachineFault
from .virtual_network import MACHINE, PROGRAM, VirtualNetwork, VirtualSocket

PATIENCE_S = 400.0  # after the faults, for all that is open: a first step may take 120 s


class HostsWorld:
    """Runs a scenario to its end.

    Raises:
        SimulationFault: a wrong or lost token, an error that no request has caused, a wait that does not end, a stranger that is taken
            for a host, or a connection, a worker or a task that is left.
    """

    def __init__(self, seed: int) -> None:
        self.scenario = HostsScenario(seed)
        self.network = VirtualNetwork(self.scenario.dice)
        self.numbers = iter(range(10**9))
        self.workers: dict[VirtualWorker, str] = {}  # that run, and on which machine
        self.listening: set[VirtualGroup] = set()
        self.hosts: dict[int, RunningHost] = {}
        self.num_restarts = 0

    def run(self) -> None:
        with _virtual(self):
            run_deterministically(self._main, seed=self.scenario.seed)

    def make_device(self) -> SimulatedDevice:
        return SimulatedDevice(NUM_BLOCKS, BLOCK_SIZE, VOCABULARY, 2)

    def spawn(self, control: VirtualSocket, rank: int) -> VirtualWorker:
        """Start a worker where this task runs; rank 0 answers plans."""
        worker = VirtualWorker(self, control, is_answering=rank == 0)
        self.workers[worker] = MACHINE.get()
        self._nursery.start_soon(self._run_worker, worker)
        return worker

    async def _run_worker(self, worker: VirtualWorker) -> None:
        await worker.run()
        del self.workers[worker]

    def start_host(self, node: int, address: str, key: bytes = KEY) -> RunningHost:
        running = RunningHost(self, node, address, key)
        self._nursery.start_soon(running.run)
        return running

    async def _main(self) -> None:
        PROGRAM.set("front")
        MACHINE.set("front")
        scenario = self.scenario
        listener: Any = self.network.listen("front")
        self.front = WatchedCoordinator(listener, KEY, scenario.num_hosts + 1)
        async with trio.open_nursery() as self._nursery:
            for node in range(1, scenario.num_hosts + 1):
                self.hosts[node] = self.start_host(node, f"10.0.0.{node}")
            async with coordinator.listening(self.front):
                with trio.move_on_after(FAULTS_S + PATIENCE_S) as patience:
                    await self._serve()
                if patience.cancelled_caught:
                    raise SimulationFault(f"it does not end: {self.front}, {self.hosts}")
            await trio.sleep(30.0)  # the hosts find out
            self._check_end()
            for running in self.hosts.values():
                running.kill()
            await trio.testing.wait_all_tasks_blocked()
            if self._nursery.child_tasks:
                raise SimulationFault(f"tasks are left: {self._nursery.child_tasks}")

    async def _serve(self) -> None:
        async with open_engine(self._config(), self._devices(), InlineThreads()) as engine:
            async with trio.open_nursery() as clients:
                for index, (at_s, prompt) in enumerate(self.scenario.requests):
                    clients.start_soon(self._ask, engine, index, at_s, prompt)
                clients.start_soon(self._probe, engine)
                for fault in self.scenario.faults:
                    clients.start_soon(self._play, fault)
            await self._settle(engine)
        self.num_restarts = self.front._num_orders - self.scenario.num_replicas

    async def _settle(self, engine: Engine) -> None:
        """Wait until every replica is there again; then there is one host of each number, and nothing that was started in vain."""

        def are_up() -> bool:
            return not any(part.is_device_lost for part in engine.statistics().replicas)

        while not are_up():  # noqa: ASYNC110  # nothing tells of it
            await trio.sleep(1.0)
        await trio.sleep(30.0)
        wanted = sum(len(ranks) for layout in self.scenario.layouts for ranks in layout.values())
        if not are_up() or len(self.workers) != wanted:
            raise SimulationFault(f"{len(self.workers)} workers run, not {wanted}")
        if self.listening:
            raise SimulationFault("a machine listens for an order that has been given up")
        if len(self.front._hosts) != self.scenario.num_hosts:
            raise SimulationFault(f"hosts have not come back: {self.front}")

    def _config(self) -> Any:
        return msgspec.structs.replace(
            engine_config(), data_parallel_size=self.scenario.num_replicas, device_worker="process",
            max_worker_restarts=16, worker_restart_window_s=1.0,
        )  # fmt: skip

    def _devices(self) -> list[ProcessDevice]:
        async def make_group(node: int, order: int) -> launch_hosts.HostGroup:
            return launch_hosts.HostGroup(self.front, await self.front.host(node), order)

        config = self._config()
        recorded_workers = [
            launch_hosts.HostsLauncher(config, layout, replica, self.front, make_group)
            for replica, layout in enumerate(self.scenario.layouts)
        ]
        return [
            ProcessDevice(config, replica=r, launch_workers=worker_group)
            for r, worker_group in enumerate(recorded_workers)
        ]

    # Clients

    async def _ask(self, engine: Engine, index: int, at_s: float, prompt: list[int]) -> None:
        await trio.sleep(at_s)
        num, name = self.scenario.num_tokens, f"request {index}"
        params = SamplingParams(temperature=0.0, max_tokens=num)
        final: Any = None
        async for output in engine.generate({"prompt_token_ids": prompt}, params, name):
            final = output
        found = final.outputs[0]
        wanted = simulated_tokens(tuple(prompt), Sampling(temperature=0.0), num, VOCABULARY)
        if found.finish_reason == "error" or list(found.token_ids) != list(wanted):
            raise SimulationFault(f"{name} got {found}, not {wanted}")

    async def _probe(self, engine: Engine) -> None:
        """Ask now and then whether it is well; the answer may be that it is not."""
        for _ in range(10):
            with suppress(RetryableRequestError):
                await engine.controls.probe()
            await trio.sleep(FAULTS_S / 10)

    # Faults

    async def _play(self, fault: MachineFault) -> None:
        await trio.sleep(fault.at_s)
        kind, node = fault.kind, fault.node
        address = self.hosts[node].address
        match kind:
            case "cut":
                self.network.cut(address)
                await self._watch_silence(node, fault.lasts_s)
                self.network.heal(address)
            case "off":
                self.network.switch_off(address)
                self.hosts[node].kill()
                self._kill_workers(address)
                await self._watch_silence(node, fault.lasts_s)
                self.network.heal(address)
                self._restart(node)
            case "host killed":
                self.hosts[node].kill()
                await trio.sleep(fault.lasts_s)
                self._restart(node)
            case "host stopped":
                stopped = self.hosts[node]
                self.network.frozen.add(stopped.program)
                await trio.sleep(fault.lasts_s)
                self.network.thaw(stopped.program)
            case "slow":
                self.network.latency_s[address] = self.scenario.dice.choice((0.3, 2.0, 8.0))
                await trio.sleep(fault.lasts_s)
                self.network.latency_s.pop(address, None)
            case "worker killed":
                with trio.move_on_after(fault.lasts_s):
                    while True:  # again and again
                        self._kill_workers(address)
                        await trio.sleep(2.7)
            case "twin":
                twin = self.start_host(node, f"10.0.1.{node}")
                await trio.sleep(fault.lasts_s)
                twin.kill()
            case "wrong key":
                await self._play_wrong_key(node)
            case _:
                self._nursery.start_soon(self._play_stranger, kind, node)

    async def _watch_silence(self, node: int, lasts_s: float) -> None:
        """Wait; the front must know of a silence before it has lasted for long."""
        link, began_s = self.front._hosts.get(node), trio.current_time()
        with trio.move_on_after(lasts_s) as whole:
            await trio.sleep(authentication.VANISHED_S + authentication.KEEP_ALIVE_S + 1.0)
            address = self.hosts[node].address
            is_cut = self.network.cut_s("front", address) <= began_s
            is_kept = self.front._hosts.get(node) is link
            if is_cut and is_kept and link is not None and link.address == address:
                raise SimulationFault(f"{link} is silent, and nothing notices")
            await trio.sleep_forever()
        assert whole.cancelled_caught

    def _restart(self, node: int) -> None:
        """Start a host where none runs: two faults may have ended it."""
        if self.hosts[node].is_killed:
            self.hosts[node] = self.start_host(node, self.hosts[node].address)

    def _kill_workers(self, address: str) -> None:
        for worker, machine in list(self.workers.items()):
            if machine == address:
                worker.kill()

    async def _play_wrong_key(self, node: int) -> None:
        other = self.start_host(node, f"{STRANGER}0.{node}", b"another key of others")
        with trio.move_on_after(30.0):
            await other.ended.wait()
        if other.refusal is None:
            raise SimulationFault("a host with another key was not refused")

    async def _play_stranger(self, kind: str, node: int) -> None:
        """Connect as what does not belong; whatever it says, its connection must end soon."""
        PROGRAM.set(f"stranger, {kind}")
        MACHINE.set(f"{STRANGER}1.{next(self.numbers)}")
        hello = channel.HostHello(channel.protocol(), node, self.scenario.num_hosts + 1)
        if kind == "nonsense":  # it has the key
            messages = (
                channel.WorkerHello(99, 0), channel.Started(1),
                channel.HostHello(channel.protocol(), node, 77), channel.HostHello("older", node, 77),
            )  # fmt: skip
            connection = await self.network.dial(FRONT, KEY)
            await connection.write_all(channel.encode(self.scenario.dice.choice(messages)))
        else:
            connection = await self.network.connect(FRONT[0])
            if kind == "garbage":
                await connection.write_all(b"GET / HTTP/1.1\r\n" * 9)
            elif kind == "impostor":
                greeting = await connection.read_exactly(authentication.GREETING_BYTES)
                sent, _ = authentication.answer(b"a key that was guessed", greeting)
                await connection.write_all(sent + channel.encode(hello))
        with trio.move_on_after(3 * authentication.PROOF_S) as patience, suppress(OSError):
            while True:
                await connection.wait_readable()
                if not connection.recv(2**10):
                    break
        connection.close()
        if patience.cancelled_caught:
            raise SimulationFault(f"a stranger is kept: {kind}")

    def _check_end(self) -> None:
        if self.workers:
            raise SimulationFault(f"workers are left: {self.workers}")
        if self.network.sockets:
            raise SimulationFault(f"connections are left: {self.network.sockets}")
        if repr(self.front) != "<Coordinator: 0 hosts, 0 workers expected>":
            raise SimulationFault(f"the front keeps what is gone: {self.front}")


@contextmanager
def _virtual(world: HostsWorld) -> Iterator[None]:
    """Put virtual sockets where the modules of the nodes have real ones."""
    anyio: Any = VirtualAnyio()
    with ExitStack() as patches:
        for module in (channel, coordinator, host, launch_hosts, worker_group):
            patches.enter_context(patch.object(module, "anyio", anyio))
        dial: Callable[..., Any] = world.network.dial
        patches.enter_context(patch.object(host, "dial", dial))
        patches.enter_context(patch.object(host, "WorkerGroup", partial(VirtualGroup, world)))
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


if __name__ == "__main__":
    run_for_seconds(HostsWorld, __doc__)
