"""The observer actor: statistics in; metrics, the interval log line and spans out.

Laws.  A sender never waits: a message that finds the inbox full is dropped and counted.  A failure in here
ends no request: it is logged and the next message is taken.

The last events of an engine: losses of workers, preemptions, refusals, and changes of its state.

Metrics count events, and the log has them as text.  A page that shows a running engine needs the last few of them as data, in
order and without parsing.  Texts of requests never get in: an event has only numbers and words from fixed lists.

One OpenTelemetry span for each request.  Imported only when `otlp_traces_endpoint` is set.

A span is made when its request has ended, from the times noted on the way; nothing is traced
while the request runs.  The caller's W3C trace context, when it sent one, is the span's parent, and its
"not sampled" is honoured.
"""

import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from itertools import count
from typing import Literal, assert_never

import anyio
import msgspec
from anyio.abc import TaskStatus
from anyio.streams.memory import MemoryObjectReceiveStream
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from trouper.actors.messages.controls import Flush, ObserverInbox
from trouper.actors.messages.outputs import (
    GrammarStats,
    OutputStats,
    RequestEnded,
    SchedulerStats,
    StepStats,
)
from trouper.actors.messages.steps import DeviceBack, DeviceFailed, DeviceLost, ReplicaEvent
from trouper.actors.observability.metrics import Metrics

# Events are rare or merged, so these are minutes to days; at 200 bytes each the log takes 40 kB.
MAX_EVENTS = 200
# Equal events within this time are one event with a count, so that an overload does not push out what has caused it.
MERGE_S = 1.0

EventKind = Literal[
    "loss", "return", "failure", "recompute", "preemption", "refusal", "state", "overload"
]


class EngineEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event, or several equal ones within a second.

    Attributes:
        id: names the event; later counts of the same event have the same id.
        revision: rises with every change of the log, so a reader can ask for what is new.
        at: the time of the first one, in seconds since 1970.
        detail: the cause of a loss, `kept` if the KV cache has outlived it, the limit behind a refusal, or the new state.
        count: how many equal events these are; of `recompute`, tokens.
        sequences: sequences that a loss interrupts.
    """

    id: int
    revision: int
    at: float
    kind: EventKind
    replica: int = 0
    detail: str = ""
    count: int = 1
    step: int | None = None
    seconds: float = 0.0
    sequences: int = 0


class RecentEvents:
    """The last events of one engine, the oldest first.  Only the event loop of the engine writes it.

    Args:
        now: the time in seconds since 1970; tests give their own.
    """

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self.revision = 0
        self._now = now
        self._events: deque[EngineEvent] = deque(maxlen=MAX_EVENTS)
        self._next_id = 1

    def __repr__(self) -> str:
        return f"<RecentEvents of {len(self._events)}, revision {self.revision}>"

    def note(
        self,
        kind: EventKind,
        detail: str = "",
        *,
        replica: int = 0,
        count: int = 1,
        step: int | None = None,
        seconds: float = 0.0,
        sequences: int = 0,
    ) -> None:
        """Add an event, or raise the count of an equal event of the last second.

        Losses and returns are never merged, because each has its own numbers.
        """
        self.revision += 1
        now = self._now()
        if kind in ("recompute", "preemption", "refusal") and self._merge(
            kind, detail, replica, count, now
        ):
            return
        self._events.append(
            EngineEvent(
                id=self._next_id,
                revision=self.revision,
                at=now,
                kind=kind,
                replica=replica,
                detail=detail,
                count=count,
                step=step,
                seconds=seconds,
                sequences=sequences,
            )
        )
        self._next_id += 1

    def since(self, revision: int) -> list[EngineEvent]:
        """Return the events added or changed after this revision, the oldest first.  Revision 0 returns all."""
        return [event for event in self._events if event.revision > revision]

    def _merge(self, kind: str, detail: str, replica: int, count: int, now: float) -> bool:
        """Add to an equal event of the last second.  Returns whether there was one.

        Only as many events as kinds, details and replicas exist can be younger than a second, so the search is short.
        """
        for place in range(len(self._events) - 1, -1, -1):
            event = self._events[place]
            if event.at <= now - MERGE_S:
                return False
            if (event.kind, event.detail, event.replica) == (kind, detail, replica):
                self._events[place] = msgspec.structs.replace(
                    event, revision=self.revision, count=event.count + count
                )
                return True
        return False


EXPORT_TIMEOUT_S = 5  # each of the few batches left at the end may take so long
NANOSECONDS = 10**9


class Tracer:
    """Creates one span for each finished request, in an OpenTelemetry provider of its own.

    Nothing is registered globally, so a program that embeds the engine keeps its own tracing.
    """

    def __init__(self, model_name: str, processor: SpanProcessor) -> None:
        self._model_name = model_name
        self._provider = TracerProvider(
            resource=Resource.create({SERVICE_NAME: "trouper"}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("trouper")

    def note(self, ended: RequestEnded) -> None:
        """Create the span of a finished request, and queue it for export.

        Its times are those of the request's statistics, so nothing happens while the request runs.
        """
        stats = ended.stats
        start_ns = int(stats.arrival_time * NANOSECONDS)
        span = self._tracer.start_span(
            "llm_request",
            context=_context(ended.trace_headers),
            kind=SpanKind.SERVER,
            attributes=self._attributes(ended),
            start_time=start_ns,
        )
        if ended.finish_reason == "error":
            span.set_status(StatusCode.ERROR, ended.error_code)
        span.end(start_ns + int((stats.e2e_s or 0.0) * NANOSECONDS))

    def close(self) -> None:
        """Export the remaining spans, and stop the exporter's thread.

        It blocks until they are sent, at most for the timeout of the export. Later spans are dropped.
        """
        self._provider.shutdown()

    def _attributes(self, ended: RequestEnded) -> dict[str, str | int | float | tuple[str, ...]]:
        params, stats = ended.params, ended.stats
        found = {
            "gen_ai.request.id": ended.request_id,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.n": params.n,
            "gen_ai.response.model": self._model_name,
            "gen_ai.response.finish_reasons": (ended.finish_reason,),
            "gen_ai.usage.num_sequences": params.n,
            "gen_ai.usage.prompt_tokens": ended.num_prompt_tokens,
            "gen_ai.usage.completion_tokens": stats.num_generation_tokens,
            "gen_ai.latency.time_in_queue": stats.queue_s,
            "gen_ai.latency.time_to_first_token": stats.time_to_first_token_s,
            "gen_ai.latency.time_in_model_prefill": stats.prefill_s,
            "gen_ai.latency.time_in_model_decode": stats.decode_s,
            "gen_ai.latency.time_in_model_inference": stats.inference_s,
            "gen_ai.latency.e2e": stats.e2e_s,
        }
        return {name: value for name, value in found.items() if value is not None}


def otlp_processor(endpoint: str) -> SpanProcessor:
    """Send spans to a collector over HTTP, in batches, from a thread of its own.

    Raises:
        ImportError: the exporter is not installed.
    """
    # By name, because types are checked without the extra too.
    http = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    return BatchSpanProcessor(http.OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S))


def _context(headers: Mapping[str, str] | None) -> Context:
    carrier = {name.lower(): value for name, value in (headers or {}).items()}
    return TraceContextTextMapPropagator().extract(carrier, Context())


logger = logging.getLogger("trouper")
# Between two looks at the inbox: messages come when the loop is needed elsewhere, and a look takes a core from a step
# for 0.2 ms where caches are cold.
INTAKE_PAUSE_S = 0.25
MESSAGES_PER_TURN = 64  # of 5 µs each
HIT_RATE_REQUESTS = 1000  # the hit rate in the log line is over so many


class ObserverSnapshot(msgspec.Struct, frozen=True):
    """The state of the observer."""

    num_ended: int  # requests whose end is in the metrics; 0 without metrics


class Observer:
    """Owns its inbox and the metrics; writes one log line each `interval_s` seconds.

    Without metrics there are no log lines either: then it only passes ended requests on, for tracing.
    """

    def __init__(
        self,
        inbox: MemoryObjectReceiveStream[ObserverInbox],
        metrics: Metrics | None,
        statistics: Callable[[], Sequence[SchedulerStats]],
        interval_s: float,
        note_ended: Callable[[RequestEnded], None] | None = None,
        events: RecentEvents | None = None,
    ) -> None:
        self.metrics = metrics
        self._events = RecentEvents() if events is None else events
        self._inbox = inbox
        self._statistics = statistics  # of each replica's scheduler, at any time
        self._interval_s = interval_s if metrics is not None else math.inf
        self._note_ended = note_ended  # makes a span
        self._intake_pause = anyio.CancelScope()
        self._before: Sequence[SchedulerStats] = ()  # at the last line, or at the beginning
        self._since_s = 0.0
        # Of the last requests of each replica: prompt tokens, and how many of them were in the prefix cache.
        self._prompts: defaultdict[int, deque[tuple[int, int]]] = defaultdict(
            lambda: deque(maxlen=HIT_RATE_REQUESTS)
        )

    def snapshot(self) -> ObserverSnapshot:
        """Describe what has been counted.

        It is part of the engine's snapshot, with which tests wait for all statistics.
        """
        return ObserverSnapshot(0 if self.metrics is None else self.metrics.num_ended)

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        with self._inbox:
            self._since_s, self._before = anyio.current_time(), self._take_snapshot()
            task_status.started()
            try:
                while not await self._watch():
                    self.log()
            finally:
                self._drain()  # the engine ends: what its last requests left is still counted
                self._take_snapshot()

    async def _watch(self) -> bool:
        """Take messages until the interval is over; True when the inbox has ended."""
        deadline = self._since_s + self._interval_s
        with anyio.CancelScope(deadline=deadline):
            async for message in self._inbox:
                self._note(message)
                is_empty = self._drain(MESSAGES_PER_TURN)
                if anyio.current_time() >= deadline:
                    return False
                if is_empty:
                    await self._pause_intake()
            return True
        return False

    async def _pause_intake(self) -> None:
        with anyio.CancelScope(
            deadline=anyio.current_time() + INTAKE_PAUSE_S
        ) as self._intake_pause:
            await anyio.sleep_forever()

    def hurry(self) -> None:
        """Process the messages in the inbox now, because a caller waits for the result.

        Usually the observer pauses between readings, so that it never competes with requests.
        """
        self._intake_pause.cancel()

    def _drain(self, limit: int | None = None) -> bool:
        """Take everything in the inbox; True when it is empty."""
        try:
            for _ in count() if limit is None else range(limit):
                self._note(self._inbox.receive_nowait())
        except (anyio.WouldBlock, anyio.EndOfStream):
            return True
        return False

    def _take_snapshot(self) -> Sequence[SchedulerStats]:
        stats = self._statistics()
        if self.metrics is not None:
            self.metrics.note_stats(stats)
        return stats

    def log(self) -> None:
        """Write the line of this interval, one for each replica, and begin the next one.

        An engine idle during the whole interval writes no line.
        """
        now = anyio.current_time()
        snapshot = self._take_snapshot()
        before = self._before or (None,) * len(snapshot)
        for replica, (was, stats) in enumerate(zip(before, snapshot, strict=True)):
            if not stats.num_steps:
                continue
            is_idle = stats == was and not stats.num_running
            line = interval_line(was, stats, now - self._since_s, self._prompts[replica])
            where = f"engine {replica}: " if len(snapshot) > 1 else ""
            logger.log(logging.DEBUG if is_idle else logging.INFO, "%s%s", where, line)
        self._before, self._since_s = snapshot, now

    def _note(self, message: ObserverInbox) -> None:
        try:
            match message:
                case OutputStats():
                    self._note_output_stats(message)
                case ReplicaEvent(replica, event):
                    self._note_device(event, replica)
                case DeviceLost() | DeviceBack():
                    self._note_device(message)
                case Flush(answer):
                    self._take_snapshot()
                    answer.set(None)
                case StepStats():
                    self._note_step(message)
                case GrammarStats():
                    if self.metrics is not None:
                        self.metrics.note_grammar(message)
                case _:
                    assert_never(message)
        except Exception:  # statistics never touch requests
            logger.exception("statistics could not be recorded")

    def _note_step(self, stats: StepStats) -> None:
        if stats.num_preemptions:
            self._events.note("preemption", replica=stats.replica, count=stats.num_preemptions)
        if stats.num_lost_tokens:
            self._events.note("recompute", replica=stats.replica, count=stats.num_lost_tokens)
        if self.metrics is not None:
            self.metrics.note_step(stats)
            self.metrics.note_grammar_work(stats.grammar, stats.replica)

    def _note_device(self, event: object, replica: int = 0) -> None:
        if isinstance(event, DeviceLost):
            self._note_loss(event, replica)
            if self.metrics is not None:
                self.metrics.note_loss(event, replica)
        elif isinstance(event, DeviceBack):
            detail = "kept" if event.keeps_memory else ""
            self._events.note("return", detail, replica=replica, seconds=event.pause_s)
            if self.metrics is not None:
                self.metrics.note_return(event, replica)
        elif isinstance(event, DeviceFailed):
            self._events.note("failure", replica=replica)

    def _note_loss(self, loss: DeviceLost, replica: int) -> None:
        """Add a loss to the events.

        The message of the loss stays out, because it may have paths and lines of the worker in it.
        """
        stats = self._statistics()[replica]
        num_sequences = stats.num_running + stats.num_waiting + stats.num_deferred
        self._events.note(
            "loss",
            loss.cause,
            replica=replica,
            step=loss.step,
            sequences=num_sequences,
        )

    def _note_output_stats(self, stats: OutputStats) -> None:
        if self.metrics is not None:
            self.metrics.note_output_stats(stats)
        for ended in stats.ended:
            self._prompts[stats.replica].append((ended.num_prompt_tokens, ended.num_cached_tokens))
            if self._note_ended is not None:
                self._note_ended(ended)


def interval_line(
    before: SchedulerStats | None,
    now: SchedulerStats,
    seconds: float,
    prompts: Collection[tuple[int, int]] = (),
) -> str:
    """Write the log line: throughput since `before`, queues, cache.  `prompts`: (tokens, cached tokens)."""

    def gained(name: str) -> int:
        return getattr(now, name) - (0 if before is None else getattr(before, name))

    rate = max(seconds, 1e-9)
    parts = [
        f"prompt throughput: {gained('num_prompt_tokens') / rate:.1f} tokens/s",
        f"generation throughput: {gained('num_generation_tokens') / rate:.1f} tokens/s",
        f"running: {now.num_running}",
        f"waiting: {now.num_waiting + now.num_deferred}",
    ]
    if gained("num_preemptions"):
        parts.append(f"preemptions: {gained('num_preemptions')}")
    parts.append(f"KV cache usage: {100 * now.kv_cache_usage:.1f} %")
    num_tokens = sum(num_tokens for num_tokens, _ in prompts)
    if num_tokens:
        num_cached = sum(num_cached for _, num_cached in prompts)
        parts.append(f"prefix cache hit rate: {100 * num_cached / num_tokens:.1f} %")
    return ", ".join(parts)
