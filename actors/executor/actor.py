"""The executor actor: two loops, one submits plans to the device, one passes its results to the scheduler."""

import anyio
import msgspec
from anyio.abc import TaskStatus
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from trouper.actors.executor.device import Device, DeviceInfo
from trouper.actors.messages.controls import DeviceCall, ExecutorInbox, SchedulerInbox
from trouper.actors.messages.requests import PrepareGrammar
from trouper.actors.messages.steps import DeviceFailed, ReplicaEvent
from trouper.errors import DeviceStartError

CLOSE_GRACE_S = 30  # one step under way, then the memory goes back


class ExecutorSnapshot(msgspec.Struct, frozen=True):
    """The state of the executor."""

    last_step: int  # that was given to the device; 0 before the first
    call: str | None  # the method of the device that is under way


class Executor:
    """Owns one device.  `run` reports the loaded device's `DeviceInfo` once it can take plans."""

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
        self._replica = replica  # None: there is one alone
        self._has_failed = False  # the device, of one of several replicas
        self._last_step = 0
        self._call_under_way: str | None = None

    def snapshot(self) -> ExecutorSnapshot:
        """Describe what the device has been given."""
        return ExecutorSnapshot(self._last_step, self._call_under_way)

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
        """Submit plans in the order in which they come; a call waits behind those before it."""
        async for message in self._inbox:
            if isinstance(message, DeviceCall):
                await self._call(message)
            elif isinstance(message, PrepareGrammar):
                self._device.prepare(message)
            else:
                self._last_step = message.step
                self._device.submit(message)

    async def _receive(self) -> None:
        """Pass on each result; room is reserved, for there are never more than the plans in flight and one grammar.

        Raises:
            DeviceStartError: the device is not started again, and there is no other.
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
        if self._has_failed:  # it holds no memory, no adapter and no trace: all is as asked for
            message.answer.set(None)
            return
        self._call_under_way = message.action.name
        try:
            message.answer.set(await self._device.call(message.action))
        except Exception as error:  # it belongs to the task that asked
            message.answer.fail(error)
        finally:
            self._call_under_way = None
