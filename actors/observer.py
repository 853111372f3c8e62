"""The observer actor: facts in; metrics, the interval log line and spans out.

Laws.  Who reports never waits: a fact that finds the inbox full is dropped and counted.  A failure in here
ends nobody's request: it is logged and the next fact is taken.  Source: spec section 18.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection
from typing import assert_never

import anyio
from anyio.abc import TaskStatus
from anyio.streams.memory import MemoryObjectReceiveStream

from trouper.actors.messages import ObserverInbox, RequestEnded, SchedulerStats, Stepped, Told
from trouper.actors.metrics import Metrics

logger = logging.getLogger("trouper")
HIT_RATE_REQUESTS = 1000  # the hit rate in the log line is over so many


class Observer:
    """Owns its inbox and the metrics; writes one log line each `interval_s` seconds."""

    def __init__(
        self,
        inbox: MemoryObjectReceiveStream[ObserverInbox],
        metrics: Metrics,
        interval_s: float,
        on_request_ended: Callable[[RequestEnded], None] | None = None,
    ) -> None:
        self._inbox = inbox
        self.metrics = metrics
        self._interval_s = interval_s
        self._on_request_ended = on_request_ended  # makes a span
        self._before: SchedulerStats | None = None  # at the last line
        self._now: SchedulerStats | None = None
        self._since_s = 0.0
        # Of the last requests: prompt tokens, and how many of them were in the prefix cache.
        self._prompts: deque[tuple[int, int]] = deque(maxlen=HIT_RATE_REQUESTS)

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        with self._inbox:
            self._since_s = anyio.current_time()
            task_status.started()
            while True:
                with anyio.CancelScope(deadline=self._since_s + self._interval_s):
                    async for fact in self._inbox:
                        self._note(fact)
                        if anyio.current_time() >= self._since_s + self._interval_s:
                            break
                    else:
                        return
                self.log()

    def log(self) -> None:
        """Write the line of this interval and begin the next one."""
        now = anyio.current_time()
        is_idle = self._now is self._before
        if self._now is not None:
            line = interval_line(self._before, self._now, now - self._since_s, self._prompts)
            logger.log(logging.DEBUG if is_idle else logging.INFO, "%s", line)
        self._before, self._since_s = self._now, now

    def _note(self, fact: ObserverInbox) -> None:
        try:
            match fact:
                case Stepped(stats):
                    self._now = stats
                    self.metrics.note_step(fact)
                case Told():
                    self.metrics.note_told(fact)
                    for ended in fact.ended:
                        self._prompts.append((ended.num_prompt_tokens, ended.num_cached_tokens))
                        if self._on_request_ended is not None:
                            self._on_request_ended(ended)
                case _:
                    assert_never(fact)
        except Exception:  # statistics never touch requests
            logger.exception("a fact could not be recorded")


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
