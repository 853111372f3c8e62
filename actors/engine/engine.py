"""Provide `Engine`, the object through which frontends use the running actors.

It is a façade: the `RequestTable` owns the requests, `Controls` changes the lifecycle, and the actors own all other state.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import anyio
import msgspec
from anyio.streams.memory import MemoryObjectSendStream

from trouper.actors.engine.adapters import Adapters
from trouper.actors.engine.admission import check_place
from trouper.actors.engine.controls import ControlClient, Controls
from trouper.actors.engine.generation import Generation
from trouper.actors.engine.lifecycle import EngineState, Event, Lifecycle
from trouper.actors.engine.request_table import EngineSnapshot, RequestTable
from trouper.actors.executor.device import DeviceInfo, Executor
from trouper.actors.messages.controls import (
    ExecutorInbox,
    LoadAdapter,
    ObserverInbox,
    RendererInbox,
    SchedulerInbox,
)
from trouper.actors.messages.outputs import SchedulerStats
from trouper.actors.messages.requests import NO_OPTIONS, Render, RequestOptions
from trouper.actors.observability.metrics import Metrics
from trouper.actors.observability.observer import Observer, RecentEvents
from trouper.actors.output.detokenizer import Detokenizer
from trouper.actors.output.pooler import Pooler
from trouper.actors.output.slot import Slot
from trouper.actors.rendering.media.downloads import Downloads
from trouper.actors.rendering.prompts.prompts import Prompts
from trouper.actors.rendering.renderer import Renderer
from trouper.actors.rendering.tokenizer import Tokenizer
from trouper.actors.runtime.event_loop import EventLoop, Threads
from trouper.actors.scheduling.scheduler import Scheduler
from trouper.config.adapters import AdapterFiles, read_adapter
from trouper.config.engine_config import EngineConfig
from trouper.errors import EngineDeadError, TrouperValidationError
from trouper.inputs import PoolingPrompt, PromptType
from trouper.lora import LoRARequest
from trouper.metrics import Metric
from trouper.outputs import PoolingOutput, PoolingRequestOutput, RequestError, RequestOutput
from trouper.params import SamplingParams
from trouper.pooling import PoolingParams


class EngineStatistics(msgspec.Struct, frozen=True):
    """The state of all tables of the engine in numbers, at one moment.

    All of them are 0 in an idle engine, except for the numbers of blocks, so tests detect leaks with it.
    """

    num_open_requests: int
    num_rendering: int  # queued for a renderer
    num_tracked: int  # sequences in the detokenizer
    # Prompt tokens of requests without a first token.  Estimated until the prompt is rendered.
    num_prefill_tokens: int
    # The sum over all replicas.
    scheduler: SchedulerStats
    # One per replica.
    replicas: tuple[SchedulerStats, ...]


class EngineParts(msgspec.Struct, frozen=True):
    """Actors and channels that `open_engine` has started and lends to the `Engine`.

    The engine does not own them: `open_engine` closes them after the engine, whatever happens.
    """

    info: DeviceInfo
    tokenizer: Tokenizer | None
    prompts: Prompts | None  # None in an engine that pools
    to_renderer: MemoryObjectSendStream[RendererInbox]
    to_large_renderer: MemoryObjectSendStream[RendererInbox]
    to_media_renderer: MemoryObjectSendStream[RendererInbox]
    to_fetcher: MemoryObjectSendStream[RendererInbox]
    # None if no host is allowed.
    downloads: Downloads | None
    to_trying_renderer: MemoryObjectSendStream[RendererInbox]
    to_scheduler: MemoryObjectSendStream[SchedulerInbox]
    to_executors: Sequence[MemoryObjectSendStream[ExecutorInbox]]  # one for each replica
    to_observer: MemoryObjectSendStream[ObserverInbox]
    # The inbox of every actor, to report their lengths.
    inboxes: Mapping[str, MemoryObjectSendStream[Any]]
    renderers: tuple[Renderer, ...]
    scheduler: Scheduler[Any]
    executors: Sequence[Executor]
    detokenizer: Detokenizer | None  # None in an engine that pools
    pooler: Pooler | None  # None in an engine that generates
    observer: Observer | None  # None when there is nothing to observe
    events: RecentEvents
    loop: EventLoop
    threads: Threads  # for blocking work


class Engine:
    """The handle of running actors, created by `open_engine` only.

    It opens requests and forwards control calls; the state itself belongs to the actors and to the table of requests.
    """

    def __init__(self, config: EngineConfig, parts: EngineParts) -> None:
        self.config = config
        self.info = parts.info
        self.tokenizer = parts.tokenizer
        # What its renderers share, to render prompts without generating anything.
        self.prompts = parts.prompts
        # Fetches the images of URLs.  None if no host is allowed.
        self.downloads = parts.downloads
        self.metrics: Metrics | None = parts.observer and parts.observer.metrics
        # The most recent events.  Without an observer, device losses and preemptions are missing.
        self.events = parts.events
        self.lifecycle = Lifecycle()
        self._parts = parts
        self._observer = parts.observer
        self._client = ControlClient(parts.to_scheduler, parts.to_executors, parts.to_observer)
        self._threads = parts.threads
        self.adapters = Adapters(
            config.lora,
            self._read_adapter,
            self._load_adapter,
            has_replicas=config.data_parallel_size > 1,
        )
        self.requests = RequestTable(
            config,
            renderer=parts.to_renderer,
            large_renderer=parts.to_large_renderer,
            media_renderer=parts.to_media_renderer,
            fetcher=parts.to_fetcher,
            fetches=parts.downloads is not None,
            trying_renderer=parts.to_trying_renderer,
            scheduler=parts.to_scheduler,
            loop=parts.loop,
            adapters=self.adapters,
            check_open=self.check_open,
            note_rejection=self._note_rejection,
        )
        self.controls = Controls(
            self._client, self.lifecycle, self.metrics, self.events, self.requests.abort_all
        )
        self._has_warned_of_tracing = False

    def __repr__(self) -> str:
        name, state = self.config.model.name, self.lifecycle.state.value
        return f"<Engine {name!r} {state}, {len(self.requests)} open>"

    def generate(
        self,
        prompt: PromptType,
        params: SamplingParams,
        request_id: str,
        options: RequestOptions = NO_OPTIONS,
    ) -> Generation[RequestOutput]:
        """Return a request as an async iterator; nothing happens before it is entered or iterated.

        Raises:
            TypeError: `request_id` is not a string, or `params` not SamplingParams.
            TrouperValidationError: the engine does not generate text, has no adapters, or has no such replica.
        """
        self._check_types(request_id, params, SamplingParams)
        if options.lora_request is not None:
            self.adapters.check(options.lora_request)
        if options.trace_headers and self.config.otlp_traces_endpoint is None:
            self._warn_of_tracing()
        return self._generation(prompt, params.clone(), request_id, options)

    def encode(
        self,
        prompt: PoolingPrompt,
        params: PoolingParams,
        request_id: str,
        options: RequestOptions = NO_OPTIONS,
    ) -> Generation[PoolingRequestOutput[PoolingOutput]]:
        """Return a pooling request as an async iterator of one output.

        Raises:
            TypeError: `request_id` is not a string, or `params` not PoolingParams.
            TrouperValidationError: the engine does not pool, or has no such replica.
        """
        self._check_types(request_id, params, PoolingParams)
        return self._generation(prompt, params.clone(), request_id, options)

    def _generation(
        self, prompt: Any, params: Any, request_id: str, options: RequestOptions
    ) -> Generation[Any]:
        _check_order(options.priority, options.arrival_time)
        check_place(options.data_parallel_rank, options.session_id, self.config.data_parallel_size)
        return Generation(
            self.requests, request_id, params, partial(Render, prompt=prompt), options
        )

    async def _read_adapter(self, request: LoRARequest, root: str | None) -> AdapterFiles:
        return await self._threads.run(read_adapter, request.lora_path, root)

    async def _load_adapter(
        self, slot: int, files: AdapterFiles, done: Callable[[], object]
    ) -> None:
        await self._client.call_device(LoadAdapter(slot, files), done=done)

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests.  Each reader gets a final output.  Unknown and finished ids are ignored.

        Each output has `finish_reason="abort"` and contains the text generated so far.
        """
        self.requests.abort(request_ids)

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Raise the error that opening a request with `n` completions would raise now.

        Nothing is reserved, so a later call to open the request can still fail.
        """
        self.requests.check(n, request_id)

    def check_open(self) -> None:
        """Raise an error if the engine currently refuses all requests.

        Raises:

            EngineDeadError: the engine has failed or is closed.
            RetryableRequestError: the engine is paused, asleep or draining.
        """
        self._client.check_alive()
        if self.lifecycle.refuses is not None:
            raise self.lifecycle.refuses.to_exception()

    @property
    def num_tokens(self) -> int:
        """Count the prompt tokens computed and the tokens sampled so far.

        Admission reads this for every request, so it takes O(1), unlike `statistics`. The difference of two readings
        is the throughput.
        """
        return self._parts.scheduler.num_tokens

    @property
    def num_prefill_tokens(self) -> int:
        """Count the prompt tokens of requests without a first token, estimated until the prompt is rendered.  Takes O(1)."""
        return self.requests.num_prefill_tokens

    def statistics(self) -> EngineStatistics:
        """Read every table of the engine, for metrics, health checks and tests.

        Its cost grows with the number of open requests, so it must not be called for each request.
        """
        parts = self._parts
        return EngineStatistics(
            num_open_requests=len(self.requests),
            num_rendering=self.requests.num_rendering,
            num_tracked=parts.detokenizer.num_tracked if parts.detokenizer else 0,
            num_prefill_tokens=self.requests.num_prefill_tokens,
            scheduler=parts.scheduler.statistics(),
            replicas=parts.scheduler.replica_statistics(),
        )

    def snapshot(self) -> EngineSnapshot:
        """Describe the state of every actor: its requests, and what it is waiting for.

        Tests compare snapshots, and operators examine a hanging engine with them.
        """
        parts = self._parts
        return EngineSnapshot(
            state=self.lifecycle.state,
            requests=self.requests.snapshot(),
            inboxes={
                name: inbox.statistics().current_buffer_used
                for name, inbox in parts.inboxes.items()
            },
            renderers=tuple(renderer.snapshot() for renderer in parts.renderers),
            scheduler=parts.scheduler.snapshot(),
            executors=tuple(executor.snapshot() for executor in parts.executors),
            detokenizer=parts.detokenizer and parts.detokenizer.snapshot(),
            pooler=parts.pooler and parts.pooler.snapshot(),
            observer=parts.observer and parts.observer.snapshot(),
        )

    async def get_metrics(self) -> list[Metric]:
        """Return every metric, including everything reported so far.

        Raises:
            TrouperValidationError: statistics are disabled.
        """
        if self.metrics is None:
            raise TrouperValidationError(
                "metrics need statistics; set disable_log_stats=False",
                parameter="disable_log_stats",
            )
        await self.refresh_metrics()
        return self.metrics.values()

    async def refresh_metrics(self) -> None:
        """Wait until the metrics include every message sent to the observer so far."""
        if self._observer is not None:
            await self._client.flush_observer(self._observer.hurry)

    async def log_stats(self) -> None:
        """Write the statistics log line now, and restart the interval until the next one.  Does nothing without statistics."""
        await self.refresh_metrics()
        if self._observer is not None:
            self._observer.log()

    async def wait_idle(self) -> None:
        """Wait until all open requests have ended, whether or not their outputs have been read.

        New requests may still be opened meanwhile.

        Raises:

            EngineDeadError: the engine died meanwhile.
        """
        while busy := [slot for slot in self.requests.slots if not slot.is_over]:
            await self._wait_over(busy)
        self.check_alive()

    async def shut_down(self, timeout_s: float) -> None:
        """Refuse new requests, wait up to `timeout_s` for the open ones, and abort the rest.

        It returns at once if the engine has already failed.
        """
        if self.dead_error is not None:
            return
        self.lifecycle.move(Event.STOP)
        self.lifecycle.refuses = RequestError(
            "draining", "the engine is shutting down", retryable=True
        )
        if timeout_s > 0 and not self.lifecycle.is_sleeping:
            with anyio.move_on_after(timeout_s):
                await self._wait_over(self.requests.slots)
        await self._wait_over(self.requests.abort_all())
        if self.dead_error is not None:
            return  # another failure has ended the engine meanwhile
        self.lifecycle.move(Event.STOPPED)
        self._client.end(EngineDeadError("the engine is closed"))

    def die(self, error: BaseException) -> None:
        """Fail every waiting call and request with the reason why the engine has ended.

        The first failure is kept; later ones are usually its consequences.
        """
        if self.dead_error is not None:
            return
        self.lifecycle.move(Event.FAIL)
        death = EngineDeadError(f"the engine died: {type(error).__name__}: {error}")
        death.__cause__ = error
        self._end(death)

    def hang_up(self) -> None:
        """Fail all open calls and requests, because the actors have ended and will not answer them.

        This is the last step of every shutdown, normal or not.
        """
        self._end(self.dead_error or EngineDeadError("the engine is closed"))

    @property
    def dead_error(self) -> EngineDeadError | None:
        """The reason why the engine no longer serves, or None while it does.

        It is set once and never cleared: a failed engine cannot be revived.
        """
        return self._client.error

    def raise_death(self) -> None:
        """Raise EngineDeadError if an actor has failed.

        `open_engine` uses it, so that the program sees the original failure instead of a cancellation. Does nothing
        for an engine closed in order.
        """
        if self.lifecycle.state is EngineState.FAILED and self.dead_error is not None:
            raise self.dead_error

    def check_alive(self) -> None:
        """Raise EngineDeadError, with the cause, once the engine has failed or is closed.

        It is cheap, so it can be called for each request.
        """
        self._client.check_alive()

    def _end(self, error: EngineDeadError) -> None:
        for slot in self.requests.slots:
            # A request that has ended already keeps its result, even if it has not been read.
            if not slot.is_over:
                slot.fail(error)
        self._client.end(error)

    async def _wait_over(self, slots: Iterable[Slot[Any]]) -> None:
        for slot in slots:
            await slot.wait_over()

    def _note_rejection(self, limit: str) -> None:
        self.events.note("refusal", limit)
        if self.metrics is not None:
            self.metrics.note_rejection(limit)

    def _warn_of_tracing(self) -> None:
        if not self._has_warned_of_tracing:
            self._has_warned_of_tracing = True
            warnings.warn("trace_headers are ignored: no otlp_traces_endpoint", stacklevel=5)

    def _check_types(self, request_id: object, params: object, kind: type[Any]) -> None:
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string, not {type(request_id).__name__}")
        if not isinstance(params, kind):
            raise TypeError(f"params must be {kind.__name__}, not {type(params).__name__}")
        if (kind is PoolingParams) != (self.config.pooler is not None):
            runner = "pooling" if kind is PoolingParams else "generate"
            rule = f"this needs an engine with runner={runner!r}"
            raise TrouperValidationError(rule, parameter="runner")


def _check_order(priority: object, arrival_time: object) -> None:
    """Check the values that determine the order of service, because they must be comparable among all requests."""
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
