"""The actors between a client and the scheduler: the renderer makes token ids of prompts, and the fetcher downloads images first.

Tokenization and templates take milliseconds, so they run in threads and never on the event loop.  A renderer works on
one request at a time, or on a batch of queued plain texts with at most `BATCH_CHARS` characters, because a hop to a
thread costs as much as rendering some of them.  Several renderers receive from clones of one inbox.

The fetcher gives each request a task of its own, because a slow host must delay no other request.  There are at most
`MAX_OPEN_REQUESTS` tasks, and `Downloads` bounds the connections and the bytes.

Laws:
1. A request's failure, a download's included, ends only this request.
2. A grammar without a trial goes to another renderer, because a trial may take a second and no other request should wait for it.
3. `Track` is sent before `Admit`, and there is no await between the last check of the slot and the two sends, so both actors know a
   request or neither does.
4. When a client leaves, its downloads are cancelled at once.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import anyio
import msgspec
from anyio.abc import TaskStatus
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from trouper.actors.messages.controls import DetokenizerInbox, SchedulerInbox
from trouper.actors.messages.outputs import GrammarStats
from trouper.actors.messages.requests import Admit, AdmitPooling, Render, RequestId
from trouper.actors.rendering.grammar.trial_processes import UntriedGrammarError
from trouper.actors.rendering.media.downloads import Downloads
from trouper.actors.rendering.prompts.prompts import Rendered
from trouper.actors.runtime.event_loop import Reporter, Threads
from trouper.errors import GenerationError, GrammarError, TrouperError, TrouperValidationError
from trouper.params import SamplingParams


class Fetcher:
    """The actor that waits for hosts, in place of the renderers.

    It owns its channel ends, and borrows the reply slot of each request to report errors.
    """

    def __init__(
        self,
        inbox: MemoryObjectReceiveStream[Render],
        renderer: MemoryObjectSendStream[Render],
        downloads: Downloads,
    ) -> None:
        self._inbox, self._renderer, self._downloads = inbox, renderer, downloads

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve requests until the engine ends."""
        with self._inbox, self._renderer:
            async with anyio.create_task_group() as tasks:
                task_status.started()
                async for message in self._inbox:
                    tasks.start_soon(self._serve, message)

    async def _serve(self, message: Render) -> None:
        slot, prompt = message.slot, None
        error: Exception | None = None
        if not slot.is_aborted:
            try:
                with slot.scope:
                    prompt = await self._downloads.fill(message.prompt)
            except Exception as raised:  # it is this request's, whatever it is
                error = raised
        if error is not None:
            slot.fail(typed(error))
        elif prompt is None or slot.is_aborted:
            slot.abort()
        else:
            self._hand_on(msgspec.structs.replace(message, prompt=prompt))

    def _hand_on(self, message: Any) -> None:
        """There is room for each open request."""
        try:
            self._renderer.send_nowait(message)
        except anyio.BrokenResourceError:
            # The engine is going down, and its end ends every request.
            pass


BATCH_CHARS = 2**13  # rendered in some 3 ms
QUICK_KEYS = frozenset({"prompt", "prompt_token_ids", "text_pair", "cache_salt"})


class RendererSnapshot(msgspec.Struct, frozen=True):
    """The state of a renderer: the requests in its thread at this moment.

    Tests compare it, and it shows which request keeps a renderer busy.
    """

    rendering: tuple[RequestId, ...]  # requests that are in the thread now


class Renderer:
    """The actor that renders prompts in a worker thread.

    It owns its channel ends, and borrows the reply slot of each request to report errors.
    """

    def __init__(
        self,
        inbox: MemoryObjectReceiveStream[Render],
        scheduler: MemoryObjectSendStream[SchedulerInbox],
        detokenizer: MemoryObjectSendStream[DetokenizerInbox],
        render: Callable[[Render], Rendered],
        threads: Threads,
        reporter: Reporter | None = None,
        trials: MemoryObjectSendStream[Render] | None = None,
    ) -> None:
        self._inbox = inbox
        self._scheduler = scheduler
        self._detokenizer = detokenizer
        self._render = render
        self._threads = threads
        self._reporter = reporter or Reporter(None)
        self._trials = trials  # to the renderers that try grammars; None: this is one
        self._batch: list[Render] = []  # in the thread now

    def snapshot(self) -> RendererSnapshot:
        """Describe what it is doing."""
        return RendererSnapshot(tuple(message.id for message in self._batch))

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        with (
            self._inbox,
            self._scheduler,
            self._detokenizer,
            self._reporter,
            self._trials or nullcontext(),
        ):
            task_status.started()
            async for message in self._inbox:
                first: Render | None = message
                while first is not None:
                    batch, first = self._gather(first)
                    self._batch = batch
                    await (self._serve(*batch) if len(batch) == 1 else self._serve_all(batch))
                    self._batch = []

    def _gather(self, message: Render) -> tuple[list[Render], Render | None]:
        """Return the prompts to be served together, and one that came behind them and does not fit, or None."""
        batch, room = [message], BATCH_CHARS - _plain_size(message)
        while room > 0:
            try:
                message = self._inbox.receive_nowait()
            except (anyio.WouldBlock, anyio.EndOfStream):
                break
            room -= _plain_size(message)
            if room < 0:
                return batch, message
            batch.append(message)
        return batch, None

    async def _serve(self, message: Render) -> None:
        slot = message.slot
        rendered: Rendered | Exception | None = None
        if not slot.is_aborted:
            try:
                with slot.scope:
                    rendered = await self._threads.run(self._render, message)
            except Exception as error:  # it is this request's, whatever it is
                rendered = error
        self._end(message, rendered)

    async def _serve_all(self, batch: Sequence[Render]) -> None:
        found: Sequence[Rendered | Exception | None]
        try:
            found = await self._threads.run(self._render_all, batch)
        except Exception as error:  # no text takes so long
            found = [error] * len(batch)
        for message, rendered in zip(batch, found, strict=True):
            self._end(message, rendered)

    def _render_all(self, batch: Sequence[Render]) -> list[Rendered | Exception | None]:
        """Render a batch, in a worker thread; None replaces an aborted request."""
        found: list[Rendered | Exception | None] = []
        for message in batch:
            try:
                found.append(None if message.slot.is_aborted else self._render(message))
            except Exception as error:
                found.append(error)
        return found

    def _end(self, message: Render, rendered: Rendered | Exception | None) -> None:
        slot = message.slot
        if isinstance(rendered, UntriedGrammarError) and self._trials is not None:
            self._send_to_trial(message, self._trials)
            return
        if isinstance(rendered, GrammarError):
            self._reporter.report(GrammarStats(refusal=rendered.code))
        elif isinstance(rendered, Rendered):
            self._report(rendered.admit)
        if isinstance(rendered, Exception):
            slot.fail(typed(rendered))
        elif rendered is None or slot.is_aborted:
            slot.abort()
        else:
            self._admit(rendered)

    def _report(self, admit: Admit | AdmitPooling) -> None:
        grammar = admit.grammar if isinstance(admit, Admit) else None
        if grammar is not None and grammar.rules.source is not None:
            self._reporter.report(GrammarStats(grammar.compile_s))

    def _send_to_trial(self, message: Render, trials: MemoryObjectSendStream[Render]) -> None:
        """Have the grammar of a request tried in another process.  The inbox has room for each open request."""
        try:
            trials.send_nowait(message)
        except anyio.BrokenResourceError:
            pass  # the engine is going down, and its end ends every request

    def _admit(self, rendered: Rendered) -> None:
        """Pass a rendered request to the detokenizer and the scheduler.  Both inboxes have room for each open request."""
        try:
            if rendered.track is not None:
                self._detokenizer.send_nowait(rendered.track)
            if isinstance(rendered.admit, AdmitPooling):
                rendered.admit.slot.start(rendered.admit.prompt_token_ids)
            self._scheduler.send_nowait(rendered.admit)
        except anyio.BrokenResourceError:
            pass  # the engine is going down, and its end ends every request


def _plain_size(message: Render) -> float:
    """Size of a prompt of only text or ids; infinite if anything else must be tokenised or looked through."""
    prompt: Any = message.prompt
    params = message.params
    if isinstance(params, SamplingParams) and (
        params.bad_words
        or params.logit_bias
        or params.allowed_token_ids
        or params.stop_token_ids
        or params.structured_outputs
    ):
        return math.inf
    if isinstance(prompt, str):
        return len(prompt)
    parts: list[Any] = [prompt]
    if isinstance(prompt, dict) and prompt.keys() <= QUICK_KEYS:
        parts = [*prompt.values()]
    if not all(isinstance(part, str | list | tuple) for part in parts):
        return math.inf
    return sum(map(len, parts))


def typed(error: Exception) -> Exception:
    """Return an error of rendering in a class of the API, with a defect as its cause."""
    if isinstance(error, TimeoutError):
        return TrouperValidationError(f"rendering the prompt {error}", parameter="prompt")
    if isinstance(error, TrouperError | TypeError | ValueError):
        return error
    wrapped = GenerationError(f"rendering the prompt failed: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
