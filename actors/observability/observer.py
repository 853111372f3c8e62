"""The observer actor: it takes statistics, and makes metrics, the interval log line, recent events and spans of them.

`RecentEvents` keeps the last losses of workers, preemptions, refusals and changes of the engine's state. Metrics only count
them, and the log has them as text, but a page that shows a running engine needs them as data, in order and without parsing.
Texts of requests never get in: an event has only numbers and words from fixed lists.

Laws.  A sender never waits: a message that finds the inbox full is dropped and counted.  A failure in here
ends no request: it is logged and the next message is taken.
"""

import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from itertools import count
from typing import Literal, assert_never

import anyio
import msgspec
from anyio.abc import TaskStatus
from anyio.streams.memory import MemoryObjectReceiveStream

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
