"""`Engine`: what frontends hold while the troupe plays.

It owns the table of open requests and the engine's lifecycle, and asks the actors for everything else.
Requests are opened, aborted and closed synchronously; only what waits for the device is async.
"""

import math
import time
import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import anyio
import msgspec
from anyio.streams.memory import MemoryObjectSendStream

from trouper.actors.engine.admission import Admission, embeds_bytes, estimate_tokens
from trouper.actors.engine.controls import Controls
from trouper.actors.engine.generation import Generation, MakeRender
from trouper.actors.engine.lifecycle import EngineState, Event
from trouper.actors.engine.requests import Questions
from trouper.actors.executor.device import DeviceInfo
from trouper.actors.messages.identifiers import RequestId
from trouper.actors.messages.inboxes import (
    ExecutorInbox,
    ObserverInbox,
    RendererInbox,
    SchedulerInbox,
)
from trouper.actors.messages.requests import Abort, Render
from trouper.actors.messages.stats import SchedulerStats
from trouper.actors.observability.observer import Observer
from trouper.actors.output.detokenizer import Detokenizer
from trouper.actors.rendering.tokenizer import Tokenizer
from trouper.actors.replies.pooling_slot import PoolingSlot
from trouper.actors.replies.reply_slot import ReplySlot
from trouper.actors.replies.slot import Slot
from trouper.actors.runtime.event_loop import EventLoop
from trouper.actors.scheduling.scheduler import Scheduler
from trouper.config.resolve import EngineConfig
from trouper.errors import (
    EngineDeadError,
    RetryableRequestError,
    TrouperValidationError,
)
from trouper.inputs import PoolingPrompt, PromptType
from trouper.metrics import Metric
from trouper.outputs import RequestOutput
from trouper.params import SamplingParams
from trouper.pooling import PoolingParams
from trouper.pooling_outputs import PoolingOutput, PoolingRequestOutput

# Rendering either takes about 10 ms.
LARGE_PROMPT = 8192  # tokens by estimate
LARGE_EMBEDS = 2**22  # bytes


class EngineStatistics(msgspec.Struct, frozen=True):
    """One look at every table of the engine; all zero but the block counts when it is idle."""

    num_open_requests: int
    num_rendering: int  # queued for a renderer
    num_tracked: int  # sequences the Detokenizer knows
    num_prefill_tokens: int  # of prompts without a first token; an estimate until they are rendered
    scheduler: SchedulerStats


class Engine(Controls):
    """The handle of a running troupe.  Made by `open_engine`, never by hand."""

    def __init__(
        self,
        config: EngineConfig,
        info: DeviceInfo,
        tokenizer: Tokenizer | None,
        to_renderer: MemoryObjectSendStream[RendererInbox],
        to_large_renderer: MemoryObjectSendStream[RendererInbox],
        to_scheduler: MemoryObjectSendStream[SchedulerInbox],
        to_executor: MemoryObjectSendStream[ExecutorInbox],
        to_observer: MemoryObjectSendStream[ObserverInbox],
        scheduler: Scheduler,
        detokenizer: Detokenizer | None,  # None in an engine that pools
        observer: Observer | None,
        loop: EventLoop,
    ) -> None:
        super().__init__(
            Questions(to_scheduler, to_executor, to_observer),
            None if observer is None else observer.metrics,
        )
        self.config = config
        self.info = info
        self.tokenizer = tokenizer
        self._to_renderer = to_renderer
        self._to_large_renderer = to_large_renderer
        self._to_scheduler = to_scheduler
        self._scheduler = scheduler
        self._detokenizer = detokenizer
        self._observer = observer
        self._admission = Admission(
            config.max_num_queued_reqs, config.max_num_queued_tokens, self._note_rejection
        )
        self._open: dict[str, tuple[RequestId, Slot[Any]]] = {}
        self._next_id = 0
        self._has_warned_of_tracing = False
        self._loop = loop

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
    ) -> Generation[RequestOutput]:
        """A request as an async iterator; nothing happens before it is entered or iterated.

        Raises:
            TypeError: `request_id` is not a string, or `params` not SamplingParams.
            TrouperValidationError: the model does not generate.
        """
        self._check_types(request_id, params, SamplingParams)
        _check_order(priority, arrival_time)
        if trace_headers and self.config.otlp_traces_endpoint is None:
            self._warn_of_tracing()

        render = partial(
            Render,
            prompt=prompt,
            priority=priority,
            truncate_prompt_tokens=truncate_prompt_tokens,
            truncation_side=truncation_side,
            add_special_tokens=add_special_tokens,
            mm_processor_kwargs=mm_processor_kwargs,
            trace_headers=trace_headers,
        )
        return Generation(self, request_id, params.clone(), render, arrival_time)

    def encode(
        self,
        prompt: PoolingPrompt,
        params: PoolingParams,
        request_id: str,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
        truncate_prompt_tokens: int | None = None,
        truncation_side: str | None = None,
        add_special_tokens: bool | None = None,
    ) -> Generation[PoolingRequestOutput[PoolingOutput]]:
        """A pooling request: an async iterator of one output.

        Raises:
            TypeError: `request_id` is not a string, or `params` not PoolingParams.
            TrouperValidationError: the model does not pool.
        """
        self._check_types(request_id, params, PoolingParams)
        _check_order(priority, arrival_time)

        render = partial(
            Render,
            prompt=prompt,
            priority=priority,
            truncate_prompt_tokens=truncate_prompt_tokens,
            truncation_side=truncation_side,
            add_special_tokens=add_special_tokens,
        )
        return Generation(self, request_id, params.clone(), render, arrival_time)

    def open_request(
        self,
        request_id: str,
        params: SamplingParams | PoolingParams,
        render: MakeRender,
        arrival_time: float | None,
    ) -> tuple[RequestId, Slot[Any]]:
        """Register and submit in one synchronous act, so no cancellation can fall in between.

        Raises:
            RuntimeError: this is not the engine's loop, or its thread.
            ValueError: the id is in flight already.
            RetryableRequestError: the engine is paused, asleep or draining.
            QueueOverflowError: too many open requests.
            MaxQueuedTokensError: too many prompt tokens in prefill.
            EngineDeadError: the engine is gone.
        """
        self._loop.check_current()
        self.check_admission(params.n, request_id)
        id = RequestId(self._next_id)
        self._next_id += params.n
        slot = self._slot(request_id, params)
        now = time.time()
        slot.stats.arrival_time = now if arrival_time is None else arrival_time
        slot.stats.arrival_ts = anyio.current_time() - max(0.0, now - slot.stats.arrival_time)
        self._open[request_id] = id, slot
        self._admission.enter(params.n)
        message = render(id=id, params=params, slot=slot, arrival_time=slot.stats.arrival_time)
        num_tokens = estimate_tokens(message.prompt)
        slot.count_prefill(num_tokens)
        is_large = num_tokens > LARGE_PROMPT or embeds_bytes(message.prompt) > LARGE_EMBEDS
        renderer = self._to_large_renderer if is_large else self._to_renderer
        renderer.send_nowait(message)
        return id, slot

    def _slot(self, request_id: str, params: SamplingParams | PoolingParams) -> Slot[Any]:
        prefills, shows_stats = self._admission.prefills, self.config.log_stats
        if isinstance(params, PoolingParams):
            return PoolingSlot(request_id, prefills=prefills, shows_stats=shows_stats)
        return ReplySlot(
            request_id,
            params,
            self.config.stream_interval,
            prefills=prefills,
            shows_stats=shows_stats,
        )

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Raises what opening a request of n completions would raise now."""
        self._questions.check_alive()
        if self.lifecycle.refuses is not None:
            raise RetryableRequestError(self.lifecycle.refuses)
        if request_id in self._open:
            raise ValueError(f"request_id {request_id!r} is already in flight")
        self._admission.check(n)

    def close_request(self, id: RequestId, slot: Slot[Any], *, is_finished: bool) -> None:
        """The reader is done.  Unfinished means: abort."""
        if not is_finished:
            self._post_abort(id, slot)
        slot.close()
        if self._open.pop(slot.request_id, None) is not None:
            self._admission.leave(slot.n)

    def drop_request(self, id: RequestId, slot: Slot[Any]) -> None:
        """Its reader was garbage, in whatever thread: close it on the loop."""
        try:
            self._loop.call_soon(partial(self.close_request, id, slot, is_finished=False))
        except RuntimeError:
            pass  # the loop has ended, and the request with it

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests; each reader gets its final output.  Unknown and finished ids are ignored."""
        for request_id in (request_ids,) if isinstance(request_ids, str) else tuple(request_ids):
            if request_id in self._open:
                self._post_abort(*self._open[request_id])

    def abort_all(self) -> list[Slot[Any]]:
        self.abort(list(self._open))
        return [slot for _, slot in self._open.values()]

    @property
    def open_slots(self) -> tuple[Slot[Any], ...]:
        """The reply slots of all open requests, in the order of their opening."""
        return tuple(slot for _, slot in self._open.values())

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(
            num_open_requests=len(self._open),
            num_rendering=sum(
                lane.statistics().current_buffer_used
                for lane in (self._to_renderer, self._to_large_renderer)
            ),
            num_tracked=self._detokenizer.statistics().num_tracked if self._detokenizer else 0,
            num_prefill_tokens=self._admission.prefills.num_tokens,
            scheduler=self._scheduler.statistics(),
        )

    async def get_metrics(self) -> list[Metric]:
        """Every metric, with all that has been reported so far.

        Raises:
            TrouperValidationError: statistics are off.
        """
        if self.metrics is None:
            raise TrouperValidationError(
                "metrics need statistics: disable_log_stats=False", parameter="disable_log_stats"
            )
        await self.refresh_metrics()
        return self.metrics.values()

    async def refresh_metrics(self) -> None:
        """Count what has been reported so far."""
        if self._observer is not None:
            await self._questions.flush_observer(self._observer.hurry)

    async def log_stats(self) -> None:
        """Write the log line now.  Without statistics there is none."""
        await self.refresh_metrics()
        if self._observer is not None:
            self._observer.log()

    async def wait_idle(self) -> None:
        """Wait until no request is open that could still get output.

        Raises:
            EngineDeadError: the engine died meanwhile.
        """
        while busy := [slot for slot in self.open_slots if not slot.is_over]:
            await self._wait_over(busy)
        self.check_alive()

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
        self._questions.end(EngineDeadError("the engine is closed"))

    def die(self, error: BaseException) -> None:
        """Tell every waiter why the engine is gone."""
        if self.dead_error is not None:
            return
        self.lifecycle.move(Event.FAIL)
        death = EngineDeadError(f"the engine died: {type(error).__name__}: {error}")
        death.__cause__ = error
        self._end(death)

    def hang_up(self) -> None:
        """The troupe is gone, for whatever reason: nobody is left to answer or to write."""
        self._end(self.dead_error or EngineDeadError("the engine is closed"))

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why the engine serves no more; None while it does."""
        return self._questions.error

    def raise_death(self) -> None:
        """Raises EngineDeadError if an actor has failed."""
        if self.lifecycle.state is EngineState.FAILED and self.dead_error is not None:
            raise self.dead_error

    def check_alive(self) -> None:
        """Raises EngineDeadError, with the cause, once the engine has failed or is closed."""
        self._questions.check_alive()

    def _end(self, error: EngineDeadError) -> None:
        for slot in self.open_slots:
            if not slot.is_over:  # else its end is written, and only has to be read
                slot.fail(error)
        self._questions.end(error)

    async def _wait_over(self, slots: Iterable[Slot[Any]]) -> None:
        for slot in slots:
            await slot.wait_over()

    def _note_rejection(self, limit: str) -> None:
        if self.metrics is not None:
            self.metrics.note_rejection(limit)

    def _warn_of_tracing(self) -> None:
        if not self._has_warned_of_tracing:
            self._has_warned_of_tracing = True
            warnings.warn("trace_headers are ignored: no otlp_traces_endpoint", stacklevel=4)

    def _check_types(self, request_id: object, params: object, kind: type[Any]) -> None:
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string, not {type(request_id).__name__}")
        if not isinstance(params, kind):
            raise TypeError(f"params must be {kind.__name__}, not {type(params).__name__}")
        if (kind is PoolingParams) != (self.config.pooler is not None):
            runner = "pooling" if kind is PoolingParams else "generate"
            raise TrouperValidationError(
                f"this needs an engine with runner={runner!r}", parameter="runner"
            )

    def _post_abort(self, id: RequestId, slot: Slot[Any]) -> None:
        if slot.is_aborted:
            return  # once is enough, and once is what the channel has room for
        slot.cancel()
        try:
            self._to_scheduler.send_nowait(Abort(id))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # the troupe is gone, and all its tables with it


def _check_order(priority: object, arrival_time: object) -> None:
    """What decides the order of service must be comparable: the scheduler serves everybody."""
    if type(priority) is bool or not isinstance(priority, int) or not -(2**63) < priority < 2**63:
        raise TrouperValidationError(
            "must be a 64-bit integer", parameter="priority", value=priority
        )
    if arrival_time is not None and not (
        isinstance(arrival_time, int | float) and 0 <= arrival_time < math.inf
    ):
        raise TrouperValidationError(
            "must be a finite number ≥ 0", parameter="arrival_time", value=arrival_time
        )
