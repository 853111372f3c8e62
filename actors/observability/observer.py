"""The observer actor: facts in; metrics, the interval log line and spans out.

Laws.  Who reports never waits: a fact that finds the inbox full is dropped and counted.  A failure in here
ends nobody's request: it is logged and the next fact is taken.  Source: spec section 18.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Collection
from itertools import count
from typing import assert_never

import anyio
from anyio.abc import TaskStatus
from anyio.streams.memory import MemoryObjectReceiveStream

from trouper.actors.messages.controls import Flush
from trouper.actors.messages.inboxes import ObserverInbox
from trouper.actors.messages.stats import OutputStats, RequestEnded, SchedulerStats, StepStats
from trouper.actors.observability.metrics import Metrics

logger = logging.getLogger("trouper")
# Between two looks at the inbox: facts come when the loop is needed elsewhere, and a look takes a core from a step
# for 0.2 ms where caches are cold.
REST_S = 0.25
FACTS_PER_TURN = 64  # of 5 µs each
HIT_RATE_REQUESTS = 1000  # the hit rate in the log line is over so many


class Observer:
    """Owns its inbox and the metrics; writes one log line each `interval_s` seconds.

    Without metrics there are no log lines either: then it only passes on who has ended, for tracing.
    """

    def __init__(
        self,
        inbox: MemoryObjectReceiveStream[ObserverInbox],
        metrics: Metrics | None,
        statistics: Callable[[], SchedulerStats],
        interval_s: float,
        note_ended: Callable[[RequestEnded], None] | None = None,
    ) -> None:
        self.metrics = metrics
        self._inbox = inbox
        self._statistics = statistics  # of the scheduler, whenever somebody asks
        self._interval_s = interval_s if metrics is not None else math.inf
        self._note_ended = note_ended  # makes a span
        self._rest = anyio.CancelScope()
        self._before: SchedulerStats | None = None  # at the last line, or at the beginning
        self._since_s = 0.0
        # Of the last requests: prompt tokens, and how many of them were in the prefix cache.
        self._prompts: deque[tuple[int, int]] = deque(maxlen=HIT_RATE_REQUESTS)

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        with self._inbox:
            self._since_s, self._before = anyio.current_time(), self._look()
            task_status.started()
            try:
                while not await self._watch():
                    self.log()
            finally:
                self._drain()  # the end of the engine: what its last requests left is still counted
                self._look()

    async def _watch(self) -> bool:
        """Take facts until the interval is over; True when the inbox has ended."""
        deadline = self._since_s + self._interval_s
        with anyio.CancelScope(deadline=deadline):
            async for fact in self._inbox:
                self._note(fact)
                is_empty = self._drain(FACTS_PER_TURN)
                if anyio.current_time() >= deadline:
                    return False
                if is_empty:
                    await self._rest_a_while()
            return True
        return False

    async def _rest_a_while(self) -> None:
        with anyio.CancelScope(deadline=anyio.current_time() + REST_S) as self._rest:
            await anyio.sleep_forever()

    def hurry(self) -> None:
        """Somebody waits for what is in the inbox."""
        self._rest.cancel()

    def _drain(self, limit: int | None = None) -> bool:
        """Take what is there; True when nothing is left."""
        try:
            for _ in count() if limit is None else range(limit):
                self._note(self._inbox.receive_nowait())
        except (anyio.WouldBlock, anyio.EndOfStream):
            return True
        return False

    def _look(self) -> SchedulerStats:
        stats = self._statistics()
        if self.metrics is not None:
            self.metrics.note_stats(stats)
        return stats

    def log(self) -> None:
        """Write the line of this interval and begin the next one."""
        now = anyio.current_time()
        stats = self._look()
        if stats.num_steps:
            is_idle = stats == self._before and not stats.num_running
            line = interval_line(self._before, stats, now - self._since_s, self._prompts)
            logger.log(logging.DEBUG if is_idle else logging.INFO, "%s", line)
        self._before, self._since_s = stats, now

    def _note(self, fact: ObserverInbox) -> None:
        try:
            match fact:
                case StepStats(num_tokens):
                    if self.metrics is not None:
                        self.metrics.note_step(num_tokens)
                case OutputStats():
                    self._note_output_stats(fact)
                case Flush(answer):
                    self._look()
                    answer.set(None)
                case _:
                    assert_never(fact)
        except Exception:  # statistics never touch requests
            logger.exception("a fact could not be recorded")

    def _note_output_stats(self, told: OutputStats) -> None:
        if self.metrics is not None:
            self.metrics.note_output_stats(told)
        for ended in told.ended:
            self._prompts.append((ended.num_prompt_tokens, ended.num_cached_tokens))
            if self._note_ended is not None:
                self._note_ended(ended)


def interval_line(
    before: SchedulerStats | None,
    now: SchedulerStats,
    seconds: float,
    prompts: Collection[tuple[int, int]] = (),
) -> str:
    """The log line: throughput since `before`, queues, cache.  `prompts`: (tokens, cached tokens)."""

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
