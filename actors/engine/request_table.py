"""The open requests of an engine, and snapshots of its actors for tests and for engines that hang.

Requests are opened, aborted and closed synchronously, so no cancellation falls between two tables. Each actor's
`snapshot()` reads its own tables, in microseconds, without waiting and without changing anything.
"""

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import anyio
import msgspec
from anyio.streams.memory import MemoryObjectSendStream

from trouper.actors.engine.adapters import Adapters
from trouper.actors.engine.admission import Admission, embeds_bytes, estimate_tokens, has_images
from trouper.actors.engine.generation import MakeRender
from trouper.actors.engine.lifecycle import EngineState
from trouper.actors.executor.device import ExecutorSnapshot
from trouper.actors.messages.controls import RendererInbox, SchedulerInbox
from trouper.actors.messages.requests import Abort, Render, RequestId, RequestOptions
from trouper.actors.observability.observer import ObserverSnapshot
from trouper.actors.output.detokenizer import DetokenizerSnapshot
from trouper.actors.output.pooler import PoolerSnapshot
from trouper.actors.output.slot import PoolingSlot, ReplySlot, Slot
from trouper.actors.rendering.media.downloads import remote_parts
from trouper.actors.rendering.renderer import RendererSnapshot
from trouper.actors.runtime.event_loop import EventLoop
from trouper.actors.scheduling.scheduling_policy import SchedulerSnapshot
from trouper.config.engine_config import EngineConfig
from trouper.lora import LoRARequest
from trouper.params import SamplingParams
from trouper.pooling import PoolingParams


class RequestSnapshot(msgspec.Struct, frozen=True):
    """One open request; its sequences have the ids from `id` on.

    Sequences of one request have consecutive ids, so one number describes all of them.
    """

    id: RequestId
    request_id: str  # the caller's name for it
    is_aborted: bool
    is_over: bool  # nothing will be written any more
    num_unread: int  # completions whose end has not been handed out


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an engine and of each of its actors.

    It is plain data without references to live objects, so it can be compared and printed.
    """

    state: EngineState
    requests: tuple[RequestSnapshot, ...]  # in the order of their opening
    inboxes: dict[str, int]  # messages in each channel
    renderers: tuple[RendererSnapshot, ...]  # the first one is that of large prompts
    scheduler: SchedulerSnapshot
    executors: tuple[ExecutorSnapshot, ...]  # of each replica
    detokenizer: DetokenizerSnapshot | None  # None in an engine that pools
    pooler: PoolerSnapshot | None  # None in an engine that generates
    observer: ObserverSnapshot | None  # None when there is nothing to observe


# Rendering either takes about 10 ms.
LARGE_PROMPT = 8192  # tokens by estimate
LARGE_EMBEDS = 2**22  # bytes


class RequestTable:
    """Open requests for `Generation`s, and keep the open ones.

    Args:
        adapters: the adapters that requests may name.
        check_open: raises the error that refuses every request now.
        note_rejection: takes the name of the limit that refused a request.
        fetches: whether URLs of hosts are fetched.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        renderer: MemoryObjectSendStream[RendererInbox],
        large_renderer: MemoryObjectSendStream[RendererInbox],
        media_renderer: MemoryObjectSendStream[RendererInbox],
        fetcher: MemoryObjectSendStream[RendererInbox],
        fetches: bool,
        trying_renderer: MemoryObjectSendStream[RendererInbox],
        scheduler: MemoryObjectSendStream[SchedulerInbox],
        loop: EventLoop,
        adapters: Adapters,
        check_open: Callable[[], None],
        note_rejection: Callable[[str], None],
    ) -> None:
        self._config = config
        self._renderer = renderer
        self._large_renderer = large_renderer
        self._media_renderer = media_renderer
        self._fetcher, self._fetches = fetcher, fetches
        self._trying_renderer = trying_renderer
        self._scheduler = scheduler
        self._loop = loop
        self._adapters = adapters
        self._check_open = check_open
        self._admission = Admission(
            config.max_num_queued_reqs, config.max_num_queued_tokens, note_rejection
        )
        self._open: dict[str, tuple[RequestId, Slot[Any]]] = {}
        self._next_id = 0

    def __repr__(self) -> str:
        return f"<RequestTable {len(self._open)} open>"

    def __len__(self) -> int:
        return len(self._open)

    @property
    def slots(self) -> tuple[Slot[Any], ...]:
        """List the reply slots of all open requests, in the order of their opening."""
        return tuple(slot for _, slot in self._open.values())

    @property
    def num_rendering(self) -> int:
        """Count the requests queued for a renderer."""
        queues = (
            self._renderer,
            self._large_renderer,
            self._media_renderer,
            self._fetcher,
            self._trying_renderer,
        )
        return sum(queue.statistics().current_buffer_used for queue in queues)

    @property
    def num_prefill_tokens(self) -> int:
        """Count the prompt tokens of requests without a first token, by an estimate until they are rendered."""
        return self._admission.prefills.num_tokens

    def snapshot(self) -> tuple[RequestSnapshot, ...]:
        """Describe every open request, in the order of their opening."""
        return tuple(
            RequestSnapshot(id, name, slot.is_aborted, slot.is_over, slot.num_unread)
            for name, (id, slot) in self._open.items()
        )

    def open_request(
        self,
        request_id: str,
        params: SamplingParams | PoolingParams,
        render: MakeRender,
        options: RequestOptions,
    ) -> tuple[RequestId, Slot[Any]]:
        """Register and submit a request in one synchronous call, so no cancellation can happen in between.

        Raises:
            RuntimeError: this is not the engine's loop, or its thread.
            ValueError: the id is in flight already.
            RetryableRequestError: the engine is paused, asleep or draining.
            QueueOverflowError: too many open requests.
            MaxQueuedTokensError: too many prompt tokens in prefill.
            EngineDeadError: the engine has failed or is closed.
            LoRAAdapterNotFoundError: the adapter is not loaded.
        """
        self._loop.check_current()
        self.check(params.n, request_id)
        lora_request, arrival_time = options.lora_request, options.arrival_time
        adapter = None if lora_request is None else self._adapters.enter(lora_request)
        id = RequestId(self._next_id)
        self._next_id += params.n
        slot = self._slot(request_id, params)
        slot.lora_request = lora_request
        if adapter is not None:
            slot.on_over = partial(self._adapters.leave, adapter)
        now = time.time()
        slot.stats.arrival_time = now if arrival_time is None else arrival_time
        slot.stats.arrival_ts = anyio.current_time() - max(0.0, now - slot.stats.arrival_time)
        self._open[request_id] = id, slot
        self._admission.enter(params.n)
        message = render(
            id=id,
            params=params,
            slot=slot,
            options=options,
            arrival_time=slot.stats.arrival_time,
            adapter=adapter,
        )
        num_tokens = estimate_tokens(message.prompt)
        lane = self._lane(message, num_tokens)
        slot.count_prefill(num_tokens)
        lane.send_nowait(message)
        return id, slot

    def _lane(self, message: Render, num_tokens: int) -> MemoryObjectSendStream[RendererInbox]:
        """Choose the renderers of a request, so that short texts wait for no long prompt and for no image."""
        if has_images(message.prompt):
            is_remote = self._fetches and remote_parts(message.prompt)
            return self._fetcher if is_remote else self._media_renderer
        is_large = num_tokens > LARGE_PROMPT or embeds_bytes(message.prompt) > LARGE_EMBEDS
        return self._large_renderer if is_large else self._renderer

    def _slot(self, request_id: str, params: SamplingParams | PoolingParams) -> Slot[Any]:
        prefills, shows_stats = self._admission.prefills, self._config.log_stats
        if isinstance(params, PoolingParams):
            return PoolingSlot(request_id, prefills=prefills, shows_stats=shows_stats)
        return ReplySlot(
            request_id,
            params,
            self._config.stream_interval,
            prefills=prefills,
            shows_stats=shows_stats,
        )

    def check(self, n: int = 1, request_id: str | None = None) -> None:
        """Raise the error that opening a request with `n` completions would raise now.

        An id already in use is an error too, because it would no longer identify one request.
        """
        self._check_open()
        if request_id in self._open:
            raise ValueError(f"request_id {request_id!r} is already in flight")
        self._admission.check(n)

    async def load_adapter(
        self, lora_request: LoRARequest, *, waits: bool = True, loads_new: bool = True
    ) -> None:
        """Load the adapter of a request, unless it is there already; raises as `Adapters.load` does.

        Args:
            waits: wait for a request to end if all adapters are in use.
            loads_new: False loads only one loaded before, after it lost its slot.
        """
        self._check_open()
        if waits:
            await self._adapters.load_in_turn(lora_request, self._check_open, loads_new=loads_new)
        else:
            await self._adapters.load(lora_request)

    def close_request(self, id: RequestId, slot: Slot[Any], *, is_finished: bool) -> None:
        """Forget a request after its reader has stopped.

        Abort it if it has not finished. Its memory and its place in the limits become free at once, and its blocks
        after the step in flight.
        """
        if not is_finished:
            self._post_abort(id, slot)
        slot.close()
        if self._open.pop(slot.request_id, None) is not None:
            self._admission.leave(slot.n)

    def drop_request(self, id: RequestId, slot: Slot[Any]) -> None:
        """Close a request after the garbage collection of its iterator, from any thread.

        The work is moved to the event loop, because the table belongs to it.
        """
        try:
            self._loop.call_soon(partial(self.close_request, id, slot, is_finished=False))
        except RuntimeError:
            pass  # the loop has ended, and the request with it

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests by their ids.

        Each reader gets a final output. Unknown and finished ids are ignored, because a request may finish at any
        moment.
        """
        for request_id in (request_ids,) if isinstance(request_ids, str) else tuple(request_ids):
            if request_id in self._open:
                self._post_abort(*self._open[request_id])

    def abort_all(self) -> list[Slot[Any]]:
        """Abort every open request.

        Returns the slots in which their ends will appear. A caller that wants to wait for all ends can wait for these
        slots.
        """
        self.abort(list(self._open))
        return list(self.slots)

    def _post_abort(self, id: RequestId, slot: Slot[Any]) -> None:
        if slot.is_aborted:
            return  # once is enough, and once is what the channel has room for
        slot.cancel()
        try:
            self._scheduler.send_nowait(Abort(id))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # the actors and all their tables no longer exist
