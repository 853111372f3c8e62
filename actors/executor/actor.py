"""The executor actor: plans go to the device in order, answers come back in order."""

from typing import assert_never

import anyio
from anyio.abc import TaskStatus

from trouper.actors.channel import Inbox, Sender
from trouper.actors.executor.device import Device, DeviceInfo
from trouper.actors.messages import DeviceCall, ExecutorInbox, PoolPlan, SchedulerInbox, StepPlan

CLOSE_GRACE_S = 30  # one step under way, then the memory goes back


class Executor:
    """Owns one device.  `run` reports the loaded device's `DeviceInfo` once it can take plans."""

    def __init__(
        self,
        inbox: Inbox[ExecutorInbox],
        scheduler: Sender[SchedulerInbox],
        device: Device,
    ) -> None:
        self._inbox = inbox
        self._scheduler = scheduler
        self._device = device

    async def run(self, *, task_status: TaskStatus[DeviceInfo] = anyio.TASK_STATUS_IGNORED) -> None:
        with self._inbox, self._scheduler:
            try:
                info = await self._device.load()
                async with anyio.create_task_group() as tg:
                    # Room for the answers is reserved: there are never more than the plans in flight.
                    tell = self._scheduler.send_nowait
                    tg.start_soon(self._device.deliver, tell, name="executor answers")
                    task_status.started(info)
                    async for message in self._inbox:
                        match message:
                            case StepPlan() | PoolPlan():
                                self._device.submit(message)
                            case DeviceCall():
                                await self._call(message)
                            case _:
                                assert_never(message)
                    tg.cancel_scope.cancel()
            finally:
                with anyio.move_on_after(CLOSE_GRACE_S, shield=True):
                    await self._device.aclose()

    async def _call(self, message: DeviceCall) -> None:
        try:
            message.answer.set(await self._device.call(message.method, *message.args))
        except Exception as error:  # it belongs to who asked
            message.answer.fail(error)
