"""Run a response in background, after its client has received its id."""

import time
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import anyio

from trouper.errors import EngineDeadError
from trouper.frontends.server.generation.adapter import StreamEvent
from trouper.frontends.server.generation.driver import Driver, client_names
from trouper.frontends.server.http.body import ClientGone
from trouper.frontends.server.http.context import (
    Message,
    RequestContext,
    event_frame,
)
from trouper.frontends.server.responses.adapter import ResponsesAdapter
from trouper.frontends.server.responses.memory import encode, stored_response
from trouper.frontends.server.responses.turn import ResponsesTurn
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared.errors import MAX_MESSAGE, HTTPError, clean, describe, log

JSONObject = dict[str, Any]
MAX_DIGITS = 15
CODES = {
    429: "rate_limit_exceeded"
}  # OpenAI's types have only invalid_prompt for other errors of a request


class BackgroundResponse:
    """One background response.  However it ends, the store gets its end, unless it was deleted.

    The events of a streaming one are stored, too, so that any number of clients can read them.
    """

    def __init__(
        self,
        service: Service,
        context: RequestContext,
        turn: ResponsesTurn,
        driver: Driver[ResponsesAdapter],
    ) -> None:
        self._service = service
        self._context = context
        self._turn = turn
        self._driver = driver
        self._streams = bool(turn.body.stream)
        self._response = {**driver.adapter.response, "status": "queued"}
        # Whether its end is to be written to the journal.
        self.notes_end = True
        self._failure: JSONObject | None = None
        if self._streams:
            context.redirect(self._record)

    @property
    def name(self) -> str:
        return self._response["id"]

    def queue(self) -> JSONObject:
        """Store the response as queued, and return it.  Raises HTTPError if the store has no room.

        Its client polls it by its id, or follows its events.
        """
        if not self._put(self._response):
            text = "the store has no room for another background response, try again later"
            raise HTTPError(503, "overloaded", text)
        if self._streams:
            self._service.responses.open_log(self.name)
            for event in self._driver.adapter.queue():
                self._append(event)
        return self._response

    async def perform(self, resources: AbstractContextManager[Any]) -> None:
        """Generate the answer, then release the resources.

        A passed deadline or another failure becomes the status of the stored response, because no client is
        connected.
        """
        with resources:
            with self._ended():
                await self._generate()
            # Not reached by a cancellation: a later process goes on, unless the client has asked for the end.
            if self._service.journal is not None and self.notes_end:
                failure = b"" if self._failure is None else encode(self._failure)
                self._service.journal.streams.note_end(self.name, time.time())
                await self._service.journal.note_end(self.name, failure)

    def cut(self) -> None:
        """End the readers of a response that this process does not begin."""
        log = self._service.responses.log(self.name)
        if log is not None:
            log.is_cut = True
            log.close()

    async def _generate(self) -> None:
        self._put({**self._response, "status": "in_progress"})
        with anyio.move_on_after(self._context.timeout_s) as deadline:
            with client_names(partial(ResponsesAdapter.client_name, self._turn)):
                if self._streams:
                    await self._driver.answer(self._keep_end)
                else:
                    await self._driver.complete()
        if deadline.cancelled_caught:
            text = f"the deadline of {self._context.timeout_s:g} s has passed"
            raise HTTPError(504, "deadline_exceeded", text)

    @contextmanager
    def _ended(self) -> Generator[None]:
        """Store how the block has ended; a failure goes no further."""
        end: JSONObject | None = {**self._response, "status": "cancelled"}
        is_cut = False
        try:
            yield
            end = None
        except anyio.get_cancelled_exc_class():
            is_cut = self._goes_on
            raise
        except Exception as error:
            end = {**self._response, "status": "failed", "error": self._describe(error)}
            self._failure = end
            # After the engine's death the next process goes on, and one with the former adapter where this one cannot.
            is_lost = describe(error).code == "stream_lost"
            self.notes_end &= not (is_lost or isinstance(error, EngineDeadError))
            if is_lost and self._service.journal is not None:
                self._service.journal.streams.count_lost("request")
        finally:
            if not is_cut:
                self._keep_end(end)
            log = self._service.responses.log(self.name)
            if log is not None:
                log.is_cut = is_cut
                if end is not None and not is_cut:
                    self._append(self._driver.adapter.event(f"response.{end['status']}", end))
                log.close()

    @property
    def _goes_on(self) -> bool:
        """Whether a later process goes on with this response if it is cancelled now."""
        service = self._service
        stored = service.responses.get(self.name, self._context.tenant)
        is_running = stored is not None and stored.is_running
        return is_running and service.journal is not None and service.is_ending

    def _keep_end(self, end: JSONObject | None = None) -> None:
        """Store the given end, or else the end of the answer."""
        stored = self._service.responses.get(self.name, self._context.tenant)
        if stored is not None and stored.is_running:
            self._put(self._driver.adapter.response if end is None else end)

    async def _record(self, message: Message) -> None:
        """Keep what the driver sends: each event is one message."""
        if message["type"] == "http.response.body" and message["body"]:
            self._service.responses.append(self.name, message["body"])

    def _append(self, event: StreamEvent) -> None:
        self._service.responses.append(self.name, event_frame(event.content, event.name))

    def _put(self, response: JSONObject) -> bool:
        stored = stored_response(self._turn, response, self._context.tenant)
        return self._service.responses.put(self.name, stored)

    def _describe(self, error: Exception) -> JSONObject:
        problem = describe(error)
        log(problem, error, self._context.id)
        if isinstance(error, EngineDeadError):
            self._service.died.set()
        code = "server_error" if problem.status >= 500 else "invalid_prompt"
        return {
            "code": CODES.get(problem.status, code),
            "message": clean(problem.message, MAX_MESSAGE),
        }


async def follow(service: Service, context: RequestContext, name: str, start: int = 0) -> None:
    """Send the events of a response from number `start` on, including future ones.

    Raises:
        HTTPError: its events are not kept.
        ClientGone: this process ends before the response.
    """
    log = service.responses.log(name)
    if log is None:
        text = "only a response made with background and stream can be streamed by its id; get this one without stream"
        raise HTTPError(400, "invalid_value", text, param="stream")
    has_ids = service.journal is not None
    await context.start_events()
    while frames := await log.read(start):
        for number, frame in enumerate(frames, start):
            await context.send_frame(b"id: %d\n%b" % (number, frame) if has_ids else frame)
        start += len(frames)
    if log.is_cut:
        raise ClientGone
    if log.is_dropped:
        text = "the events of this response were evicted; get the response by its id"
        raise HTTPError(404, "response_not_found", text)
    await context.end_events(ResponsesAdapter.STREAM_END)


def wanted_event(context: RequestContext) -> int:
    """Return the number of the event behind the last one that a client has, by the header that browsers send.

    Raises:
        HTTPError: it is no number.
    """
    last = context.header(b"last-event-id")
    if not last:
        return 0
    if not (last.isdigit() and len(last) <= MAX_DIGITS):
        text = "Last-Event-ID: must be the number of an event of this response"
        raise HTTPError(400, "cursor_invalid", text, param="Last-Event-ID")
    return int(last) + 1
