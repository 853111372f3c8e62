"""`Engine`: what frontends hold while the troupe plays.

It owns the table of open requests and the engine's lifecycle, and asks the actors for everything else.
Requests are opened, aborted and closed synchronously; only what waits for the device is async.
"""

import time
import warnings
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar, cast

import anyio
import msgspec
from anyio.streams.memory import MemoryObjectSendStream

from trouper.actors.admission import Admission
from trouper.actors.answer import Answer
from trouper.actors.detokenizer import Detokenizer
from trouper.actors.executor.device import DeviceInfo
from trouper.actors.generation import Generation
from trouper.actors.lifecycle import (
    MEMORY,
    EngineState,
    Event,
    Lifecycle,
    Mode,
    check_level,
    check_mode,
    check_tags,
)
from trouper.actors.messages import (
    Abort,
    DeviceCall,
    ExecutorInbox,
    Flush,
    ObserverInbox,
    Render,
    RendererInbox,
    RequestId,
    ResetPrefixCache,
    SchedulerInbox,
    SchedulerStats,
    SetPause,
    Step,
)
from trouper.actors.metrics import Metrics
from trouper.actors.observer import Observer
from trouper.actors.pause import Pause
from trouper.actors.rendering.tokenizer import Tokenizer
from trouper.actors.reply import ReplySlot
from trouper.actors.scheduler import Scheduler
from trouper.config import EngineConfig
from trouper.errors import (
    EngineDeadError,
    ProfilerAlreadyActiveError,
    RetryableRequestError,
    TrouperValidationError,
)
from trouper.inputs import PromptType
from trouper.metrics import Metric
from trouper.params import SamplingParams

T = TypeVar("T")
RESTORE_GRACE_S = 60  # giving weights back, or taking a pause back, while being cancelled


class EngineStatistics(msgspec.Struct, frozen=True):
    """One look at every table of the engine; all zero but the block counts when it is idle."""

    num_open_requests: int
    num_rendering: int  # queued for a renderer
    num_tracked: int  # sequences the Detokenizer knows
    scheduler: SchedulerStats


class Engine:
    """The handle of a running troupe.  Made by `open_engine`, never by hand."""

    def __init__(
        self,
        config: EngineConfig,
        info: DeviceInfo,
        tokenizer: Tokenizer | None,
        to_renderer: MemoryObjectSendStream[RendererInbox],
        to_scheduler: MemoryObjectSendStream[SchedulerInbox],
        to_executor: MemoryObjectSendStream[ExecutorInbox],
        to_observer: MemoryObjectSendStream[ObserverInbox],
        scheduler: Scheduler,
        detokenizer: Detokenizer,
        observer: Observer | None,
    ) -> None:
        self.config = config
        self.info = info
        self.tokenizer = tokenizer
        self.metrics = None if observer is None else observer.metrics  # None: statistics are off
        self.dead_error: EngineDeadError | None = None
        self.lifecycle = Lifecycle()
        self._to_renderer = to_renderer
        self._to_scheduler = to_scheduler
        self._to_executor = to_executor
        self._to_observer = to_observer
        self._scheduler = scheduler
        self._detokenizer = detokenizer
        self._observer = observer
        self._admission = Admission(
            config.max_num_queued_reqs, config.max_num_queued_tokens, self._note_rejection
        )
        self._open: dict[str, tuple[RequestId, ReplySlot]] = {}
        self._answers: set[Answer[Any]] = set()  # those somebody waits for
        self._next_id = 0
        self._is_profiling = False
        self._has_warned_of_tracing = False
        # Sleeping and waking are protocols of several awaits over one state; two at a time would
        # interleave half-done ones.  Spec 10.3: concurrent calls queue.
        self._transition = anyio.Lock()

    def __repr__(self) -> str:
        return f"<Engine {self.config.model.name!r} {self.lifecycle.state.value}, {len(self._open)} open>"

    # Requests

    def generate(
        self,
        prompt: PromptType,
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
        truncate_prompt_tokens: int | None = None,
        truncation_side: str | None = None,
        add_special_tokens: bool | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> Generation:
        """A request as an async iterator; nothing happens before it is entered or iterated.

        Raises:
            TypeError: `request_id` is not a string, or `params` not SamplingParams.
        """
        if not isinstance(request_id, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # not every caller is typed
            raise TypeError(f"request_id must be a string, not {type(request_id).__name__}")
        if not isinstance(params, SamplingParams):  # pyright: ignore[reportUnnecessaryIsInstance]  # the same
            raise TypeError(f"params must be SamplingParams, not {type(params).__name__}")
        if trace_headers and self.config.otlp_traces_endpoint is None:
            self._warn_of_tracing()

        def render(id: RequestId, params: SamplingParams, slot: ReplySlot) -> Render:
            return Render(
                id=id,
                prompt=prompt,
                params=params,
                slot=slot,
                priority=priority,
                arrival_time=slot.stats.arrival_time,
                truncate_prompt_tokens=truncate_prompt_tokens,
                truncation_side=truncation_side,
                add_special_tokens=add_special_tokens,
                mm_processor_kwargs=mm_processor_kwargs,
                trace_headers=trace_headers,
            )

        return Generation(self, request_id, params.clone(), render, arrival_time)

    def open_request(
        self,
        request_id: str,
        params: SamplingParams,
        render: Callable[[RequestId, SamplingParams, ReplySlot], Render],
        arrival_time: float | None,
    ) -> tuple[RequestId, ReplySlot]:
        """Register and submit in one synchronous act, so no cancellation can fall in between.

        Raises:
            ValueError: the id is in flight already.
            RetryableRequestError: the engine is paused, asleep or draining.
            QueueOverflowError: too many open requests.
            MaxQueuedTokensError: too many prompt tokens in prefill.
            EngineDeadError: the engine is gone.
        """
        self.check_admission(params.n, request_id)
        id = RequestId(self._next_id)
        self._next_id += params.n
        slot = ReplySlot(
            request_id,
            params,
            self.config.stream_interval,
            prefills=self._admission.prefills,
            shows_stats=self.config.log_stats,
        )
        now = time.time()
        slot.stats.arrival_time = now if arrival_time is None else arrival_time
        slot.stats.arrival_ts = anyio.current_time() - max(0.0, now - slot.stats.arrival_time)
        self._open[request_id] = id, slot
        self._admission.enter(params.n)
        self._to_renderer.send_nowait(render(id, params, slot))
        return id, slot

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Raises what opening a request of n completions would raise now."""
        self.check_alive()
        if self.lifecycle.refuses is not None:
            raise RetryableRequestError(self.lifecycle.refuses)
        if request_id in self._open:
            raise ValueError(f"request_id {request_id!r} is already in flight")
        self._admission.check(n)

    def close_request(self, id: RequestId, slot: ReplySlot, *, is_finished: bool) -> None:
        """The reader is done.  Unfinished means: abort."""
        if not is_finished:
            self._post_abort(id, slot)
        slot.close()
        if self._open.pop(slot.request_id, None) is not None:
            self._admission.leave(slot.n)

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests; each reader gets its final output.  Unknown and finished ids are ignored."""
        for request_id in (request_ids,) if isinstance(request_ids, str) else tuple(request_ids):
            if request_id in self._open:
                self._post_abort(*self._open[request_id])

    def abort_all(self) -> list[ReplySlot]:
        self.abort(list(self._open))
        return [slot for _, slot in self._open.values()]

    @property
    def open_slots(self) -> tuple[ReplySlot, ...]:
        """The reply slots of all open requests, in the order of their opening."""
        return tuple(slot for _, slot in self._open.values())

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(
            num_open_requests=len(self._open),
            num_rendering=self._to_renderer.statistics().current_buffer_used,
            num_tracked=self._detokenizer.statistics().num_tracked,
            scheduler=self._scheduler.statistics(),
        )

    async def get_metrics(self) -> list[Metric]:
        """Every metric, with all that has been reported so far."""
        return (await self._flush()).values()

    async def log_stats(self) -> None:
        """Write the log line now.  Without statistics there is none."""
        if self._observer is not None and self.metrics is not None:
            await self._flush()
            self._observer.log()

    async def wait_idle(self) -> None:
        """Wait until no request is open that could still get output.

        Raises:
            EngineDeadError: the engine died meanwhile.
        """
        while busy := [slot for slot in self.open_slots if not slot.is_over]:
            await self._wait_over(busy)
        self.check_alive()

    # Lifecycle

    async def step(self) -> None:
        """One iteration of an engine that is stepped by hand; its outputs are then in the slots."""
        await self._ask(Step)

    async def pause(self, mode: str = "abort", *, clear_cache: bool = True) -> None:
        """Stop scheduling; returns when that has taken full effect.  Spec sections 10.1 and 10.2."""
        check_mode(mode)
        async with self._changing():
            self.lifecycle.move(Event.PAUSE)
            await self._pause(mode, refuses=mode != "keep")
            if clear_cache and self.lifecycle.resident == MEMORY:
                await self.reset_prefix_cache(preempt="recompute")

    async def resume(self) -> None:
        """Schedule again.  Raises RuntimeError while memory is absent."""
        async with self._changing():
            self.lifecycle.move(Event.RESUME)
            await self._resume()

    @asynccontextmanager
    async def paused(
        self, mode: str = "keep", *, clear_cache: bool = False
    ) -> AsyncGenerator[None]:
        """Paused inside the block; on every way out as it was found."""
        check_mode(mode)
        was_paused = self.lifecycle.is_paused
        try:
            await self.pause(mode, clear_cache=clear_cache)
            yield
        finally:
            if not was_paused and self.dead_error is None:
                with anyio.move_on_after(RESTORE_GRACE_S, shield=True):
                    try:
                        await self.resume()
                    except EngineDeadError:
                        pass  # nothing is left to resume, and whoever must know is told elsewhere

    async def sleep(self, level: int = 1, mode: str = "abort") -> bool:
        """Pause, then give memory back; False when it sleeps that deep already.

        Level 0 only stops scheduling.  Levels 1 and 2 drop the prefix cache, the KV memory and the
        weights; sequences that `keep` has frozen are recomputed after waking.
        """
        check_level(level)
        check_mode(mode)
        async with self._changing():
            lifecycle = self.lifecycle
            if lifecycle.is_sleeping and level <= lifecycle.level and level > 0:
                return False
            if level == 0:
                lifecycle.move(Event.PAUSE)
                await self._pause(mode, refuses=False)
                return True
            is_asleep = lifecycle.resident != MEMORY
            lifecycle.move(Event.SLEEP)
            await self._pause(mode, refuses=mode != "keep")
            if not is_asleep:
                lifecycle.pause = Pause.ALL
                await self._ask(SetPause, Pause.ALL)
                await self.reset_prefix_cache(preempt="recompute")
            with anyio.CancelScope(shield=True):  # bounded by one copy of the weights
                await self._call_device("sleep", level)
            lifecycle.resident = frozenset()
            lifecycle.level = level
            lifecycle.move(Event.SLEPT)
            return True

    async def wake(self, tags: Iterable[str] | None = None) -> bool:
        """Bring memory back and, when all of it is there, schedule again.  True when fully awake."""
        wanted = check_tags(tags)
        async with self._changing():
            lifecycle = self.lifecycle
            if not lifecycle.is_sleeping:
                return True
            missing = (wanted & MEMORY) - lifecycle.resident
            lifecycle.move(Event.WAKE)
            was_short = lifecycle.resident != MEMORY
            try:
                if missing:
                    with anyio.CancelScope(shield=True):  # bounded by one load of the weights
                        await self._call_device("wake", missing)
                    lifecycle.resident |= missing
            finally:
                if lifecycle.resident != MEMORY:
                    lifecycle.move(Event.WAKE_PAUSED)
            if lifecycle.resident != MEMORY:
                return False
            lifecycle.move(Event.WOKEN)
            if was_short or "scheduling" in wanted:
                await self._resume()
            else:
                lifecycle.move(Event.PAUSE)
            return not lifecycle.is_sleeping

    async def reset_prefix_cache(self, *, preempt: str = "no") -> bool:
        """Forget all prefixes; False, and nothing changes, while any block is held."""
        return await self._ask(ResetPrefixCache, preempt)

    async def start_profile(self, folder: str, prefix: str) -> None:
        """Trace the device; `stop_profile` writes the trace into `folder`."""
        if self._is_profiling:
            raise ProfilerAlreadyActiveError("stop_profile first")
        await self._call_device("start_profile", folder, prefix)
        self._is_profiling = True

    async def stop_profile(self) -> None:
        if not self._is_profiling:
            warnings.warn("stop_profile without start_profile", stacklevel=2)
            return
        self._is_profiling = False
        await self._call_device("stop_profile")

    async def shut_down(self, timeout_s: float) -> None:
        """Refuse new requests, let the open ones finish that long, abort the rest."""
        if self.dead_error is not None:
            return
        self.lifecycle.move(Event.STOP)
        self.lifecycle.refuses = "draining: the engine is shutting down"
        if timeout_s > 0 and not self.lifecycle.is_sleeping:
            with anyio.move_on_after(timeout_s):
                await self._wait_over(self.open_slots)
        await self._wait_over(self.abort_all())
        if self.dead_error is not None:
            return  # it died of something else meanwhile
        self.lifecycle.move(Event.STOPPED)
        self.dead_error = EngineDeadError("the engine is closed")

    def die(self, error: BaseException) -> None:
        """Tell every waiter why the engine is gone."""
        if self.dead_error is not None:
            return
        self.lifecycle.move(Event.FAIL)
        self.dead_error = EngineDeadError(f"the engine died: {type(error).__name__}: {error}")
        self.dead_error.__cause__ = error
        for slot in self.open_slots:
            slot.fail(self.dead_error)
        for answer in self._answers:
            answer.fail(self.dead_error)

    def hang_up(self) -> None:
        """The troupe is gone, for whatever reason: nobody is left to answer or to write."""
        error = self.dead_error = self.dead_error or EngineDeadError("the engine is closed")
        for slot in self.open_slots:
            if not slot.is_over:  # else its end is written, and only has to be read
                slot.fail(error)
        for answer in self._answers:
            answer.fail(error)

    def raise_death(self) -> None:
        """Raises EngineDeadError if an actor has failed."""
        if self.lifecycle.state is EngineState.FAILED and self.dead_error is not None:
            raise self.dead_error

    def check_alive(self) -> None:
        """Raises EngineDeadError, with the cause, once the engine has failed or is closed."""
        if self.dead_error is not None:
            raise EngineDeadError(str(self.dead_error)) from self.dead_error.__cause__

    @asynccontextmanager
    async def _changing(self) -> AsyncGenerator[None]:
        """One change of the lifecycle at a time; the metrics show what came of it."""
        async with self._transition:
            self.check_alive()
            try:
                yield
            finally:
                if self.metrics is not None:
                    self.metrics.set_sleep_level(
                        self.lifecycle.level, is_sleeping=self.lifecycle.is_sleeping
                    )

    async def _pause(self, mode: str, *, refuses: bool) -> None:
        self.lifecycle.begin_pause(cast("Mode", mode), refuses=refuses)
        aborted = self.abort_all() if mode == "abort" else ()
        await self._ask(SetPause, self.lifecycle.pause)
        await self._wait_over(aborted)

    async def _resume(self) -> None:
        self.lifecycle.resume()
        await self._ask(SetPause, Pause.NONE)

    async def _wait_over(self, slots: Iterable[ReplySlot]) -> None:
        for slot in slots:
            await slot.wait_over()

    async def _ask(self, question: Callable[..., SchedulerInbox], *args: object) -> Any:
        self.check_alive()
        with self._awaited(Answer[Any]()) as answer:
            with _sending():
                self._to_scheduler.send_nowait(question(*args, answer))
            return await answer.wait()

    async def _flush(self) -> Metrics:
        """The metrics, after the Observer has counted everything reported before.

        Raises:
            TrouperValidationError: statistics are off.
        """
        if self.metrics is None:
            raise TrouperValidationError(
                "metrics need statistics: disable_log_stats=False", parameter="disable_log_stats"
            )
        self.check_alive()
        with self._awaited(Answer[None]()) as answer:
            with _sending():
                await self._to_observer.send(Flush(answer))
            await answer.wait()
        return self.metrics

    async def _call_device(self, method: str, *args: object) -> object:
        self.check_alive()
        with self._awaited(Answer[Any]()) as answer:
            with _sending():
                await self._to_executor.send(DeviceCall(cast("Any", method), args, answer))
            return await answer.wait()

    @contextmanager
    def _awaited(self, answer: Answer[T]) -> Generator[Answer[T]]:
        """While it is waited for, the death of the engine answers it."""
        self._answers.add(answer)
        try:
            yield answer
        finally:
            self._answers.discard(answer)

    def _note_rejection(self, limit: str) -> None:
        if self.metrics is not None:
            self.metrics.note_rejection(limit)

    def _warn_of_tracing(self) -> None:
        if not self._has_warned_of_tracing:
            self._has_warned_of_tracing = True
            warnings.warn("trace_headers are ignored: no otlp_traces_endpoint", stacklevel=4)

    def _post_abort(self, id: RequestId, slot: ReplySlot) -> None:
        if slot.is_aborted:
            return  # once is enough, and once is what the channel has room for
        slot.scope.cancel()
        try:
            self._to_scheduler.send_nowait(Abort(id))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # the troupe is gone, and all its tables with it


@contextmanager
def _sending() -> Generator[None]:
    """To an actor that may be gone already, while the engine is about to learn of it."""
    try:
        yield
    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
        raise EngineDeadError("the engine is closed") from None
