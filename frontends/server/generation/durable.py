"""Answer durable requests: in a task of their own, with their tokens in the journal, for readers that come and go.

A handler of any API runs as it does for a client, but what it sends goes to a `DurableStream`.  A later process runs the same handler
with the kept body, id, time and seed, and the driver goes on behind the kept tokens.  So all events are the same in each process.
"""

import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, ExitStack
from enum import Enum, auto
from functools import partial
from typing import Any

import anyio
import msgspec

from trouper.errors import EngineDeadError, TrouperNotFoundError
from trouper.frontends.server.durable.records import Admitted, StreamRecord
from trouper.frontends.server.durable.streams import (
    DurableStream,
    answer_digest,
    lost,
    lost_reason,
)
from trouper.frontends.server.generation.driver import Driver
from trouper.frontends.server.generation.token_keeper import TokenKeeper
from trouper.frontends.server.http.context import EVENTS, Message, RequestContext, Route
from trouper.frontends.server.http.decoding import decode
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared.errors import (
    HTTPError,
    clean,
    describe,
    log,
    unavailable,
)
from trouper.frontends.server.shared.keys import tenant_of
from trouper.params import RequestOutputKind

logger = logging.getLogger(__name__)
KEY = "Idempotency-Key"
# The seeds of the choices of two prompts are further apart than an answer has choices.
SEED_STEP = 2**32


class SavedIdentity(msgspec.Struct, frozen=True):
    """Digests by which a later server recognises that it would answer a request in another way.

    Attributes:
        adapter: the digest of the adapter's files; empty without one.
        answer: the digest of the resolved parameters.
    """

    adapter: bytes = b""
    answer: bytes = b""


class SavedCall(msgspec.Struct, frozen=True):
    """The part of a request from which a later process can begin it again.

    Attributes:
        unique_id, request_id, created: the identity of the reply.
        pieces: the items of a response's conversation, which the body may only name.
    """

    body: bytes
    unique_id: str
    request_id: str | None
    created: int
    seed: int
    cache_scope: bytes
    timeout_s: float
    pieces: list[bytes] = []
    identity: SavedIdentity = SavedIdentity()


def find_repeated(
    service: Service, context: RequestContext, key: bytes, digest: bytes
) -> DurableStream | None:
    """Return the stream of an earlier request with the same key.  Raises HTTPError (422) if its body was another one."""
    assert service.journal is not None
    found = service.journal.streams.repeated(context.key_digest, key) if key else None
    if found is not None and found.digest != digest:
        text = f"{KEY}: an earlier request with this key had another path or body; use a new key"
        raise HTTPError(422, "idempotency_mismatch", text, param=KEY)
    return found


class Remains(Enum):
    """Name what remains of a durable request after a run of its handler."""

    # The answer, complete or with its failure.
    END = auto()
    # The request: a later process may answer it, this one does not.
    REQUEST = auto()
    # The request in the journal, and here its key is free.
    NOTHING_HERE = auto()
    # Nothing: the client may send it again with the same key.
    NOTHING = auto()


def what_remains(
    error: Exception | None, *, has_begun: bool, is_resumed: bool, is_draining: bool
) -> Remains:
    """Decide what remains of a request after a run.

    Args:
        has_begun: whether there is something of an answer, so that the key is bound to it.
        is_resumed: whether an earlier process has admitted it.  What is lost here, or refused for now, may go on in a later one.
        is_draining: whether this process ends.  As after the death of the engine, its failures are not those of the request.
    """
    is_last = is_draining or isinstance(error, EngineDeadError)
    if error is None:
        return Remains.END
    if has_begun:
        return Remains.REQUEST if is_last else Remains.END
    if is_resumed and describe(error).status in (410, 429, 503):
        return Remains.REQUEST
    return Remains.NOTHING_HERE if is_last else Remains.NOTHING


class StreamRun:
    """One run of the handler of a durable request, and the `DurableAnswer` of its context.

    Args:
        context: of the request, with a ticket of its own.
        record: what an earlier process has kept.
    """

    def __init__(
        self,
        service: Service,
        stream: DurableStream,
        saved: SavedCall,
        context: RequestContext,
        route: Route,
        record: StreamRecord | None = None,
    ) -> None:
        assert service.journal is not None
        self._service, self._journal = service, service.journal
        self._stream, self._saved, self._record = stream, saved, record
        self._context, self._route = context, route
        self.created = saved.created
        self.request: Any = None
        self.handler = route.handler
        self._identity = SavedIdentity()
        self._is_given_up = False
        context.durable = self
        context.own_headers = ()
        context.redirect(self._take)

    def __repr__(self) -> str:
        return f"<StreamRun {self._stream.id}>"

    @property
    def pieces(self) -> list[bytes]:
        """Return the kept conversation, if the answer goes on."""
        return [] if self._record is None else self._saved.pieces

    def keep_conversation(self, body: bytes, pieces: tuple[bytes, ...]) -> None:
        """Keep a body with everything that it names, because a later process may not have it."""
        self._saved = msgspec.structs.replace(self._saved, body=body, pieces=list(pieces))

    def attach(self, driver: Driver[Any]) -> None:
        """Let the driver keep its tokens, and go on from those that are known."""
        parsed = driver.parsed
        if parsed.params.seed is None:
            parsed.params.seed, driver.seed_step = self._saved.seed, SEED_STEP
        self._stream.restart(parsed.num_choices)
        self._identity = identity_of(self._service, driver)
        driver.on_start = self._admit
        is_whole_with_scores = not parsed.is_stream and parsed.params.prompt_logprobs is not None
        if parsed.beams is None and not is_whole_with_scores:
            parsed.params.output_kind = RequestOutputKind.DELTA
            driver.keeper = TokenKeeper(
                self._journal,
                self._stream.id,
                parsed,
                self._service.engine.tokenizer,
                self._record,
                self._stream,
            )

    async def perform(self, resources: AbstractContextManager[Any]) -> None:
        """Run the handler to its end, then release the resources."""
        stream, journal = self._stream, self._journal
        try:
            with resources:
                error = await self._answer()
        except BaseException:
            stream.end(time.time(), is_cut=True)
            raise
        if isinstance(error, EngineDeadError):
            self._service.died.set()
        if error is None and self._is_given_up:
            text = f"nobody has read the answer for {journal.grace_s:g} s, so it was given up"
            error = HTTPError(410, "stream_expired", text)
        if error is not None and not isinstance(error, HTTPError):
            log(describe(error), error, self._context.id)
        stream.headers = self._context.own_headers
        stream.end(time.time(), error)
        remains = what_remains(
            error,
            has_begun=bool(stream.status) or self._is_given_up,
            is_resumed=self._record is not None,
            is_draining=self._service.is_draining,
        )
        if remains is Remains.END and stream.notes_end:
            await journal.note_end(
                stream.id, b"" if error is None else describe(error).code.encode()
            )
            stream.notes_end = False
        elif remains is Remains.REQUEST and error is not None:
            if describe(error).code == "stream_lost":
                journal.streams.count_lost("request")
        elif remains in (Remains.NOTHING, Remains.NOTHING_HERE):
            journal.streams.forget(stream)
            if remains is Remains.NOTHING and stream.is_admitted:
                await journal.delete(stream.id)

    async def _answer(self) -> Exception | None:
        """Run the handler until it ends, or until its answer had no reader for some time.  Returns its failure."""
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._give_up_unread, tasks.cancel_scope, name="readers")
            try:
                await self._handle()
            except Exception as error:
                failure = error
            tasks.cancel_scope.cancel()
        return failure

    async def _handle(self) -> None:
        service, saved = self._service, self._saved
        if self.request is None:
            assert self._route.body is not None
            self.request = (await decode(saved.body, self._route.body, service.threads)).request
        with anyio.move_on_after(saved.timeout_s) as deadline:
            try:
                await self.handler(service, self._context, self.request)
            except TrouperNotFoundError as error:
                if self._record is None:
                    raise
                raise lost(f"its adapter is not loaded: {error}") from error
        if deadline.cancelled_caught:
            text = f"the deadline of {saved.timeout_s:g} s has passed"
            raise HTTPError(504, "deadline_exceeded", text)

    async def _give_up_unread(self, scope: anyio.CancelScope) -> None:
        stream = self._stream
        while True:
            turn = stream.turn
            if stream.num_readers:
                await turn.wait()
                continue
            with anyio.move_on_after(self._journal.grace_s) as grace:
                await turn.wait()
            if grace.cancelled_caught:
                self._is_given_up = True
                scope.cancel()
                return

    async def _admit(self) -> None:
        """Write the request to the journal before anything of its answer.

        Raises:
            HTTPError: the journal cannot be written, or has no room; or the adapter of a stream that goes on is another one.
        """
        if self._record is not None:
            check_same(self._saved.identity, self._identity)
            return
        saved = self._saved = msgspec.structs.replace(self._saved, identity=self._identity)
        stream, journal = self._stream, self._journal
        record = Admitted(
            stream.id, stream.owner, msgspec.msgpack.encode(saved), stream.route, stream.key,
            stream.digest, journal.fingerprint, stream.at,
        )  # fmt: skip
        if not journal.has_room(len(record.request)):
            raise no_journal()
        is_written = False
        # Bounded by the journal's own time limit.
        with anyio.CancelScope(shield=True):
            stream.is_admitted = True
            is_written = await journal.admit(record)
        if not is_written:
            raise no_journal()

    async def _take(self, message: Message) -> None:
        """Keep what the handler sends: each event is one message."""
        if message["type"] == "http.response.start":
            kind = dict(message["headers"]).get(b"content-type")
            self._stream.headers = self._context.own_headers
            self._stream.begin(message["status"], is_events=kind == EVENTS)
        elif message["body"]:
            is_end = self._stream.is_events and not message["more_body"]
            self._stream.add(message["body"], is_end=is_end)


def resume_streams(
    service: Service, records: dict[str, StreamRecord], route_of: Callable[[str], Route | None]
) -> None:
    """Go on with the streams of an earlier process, in the order of their admission.

    Call it when the engine is loaded, before any client is served.
    """
    for name, record in records.items():
        try:
            _resume(service, name, record, route_of(record.admitted.route))
        except Exception as error:
            logger.warning("%s cannot go on: %s", name, error)


def _resume(service: Service, name: str, record: StreamRecord, route: Route | None) -> None:
    journal, admitted = service.journal, record.admitted
    assert journal is not None
    tenant = tenant_of(service.settings, admitted.owner)
    if tenant is None or route is None:
        # Its key was removed, and no other key may find it.
        return
    stream = DurableStream(
        name, admitted.owner, admitted.route, admitted.key, admitted.digest, admitted.at
    )
    stream.is_admitted = True
    journal.streams.add(stream)
    stream.make_again = partial(begin_again, service, stream, tenant, route)
    ended = record.ended
    stream.notes_end = ended is None
    reason = lost_reason(admitted.model, journal.fingerprint)
    if reason is not None:
        journal.streams.count_lost("model")
        stream.end(time.time(), lost(reason))
    elif ended is not None and ended.failure:
        code = clean(ended.failure.decode(errors="replace"), 64)
        text = f"the answer ended with the error {code} in an earlier server"
        stream.end(ended.at, HTTPError(410, "stream_expired", text))
    elif ended is not None:
        stream.end(ended.at)
        stream.cool()
    else:
        journal.streams.num_resumed += 1
        begin_again(service, stream, tenant, route, record, name)


def begin_again(
    service: Service,
    stream: DurableStream,
    tenant: str,
    route: Route,
    record: StreamRecord,
    name: str | None = None,
) -> None:
    """Run the handler of a kept request again.

    Args:
        name: of the task; None for an answer that has ended, whose first task may still be writing its end.  A client reads it again,
            so it needs a place like a new request.

    Raises:
        HTTPError: an ended answer finds no room.
    """
    saved = msgspec.msgpack.decode(record.admitted.request, type=SavedCall)
    context = RequestContext.without_client(route.path)
    context.id, context.client_id = saved.unique_id, saved.request_id
    context.tenant, context.key_digest = tenant, stream.owner
    context.cache_scope, context.timeout_s = saved.cache_scope, saved.timeout_s
    context.num_body_bytes = len(saved.body)
    run = StreamRun(service, stream, saved, context, route, record)
    if name is None:
        with ExitStack() as stack:
            context.ticket = stack.enter_context(service.enter(context))
            again = f"{stream.id} {secrets.token_hex(4)}"
            service.background.start(again, partial(run.perform, context.ticket))
            stack.pop_all()
        return
    start_recovered(
        service, context, name, run.perform, lambda: stream.end(time.time(), is_cut=True)
    )


def start_recovered(
    service: Service,
    context: RequestContext,
    name: str,
    perform: Callable[[AbstractContextManager[Any]], Awaitable[None]],
    cut: Callable[[], None],
) -> None:
    """Start the work for an answer of an earlier process: at once, or when the limits leave room for it.

    They may be lower than those of the earlier process, which has promised the answer.

    Args:
        cut: called if the work is cancelled before there is room: the readers must not wait any longer.
    """
    place = service.promise(context)

    async def perform_in_turn() -> None:
        with place:
            try:
                context.ticket = await place.ticket()
            except anyio.get_cancelled_exc_class():
                cut()
                raise
            await perform(place)

    with ExitStack() as stack:
        stack.enter_context(place)
        service.background.start(name, perform_in_turn)
        stack.pop_all()


def check_same(saved: SavedIdentity, now: SavedIdentity) -> None:
    """Check that an answer can go on.

    Raises:
        HTTPError: its adapter or its parameters have changed.
    """
    if now.adapter != saved.adapter:
        raise lost("its adapter has changed")
    if saved.answer and now.answer != saved.answer:
        raise lost("the server's options now give other parameters for it")


def identity_of(service: Service, driver: Driver[Any]) -> SavedIdentity:
    """Return the identity of a request, once its adapter is known and before it begins."""
    parsed, adapter = driver.parsed, driver.parsed.options.lora_request
    return SavedIdentity(
        b"" if adapter is None else service.engine.adapters.digest_of(adapter),
        answer_digest(parsed.params, service.answers, service.config.max_model_len),
    )


def no_journal() -> HTTPError:
    text = "the journal has no room or cannot be written, so the answer would not be kept; try again later, or without asking for it"
    return unavailable("journal_unavailable", text)
