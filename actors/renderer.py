"""The renderer actor: takes prompts as their callers wrote them, has them rendered in a thread (short ones
where they are), and hands them on.

Laws.  One request at a time per actor; the wiring starts several on clones of one inbox.  A request's
fault ends that request only.  `Track` goes out before `Admit`, and no await lies between the last look
at the slot and the two sends: a request is known to both actors or to neither.
"""

from collections.abc import Callable
from typing import Any

import anyio
from anyio.abc import TaskStatus
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from trouper.actors.messages import AdmitPooling, DetokenizerInbox, Render, SchedulerInbox
from trouper.actors.ports import Threads
from trouper.actors.rendering.text import Rendered
from trouper.errors import GenerationError, TrouperError, TrouperValidationError
from trouper.params import SamplingParams

QUICK = 128  # characters or ids
QUICK_KEYS = frozenset({"prompt", "prompt_token_ids", "text_pair", "cache_salt"})


class Renderer:
    """Owns the channel ends it is given; borrows the slot of each request."""

    def __init__(
        self,
        inbox: MemoryObjectReceiveStream[Render],
        scheduler: MemoryObjectSendStream[SchedulerInbox],
        detokenizer: MemoryObjectSendStream[DetokenizerInbox],
        render: Callable[[Render], Rendered],
        threads: Threads,
    ) -> None:
        self._inbox = inbox
        self._scheduler = scheduler
        self._detokenizer = detokenizer
        self._render = render
        self._threads = threads

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        with self._inbox, self._scheduler, self._detokenizer:
            task_status.started()
            async for message in self._inbox:
                await self._serve(message)

    async def _serve(self, message: Render) -> None:
        slot = message.slot
        rendered: Rendered | None = None
        if not slot.is_aborted:
            try:
                with slot.scope:
                    rendered = await self._threads.run(
                        self._render, message, is_quick=_is_quick(message)
                    )
            except Exception as error:  # it is this request's, whatever it is
                slot.fail(_typed(error))
                return
        if rendered is None or slot.is_aborted:
            slot.abort()
        else:
            self._hand_over(rendered)

    def _hand_over(self, rendered: Rendered) -> None:
        """Room is reserved in both inboxes by the wiring's arithmetic."""
        try:
            if rendered.track is not None:
                self._detokenizer.send_nowait(rendered.track)
            if isinstance(rendered.admit, AdmitPooling):
                rendered.admit.slot.start(rendered.admit.prompt_token_ids)
            self._scheduler.send_nowait(rendered.admit)
        except anyio.BrokenResourceError:
            pass  # the engine is going down, and its end ends every request


def _is_quick(message: Render) -> bool:
    """Text or ids so short, and nothing else that would have to be tokenised or looked through."""
    prompt: Any = message.prompt
    params = message.params
    if isinstance(params, SamplingParams) and (
        params.bad_words or params.logit_bias or params.allowed_token_ids or params.stop_token_ids
    ):
        return False
    parts: list[Any] = [prompt]
    if isinstance(prompt, dict) and prompt.keys() <= QUICK_KEYS:
        parts = [*prompt.values()]
    return all(isinstance(part, str | list | tuple) for part in parts) and (
        sum(map(len, parts)) <= QUICK
    )


def _typed(error: Exception) -> Exception:
    if isinstance(error, TimeoutError):
        return TrouperValidationError(f"rendering the prompt {error}", parameter="prompt")
    if isinstance(error, TrouperError | TypeError | ValueError):
        return error
    wrapped = GenerationError(f"rendering the prompt failed: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
