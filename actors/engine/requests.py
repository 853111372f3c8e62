"""Questions to actors: each is answered, or failed by the end of the engine; nobody waits for ever."""

from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any, Literal

import anyio
from anyio.streams.memory import MemoryObjectSendStream

from trouper.actors.messages.controls import DeviceCall, Flush, Probe
from trouper.actors.messages.inboxes import ExecutorInbox, ObserverInbox, SchedulerInbox
from trouper.actors.runtime.future import Answer
from trouper.errors import EngineDeadError

# The end of the engine follows at once, and fails the open answers with its cause.
ACTOR_IS_GONE = (anyio.BrokenResourceError, anyio.ClosedResourceError)


class Questions:
    """Borrows the sending ends; keeps the answers that somebody waits for.

    `end` is final: it fails what is open, and every later question raises the same error.
    """

    def __init__(
        self,
        scheduler: MemoryObjectSendStream[SchedulerInbox],
        executor: MemoryObjectSendStream[ExecutorInbox],
        observer: MemoryObjectSendStream[ObserverInbox],
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._observer = observer
        self._open: set[Answer[Any]] = set()
        self._probing = anyio.Lock()
        self._probe = Answer[object]()  # sent, or to be sent next
        self._is_probe_sent = False
        self.error: EngineDeadError | None = None

    async def ask_scheduler(self, question: Callable[..., SchedulerInbox], *args: object) -> Any:
        """`question` is the message's class; the answer becomes its last field."""
        with self._asking() as answer:
            with suppress(*ACTOR_IS_GONE):
                self._scheduler.send_nowait(question(*args, answer))
            return await answer.wait()

    async def call_device(
        self,
        method: Literal["sleep", "wake", "start_profile", "stop_profile"],
        *args: object,
        done: Callable[[], object] = lambda: None,
    ) -> None:
        """One at a time, which is what the executor's inbox has room for, and `done` as soon as it is.

        Nobody leaves a device that is at it: a cancellation is raised after `done`, or in place of an error.
        """
        with self._asking() as answer:
            with suppress(*ACTOR_IS_GONE):
                self._executor.send_nowait(DeviceCall(method, args, answer))
            cancelled = await answer.insist()
        try:
            answer.result()
            done()
        finally:
            if cancelled is not None:
                raise cancelled

    async def probe(self) -> None:
        """A round trip: to the scheduler, from it through the executor to the device, and back.

        One is under way at a time, which is what the executor's inbox has room for: whoever asks after
        somebody has stopped waiting takes over what that one sent.
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
                    if answer.is_there:
                        self._probe, self._is_probe_sent = Answer[object](), False

    async def flush_observer(self, hurry: Callable[[], object]) -> None:
        """Wait until everything reported before has been counted; `hurry` wakes the observer."""
        with self._asking() as answer:
            with suppress(*ACTOR_IS_GONE):
                await self._observer.send(Flush(answer))
            hurry()
            await answer.wait()

    def check_alive(self) -> None:
        """Raises EngineDeadError, with the cause, once the engine has failed or is closed."""
        if self.error is not None:
            raise EngineDeadError(str(self.error)) from self.error.__cause__

    def end(self, error: EngineDeadError) -> None:
        self.error = error
        for answer in self._open:
            answer.fail(error)

    @contextmanager
    def _asking(self, answer: Answer[Any] | None = None) -> Generator[Answer[Any]]:
        self.check_alive()
        answer = answer or Answer[Any]()
        self._open.add(answer)
        try:
            yield answer
        finally:
            self._open.discard(answer)
