"""Send durable streams to clients, from any cursor on, and serve the routes of `/v1/streams`."""

import time
from typing import Any

from trouper.frontends.server.durable.streams import (
    END,
    Cursor,
    DurableStream,
    LoggedEvent,
    cursor_invalid,
)
from trouper.frontends.server.http.body import ClientGone
from trouper.frontends.server.http.context import Headers, RequestContext
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared.errors import HTTPError, clean, unsupported

STREAMS = "/v1/streams/"  # an id follows
LAST_EVENT = b"last-event-id"
YES, NO = (b"x-durable", b"yes"), (b"x-durable", b"no")
NOT_DURABLE = b": not durable\n\n"


async def follow_stream(
    service: Service,
    context: RequestContext,
    stream: DurableStream,
    first: int | None = None,
) -> None:
    """Send a stream from the client's cursor on, including future events.

    Args:
        first: the number of the first requested event, for an API that counts events instead of using cursors.

    Raises:
        Exception: the failure of the answer, after its events.
        HTTPError: the cursor belongs to no event of this stream.
        ClientGone: this process stops before the end of the answer.
    """
    if stream.attach is not None:
        # The response store has it as soon as it is admitted.
        await stream.wait_head()
        context.own_headers += _head(service, stream)
        if not stream.status:
            raise _failure(stream)
        await stream.attach(service, context)
        return
    with stream.read():
        if stream.is_cold:
            _make_again(service, stream)
        await stream.wait_head()
        context.own_headers += (*_head(service, stream), *stream.headers)
        if not stream.status:
            raise _failure(stream)
        if not stream.is_events:
            await stream.wait_end()
            if stream.error is not None or stream.is_cut:
                raise _failure(stream)
            body = b"".join(entry.frame for entry in stream.entries)
            await context.send_body(body, status=stream.status)
            return
        await _send_events(service, context, stream, first)


def _head(service: Service, stream: DurableStream) -> Headers:
    """Return the headers of a durable answer: its id, and whether the journal can be written at present."""
    journal = service.journal
    is_kept = journal is not None and not journal.has_failed
    return (YES if is_kept else NO, (b"x-stream-id", stream.id.encode()))


async def _send_events(
    service: Service, context: RequestContext, stream: DurableStream, first: int | None
) -> None:
    given = _given_cursor(context) if first is None else None
    cursor = _first_cursor(stream, given)
    has_rest = first is not None or any(_is_wanted(given, cursor, e) for e in stream.entries)
    if stream.is_whole and context.method == "GET" and not has_rest:
        # After 204, browsers stop reconnecting.
        await context.send_empty(204)
        return
    assert service.journal is not None
    await context.start_events()
    place, is_told = first or 0, False
    while place < len(stream.entries) or not stream.is_over:
        num_shown = await stream.wait(place)
        for entry in stream.entries[place : min(num_shown, place + 64)]:
            place += 1
            if given is not None:
                if not _is_wanted(given, cursor, entry):
                    continue
                cursor = cursor.joined(entry.cursor)
            id = END if entry.is_end else str(entry.cursor if given is None else cursor)
            await context.send_frame(b"id: %b\n%b" % (id.encode(), entry.frame))
        if not (service.journal.is_working or is_told):
            is_told = True
            await context.send_frame(NOT_DURABLE)
    if stream.error is not None or stream.is_cut:
        raise _failure(stream)
    await context.end_events(b"")


def _first_cursor(stream: DurableStream, given: str | None) -> Cursor:
    """Return the client's cursor, by default the position before all events.

    Raises:
        HTTPError: it belongs to no event of this stream.
    """
    if given is None or given == END:
        return Cursor((0,) * stream.num_choices, -1)
    cursor = Cursor.parse(given, stream.num_choices)
    if stream.is_whole and any(
        a > b for a, b in zip(cursor.tokens, stream.cursor.tokens, strict=True)
    ):
        raise cursor_invalid()
    return cursor


def _is_wanted(given: str | None, cursor: Cursor, entry: LoggedEvent) -> bool:
    """Return whether a client with this cursor still needs an event."""
    return given != END and (entry.is_end or given is None or not cursor.covers(entry))


def _failure(stream: DurableStream) -> Exception:
    """Return why a stream has no further events."""
    return ClientGone() if stream.error is None else stream.error


def _make_again(service: Service, stream: DurableStream) -> None:
    """Rebuild the evicted events of an ended stream from its tokens in the journal.

    Raises:
        HTTPError: the stream has expired, or the server has no room.
    """
    assert service.journal is not None
    record = service.journal.record(stream.id)
    if record is None:
        service.journal.streams.forget(stream)
        text = "the answer has expired (--stream-retain); send the request again"
        raise HTTPError(410, "stream_expired", text)
    assert stream.make_again is not None
    stream.warm()
    try:
        stream.make_again(record)
    except BaseException:
        # Restored, so that the next reader tries again.
        stream.is_over = True
        stream.cool()
        raise


def _given_cursor(context: RequestContext) -> str | None:
    """Return the client's cursor: `starting_after` in the query of a GET, else the header `Last-Event-ID`, else None."""
    after = context.query().get("starting_after") if context.method == "GET" else None
    if after:
        return after[-1]
    header = context.header(LAST_EVENT)
    return None if not header else header.decode(errors="replace").strip()


async def list_streams(service: Service, context: RequestContext, _: None) -> None:
    """List the durable streams of a client's API key, the oldest first."""
    journal = _journal(service)
    journal.streams.tidy(time.time())
    data = [_shown(stream) for stream in journal.streams.of(context.key_digest)]
    await context.send_json({"object": "list", "data": data})


async def get_stream(service: Service, context: RequestContext, _: None) -> None:
    """Send the events of a stream after the client's cursor, or the whole reply of a request without `stream`."""
    await follow_stream(service, context, _found(service, context))


async def delete_stream(service: Service, context: RequestContext, _: None) -> None:
    """Delete a stream, also from the journal.  A running one is aborted."""
    journal, stream = _journal(service), _found(service, context)
    if stream.attach is not None:
        text = (
            f"{STREAMS}{stream.id} is a background response; use DELETE /v1/responses/{stream.id}"
        )
        raise HTTPError(409, "conflict", text)
    stream.end(time.time(), HTTPError(410, "stream_expired", "the stream was deleted"))
    journal.streams.forget(stream)
    service.background.cancel(stream.id)
    await journal.delete(stream.id)
    await context.send_json({"id": stream.id, "object": "stream", "deleted": True})


def _shown(stream: DurableStream) -> dict[str, Any]:
    is_response = stream.attach is not None
    return {
        "id": stream.id,
        "object": "stream",
        "route": stream.route,
        "status": stream.state,
        "created": int(stream.at),
        "ended_at": int(stream.ended_at) or None,
        "cursor": None if is_response or stream.is_cold else str(stream.cursor),
        "num_readers": stream.num_readers,
    }


def _found(service: Service, context: RequestContext) -> DurableStream:
    journal = _journal(service)
    journal.streams.tidy(time.time())
    id = context.path.removeprefix(STREAMS)
    found = journal.streams.find(context.key_digest, id)
    if found is None:
        text = f"Stream with id '{clean(id, 100)}' not found. It has expired, or it belongs to another key."
        raise HTTPError(404, "stream_not_found", text, param="id")
    return found


def _journal(service: Service) -> Any:
    """Return the journal.

    Raises:
        UnsupportedFeatureError: the server has no journal.
        HTTPError: (503) the streams of an earlier server are not resumed yet.
    """
    if service.journal is None:
        raise unsupported("streams", "this server stores none; start it with --journal DIR")
    service.check_open()
    return service.journal
