"""Control calls to actors, such as a pause or a probe.

Each call is answered by its actor, or fails when the engine ends.  So no caller waits for ever, even if an actor dies.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import anyio
from anyio.streams.memory import MemoryObjectSendStream

from trouper.actors.messages.controls import (
    DeviceAction,
    DeviceCall,
    ExecutorInbox,
    Flush,
    ObserverInbox,
    Probe,
    SchedulerInbox,
)
from trouper.actors.runtime.future import Future
from trouper.errors import EngineDeadError

# The engine ends right after these errors, and fails the open answers with its cause.
ACTOR_IS_GONE = (anyio.BrokenResourceError, anyio.ClosedResourceError)


class ControlClient:
    """Send orders to the actors and keep the futures of their answers.

    `end` is final: it fails the open answers, and every later call raises the same error.
    """

    def __init__(
        self,
        scheduler: MemoryObjectSendStream[SchedulerInbox],
        executors: Sequence[MemoryObjectSendStream[ExecutorInbox]],
        observer: MemoryObjectSendStream[ObserverInbox],
    ) -> None:
        self._scheduler = scheduler
        self._executors = tuple(executors)  # one for each replica
        self._observer = observer
        self._open: set[Future[Any]] = set()
        self._probing = anyio.Lock()
        self._probe = Future[object]()  # sent, or to be sent next
        self._is_probe_sent = False
        self.error: EngineDeadError | None = None

    async def ask_scheduler(self, question: Callable[..., SchedulerInbox], *args: object) -> Any:
        """Send a message of the class `question` with a future as its last field, and wait for the answer.

        Raises EngineDeadError if the engine ends before the answer.
        """
        with self._asking() as answer:
            with suppress(*ACTOR_IS_GONE):
                self._scheduler.send_nowait(question(*args, answer))
            return await answer.wait()

    async def call_device(
        self,
        action: DeviceAction,
        *,
        done: Callable[[], object] = lambda: None,
        undo: DeviceAction | None = None,
    ) -> None:
        """Perform an action on the devices of all replicas, and call `done` after it.

        The executor's inbox has room for one call of the lifecycle and one for an adapter at a time.  A cancellation is raised
        after the call has ended: after `done`, or in place of an error.

        Args:
            undo: the action for the devices that succeeded, if others failed.  If `undo` fails, `done` is called, because the action
                stays in effect on at least one device.
        """
        answers, cancelled = await self._call_all(self._executors, action)
        pairs = list(zip(self._executors, answers, strict=True))
        able = [executor for executor, answer in pairs if answer.error is None]
        if undo is not None and 0 < len(able) < len(pairs) and self.error is None:
            undone, again = await self._call_all(able, undo)
            cancelled = cancelled or again
            if any(answer.error is not None for answer in undone):
                done()
        try:
            for answer in answers:
                answer.result()
            done()
        finally:
            if cancelled is not None:
                raise cancelled

    async def _call_all(
        self,
        executors: Sequence[MemoryObjectSendStream[ExecutorInbox]],
        action: DeviceAction,
    ) -> tuple[list[Future[Any]], BaseException | None]:
        """Call some devices at once and wait for all.  Returns their answers, and a cancellation that arrived meanwhile."""
        cancelled: BaseException | None = None
        with ExitStack() as asking:
            answers = [asking.enter_context(self._asking()) for _ in executors]
            for executor, answer in zip(executors, answers, strict=True):
                with suppress(*ACTOR_IS_GONE):
                    executor.send_nowait(DeviceCall(action, answer))
            for answer in answers:
                cancelled = await answer.wait_shielded() or cancelled
        return answers, cancelled

    async def probe(self) -> None:
        """Make a round trip through the scheduler and the executor to the device and back.

        The executor's inbox has room for one probe at a time.  So after a cancelled call, the next caller waits for the probe that is
        already on its way.
        """
        async with self._probing:
            with self._asking(self._probe) as answer:
                try:
                    if not self._is_probe_sent:
                        with suppress(*ACTOR_IS_GONE):
                            self._scheduler.send_nowait(Probe(answer))
                        self._is_probe_sent = True
                    await answer.wait()
                finally:
                    if answer.is_done:
                        self._probe, self._is_probe_sent = Future[object](), False

    async def flush_observer(self, hurry: Callable[[], object]) -> None:
        """Wait until the observer has counted everything reported before.

        Args:
            hurry: wakes the observer.

        Channels keep the order of messages, so an answer means that all earlier ones have been processed.
        """
        with self._asking() as answer:
            with suppress(*ACTOR_IS_GONE):
                await self._observer.send(Flush(answer))
            hurry()
            await answer.wait()

    def check_alive(self) -> None:
        """Raise EngineDeadError, with the cause, once the engine has failed or is closed.

        Frontends call it before they wait for an actor, because a dead actor would never answer.
        """
        if self.error is not None:
            raise EngineDeadError(str(self.error)) from self.error.__cause__

    def end(self, error: EngineDeadError) -> None:
        self.error = error
        for answer in self._open:
            answer.fail(error)

    @contextmanager
    def _asking(self, answer: Future[Any] | None = None) -> Generator[Future[Any]]:
        self.check_alive()
        answer = answer or Future[Any]()
        self._open.add(answer)
        try:
            yield answer
        finally:
            self._open.discard(answer)
