"""Run the handlers of durable requests in background tasks, and resume them after a restart of the server.

The handler of any API runs unchanged, but its output goes to a `DurableStream` instead of a connection.  After a restart, the new process
runs the same handler with the saved body, id, time and seed.  The driver replays the tokens in the journal and generates the remaining
ones, so clients see the same events as without the restart.
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
# The distance between the seeds of two prompts: more than the number of choices, whose seeds are consecutive.
SEED_STEP = 2**32


class SavedIdentity(msgspec.Struct, frozen=True):
    """Store digests of a request's inputs from outside its body, so that a later server refuses to resume it if they have changed.

    Attributes:
        adapter: the digest of the adapter's files; empty without one.
        answer: the digest of the resolved parameters.
    """

    adapter: bytes = b""
    answer: bytes = b""


class SavedCall(msgspec.Struct, frozen=True):
    """Store everything that a later process needs to run a request again.

    Attributes:
        unique_id, request_id, created: the server's id, the client's id and the creation time in the reply.
        timeout_s: the time limit of the request, in seconds.
        pieces: the encoded items of a response's conversation, to which the body may refer by id.
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
    """Return the stream of the client's earlier request with the same idempotency key, or None.

    Raises:
        HTTPError: (422) the earlier request had another path or body.
    """
    assert service.journal is not None
    found = service.journal.streams.repeated(context.key_digest, key) if key else None
    if found is not None and found.digest != digest:
        text = (
            f"{KEY}: an earlier request with this key had a different path or body; use a new key"
        )
        raise HTTPError(422, "idempotency_mismatch", text, param=KEY)
    return found


class Remains(Enum):
    """Decide what a server retains of a durable request when its handler ends: the answer, only the request, or nothing."""

    # Retain the answer, complete or with its error.
    END = auto()
    # Retain the request, so that a later process can resume it.
    REQUEST = auto()
    # Retain the request in the journal, but release its idempotency key in this process.
    NOTHING_HERE = auto()
    # Retain nothing, so that the client can retry with the same key.
    NOTHING = auto()


def what_remains(
    error: Exception | None, *, has_begun: bool, is_resumed: bool, is_draining: bool
) -> Remains:
    """Decide what to retain of a durable request after its handler has ended with this error or with none.

    Args:
        has_begun: whether the answer has begun, so that the key must stay bound to it.
        is_resumed: whether an earlier process admitted the request.  If this process cannot resume it, a later one may.
        is_draining: whether this process is shutting down.  Its failures, like those of a dead engine, are not the request's fault.
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
    """Run the handler of a durable request once, and collect its output in the stream.

    It implements `DurableAnswer`, through which the handler reaches it.

    Args:
        context: the request's context, with its own admission ticket and without a connection.
        record: the journal's records of an earlier process, from which to resume.
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
        """The saved conversation of a resumed answer, else an empty list."""
        return [] if self._record is None else self._saved.pieces

    def keep_conversation(self, body: bytes, pieces: tuple[bytes, ...]) -> None:
        """Save a body together with the items to which it refers, because a later process may no longer have them."""
        self._saved = msgspec.structs.replace(self._saved, body=body, pieces=list(pieces))

    def attach(self, driver: Driver[Any]) -> None:
        """Make the driver write its tokens to the journal, and resume after the tokens of an earlier process."""
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
        """Run the handler, release the resources, and retain what `what_remains` decides."""
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
            text = f"no client has read the answer for {journal.grace_s:g} s, so it was aborted (--stream-grace)"
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
        """Run the handler until its end, or until its answer had no reader for `grace_s` seconds.  Returns the handler's error."""
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
            text = f"the answer took longer than the request's time limit of {saved.timeout_s:g} s"
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
        """Write the request to the journal before generation starts, or check that a resumed request is unchanged.

        Raises:
            HTTPError: the journal is full or cannot be written, or the adapter or parameters of a resumed request have changed.
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
        # Shielded, because the record is already submitted; `admit` has its own time limit.
        with anyio.CancelScope(shield=True):
            stream.is_admitted = True
            is_written = await journal.admit(record)
        if not is_written:
            raise no_journal()

    async def _take(self, message: Message) -> None:
        """Collect a message of the handler, which contains the head of the reply or one event."""
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
    """Resume the streams of an earlier process in the order of their admission.

    Call it after the engine is loaded and before any client is served, so that no client misses its stream.
    """
    for name, record in records.items():
        try:
            _resume(service, name, record, route_of(record.admitted.route))
        except Exception as error:
            logger.warning("cannot resume the answer %s of an earlier server: %s", name, error)


def _resume(service: Service, name: str, record: StreamRecord, route: Route | None) -> None:
    journal, admitted = service.journal, record.admitted
    assert journal is not None
    tenant = tenant_of(service.settings, admitted.owner)
    if tenant is None or route is None:
        # The API key was removed from the server, and no other key may read its answers.
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
        text = f"the answer failed before the server's restart, with the error {code}"
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
    """Run the handler of a saved request again, to resume its answer or to rebuild the events of an ended one.

    Args:
        name: the task's name, to resume an answer.  None rebuilds an ended answer for a client, which is admitted like a new request.

    Raises:
        HTTPError: the admission limits leave no room to rebuild an answer.
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
            # Unique, because the first task of the stream may still be writing its end.
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
    """Start a task for an answer of an earlier process, which begins as soon as the admission limits permit.

    It waits instead of being refused, because the earlier process accepted the request, perhaps under higher limits.

    Args:
        cut: called if the task is cancelled while it waits, to release the readers.
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
    """Check that a saved answer can be resumed with the same result.

    Raises:
        HTTPError: its adapter or its resolved parameters have changed.
    """
    if now.adapter != saved.adapter:
        raise lost("its adapter has changed")
    if saved.answer and now.answer != saved.answer:
        raise lost("the server's options now resolve the request to other parameters")


def identity_of(service: Service, driver: Driver[Any]) -> SavedIdentity:
    """Return the digests of a parsed request's adapter and parameters."""
    parsed, adapter = driver.parsed, driver.parsed.options.lora_request
    return SavedIdentity(
        b"" if adapter is None else service.engine.adapters.digest_of(adapter),
        answer_digest(parsed.params, service.answers, service.config.max_model_len),
    )


def no_journal() -> HTTPError:
    text = f"the journal is full or cannot be written, so the answer would not survive a restart; try again later, or without {KEY}"
    return unavailable("journal_unavailable", text)
