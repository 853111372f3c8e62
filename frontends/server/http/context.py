"""Represent one HTTP request and its response, over ASGI's scope, receive and send, and the route that serves it.

A `Route` is an entry of the table of routes.  Its type is here because the context, the service and the OpenAPI document use it,
and the table imports all handlers.

Laws:
1. A request gets exactly one response.
2. After the client has disconnected, sending does nothing.
3. No input is stored beyond its limit.
"""

import re
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from copy import copy
from secrets import token_hex
from time import perf_counter
from typing import Any, Literal, Protocol, Self
from urllib.parse import parse_qs

import anyio
import msgspec

from trouper.frontends.server.admission.gate import AdmissionTicket
from trouper.frontends.server.http.body import Body, too_large
from trouper.frontends.server.shared.errors import (
    OPENAI_ERRORS,
    ErrorBody,
    ErrorForm,
    Headers,
    HTTPError,
)
from trouper.frontends.server.shared.settings import ServerSettings

Access = Literal["public", "user", "admin"]
# Takes the service, the request's context and its decoded body.
Handler = Callable[[Any, Any, Any], Awaitable[None]]


class Route(msgspec.Struct, frozen=True):
    """Declare the handler of a method and a path, and describe it for the OpenAPI document.

    Attributes:
        body: the type of the request's body, or None without a body.
        generates: whether the request uses the engine and must be admitted by the gate.
        pools: whether the route needs a pooling model.  Such a route `generates`, too.
        tokenizes: whether the request must be admitted by the gate although it does not use the engine.
        reply: the type of the reply; None means any JSON object.
        stream_prefix: the prefix of the ids of its replies; empty if its answers cannot be durable.
        choose: returns the route for a body, if one path accepts the bodies of several routes.
    """

    method: str
    path: str
    access: Access
    handler: Handler
    body: type[msgspec.Struct] | None = None
    generates: bool = False
    reply: type[msgspec.Struct] | None = None
    # The kind of the reply's body.
    kind: Literal["json", "text", "empty", "events", "file"] = "json"
    # The schemas of the query's fields.
    query: dict[str, dict[str, Any]] = {}
    tokenizes: bool = False
    pools: bool = False
    # Called with the service and the body.
    choose: Callable[[Any, Any], "Route"] | None = None
    errors: ErrorForm = OPENAI_ERRORS
    stream_prefix: str = ""
    # Whether a body of any content type is parsed as JSON.  Web pages cannot abuse this, because requests with an Origin are refused.
    takes_any_type: bool = False
    # Whether the body is a form with a file (multipart/form-data) instead of JSON.
    takes_form: bool = False


Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

JSON = b"application/json"
TEXT = b"text/plain; charset=utf-8"
EVENTS = b"text/event-stream; charset=utf-8"
LINES = b"application/x-ndjson"
DONE = b"data: [DONE]\n\n"
MAX_ID = 128
MAX_QUERY_FIELDS = 64
MAX_TIMEOUT_MS = 24 * 60 * 60 * 1000
# The largest chunk of a body, in bytes.  Copying one takes 0.1 ms.
MAX_FRAME = 2**20
UNSAFE_IN_ID = re.compile(r"[^A-Za-z0-9._:@+=/-]")
encode = msgspec.json.Encoder().encode


def event_frame(content: object, name: str | None = None) -> bytes:
    """Encode a server-sent event: `content` as a `data:` line of JSON, after an `event:` line if it has a name."""
    head = b"" if name is None else b"event: %b\n" % name.encode()
    return b"%bdata: %b\n\n" % (head, encode(content))


class DurableAnswer(Protocol):
    """Connect a handler with the journal, for a request with a durable answer."""

    # The time at which the first process accepted the request, in seconds of the wall clock.
    created: int

    @property
    def pieces(self) -> Sequence[bytes]:
        """The conversation saved by an earlier process, or nothing."""
        ...

    def keep_conversation(self, body: bytes, pieces: tuple[bytes, ...]) -> None:
        """Save a body together with the items to which it refers by id."""
        ...

    def attach(self, driver: Any) -> None:
        """Make the request's driver write its tokens to the journal."""
        ...


class RequestContext:
    """Give a handler the request's head, its body on demand, and the methods that send the response.

    It guarantees one response for each request: after the first byte, an error can only become an event or end the connection.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.root_path: str = scope.get("root_path", "").rstrip("/")
        self.scheme: str = scope.get("scheme", "http")
        root = self.root_path
        path: str = scope["path"]
        self.path = path.removeprefix(root) if path.startswith(f"{root}/") else path
        self.method: str = scope["method"]
        # Normalised, because ASGI servers may use other byte types, and capitals.
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        self.headers = [(bytes(name).lower(), bytes(value)) for name, value in headers]
        self._firsts = dict(reversed(self.headers))
        length = self._firsts.get(b"content-length", b"")
        # The value of Content-Length, or 0 without a valid one.
        self.content_length = int(length[:20]) if length.isdigit() else 0
        self.client = _address(scope.get("client"))
        self._began = perf_counter()
        # The id of the request in the engine and in the log.
        self.id = token_hex(16)
        self.client_id = _sanitised(self.header(b"x-request-id"))
        self.is_gone = False
        # Whether an administrator has aborted the request, so that no further generation may start.
        self.is_aborted = False
        self.has_started = False
        self.status = 0  # of the answer
        self.is_stream = False
        # Whether a stream has JSON lines instead of server-sent events.
        self.is_lines = False
        self.num_sends = 0
        # The number of events of the stream so far.
        self.num_events = 0
        # The name of the API key by which usage is counted; empty without keys.
        self.tenant = ""
        # Whether the listener has control routes, and whether this client may use them.
        self.has_control = self.is_admin = False
        # The SHA-256 of the API key, which identifies the owner across restarts; empty without keys.
        self.key_digest = b""
        # Only requests with the same scope share cached prefixes.
        self.cache_scope = b""
        # The deadline, and whether the client itself has set one; see `read_timeout`.
        self.timeout_s = 0.0
        self.has_deadline = False
        # The routes of the listener that received the request.
        self.served: Sequence[Route] = ()
        self.ticket: AdmissionTicket | None = (
            None  # of a request that generates, once it is admitted
        )
        self.num_body_bytes = 0
        self.own_headers: Headers = ()  # with every answer
        # Set for a request with a durable answer.
        self.durable: DurableAnswer | None = None
        # The digests of the `Idempotency-Key` and of the body, for a background response.
        self.repeat_key = self.repeat_digest = b""
        self._query: bytes = scope.get("query_string", b"")
        self._raw_path: bytes = scope.get("raw_path") or path.encode(errors="replace")
        self._receive = receive
        self._send = send
        # Whether messages go to a store in this process, which never blocks.
        self._is_redirected = False
        self._is_sending = False

    @classmethod
    def without_client(cls, path: str) -> Self:
        """Return the context of a request without a connection, which receives nothing and drops all messages."""
        return cls({"path": path, "method": "POST", "headers": []}, _receive_nothing, _send_nothing)

    def __repr__(self) -> str:
        return f"<RequestContext {self.method} {self.path[:40]!r} {self.id}>"

    @property
    def age_s(self) -> float:
        """The seconds since the head of the request arrived, including the time in the admission queue."""
        return perf_counter() - self._began

    @property
    def request_id(self) -> str:
        """The client's id of the request, or else the server's, without control characters.

        It appears in the reply, in logs and in traces.
        """
        return self.client_id or self.id

    def name_by(self, request_id: str | None) -> None:
        """Use the body's `request_id` as the client's id, unless a header has set one.

        The header has precedence, because a proxy may have logged it already.
        """
        self.client_id = self.client_id or _sanitised((request_id or "").encode(errors="replace"))

    def detached(self, ticket: AdmissionTicket) -> "RequestContext":
        """Return a copy with another ticket, for work that outlives the response to this request.

        The original ticket ends with the request; the copy keeps the head and the ids.
        """
        other = copy(self)
        other.ticket = ticket
        return other

    def redirect(self, send: Send) -> None:
        """Send all further messages to `send` instead of the client, as for a background response."""
        self._send, self._is_redirected = send, True

    def header(self, name: bytes) -> bytes | None:
        """Return the value of the first header of this lower-case name, or None."""
        return self._firsts.get(name)

    def query(self) -> dict[str, list[str]]:
        try:
            text = self._query.decode("ascii")
            return parse_qs(text, keep_blank_values=True, max_num_fields=MAX_QUERY_FIELDS)
        except ValueError:
            raise HTTPError(400, "invalid_value", "the query is malformed", param="query") from None

    def check_head(self, settings: ServerSettings) -> None:
        """Raise HTTPError (414 or 431) if the head exceeds its limits.

        The limits bound memory and logs for requests that have not been authenticated yet.
        """
        if len(self._raw_path) > settings.max_path:
            raise HTTPError(
                414, "path_too_long", f"the path must have at most {settings.max_path} bytes"
            )
        size = sum(len(name) + len(value) for name, value in self.headers)
        if len(self.headers) > settings.max_headers or size > settings.max_header_bytes:
            raise HTTPError(
                431,
                "headers_too_large",
                f"the request must have at most {settings.max_headers} headers and {settings.max_header_bytes} bytes of them",
            )

    def read_timeout(self, settings: ServerSettings) -> None:
        """Set the time limit: `X-Request-Timeout-Ms`, but at most the server's limit.  Raises HTTPError for an invalid header."""
        given = self.header(b"x-request-timeout-ms")
        self.has_deadline = given is not None
        self.timeout_s = settings.request_timeout_s
        if given is not None:
            if not given.isdigit() or not 1 <= int(given[:20]) <= MAX_TIMEOUT_MS:
                rule = f"must be an integer in [1, {MAX_TIMEOUT_MS}]"
                raise HTTPError(400, "invalid_value", rule, param="X-Request-Timeout-Ms")
            self.timeout_s = min(int(given) / 1000, self.timeout_s)

    async def read_body(self, settings: ServerSettings, body: Body) -> None:
        """Read the whole body.

        Raises:
            HTTPError: the body is too large, too slow or compressed, or the memory for bodies is exhausted.
            ClientGone: the client disconnected.
        """
        if self.header(b"content-encoding") not in (None, b"", b"identity"):
            text = "a compressed body is not supported; send it without Content-Encoding"
            raise HTTPError(415, "encoded_body", text)
        if self.content_length > settings.max_body:
            raise too_large(settings.max_body)
        await body.read(
            self._receive,
            timeout_s=settings.body_timeout_s,
            start_timeout_s=settings.body_start_timeout_s,
            min_rate=settings.min_body_rate,
        )
        self.num_body_bytes = body.size

    async def wait_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass  # unread parts of the body
        self.is_gone = True

    async def send_json(self, content: object, status: int = 200, headers: Headers = ()) -> None:
        await self.send_body(encode(content), JSON, status, headers)

    async def send_body(
        self, body: bytes, kind: bytes = JSON, status: int = 200, headers: Headers = ()
    ) -> None:
        if self.ticket is not None:
            # Released first, because the client may send its next request as soon as it has the answer.
            self.ticket.leave()
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, ((b"content-type", kind), length, *headers))
        for begin in range(0, len(body) - MAX_FRAME, MAX_FRAME):
            await self._send_chunk(body[begin : begin + MAX_FRAME])
        rest = body[(len(body) - 1) // MAX_FRAME * MAX_FRAME :]
        await self._put({"type": "http.response.body", "body": rest, "more_body": False})

    async def send_empty(self, status: int = 200) -> None:
        await self._start(status, () if status == 204 else ((b"content-length", b"0"),))
        await self._put({"type": "http.response.body", "body": b"", "more_body": False})

    async def start_events(self) -> None:
        self.is_stream = True
        await self._start(
            200,
            (
                (b"content-type", LINES if self.is_lines else EVENTS),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),  # nginx would collect the chunks
            ),
        )

    async def send_event(self, content: object, name: str | None = None) -> None:
        frame = encode(content) + b"\n" if self.is_lines else event_frame(content, name)
        await self.send_frame(frame)

    async def send_frame(self, frame: bytes) -> None:
        """Send an encoded event of a started stream.  Waits if the client reads slowly."""
        self.num_events += 1
        await self._send_chunk(frame)

    async def send_comment(self) -> None:
        """Send a comment to keep the connection alive, unless another message is being sent.  JSON lines have no comments."""
        if not self._is_sending and not self.is_lines:
            await self._send_chunk(b": keep-alive\n\n")

    async def end_events(self, mark: bytes = DONE) -> None:
        await self._put({"type": "http.response.body", "body": mark, "more_body": False})

    async def fail(self, problem: ErrorBody, form: ErrorForm) -> None:
        """Send an error as the response, or as an event if a stream has already started.

        A started response that is not a stream cannot carry an error, so nothing is sent for it.
        """
        if not self.has_started:
            body = form.render(problem, self.request_id)
            await self.send_json(body, problem.status, problem.headers)
        elif self.is_stream:
            if form.render_event is None:
                content = form.render(problem, self.request_id)
            else:
                content = form.render_event(problem, self.num_events)
            await self.send_event(content, form.event)
            await self.end_events(form.stream_end)

    async def _start(self, status: int, headers: Headers) -> None:
        self.has_started = True
        self.status = status
        headers = (*headers, *self.own_headers, (b"x-request-id", self.request_id.encode()))
        await self._put({"type": "http.response.start", "status": status, "headers": headers})

    async def _send_chunk(self, chunk: bytes) -> None:
        await self._put({"type": "http.response.body", "body": chunk, "more_body": True})

    async def _put(self, message: Message) -> None:
        if self.is_gone:
            return
        self.num_sends += 1
        if self._is_redirected:
            await self._send(message)
            return
        self._is_sending = True
        try:
            # Shielded, because a cancellation in the middle of `send` would truncate a frame.  `listeners.UNREAD_S` bounds the wait.
            with anyio.CancelScope(shield=True):
                await self._send(message)
        except OSError:
            # Some servers raise it after the client has disconnected.
            self.is_gone = True
        finally:
            self._is_sending = False


async def _receive_nothing() -> Message:
    await anyio.sleep_forever()
    return {}


async def _send_nothing(_: Message) -> None:
    pass


def _address(client: tuple[str, int | None] | None) -> str:
    """Return the address of the peer (a proxy's, behind a proxy), or `-` for a socket file."""
    host, port = client or ("", None)
    host = f"[{host}]" if ":" in host else host or "-"
    return host if port is None else f"{host}:{port}"


def _sanitised(value: bytes | None) -> str | None:
    """Reduce an id to harmless printable characters.  Returns None for an empty one."""
    text = (value or b"")[:MAX_ID].decode("ascii", errors="replace")
    return UNSAFE_IN_ID.sub("_", text) or None
