"""The executor actor connects the scheduler to a device: one loop submits plans, another returns results.

Two loops are needed because submitting must never wait for a result: the next plan is queued on the device
while the current one runs.
"""

import anyio
import msgspec
from anyio.abc import TaskStatus
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from trouper.actors.executor.device import Device, DeviceInfo
from trouper.actors.messages.controls import DeviceCall, ExecutorInbox, SchedulerInbox
from trouper.actors.messages.requests import PrepareGrammar
from trouper.actors.messages.steps import DeviceFailed, ReplicaEvent, TierOrder
from trouper.errors import DeviceStartError

# Seconds for the step in progress to end and for the memory to be released.
CLOSE_GRACE_S = 30


class ExecutorSnapshot(msgspec.Struct, frozen=True):
    """State of the executor for diagnostics. `last_step` is 0 before the first plan; `call` names the action in
    progress.
    """

    last_step: int
    call: str | None
    # Worker processes on this machine.
    process_ids: tuple[int, ...] = ()


class Executor:
    """Owns one device and the order of everything sent to it. `run` reports the loaded device's `DeviceInfo`
    when the device can accept plans.

    Args:
        replica: index of this device among several replicas, added to each of its events; None for a single
            device.
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
        # Set when this replica failed for good while other replicas go on.
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
        """Submit plans in the order of their messages. An action waits until the messages before it were
        submitted.
        """
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
        """Forward each result to the scheduler without waiting. The channel has room for all plans in flight and
        one grammar.

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
        # A failed device holds no memory, no adapter and no trace, so there is nothing to do.
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
