"""What stands on simulated machines: hosts, which are real, and their workers, which are tasks that answer frames."""

import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
import trio

from tests.simulation.simulated_device import SimulatedDevice
from tests.simulation.turns import SimulationFault
from trouper.actors.executor.device import DeviceInfo
from trouper.actors.executor.workers.launching import Exit
from trouper.actors.executor.workers.machines import channel, coordinator, host
from trouper.actors.executor.workers.model_files import MachineFacts
from trouper.actors.executor.workers.wire import (
    MAX_FRAME,
    Call,
    Close,
    Frame,
    FrameReader,
    Load,
    Loaded,
    Returned,
    encode,
)
from trouper.actors.messages.steps import StepPlan
from trouper.config.parallel import NodesConfig
from trouper.errors import DeviceStartError, TrouperValidationError

from .virtual_network import MACHINE, PROGRAM, VirtualSocket

KEY = b"a key of these machines"
FRONT = ("front", 1)
NUM_BLOCKS, BLOCK_SIZE = 65, 4
STRANGER = "192.168."  # begins the addresses of machines that do not belong


class VirtualWorker:
    """A worker's process: a task that answers frames until its connection ends, or it is killed."""

    def __init__(self, world: Any, control: VirtualSocket, is_answering: bool) -> None:
        self._world, self._control, self._is_answering = world, control, is_answering
        self._scope = trio.CancelScope()
        self._device: SimulatedDevice | None = None
        self.status: int | None = None
        self.ended = trio.Event()

    def kill(self) -> None:
        self._scope.cancel()

    async def run(self) -> None:
        with self._scope, suppress(OSError):
            await self._serve()
            self.status = 0
        if self.status is None:
            self.status = -9 if self._scope.cancelled_caught else 70
        if not self._control.is_closed:
            self._control.close()
        self.ended.set()

    async def _serve(self) -> None:
        frames = FrameReader(max_inline=MAX_FRAME)
        while True:
            await self._control.wait_readable()
            data = self._control.recv(2**16)
            if not data:
                raise ConnectionError("the front has hung up")
            frames.feed(data, [])
            while (frame := frames.take()) is not None:
                if isinstance(frame, Close):
                    return
                if (answer := await self._answer(frame)) is not None:
                    await self._control.write_all(encode(answer, is_inline=True)[0])

    async def _answer(self, frame: Frame) -> Frame | None:
        match frame:
            case Load():
                await trio.sleep(0.5)
                self._device = self._world.make_device()
                return Loaded(DeviceInfo(NUM_BLOCKS, BLOCK_SIZE, "float32", "simulated"))
            case StepPlan():
                if not self._is_answering:
                    return None
                await trio.sleep(self._world.scenario.step_s)
                assert self._device is not None
                return self._device._run(frame)
            case Call(number):
                return Returned(number)
            case _:
                raise SimulationFault(f"a worker was sent {frame}")


class VirtualGroup:
    """Stands for `WorkerGroup`: what blocks there waits here."""

    def __init__(self, world: Any, front: tuple[str, int], address: str, key: bytes, *_: Any) -> None:  # fmt: skip
        self._world, self._front, self._key = world, front, key
        self._controls: dict[int, VirtualSocket] = {}
        self.processes: dict[int, VirtualWorker] = {}

    @property
    def is_over(self) -> bool:
        return bool(self.processes) and all(w.ended.is_set() for w in self.processes.values())

    def listen(self) -> int:
        self._world.listening.add(self)
        return 1

    async def connect(self, start: channel.Start) -> None:
        try:
            for rank in start.ranks:
                control = await self._world.network.dial(self._front, self._key)
                self._controls[rank] = control
                await control.write_all(channel.encode(channel.WorkerHello(start.order, rank)))
        except OSError as error:
            raise DeviceStartError(f"cannot connect: {error}") from None

    def spawn(self) -> None:
        for rank, control in self._controls.items():
            self.processes[rank] = self._world.spawn(control, rank)
        self._controls = {}
        self.close()

    async def reap(self, rank: int, grace_s: float) -> Exit:
        worker = self.processes.get(rank)
        if worker is None:
            return Exit(None)
        with trio.move_on_after(grace_s):
            await worker.ended.wait()
        worker.kill()
        await worker.ended.wait()
        return Exit(worker.status)

    def kill(self) -> None:
        for worker in self.processes.values():
            worker.kill()
        self.close()

    def close(self) -> None:
        self._world.listening.discard(self)
        for control in self._controls.values():
            control.close()
        self._controls = {}


class WatchedCoordinator(coordinator.Coordinator):
    """Notes that a machine was taken which does not belong."""

    async def _serve_host(self, hello: Any, channel: Any, address: str) -> None:
        if address.startswith(STRANGER) and hello.num_nodes == self._num_nodes:
            raise SimulationFault(f"{address} is taken for a host")
        await super()._serve_host(hello, channel, address)


class RunningHost:
    """A `Host` in a task, which may be killed or stopped."""

    def __init__(self, world: Any, node: int, address: str, key: bytes = KEY) -> None:
        self.address, self.program = address, f"host {node} at {address}, {next(world.numbers)}"
        nodes = NodesConfig("mp", world.scenario.num_hosts + 1, node, *FRONT)
        self._host = host.Host(nodes, key, MachineFacts(1))
        self._scope = trio.CancelScope()
        self.refusal: TrouperValidationError | None = None
        self.ended = trio.Event()
        self.is_killed = False

    def kill(self) -> None:
        self.is_killed = True
        self._scope.cancel()

    async def run(self) -> None:
        PROGRAM.set(self.program)
        MACHINE.set(self.address)
        with self._scope:
            try:
                await self._host.serve()
            except TrouperValidationError as error:
                self.refusal = error
        self.ended.set()


class VirtualAnyio:
    """Stands for `anyio` in the modules that use virtual sockets; what would block a thread is a task's."""

    def __init__(self) -> None:
        self.to_thread = self

    def __getattr__(self, name: str) -> Any:
        return getattr(anyio, name)

    async def wait_readable(self, one: Any) -> None:
        await one.wait_readable()

    async def wait_writable(self, one: Any) -> None:
        await one.wait_writable()

    def notify_closing(self, one: Any) -> None:
        one.notify_closing()

    async def run_sync(self, function: Callable[..., Any], *args: Any, limiter: Any = None) -> Any:
        """Nothing cancels a thread."""
        with trio.CancelScope(shield=True):
            await trio.lowlevel.checkpoint()
            found = function(*args)
            return await found if inspect.isawaitable(found) else found
