"""HTTP/1.1 for requests of the usual form, without h11, which takes a fifth of a millisecond for each.

Laws.  What is not plainly of that form goes to hypercorn and h11 unread, and is theirs to judge: a head that comes in
pieces, a body in chunks, two lengths, an upgrade, whatever is odd.  One request at a time: what a client sends beyond
its body waits until the answer is out.  The frame of an answer cannot be broken by what it says.  The head of an
answer that says its length leaves with what comes next.  An answer given before its request was read leaves the
connection open when little is left to come, until it has: a client that is cut off while it speaks hears no answer.
"""

import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

import h11
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.worker_context import WorkerContext

from trouper.frontends.server.errors import logger
from trouper.frontends.server.http.exchange import WHEN_LEFT, WHOLE_SENDS, Answer, Message

HEAD = re.compile(
    rb"(GET|POST) (/[!-~]*) HTTP/1\.1\r\n"
    rb"((?:[!#$%&'*+.^_`|~\w-]+:[^\x00-\x08\n-\x1f\x7f]*\r\n)+)\r\n"
)  # no two parts of it can begin alike, so it takes linear time
FIELD = re.compile(rb"([^:]+):[ \t]*([^\r]*)\r\n")
KEEP, CLOSE = b"keep-alive", b"close"
THEIRS = frozenset((b"transfer-encoding", b"expect", b"upgrade"))
MAX_DIGITS = 15
MAX_PIECES = 4  # of a body that its handler has not asked for: of `LARGE_RECV` bytes at most, 1 MiB a connection
MAX_UNREAD = 2**16  # bytes of a body that are still taken when its answer is out
SMALL = 2**14  # bytes; copied in some microseconds
Fields = Sequence[tuple[bytes, bytes]]


class Head(NamedTuple):
    """Of a request of the usual form."""

    method: str
    target: bytes
    headers: list[tuple[bytes, bytes]]
    num_body: int  # bytes
    asks_to_close: bool
    end: int  # where it ends


class Shared:
    """What all connections have in common."""

    def __init__(
        self,
        app: Any,
        greet: Callable[[dict[str, Any]], Answer | None],
        config: Config,
        context: WorkerContext,
    ) -> None:
        self.app, self.greet, self.config, self.context = app, greet, config, context
        self._second = 0  # of the date
        self._fields: Fields = ()

    def fields(self) -> Fields:
        """Of every answer; the date among them changes once a second."""
        second = int(time.time())
        if second != self._second:
            self._second, self._fields = second, self.config.response_headers("h11")
        return self._fields


def plain_head(data: bytes) -> Head | None:
    """What `data` begins with, if that is what h11 would make of it, too; None: h11 shall say."""
    found = HEAD.match(data)
    if found is None:
        return None
    method, target, lines = found.groups()
    headers = [(name.lower(), value.rstrip(b" \t")) for name, value in FIELD.findall(lines)]
    fields = dict(headers)
    length = fields.get(b"content-length", b"0")
    connection = fields.get(b"connection", KEEP).lower()
    is_plain = (
        len(fields) == len(headers)  # nothing is there twice
        and b"host" in fields
        and fields.keys().isdisjoint(THEIRS)
        and connection in (KEEP, CLOSE)
        and length.isdigit()
        and len(length) <= MAX_DIGITS
    )
    if not is_plain:
        return None
    return Head(method.decode(), target, headers, int(length), connection == CLOSE, found.end())


def answer_head(status: int, headers: Fields) -> bytes:
    """Raises ValueError for a header that would be more than one line."""
    lines = [b"HTTP/1.1 %d \r\n" % status, *(b"%b: %b\r\n" % field for field in headers), b"\r\n"]
    head = b"".join(lines)
    if head.count(b"\n") != len(lines) or head.count(b"\r") != len(lines):
        raise ValueError("a header has a line break in it")
    return head


class Http1:
    """One connection's protocol, in the place of hypercorn's, which gets what is not ours."""

    def __init__(
        self,
        shared: Shared,
        theirs: H11Protocol,
        tasks: TaskGroup,
        write: Callable[[bytes], Awaitable[None]],
        base: dict[str, Any],  # of every scope
    ) -> None:
        self._shared = shared
        self._theirs = theirs
        self._tasks = tasks
        self._write = write
        self._base = base
        self._cycle: Cycle | None = None
        self._num_unread = 0  # bytes of a body whose answer is out
        self._num_requests = 0
        self._closes_after = False  # the request that has come
        self._is_over = False  # nothing is read any more

    @property
    def num_due(self) -> int:
        """Bytes of the request under way that have not come."""
        return self._cycle.num_due if self._cycle is not None else 0

    async def initiate(self) -> None:
        await self._theirs.initiate()

    async def handle(self, event: Event) -> None:
        if isinstance(event, RawData):
            await self._read(event.data)
        else:
            if self._cycle is not None:
                self._cycle.leave()
            await self._theirs.handle(event)

    async def finish(self, num_due: int, *, is_last: bool) -> None:
        """An answer is out, or never will be.  `num_due` bytes of its request have not come."""
        self._cycle = None
        self._num_unread = num_due
        must_close = num_due > MAX_UNREAD or self._shared.context.terminated.is_set()
        if must_close or (is_last and not (num_due and self._closes_after)):
            await self._close()
        else:  # also when the rest of the last request is still to come
            await self._theirs.send(Updated(idle=True))

    def fields(self, given: Fields) -> Fields:
        """With those that every answer has."""
        closes = self._closes_after or self._shared.context.terminated.is_set()
        own = ((b"connection", CLOSE),) if closes and (b"connection", CLOSE) not in given else ()
        return (*given, *self._shared.fields(), *own)

    async def _read(self, data: bytes) -> None:
        while data and not self._is_over:
            if self._num_unread:
                num = min(self._num_unread, len(data))
                self._num_unread -= num
                data = data[num:]
                if self._closes_after and not self._num_unread:
                    await self._close()
            elif self._cycle is not None:
                cycle = self._cycle
                data = await cycle.take(data)
                if data:
                    await cycle.over.wait()
            elif self._is_theirs() or (head := plain_head(data)) is None:
                await self._theirs.handle(RawData(data))
                return
            else:
                data = await self._begin(head, data)

    def _is_theirs(self) -> bool:
        """They are in the middle of something."""
        state = self._theirs.connection
        is_idle = state.our_state is h11.IDLE and state.their_state is h11.IDLE
        return not is_idle or bool(state.trailing_data[0])

    async def _begin(self, head: Head, data: bytes) -> bytes:
        """Returns what is beyond the request."""
        path, _, query = head.target.partition(b"?")
        scope = {
            **self._base,
            "method": head.method,
            "path": unquote(path.decode()),
            "raw_path": path,
            "query_string": query,
            "headers": head.headers,
            "state": {},
            "extensions": {WHOLE_SENDS: {}},
        }
        self._num_requests += 1
        most = self._shared.config.keep_alive_max_requests
        self._closes_after = head.asks_to_close or self._num_requests >= most
        answer = self._shared.greet(scope)
        if answer is not None:
            return await self._refuse(answer, head.num_body, data[head.end :])
        self._cycle = cycle = Cycle(self, self._write, head.num_body)
        scope["extensions"][WHEN_LEFT] = cycle.when_left
        self._tasks.spawn(
            self._perform, scope, cycle
        )  # at once: it gives back what was taken for it
        await self._theirs.send(Updated(idle=False))
        return await cycle.take(data[head.end :])

    async def _refuse(self, answer: Answer, num_body: int, data: bytes) -> bytes:
        """Without a handler; returns what is beyond the request."""
        num = min(num_body, len(data))
        self._closes_after |= (
            num_body - num > MAX_UNREAD or (b"connection", CLOSE) in answer.headers
        )
        fields = (*self.fields(answer.headers), (b"content-length", b"%d" % len(answer.body)))
        await self._write(answer_head(answer.status, fields) + answer.body)
        await self.finish(num_body - num, is_last=self._closes_after)
        return data[num:]

    async def _close(self) -> None:
        self._is_over = True
        await self._theirs.send(Closed())

    async def _perform(self, scope: dict[str, Any], cycle: "Cycle") -> None:
        try:
            await self._shared.app(scope, cycle.receive, cycle.send)
        except Exception:
            logger.exception("the application has failed")
        await cycle.complete()


class Cycle:
    """One request and its answer: what ASGI calls `receive` and `send`."""

    def __init__(
        self, protocol: Http1, write: Callable[[bytes], Awaitable[None]], num_body: int
    ) -> None:
        self.num_due = num_body  # bytes of the request that have not come
        self.is_last = False  # on its connection
        self.over = trio.Event()
        self._protocol = protocol
        self._write = write
        self._messages: deque[Message] = (
            deque()
        )  # for the handler; mostly one, which is there before it asks
        self._changed: trio.Event | None = (
            None  # in `_messages`, or they are over; of the last wait
        )
        self._is_left = False
        self._on_left: Callable[[], object] | None = None  # who is told
        self._head: bytes | None = None  # of the answer, until it has left
        self._has_begun = False
        self._is_chunked = False
        self._num_left = 0  # bytes of an answer that has said its length

    # For the connection

    async def take(self, data: bytes) -> bytes:
        """The next of the request; returns what is beyond it.  Waits when its handler does not ask for it."""
        rest = self.skip(data)
        piece = data[: len(data) - len(rest)]
        if piece or not self.num_due:
            while len(self._messages) >= MAX_PIECES and not self.over.is_set():
                await self._wait_change()
            message = {"type": "http.request", "body": piece, "more_body": self.num_due > 0}
            if not self.over.is_set():  # else nobody wants it any more
                self._messages.append(message)
                self._note_change()
        return rest

    def skip(self, data: bytes) -> bytes:
        num = min(self.num_due, len(data))
        self.num_due -= num
        return data[num:]

    def leave(self) -> None:
        """The client has."""
        self._is_left = True
        self._note_change()
        if self._on_left is not None:
            self._on_left()

    async def say(self, answer: Answer) -> None:
        """All of it, at once."""
        length = (b"content-length", b"%d" % len(answer.body))
        self._start(answer.status, (*answer.headers, length))
        await self._put(answer.body, is_whole=True)

    async def complete(self) -> None:
        """The handler has returned."""
        if self.over.is_set():
            return
        if not self._has_begun:
            await self.say(Answer(500, (), b""))
        else:
            if self._head:
                await self._write(self._head)
            self.is_last = True
            await self._end()

    # For the handler

    async def receive(self) -> Message:
        while not self._messages:
            if self._is_left or self.over.is_set():
                return {"type": "http.disconnect"}
            await self._wait_change()
        message = self._messages.popleft()
        self._note_change()
        return message

    def when_left(self, act: Callable[[], object]) -> None:
        self._on_left = act
        if self._is_left:
            act()

    async def send(self, message: Message) -> None:
        if self.over.is_set():
            return
        if message["type"] == "http.response.start":
            self._start(message["status"], message["headers"])
            if self._is_chunked:
                head, self._head = self._head, None
                await self._write(head or b"")
        else:
            body: bytes = message.get("body", b"")
            await self._put(body, is_whole=not message.get("more_body", False))

    def _start(self, status: int, given: Fields) -> None:
        headers = self._protocol.fields(given)
        named = dict(headers)
        length = named.get(b"content-length")
        self._num_left = int(length or 0)
        self._is_chunked = length is None and status not in (204, 304)
        if self._is_chunked:
            headers = (*headers, (b"transfer-encoding", b"chunked"))
        self.is_last = named.get(b"connection") == CLOSE
        self._head = answer_head(status, headers)
        self._has_begun = True

    async def _put(self, body: bytes, *, is_whole: bool) -> None:
        if self._is_chunked:
            end = b"0\r\n\r\n" if is_whole else b""
            data = b"%x\r\n%b\r\n%b" % (len(body), body, end) if body else end
        else:
            self._num_left -= len(body)
            if self._num_left < 0 or (is_whole and self._num_left):
                self.is_last = True  # what comes next would be taken for a part of it
            data = body
        head, self._head = self._head or b"", None
        if len(data) <= SMALL:
            data = head + data
        elif head:
            await self._write(head)
        await self._write(data)
        if is_whole:
            await self._end()

    async def _wait_change(self) -> None:
        if self._changed is None or self._changed.is_set():
            self._changed = trio.Event()
        await self._changed.wait()

    def _note_change(self) -> None:
        if self._changed is not None:
            self._changed.set()

    async def _end(self) -> None:
        self._messages.clear()
        self._on_left = None  # it knows the exchange, which knows us: a circle
        self.over.set()
        self._note_change()
        await self._protocol.finish(self.num_due, is_last=self.is_last)
