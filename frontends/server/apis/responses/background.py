"""Run background responses after their clients have received the ids, and resume them after a restart.

No client waits for a background response, so a task of its own consumes the answer, and clients poll it or follow its events by its id.
With a journal, request and tokens are also written to disk, from which a later process resumes the answer.
"""

import logging
import secrets
import time
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import anyio
import msgspec

from trouper.errors import EngineDeadError, TrouperNotFoundError
from trouper.frontends.server.apis.responses.adapter import ResponsesAdapter
from trouper.frontends.server.apis.responses.conversation import ResponsesRequest, ResponsesTurn
from trouper.frontends.server.apis.responses.memory import (
    decode_items,
    encode,
    find,
    stored_response,
)
from trouper.frontends.server.durable.journal import Journal
from trouper.frontends.server.durable.records import Admitted, StreamRecord
from trouper.frontends.server.durable.streams import DurableStream, lost, lost_reason
from trouper.frontends.server.generation.adapter import StreamEvent
from trouper.frontends.server.generation.driver import Driver, client_names, prepare
from trouper.frontends.server.generation.durable import (
    SavedIdentity,
    check_same,
    find_repeated,
    identity_of,
    start_recovered,
)
from trouper.frontends.server.generation.token_keeper import TokenKeeper
from trouper.frontends.server.http.body import ClientGone
from trouper.frontends.server.http.context import Message, RequestContext, event_frame
from trouper.frontends.server.service.response_store import StoredResponse
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared.errors import (
    MAX_MESSAGE,
    HTTPError,
    clean,
    describe,
    log,
    unavailable,
)
from trouper.frontends.server.shared.keys import tenant_of
from trouper.params import RequestOutputKind

JSONObject = dict[str, Any]
MAX_DIGITS = 15
CODES = {
    429: "rate_limit_exceeded"
}  # OpenAI's types have only invalid_prompt for other errors of a request


class BackgroundResponse:
    """Run one background response, and store its result whether it completes, fails or is cancelled.

    A deleted response stays deleted.  With `stream`, its events are stored, too, so that any number of clients can read them.
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
        # Whether its end must still be written to the journal.
        self.notes_end = True
        self._failure: JSONObject | None = None
        if self._streams:
            context.redirect(self._record)

    @property
    def name(self) -> str:
        return self._response["id"]

    def queue(self) -> JSONObject:
        """Store the response with status `queued`, and return it, so that its client can poll it.

        Raises:
            HTTPError: (503) the store is full of running responses.
        """
        if not self._put(self._response):
            text = "the response store has no room for another background response; try again later, or raise --responses-store-bytes"
            raise HTTPError(503, "overloaded", text)
        if self._streams:
            self._service.responses.open_log(self.name)
            for event in self._driver.adapter.queue():
                self._append(event)
        return self._response

    async def perform(self, resources: AbstractContextManager[Any]) -> None:
        """Generate the answer, then release the resources.

        A failure, such as a passed time limit, becomes the status of the stored response, because no client is connected.
        """
        with resources:
            with self._ended():
                await self._generate()
            # Not reached by a cancellation, after which a later process resumes the response unless the client has cancelled it.
            if self._service.journal is not None and self.notes_end:
                failure = b"" if self._failure is None else encode(self._failure)
                self._service.journal.streams.note_end(self.name, time.time())
                await self._service.journal.note_end(self.name, failure)

    def cut(self) -> None:
        """Disconnect the readers of a response that this process cannot start."""
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
        """Store the outcome of the block.  An exception becomes a failed response; only a cancellation propagates."""
        end: JSONObject | None = {**self._response, "status": "cancelled"}
        is_cut = False
        try:
            yield
            end = None
        except anyio.get_cancelled_exc_class():
            is_cut = self._is_resumable
            raise
        except Exception as error:
            end = {**self._response, "status": "failed", "error": self._describe(error)}
            self._failure = end
            # A later process can resume it with a new engine, or with the adapter that this one lacks.
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
    def _is_resumable(self) -> bool:
        """Whether a later process will resume this response after a cancellation at this moment."""
        service = self._service
        stored = service.responses.get(self.name, self._context.tenant)
        is_running = stored is not None and stored.is_running
        return is_running and service.journal is not None and service.is_ending

    def _keep_end(self, end: JSONObject | None = None) -> None:
        """Store this outcome, or by default the driver's complete response, if the response is still running."""
        stored = self._service.responses.get(self.name, self._context.tenant)
        if stored is not None and stored.is_running:
            self._put(self._driver.adapter.response if end is None else end)

    async def _record(self, message: Message) -> None:
        """Store an event of the driver, which sends one message for each."""
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
        HTTPError: the events were never stored, or were evicted.
        ClientGone: this process stops before the end of the response.
    """
    log = service.responses.log(name)
    if log is None:
        text = "only a response created with background and stream can be streamed; get this one without stream"
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
    """Return the number of the first event that a reconnecting client lacks, from its `Last-Event-ID` header, or 0 without it.

    Raises:
        HTTPError: the header is not a number.
    """
    last = context.header(b"last-event-id")
    if not last:
        return 0
    if not (last.isdigit() and len(last) <= MAX_DIGITS):
        text = "Last-Event-ID: must be the number of an event of this response"
        raise HTTPError(400, "cursor_invalid", text, param="Last-Event-ID")
    return int(last) + 1


logger = logging.getLogger(__name__)


class SavedRequest(msgspec.Struct, frozen=True):
    """Store everything that a later process needs to run a background response again.

    Attributes:
        body: the body with all inherited fields, and with a seed.
        pieces: the encoded items of the conversation, up to the end of the request's input.
        unique_id, request_id, created: the server's id, the client's id and the creation time in the reply.
        timeout_s: the time limit of the request, in seconds.
    """

    body: bytes
    pieces: list[bytes]
    unique_id: str
    request_id: str | None
    created: int
    cache_scope: bytes
    timeout_s: float
    identity: SavedIdentity = SavedIdentity()


async def keep_request(
    service: Service,
    context: RequestContext,
    turn: ResponsesTurn,
    driver: Driver[ResponsesAdapter],
    created: int,
) -> DurableStream | None:
    """Write a background request to the journal before its client receives an id, and make the driver write its tokens there.

    Returns None, or the stream of an earlier request with the same idempotency key.  Then nothing is written.

    Raises:
        HTTPError: the journal is full or cannot be written, or the key belongs to a different request.
    """
    journal = service.journal
    assert journal is not None
    saved = SavedRequest(
        msgspec.json.encode(turn.body), list(turn.pieces), context.id, context.client_id, created,
        context.cache_scope, context.timeout_s, identity_of(service, driver),
    )  # fmt: skip
    stream = _listed(journal, f"resp_{context.id}", context.key_digest, context.repeat_key)
    stream.digest = context.repeat_digest
    record = Admitted(
        stream.id, stream.owner, msgspec.msgpack.encode(saved), "", stream.key, stream.digest,
        journal.fingerprint, stream.at,
    )  # fmt: skip
    # Another request may have arrived while the conversation was being read.
    earlier = find_repeated(service, context, stream.key, stream.digest)
    if earlier is not None:
        return earlier
    # From now on, a request with the same key finds this stream and waits for its admission.
    journal.streams.add(stream)
    try:
        await _admit(journal, record)
    except BaseException as error:
        await forget_request(journal, stream.id, error)  # noqa: ASYNC102  # waits only after its record is handed in
        raise
    keep_tokens(service, driver, stream.id)
    return None


async def _admit(journal: Journal, record: Admitted) -> None:
    if not journal.has_room(len(record.request)):
        text = "the journal is full or cannot be written; try again later, or without background"
        raise unavailable("journal_unavailable", text)
    is_written = False
    # Shielded, because the record is already submitted; `admit` has its own time limit.
    with anyio.CancelScope(shield=True):
        is_written = await journal.admit(record)
    if not is_written:
        text = "the journal cannot be written at present; try again later, or without background"
        raise unavailable("journal_unavailable", text)


async def forget_request(journal: Journal, id: str, error: BaseException) -> None:
    """Remove a request that could not be started, also from the journal, so that no later process resumes it."""
    stream = journal.streams.remove(id)
    if stream is not None:
        failure = error if isinstance(error, Exception) else None
        stream.end(time.time(), failure, is_cut=failure is None)
    await journal.delete(id)


def _listed(journal: Journal, name: str, owner: bytes, key: bytes) -> DurableStream:
    """Return the stream that represents a background response in the list of streams.  Its events are in the response store."""
    stream = DurableStream(name, owner, "/v1/responses", key, b"", time.time())

    async def attach(service: Service, context: RequestContext) -> None:
        stored = find(service, context, name)
        if service.responses.log(name) is None:
            await context.send_body(stored.body)
        else:
            await follow(service, context, name, wanted_event(context))

    stream.attach = attach
    return stream


def with_seed(body: ResponsesRequest) -> ResponsesRequest:
    """Return the body with a random seed if it has none, because a later process must sample the same tokens."""
    if body.seed is not None:
        return body
    return msgspec.structs.replace(body, seed=secrets.randbits(62))


def keep_tokens(
    service: Service,
    driver: Driver[ResponsesAdapter],
    name: str,
    record: StreamRecord | None = None,
) -> None:
    """Make a driver write its tokens to the journal, and resume after the tokens of an earlier process in `record`."""
    assert service.journal is not None
    keeper = TokenKeeper(service.journal, name, driver.parsed, service.engine.tokenizer, record)
    driver.keeper = keeper
    driver.parsed.params.output_kind = RequestOutputKind.DELTA


def resume_responses(service: Service, records: dict[str, StreamRecord]) -> None:
    """Resume all background responses of an earlier process in the order of their admission.

    Call it after the engine is loaded and before any client is served.  Responses that cannot be resumed get the status `failed`.
    """
    for name, record in records.items():
        try:
            _resume(service, name, record)
        except Exception as error:
            logger.warning("cannot resume the response %s of an earlier server: %s", name, error)


def _resume(service: Service, name: str, record: StreamRecord) -> None:
    saved = msgspec.msgpack.decode(record.admitted.request, type=SavedRequest)
    tenant = tenant_of(service.settings, record.admitted.owner)
    if tenant is None:
        # The API key was removed from the server, and no other key may read its responses.
        return
    context = _context(saved, tenant, record.admitted.owner)
    turn = kept_turn(msgspec.json.decode(saved.body, type=ResponsesRequest), saved.pieces)
    journal = service.journal
    assert journal is not None
    stream = _listed(journal, name, record.admitted.owner, record.admitted.key)
    stream.digest, stream.at = record.admitted.digest, record.admitted.at
    stream.begin(200, is_events=False)
    journal.streams.add(stream)
    if record.ended is not None:
        stream.end(record.ended.at)
    reason = lost_reason(record.admitted.model, journal.fingerprint)
    absent: str | None = None
    try:
        driver = prepare(service, context, turn, ResponsesAdapter, saved.created)
    except TrouperNotFoundError as error:
        absent = f"its adapter is not loaded: {error}"
        named = turn.body.model
        turn = kept_turn(msgspec.structs.replace(turn.body, model=None), saved.pieces)
        driver = prepare(service, context, turn, ResponsesAdapter, saved.created)
        driver.adapter.response["model"] = named
    if record.ended is not None and record.ended.failure:
        _put_end(service, name, turn, tenant, msgspec.json.decode(record.ended.failure))
        return
    if reason is not None or absent is not None:
        journal.streams.count_lost("request" if reason is None else "model")
        error = {"code": "server_error", "message": str(lost(reason or absent or ""))}
        end = {**driver.adapter.response, "status": "failed", "error": error}
        _put_end(service, name, turn, tenant, end)
        return
    driver.on_start = partial(_check_same, saved, identity_of(service, driver))
    keep_tokens(service, driver, name, record)
    response = BackgroundResponse(service, context, turn, driver)
    response.notes_end = record.ended is None
    response.queue()
    start_recovered(service, context, name, response.perform, response.cut)


async def _check_same(saved: SavedRequest, now: SavedIdentity) -> None:  # noqa: ASYNC124  # a driver awaits it
    check_same(saved.identity, now)


def _put_end(
    service: Service, name: str, turn: ResponsesTurn, tenant: str, response: dict[str, Any]
) -> None:
    stored: StoredResponse = stored_response(turn, response, tenant)
    service.responses.put(name, stored)


def kept_turn(
    request: ResponsesRequest, pieces: Sequence[bytes], *, is_stored: bool = True
) -> ResponsesTurn:
    """Rebuild the turn of a saved request from its body and its conversation's items."""
    history = [item for piece in pieces[:-1] for item in decode_items(piece)]
    turn = ResponsesTurn(request, None, history, is_stored=is_stored)
    turn.pieces = tuple(pieces)
    return turn


def _context(saved: SavedRequest, tenant: str, key_digest: bytes) -> RequestContext:
    """Return the context of a saved request, which has no connection."""
    context = RequestContext.without_client("/v1/responses")
    context.id, context.client_id = saved.unique_id, saved.request_id
    context.tenant, context.key_digest = tenant, key_digest
    context.cache_scope, context.timeout_s = saved.cache_scope, saved.timeout_s
    return context
