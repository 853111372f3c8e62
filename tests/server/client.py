"""An HTTP client that calls an ASGI application in memory."""

import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio

JSON = ("content-type", "application/json")


@dataclass
class Answer:
    status: int = 0
    headers: dict = field(default_factory=dict)
    body: bytes = b""
    is_complete: bool = False

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self):
        return self.json["error"]

    @property
    def events(self):
        """What a stream said, `[DONE]` as it is."""
        return parse_events(self.body)


def parse_events(body):
    text = body.decode()
    assert text.endswith("\n\n"), "a frame is cut"
    found = []
    for frame in text.split("\n\n")[:-1]:
        if not frame.startswith(":"):
            assert frame.startswith("data: "), frame
            found.append(frame[6:] if frame == "data: [DONE]" else json.loads(frame[6:]))
    return found


class Client:
    """`await client.post(path, {…})`; more headers as a dict or a list of pairs."""

    def __init__(self, app, headers=()):
        self._app = app
        self._headers = list(headers)

    async def get(self, path, headers=(), method="GET"):
        return await self.request(method, path, headers=headers)

    async def post(self, path, content=None, headers=()):
        body = b"" if content is None else json.dumps(content).encode()
        return await self.request("POST", path, body, [JSON, *headers])

    async def request(self, method, path, body=b"", headers=(), chunks=None):
        async with self.stream(method, path, body, headers, chunks) as call:
            await call.wait_complete()
        return call.answer

    @asynccontextmanager
    async def stream(self, method, path, body=b"", headers=(), chunks=None, *, ends=True):
        """The call while it runs; leaving the block is the disconnect, unless it is complete.

        A body that does not end waits for more after its last chunk.
        """
        path, _, query = path.partition("?")
        all_headers = [*self._headers, *headers]
        if body and chunks is None:
            all_headers.append(("content-length", str(len(body))))
        scope = {
            "type": "http", "method": method, "path": path, "raw_path": path.encode(),
            "query_string": query.encode(), "root_path": "", "http_version": "1.1",
            "headers": [(n.lower().encode(), v.encode("latin-1")) for n, v in all_headers],
        }  # fmt: skip
        call = Call([body] if chunks is None else chunks, ends=ends)
        async with anyio.create_task_group() as tasks:
            await tasks.start(call.run, self._app, scope)
            try:
                yield call
            finally:
                call.leave()


class Call:
    """One request under way, seen from the client."""

    def __init__(self, chunks, *, ends):
        self.answer = Answer()
        self.num_chunks = 0
        self.is_over = anyio.Event()  # the application has returned
        self._chunks, self._ends = chunks, ends
        self._gone = anyio.Event()
        self._news = anyio.Event()
        self._may_send = anyio.Event()
        self._may_send.set()

    async def run(self, app, scope, *, task_status):
        task_status.started()
        try:
            await app(scope, self._receive, self._send)
        finally:
            self.is_over.set()
            self._wake()

    async def wait_complete(self):
        await self.wait_for(lambda: self.answer.is_complete or self.is_over.is_set())

    async def wait_for(self, holds):
        while not holds():
            await self._news.wait()

    def leave(self):
        self._gone.set()
        self._may_send.set()

    def stop_reading(self):
        self._may_send = anyio.Event()

    def read_on(self):
        self._may_send.set()

    async def _receive(self):
        if self._chunks:
            await anyio.lowlevel.checkpoint()
            chunk = self._chunks.pop(0)
            return {
                "type": "http.request",
                "body": chunk,
                "more_body": bool(self._chunks) or not self._ends,
            }
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        await self._may_send.wait()
        if message["type"] == "http.response.start":
            assert not self.answer.status, "two answers"
            self.answer.status = message["status"]
            headers = [(n.decode(), v.decode()) for n, v in message["headers"]]
            assert len(dict(headers)) == len(headers)
            self.answer.headers = dict(headers)
        else:
            assert self.answer.status
            assert not self.answer.is_complete, "more after the end"
            self.num_chunks += 1
            self.answer.body += message["body"]
            self.answer.is_complete = not message["more_body"]
        self._wake()

    def _wake(self):
        self._news.set()
        self._news = anyio.Event()
