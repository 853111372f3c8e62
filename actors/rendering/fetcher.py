"""The fetcher actor: it downloads the images of requests, and hands the requests on to the renderer of images.

Each request is a task, because a slow host must delay no other request.  There are at most `MAX_OPEN_REQUESTS` tasks, and
`Downloads` bounds the connections and the bytes.

Laws.  A failed download ends only its request.  When a client leaves, its downloads are cancelled at once.
"""

from typing import Any

import anyio
import msgspec
from anyio.abc import TaskStatus
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from trouper.actors.messages.requests import Render
from trouper.actors.rendering.media.downloads import Downloads
from trouper.actors.rendering.renderer import typed


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
