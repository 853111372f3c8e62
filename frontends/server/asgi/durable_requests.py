"""Decide which requests are durable, start their answers in the background, and connect a retried request to the answer of the first one.

Requests with the same `Idempotency-Key`, path and body share one answer, so a client can retry safely after a lost connection.
"""

import hashlib
import secrets
import time
from contextlib import ExitStack
from functools import partial
from typing import Any

import anyio.to_thread
import msgspec

from trouper.frontends.server.durable.streams import DurableStream
from trouper.frontends.server.generation.durable import (
    KEY,
    SavedCall,
    StreamRun,
    begin_again,
    find_repeated,
    no_journal,
)
from trouper.frontends.server.generation.stream_readers import NO, YES, follow_stream
from trouper.frontends.server.http.context import RequestContext, Route
from trouper.frontends.server.http.decoding import THREAD_FROM
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared.errors import HTTPError, unsupported

MAX_KEY = 255


class DurableRequest(msgspec.Struct, frozen=True):
    """Hold the body of a new durable request, and the digests by which a retry is recognised.

    Attributes:
        key: the SHA-256 of its `Idempotency-Key`; empty without one.
        digest: the SHA-256 of its path and body.
    """

    body: bytes
    key: bytes
    digest: bytes


async def read_durable(
    service: Service, context: RequestContext, route: Route, body: bytes | memoryview
) -> DurableRequest | DurableStream | None:
    """Decide whether a request is durable.

    Returns the stream of an earlier request that this one retries, a `DurableRequest` for a new one, and None if it is not durable.

    Raises:
        HTTPError: the key is invalid or belongs to a different request, or the journal has no room.
        UnsupportedFeatureError: the request has a key, but answers of this route cannot be durable.
    """
    journal, key = service.journal, _key(context)
    if journal is None or not route.stream_prefix:
        if key and journal is not None and route.generates and not route.pools:
            raise unsupported(
                KEY, f"answers of {route.path} are not stored for retries; leave the header out"
            )
        if key or (journal is not None and route.stream_prefix):
            context.own_headers += (NO,)
        return None
    journal.streams.tidy(time.time())
    if not key and not journal.keeps_all:
        context.own_headers += (NO,)
        return None
    digest = await _digest(service, route.path, body)
    found = find_repeated(service, context, key, digest)
    if found is not None:
        return found
    # A new segment of the journal repeats the bodies of all open requests, so they must fit.
    if not (journal.has_room(len(body)) and service.background.is_on):
        if key:
            raise no_journal()
        context.own_headers += (NO,)
        return None
    return DurableRequest(bytes(body), key, digest)


def has_stream(service: Service, context: RequestContext, route: Route) -> bool:
    """Return whether the key of a request already has an answer, before the body is read.

    Reading an answer is no new work for the engine, so it is not refused for load.

    Raises:
        HTTPError: the key is invalid.
    """
    if service.journal is None or not route.stream_prefix:
        return False
    key = _key(context)
    return bool(key) and service.journal.streams.repeated(context.key_digest, key) is not None


def attached(route: Route, stream: DurableStream) -> Route:
    """Return a route that sends an existing stream to a retrying client, from the beginning or after its `Last-Event-ID`."""

    async def follow(service: Service, context: RequestContext, _: None) -> None:
        await follow_stream(service, context, stream)

    return msgspec.structs.replace(route, handler=follow, generates=False)


def started(route: Route, asked: DurableRequest) -> Route:
    """Return a route that starts the answer to a durable request.

    The answer runs in a task of its own and survives its client, so even the first client reads it through the stream.
    """
    return msgspec.structs.replace(route, handler=partial(_start_stream, asked, route))


async def _start_stream(
    asked: DurableRequest,
    route: Route,
    service: Service,
    context: RequestContext,
    request: Any,
) -> None:
    """Start the answer to a durable request, and send it to its client like to any other reader."""
    # Another request with the same key may have arrived while this one was being decoded.
    stream = find_repeated(service, context, asked.key, asked.digest)
    handler = route.handler
    if stream is None and getattr(request, "background", None):
        # The Responses API runs background responses in tasks of its own.
        context.repeat_key, context.repeat_digest = asked.key, asked.digest
        context.own_headers += (YES,)
        await handler(service, context, request)
        return
    if stream is None:
        assert service.journal is not None
        context.name_by(getattr(request, "request_id", None))
        now = time.time()
        name = f"{route.stream_prefix}{context.id}"
        stream = DurableStream(name, context.key_digest, route.path, asked.key, asked.digest, now)
        stream.make_again = partial(begin_again, service, stream, context.tenant, route)
        saved = SavedCall(
            asked.body, context.id, context.client_id, int(now), secrets.randbits(62),
            context.cache_scope, context.timeout_s,
        )  # fmt: skip
        with ExitStack() as resources:
            if context.ticket is not None:
                context.ticket.leave()
            later = context.detached(resources.enter_context(service.enter(context)))
            run = StreamRun(service, stream, saved, later, route)
            run.request, run.handler = request, handler
            service.journal.streams.add(stream)
            try:
                service.background.start(name, partial(run.perform, resources.pop_all()))
            except BaseException:
                service.journal.streams.forget(stream)
                raise
    await follow_stream(service, context, stream)


async def _digest(service: Service, path: str, body: bytes | memoryview) -> bytes:
    head = f"{path}\n".encode()
    if len(body) < THREAD_FROM:
        return hashlib.sha256(head + bytes(body)).digest()

    def hash_all() -> bytes:
        found = hashlib.sha256(head)
        found.update(body)
        return found.digest()

    return await anyio.to_thread.run_sync(hash_all, limiter=service.threads)


def _key(context: RequestContext) -> bytes:
    """Return the digest of the client's `Idempotency-Key`, or empty bytes without that header.

    The IETF draft requires quotes around the key, but most clients omit them.

    Raises:
        HTTPError: the key is empty, too long or not printable ASCII.
    """
    given = context.header(KEY.lower().encode())
    if given is None:
        return b""
    text = given.strip()
    if len(text) > 1 and text.startswith(b'"') and text.endswith(b'"'):
        text = text[1:-1]
    if not (0 < len(text) <= MAX_KEY and all(32 <= each < 127 for each in text)):
        rule = f"must be 1 to {MAX_KEY} printable ASCII characters"
        raise HTTPError(400, "invalid_value", f"{KEY}: {rule}", param=KEY)
    return hashlib.sha256(text).digest()
