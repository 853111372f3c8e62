"""Background responses that outlive the server: what is kept of their requests, and how they go on after a restart."""

import logging
import secrets
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import anyio
import msgspec

from trouper.errors import TrouperNotFoundError
from trouper.frontends.server.durable.journal import Journal
from trouper.frontends.server.durable.records import Admitted, StreamRecord
from trouper.frontends.server.durable.streams import DurableStream, lost, lost_reason
from trouper.frontends.server.generation.driver import Driver, prepare
from trouper.frontends.server.generation.durable import (
    SavedIdentity,
    check_same,
    find_repeated,
    identity_of,
    start_recovered,
)
from trouper.frontends.server.generation.token_keeper import TokenKeeper
from trouper.frontends.server.http.context import RequestContext
from trouper.frontends.server.responses.adapter import ResponsesAdapter
from trouper.frontends.server.responses.background import BackgroundResponse, follow, wanted_event
from trouper.frontends.server.responses.memory import decode_items, find, stored_response
from trouper.frontends.server.responses.turn import ResponsesRequest, ResponsesTurn
from trouper.frontends.server.service.response_store import StoredResponse
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared.errors import unavailable
from trouper.frontends.server.shared.keys import tenant_of
from trouper.params import RequestOutputKind

logger = logging.getLogger(__name__)


class SavedRequest(msgspec.Struct, frozen=True):
    """The part of a request from which a later process can begin it again.

    Attributes:
        body: the body with everything that it inherits, and with a seed.
        pieces: the items of the conversation up to the end of its input.
        unique_id, request_id, created: the identity of the reply.
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
    """Write a request to the journal, before its client receives an id, and let the driver keep its tokens.

    Returns the entry of an earlier request with the same key, if there is one; then nothing is written.

    Raises:
        HTTPError: the journal cannot be written, or has no room; or the key belongs to another request.
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
    # One may have come while the conversation was read.
    earlier = find_repeated(service, context, stream.key, stream.digest)
    if earlier is not None:
        return earlier
    # Another request with the same key finds it from now on, and waits until it is kept.
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
        text = (
            "the journal has no room or cannot be written; try again later, or without background"
        )
        raise unavailable("journal_unavailable", text)
    is_written = False
    # Bounded by the journal's own time limit.
    with anyio.CancelScope(shield=True):
        is_written = await journal.admit(record)
    if not is_written:
        raise unavailable("journal_unavailable", "the journal cannot be written; try again later")


async def forget_request(journal: Journal, id: str, error: BaseException) -> None:
    """Forget a request that does not begin after all.  It may still be written, and must not go on in a later process."""
    stream = journal.streams.remove(id)
    if stream is not None:
        failure = error if isinstance(error, Exception) else None
        stream.end(time.time(), failure, is_cut=failure is None)
    await journal.delete(id)


def _listed(journal: Journal, name: str, owner: bytes, key: bytes) -> DurableStream:
    """Return the entry of a background response in the list of streams."""
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
    """Return a body with a seed, because a later process must sample the same tokens."""
    if body.seed is not None:
        return body
    return msgspec.structs.replace(body, seed=secrets.randbits(62))


def keep_tokens(
    service: Service,
    driver: Driver[ResponsesAdapter],
    name: str,
    record: StreamRecord | None = None,
) -> None:
    """Let a driver keep its tokens, and go on from those that an earlier process has kept."""
    assert service.journal is not None
    keeper = TokenKeeper(service.journal, name, driver.parsed, service.engine.tokenizer, record)
    driver.keeper = keeper
    driver.parsed.params.output_kind = RequestOutputKind.DELTA


def resume_responses(service: Service, records: dict[str, StreamRecord]) -> None:
    """Go on with all responses of an earlier process, in the order of their admission.

    Call it when the engine is loaded, before any client is served. One that cannot go on ends as failed.
    """
    for name, record in records.items():
        try:
            _resume(service, name, record)
        except Exception as error:
            logger.warning("%s cannot go on: %s", name, error)


def _resume(service: Service, name: str, record: StreamRecord) -> None:
    saved = msgspec.msgpack.decode(record.admitted.request, type=SavedRequest)
    tenant = tenant_of(service.settings, record.admitted.owner)
    if tenant is None:
        # Its key was removed, and no other key may find it.
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
    """Return a request of an earlier process together with the conversation that it continues."""
    history = [item for piece in pieces[:-1] for item in decode_items(piece)]
    turn = ResponsesTurn(request, None, history, is_stored=is_stored)
    turn.pieces = tuple(pieces)
    return turn


def _context(saved: SavedRequest, tenant: str, key_digest: bytes) -> RequestContext:
    """Make the context of a request without a client."""
    context = RequestContext.without_client("/v1/responses")
    context.id, context.client_id = saved.unique_id, saved.request_id
    context.tenant, context.key_digest = tenant, key_digest
    context.cache_scope, context.timeout_s = saved.cache_scope, saved.timeout_s
    return context
