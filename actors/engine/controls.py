"""Pause, sleep, wake and profile the engine as a whole, by calls to its actors.

Each of these operations waits several times while it changes the lifecycle, so a lock serializes them.  The lock also prevents
concurrent calls to the device, because the executor's inbox has room for only one.

A call is answered by its actor, or fails when the engine ends.  So no caller waits forever, even if an actor dies.
"""

import warnings
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any, cast

import anyio
from anyio.streams.memory import MemoryObjectSendStream

from trouper.actors.engine.lifecycle import (
    MEMORY,
    EngineState,
    Event,
    Hold,
    Lifecycle,
    Mode,
    check_level,
    check_mode,
    check_tags,
)
from trouper.actors.messages.controls import (
    DeviceAction,
    DeviceCall,
    ExecutorInbox,
    Flush,
    ObserverInbox,
    Pause,
    Probe,
    ResetPrefixCache,
    SchedulerInbox,
    SetPause,
    Sleep,
    StartProfile,
    Step,
    StopProfile,
    Wake,
)
from trouper.actors.observability.metrics import Metrics
from trouper.actors.observability.observer import RecentEvents
from trouper.actors.output.slot import Slot
from trouper.actors.runtime.event_loop import Future, wait_shielded
from trouper.errors import EngineDeadError, ProfilerAlreadyActiveError

# These errors mean that the actor has ended.  The engine then ends too, and fails the open calls with its cause.
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
        """Send a message through the scheduler and the executor to the device and back, to check that they are alive.

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


RESTORE_GRACE_S = 60  # taking a pause back, while being cancelled


class Controls:
    """Run operations on the whole engine, one at a time.

    Args:
        abort_all: aborts every open request, and returns the reply slots that will receive their ends.
    """

    def __init__(
        self,
        client: ControlClient,
        lifecycle: Lifecycle,
        metrics: Metrics | None,
        events: RecentEvents,
        abort_all: Callable[[], list[Slot[Any]]],
    ) -> None:
        self._client = client
        self._lifecycle = lifecycle
        self._metrics = metrics  # None: statistics are off
        self._events = events
        self._abort_all = abort_all
        self._transition = anyio.Lock()
        self._is_profiling = False

    def __repr__(self) -> str:
        return f"<Controls of an engine that is {self._lifecycle.state.value}>"

    async def step(self) -> None:
        """Run one iteration of an engine in stepped mode.

        When it returns, the outputs of the iteration can be read from the reply slots.
        """
        await self._client.ask_scheduler(Step)

    async def pause(self, mode: str = "abort", *, clear_cache: bool = True) -> None:
        """Stop scheduling, and return when the pause has taken full effect.

        Mode `abort` ends open requests, `wait` lets them finish, and `keep` holds them as they are.
        """
        check_mode(mode)
        async with self._changing():
            self._lifecycle.move(Event.PAUSE)
            await self._pause(mode, refuses=mode != "keep")
            if clear_cache and self._lifecycle.resident == MEMORY:
                await self.reset_prefix_cache(preempt="recompute")

    async def resume(self) -> None:
        """Schedule again after a pause.

        Raises:

            RuntimeError: the weights or the KV cache are not loaded; `wake` loads them first.
        """
        async with self._changing():
            self._lifecycle.move(
                Event.RESUME
            )  # illegal in ASLEEP, and memory is absent nowhere else
            await self._resume()

    @asynccontextmanager
    async def paused(
        self, mode: str = "keep", *, clear_cache: bool = False
    ) -> AsyncGenerator[None]:
        """Pause the engine inside the block, and restore its earlier state on every exit.

        Blocks may be nested or overlap, in different tasks: the engine continues when the last of them ends.
        """
        check_mode(mode)
        hold = self._lifecycle.hold(cast("Mode", mode))
        try:
            await self.pause(mode, clear_cache=clear_cache)
            yield
        finally:
            try:
                cancelled = await wait_shielded(  # noqa: ASYNC102  # which has a shield and a limit
                    partial(self._release, hold),
                    lambda: not self._lifecycle.has(hold),
                    limit_s=RESTORE_GRACE_S,
                )
            finally:
                if self._lifecycle.has(hold):  # another transition takes that long
                    self._lifecycle.release(hold)
            if cancelled is not None:
                raise cancelled

    async def sleep(self, level: int = 1, mode: str = "abort") -> bool:
        """Pause, then release device memory.  Returns False if the engine already sleeps at this level or deeper.

        Level 0 only stops scheduling.  Levels 1 and 2 drop the prefix cache, the KV memory and the
        weights.  Sequences frozen by the mode `keep` are recomputed after waking.
        """
        check_level(level)
        check_mode(mode)
        async with self._changing():
            lifecycle = self._lifecycle
            if level == 0:
                lifecycle.move(Event.PAUSE)
                await self._pause(mode, refuses=False)
                return True
            is_asleep = not lifecycle.resident and not lifecycle.is_uneven
            if is_asleep and level <= lifecycle.level:
                return False
            was_awake = lifecycle.state is EngineState.AWAKE
            lifecycle.move(Event.SLEEP)
            failure: Exception | None = None
            try:
                await self._give_memory_back(level, mode)
            except Exception as error:
                failure = error
            finally:  # given up half-way, it is paused, or as deep asleep as before
                if lifecycle.state is EngineState.DRAINING:
                    is_whole = lifecycle.resident == MEMORY
                    lifecycle.move(Event.PAUSE if is_whole else Event.SLEPT)
            if failure is not None:
                if was_awake and lifecycle.state is EngineState.PAUSED:
                    lifecycle.move(Event.RESUME)
                    await self._resume()
                raise failure
            return True

    async def wake(self, tags: Iterable[str] | None = None) -> bool:
        """Load memory that `sleep` released, and schedule again once all of it is loaded.

        Returns True if the engine is fully awake.  `tags` selects parts, by default all.
        """
        wanted = check_tags(tags)
        async with self._changing():
            lifecycle = self._lifecycle
            if not lifecycle.is_sleeping:
                return True
            missing = (wanted & MEMORY) - lifecycle.resident
            lifecycle.move(Event.WAKE)
            was_short = lifecycle.resident != MEMORY
            try:
                if missing:
                    done = partial(lifecycle.bring_back, missing)
                    await self._change_memory(Wake(missing), done)
            finally:
                if lifecycle.state is EngineState.WAKING:
                    is_whole = lifecycle.resident == MEMORY
                    lifecycle.move(Event.WOKEN if is_whole else Event.WAKE_PAUSED)
            if lifecycle.resident != MEMORY:
                return False
            if was_short or "scheduling" in wanted:
                lifecycle.move(Event.RESUME)
                await self._resume()
            return not lifecycle.is_sleeping

    async def reset_prefix_cache(self, *, preempt: str = "no", clears_tier: bool = False) -> bool:
        """Clear the prefix cache, for example after loading new weights.

        Returns False, and leaves the cache unchanged, while a sequence holds a block.  With `preempt`, running sequences are
        preempted first.

        Args:
            clears_tier: also remove the files of this model from the tier on disk, even if the result is False.
        """
        reset = partial(ResetPrefixCache, clears_tier=clears_tier)
        return await self._client.ask_scheduler(reset, preempt)

    async def probe(self) -> None:
        """Return when the scheduler and the device have processed a message: both are alive.

        The message goes through the same queues as plans, so a stuck step delays it.
        """
        await self._client.probe()

    async def start_profile(self, folder: str, prefix: str) -> None:
        """Begin a trace of the device.

        `stop_profile` writes it into `folder`.

        Raises:

            ProfilerAlreadyActiveError: a trace is already being recorded.
        """
        async with self._transition:
            if self._is_profiling:
                raise ProfilerAlreadyActiveError("stop_profile first")
            done = partial(setattr, self, "_is_profiling", True)
            start = StartProfile(folder, prefix)
            await self._client.call_device(start, done=done, undo=StopProfile())

    async def stop_profile(self) -> None:
        async with self._transition:
            if not self._is_profiling:
                warnings.warn("stop_profile without start_profile", stacklevel=2)
                return
            # only then: a trace that a lost worker's successor has begun again is to be stopped once more
            done = partial(setattr, self, "_is_profiling", False)
            await self._client.call_device(StopProfile(), done=done)

    @asynccontextmanager
    async def _changing(self) -> AsyncGenerator[None]:
        """Serialize changes of the lifecycle, and update the metrics after each one."""
        async with self._transition:
            self._client.check_alive()
            began_s, before = anyio.current_time(), self._lifecycle.shown_state
            try:
                yield
            finally:
                self._show()
                if (after := self._lifecycle.shown_state) != before:
                    seconds = anyio.current_time() - began_s
                    self._events.note("state", after, seconds=seconds)

    def _show(self) -> None:
        if self._metrics is not None:
            self._metrics.set_sleep_level(
                self._lifecycle.level, is_sleeping=self._lifecycle.is_sleeping
            )

    async def _give_memory_back(self, level: int, mode: str) -> None:
        lifecycle = self._lifecycle
        await self._pause(mode, refuses=mode != "keep")
        if lifecycle.resident == MEMORY:
            lifecycle.pause = Pause.ALL
            await self._client.ask_scheduler(SetPause, Pause.ALL)
            await self.reset_prefix_cache(preempt="recompute")
        done = partial(lifecycle.give_back, level)
        undo = Wake(MEMORY) if lifecycle.resident == MEMORY else None
        await self._change_memory(Sleep(level), done, undo)

    async def _change_memory(
        self,
        action: Sleep | Wake,
        done: Callable[[], object],
        undo: Wake | None = None,
    ) -> None:
        """Release or reload memory on all devices.  If a device fails, replicas may differ in what is loaded."""
        lifecycle = self._lifecycle
        was_uneven, lifecycle.is_uneven = lifecycle.is_uneven, True
        await self._client.call_device(action, done=done, undo=undo)
        is_partial = isinstance(action, Wake) and lifecycle.resident != MEMORY
        lifecycle.is_uneven = was_uneven and is_partial

    async def _release(self, hold: Hold) -> None:
        """End a hold.  If the engine was put to sleep or ended inside the block, it stays so."""
        async with self._transition:
            lifecycle = self._lifecycle
            lifecycle.release(hold)
            self._show()
            if lifecycle.state not in (EngineState.AWAKE, EngineState.PAUSED):
                return
            lifecycle.move(Event.PAUSE if lifecycle.is_paused else Event.RESUME)
            try:
                await self._client.ask_scheduler(SetPause, lifecycle.pause)
            except EngineDeadError:
                pass  # nothing is left to resume, and every waiter gets this error anyway

    async def _pause(self, mode: str, *, refuses: bool) -> None:
        self._lifecycle.begin_pause(cast("Mode", mode), refuses=refuses)
        aborted = self._abort_all() if mode == "abort" else ()
        await self._client.ask_scheduler(SetPause, self._lifecycle.pause)
        for slot in aborted:
            await slot.wait_over()

    async def _resume(self) -> None:
        self._lifecycle.resume()
        await self._client.ask_scheduler(SetPause, Pause.NONE)
