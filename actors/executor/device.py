"""Connect the scheduler to whatever computes: the executor actor, and the interface `Device` that it drives.

A device is a thread, a group of worker processes, or a simulation.  In its interface, `submit` never waits and `receive` does, so that the
order of plans does not depend on how tasks are scheduled, and one test suite drives real and simulated devices.  The actor has two loops:
one submits the next plan while the device still runs the current one, the other returns results.
"""

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

import anyio
import msgspec
from anyio.abc import TaskStatus
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from trouper.actors.messages.controls import DeviceAction, DeviceCall, ExecutorInbox, SchedulerInbox
from trouper.actors.messages.requests import GrammarReady, PrepareGrammar
from trouper.actors.messages.steps import (
    DeviceBack,
    DeviceFailed,
    DeviceLost,
    PoolDone,
    PoolPlan,
    ReplicaEvent,
    StepDone,
    StepFailed,
    StepPlan,
    TierAnswer,
    TierOrder,
)
from trouper.config.kv_layout import KVLayout
from trouper.errors import DeviceStartError

Result_co = TypeVar("Result_co", covariant=True)
StepResult = StepDone | PoolDone | StepFailed
DeviceEvent = StepResult | GrammarReady | TierAnswer | DeviceLost | DeviceBack


class PendingResult(NamedTuple, Generic[Result_co]):
    """Represent the result of launched work, so that the caller can launch more work before it calls `finish`.

    `is_ready` tests whether `finish` would return immediately. `finish` waits for the result. `when_ready`
    registers a callback, called from any thread; if it is None, the caller polls `is_ready`.
    """

    is_ready: Callable[[], bool]
    finish: Callable[[], Result_co]
    when_ready: Callable[[Callable[[], None]], None] | None = None


class DeviceInfo(msgspec.Struct, frozen=True):
    """Describe a device after loading. `num_blocks` includes the null block 0.

    `num_weight_bytes` is 0 if the bytes were not counted. `longest` is the longest sequence, in tokens, that
    the model code supports; None means that there is no limit.

    A model with recurrent mixers needs a state of `state_bytes` for each sequence. Then `num_state_rows` sequences can run at
    once, and the `num_snapshots` rows after theirs hold copies of states.

    `layout` describes which layers share a block; None means all.
    """

    num_blocks: int
    block_size: int
    dtype: str
    name: str
    num_weight_bytes: int = 0
    longest: int | None = None
    num_state_rows: int = 0
    num_snapshots: int = 0
    state_bytes: int = 0
    layout: KVLayout | None = None

    @property
    def kv_layout(self) -> KVLayout:
        """Return how sequences use blocks."""
        return self.layout or KVLayout(self.block_size)

    def num_kv_tokens(self, num_tokens: int) -> int:
        """Count the tokens of all sequences of one length that the KV cache holds at once."""
        return self.kv_layout.num_room_tokens(self.num_blocks - 1, num_tokens)


def timed(result: StepResult, seconds: float) -> StepResult:
    """Return the result with its computing time: the seconds for which it was the oldest plan. A failed step is returned unchanged."""
    if isinstance(result, StepFailed):
        return result
    return msgspec.structs.replace(result, seconds=seconds)


class Device(Protocol):
    """Run plans one at a time, in the order of their submission. Only one task calls `receive`.

    An implementation may be a thread, worker processes or a simulation; the executor cannot distinguish them.
    """

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Return the worker processes on this machine; none if the device runs in this process, or while they restart."""
        ...

    async def load(self) -> DeviceInfo:
        """Load the weights, allocate KV memory and record steps.

        Everything that can fail at start happens here.  Returns the sizes that the scheduler needs.
        """
        ...

    def submit(self, plan: StepPlan | PoolPlan) -> None:
        """Queue a plan that matches the kind of model. The scheduler keeps at most `max_steps_in_flight` plans
        in flight, so the queue always has room.
        """
        ...

    def prepare(self, order: PrepareGrammar) -> None:
        """Compile a grammar while steps run; `receive` returns `GrammarReady` for it. Only one order is open
        at a time.

        The device holds the grammar until a later order releases it and the plans before that order are done,
        or until the device is lost.
        """
        ...

    def order_tier(self, order: TierOrder) -> None:
        """Queue an order to the tier on disk, after the plans already submitted. `receive` returns its
        `TierAnswer`.

        A device without a tier gets no orders. A lost device does not answer its orders.
        """
        ...

    async def receive(self) -> DeviceEvent:
        """Wait for the next event: results come in the order of the plans. A cancelled wait loses nothing.

        `StepFailed` reports an error that the device survived; all later plans of the same epoch then return
        `StepFailed` without running. After `DeviceLost` earlier plans get no answer, and new plans are
        ignored until `DeviceBack`.

        Raises:
            Exception: the device is broken and the engine cannot continue.
        """
        ...

    async def call(self, action: DeviceAction) -> object:
        """Perform an action after the plans already submitted.

        Raises:
            Exception: the action failed; the device is unchanged.
        """
        ...

    async def aclose(self) -> None:
        """Release memory and threads after the step in progress.

        Idempotent.  Must not fail, because it is part of every shutdown.
        """
        ...


def torch_facts() -> dict[str, Any]:
    """Describe torch and its devices for bug reports; an empty dictionary if torch is not installed.
    `gpus` lists name, memory in bytes and compute capability.
    """
    try:
        import torch
    except ImportError:
        return {}
    gpus: list[dict[str, Any]] = []
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            found: Any = cast("Any", torch.cuda).get_device_properties(i)
            gpus.append(
                {
                    "name": found.name,
                    "memory_bytes": found.total_memory,
                    "capability": f"{found.major}.{found.minor}",
                }
            )
    return {
        "version": torch.__version__,
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "onednn": torch.backends.mkldnn.is_available(),
        "cuda": torch.version.cuda,
        "gpus": gpus,
    }


# Seconds for the step in progress to end and for the memory to be released.
CLOSE_GRACE_S = 30


class ExecutorSnapshot(msgspec.Struct, frozen=True):
    """Describe the executor for diagnostics. `last_step` is 0 before the first plan; `call` names the action in progress."""

    last_step: int
    call: str | None
    # Worker processes on this machine.
    process_ids: tuple[int, ...] = ()


class Executor:
    """Own one device, and preserve the order of everything sent to it. `run` reports `DeviceInfo` once the device accepts plans.

    Args:
        replica: index of this device among several replicas, added to each of its events; None for a single device.
    """

    def __init__(
        self,
        inbox: MemoryObjectReceiveStream[ExecutorInbox],
        scheduler: MemoryObjectSendStream[SchedulerInbox],
        device: Device,
        replica: int | None = None,
    ) -> None:
        self._inbox = inbox
        self._scheduler = scheduler
        self._device = device
        self._replica = replica
        # Whether this replica has failed permanently while others continue.
        self._has_failed = False
        self._last_step = 0
        self._call_under_way: str | None = None

    def snapshot(self) -> ExecutorSnapshot:
        """Return the last submitted step and the action in progress.

        Diagnostics use it to see whether a device is stuck, and in which step.
        """
        ids = self._device.process_ids
        return ExecutorSnapshot(self._last_step, self._call_under_way, ids)

    async def run(self, *, task_status: TaskStatus[DeviceInfo] = anyio.TASK_STATUS_IGNORED) -> None:
        with self._inbox, self._scheduler:
            try:
                info = await self._device.load()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._receive, name="executor, results")
                    task_status.started(info)
                    await self._submit()
                    tasks.cancel_scope.cancel()
            finally:
                with anyio.move_on_after(CLOSE_GRACE_S, shield=True):
                    await self._device.aclose()

    async def _submit(self) -> None:
        """Submit messages in their order. An action begins after the plans before it, and later messages wait until it ends."""
        async for message in self._inbox:
            if isinstance(message, DeviceCall):
                await self._call(message)
            elif isinstance(message, PrepareGrammar):
                self._device.prepare(message)
            elif isinstance(message, TierOrder):
                self._device.order_tier(message)
            else:
                self._last_step = message.step
                self._device.submit(message)

    async def _receive(self) -> None:
        """Forward each event to the scheduler without waiting, since its channel has room for all plans and orders in flight.

        Raises:
            DeviceStartError: the only device cannot be restarted. With several replicas the scheduler
                receives `DeviceFailed` instead.
        """
        while True:
            try:
                event = await self._device.receive()
            except DeviceStartError as error:
                if self._replica is None:
                    raise
                self._has_failed = True
                failed = DeviceFailed(str(error))
                self._scheduler.send_nowait(ReplicaEvent(self._replica, failed))
                return
            self._scheduler.send_nowait(
                event if self._replica is None else ReplicaEvent(self._replica, event)
            )

    async def _call(self, message: DeviceCall) -> None:
        # A failed device holds no memory, adapter or trace, so every action is already complete.
        if self._has_failed:
            message.answer.set(None)
            return
        self._call_under_way = message.action.name
        try:
            message.answer.set(await self._device.call(message.action))
        # The error belongs to the caller of the action, not to the engine.
        except Exception as error:
            message.answer.fail(error)
        finally:
            self._call_under_way = None
