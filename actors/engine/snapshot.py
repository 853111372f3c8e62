"""State of every actor of an engine at one moment, as plain data: for tests, and to find out why an engine hangs.

Each actor's `snapshot()` reads its own tables, in microseconds, without waiting and without changing anything.
"""

import msgspec

from trouper.actors.engine.lifecycle import EngineState
from trouper.actors.executor.actor import ExecutorSnapshot
from trouper.actors.messages.requests import RequestId
from trouper.actors.observability.observer import ObserverSnapshot
from trouper.actors.output.detokenizer import DetokenizerSnapshot
from trouper.actors.output.pooler import PoolerSnapshot
from trouper.actors.rendering.renderer import RendererSnapshot
from trouper.actors.scheduling.scheduling_policy import SchedulerSnapshot


class RequestSnapshot(msgspec.Struct, frozen=True):
    """One open request; its sequences have the ids from `id` on."""

    id: RequestId
    request_id: str  # the caller's name for it
    is_aborted: bool
    is_over: bool  # nothing will be written any more
    num_unread: int  # completions whose end has not been handed out


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an engine and of each of its actors."""

    state: EngineState
    requests: tuple[RequestSnapshot, ...]  # in the order of their opening
    inboxes: dict[str, int]  # messages that lie in each channel
    renderers: tuple[RendererSnapshot, ...]  # the first one is that of large prompts
    scheduler: SchedulerSnapshot
    executors: tuple[ExecutorSnapshot, ...]  # of each replica
    detokenizer: DetokenizerSnapshot | None  # None in an engine that pools
    pooler: PoolerSnapshot | None  # None in an engine that generates
    observer: ObserverSnapshot | None  # None when there is nothing to observe
