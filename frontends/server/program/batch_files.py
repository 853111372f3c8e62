"""Answer OpenAI's batch files: each line is handled like an HTTP request, without the network.

Laws:
1. Each line gets one answer, in the order of the lines.  A failing line gets an error; only a failed engine or file ends the batch.
2. At most `max_inflight` lines are in memory between reading and the ordered output.  Of earlier lines, only a digest of each custom_id is.
3. An answer is saved as soon as it exists, so that an interrupted batch can continue.
"""

from collections.abc import Callable
from typing import Any, BinaryIO

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from trouper.frontends.server.asgi.app import App
from trouper.frontends.server.asgi.routes import ROUTES
from trouper.frontends.server.http.context import JSON
from trouper.frontends.server.http.decoding import decode
from trouper.frontends.server.program.batch_records import (
    Answers,
    BatchError,
    BatchLine,
    BatchReply,
    BatchResponse,
    Failures,
    answer_id,
    custom_id_key,
    encode_line,
    field_of,
    origin_of,
    refusal_id,
)
from trouper.frontends.server.shared.errors import ErrorBody, HTTPError, describe

URLS = tuple(route.path for route in ROUTES if route.access == "user" and route.body is not None)


class BatchFile:
    """Run over a file of requests once, with a bounded number of open requests."""

    def __init__(
        self,
        app: App,
        max_inflight: int,
        *,
        note_reply: Callable[[], object] = lambda: None,
        origin: str = "",
    ) -> None:
        """Prepare a run.

        Args:
            note_reply: called after each line of the output.
            origin: a digest of everything besides the request that determines an answer (`origin_of`).
        """
        self._app = app
        self._note_reply = note_reply
        self._origin = origin or origin_of()
        self._max_inflight = max_inflight
        self._max_line = app.service.settings.max_body
        self._seen: set[bytes] = set()  # digests of the custom_ids so far
        self._files = anyio.CapacityLimiter(2)
        self.num_lines = 0
        self.num_failed = 0
        self.num_kept = 0
        self.failures = Failures()

    def __repr__(self) -> str:
        return f"<BatchFile {self.num_lines} lines written, {self.num_failed} of them failures>"

    async def answer_all(self, source: BinaryIO, answers: Answers) -> None:
        """Answer every line of `source` with a line in `answers`.  Requests with a saved answer are not sent.

        Raises:
            EngineDeadError, OSError: the engine or the output failed; possibly inside an exception group.
            TrouperValidationError: a saved answer belongs to another request.
        """
        error: Exception | None = None
        # With the slot that the writer holds, at most `max_inflight` lines are read but not written.
        send, receive = anyio.create_memory_object_stream[_Slot](self._max_inflight - 1)
        with receive:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._read, source, answers, send, name="reader")
                try:
                    await self._write(receive, answers)
                except Exception as raised:
                    # Raised after the group, which would wrap it in another group.
                    error = raised
                    tasks.cancel_scope.cancel()
        if error is not None:
            raise error

    async def _read(
        self, source: BinaryIO, answers: Answers, send: "MemoryObjectSendStream[_Slot]"
    ) -> None:
        number = 0
        with send:
            async with anyio.create_task_group() as requests:
                while line := await self._next_line(source):
                    number += 1
                    if line.isspace():
                        continue
                    slot = _Slot()
                    await send.send(slot)
                    try:
                        request = await self._request(line)
                    except HTTPError as refusal:
                        await self._save(_not_asked(number, line, describe(refusal)), answers, slot)
                        continue
                    saved = await self._in_thread(answers.find, request)
                    if saved is None:
                        requests.start_soon(self._answer, request, answers, slot)
                    else:
                        self.num_kept += 1
                        slot.put(saved)

    async def _next_line(self, source: BinaryIO) -> bytes:
        """Return the next line with its newline.  An overlong line is truncated to one byte more than the limit, so that it is refused."""
        limit = self._max_line + 1
        line = await self._in_thread(source.readline, limit)
        rest = line
        while len(rest) == limit and not rest.endswith(b"\n"):
            rest = await self._in_thread(source.readline, limit)
        return line

    async def _write(self, receive: "MemoryObjectReceiveStream[_Slot]", answers: Answers) -> None:
        async for slot in receive:
            await slot.is_filled.wait()
            self._check_alive()
            await self._in_thread(answers.keep, slot.position)
            self.num_lines += 1
            self._note_reply()

    def _check_alive(self) -> None:
        if self._app.service.died.is_set():
            self._app.service.engine.check_alive()

    async def _save(
        self, reply: BatchReply, answers: Answers, slot: "_Slot", model: object = None
    ) -> None:
        """Save an answer without waiting for earlier lines."""
        if reply.has_failed:
            self.num_failed += 1
            self.failures.note(reply, model)
        slot.put(await self._in_thread(answers.add, encode_line(reply) + b"\n"))

    async def _in_thread(self, function: Any, argument: Any) -> Any:
        # Abandoned when the batch ends: a read from a pipe cannot be cancelled.
        return await anyio.to_thread.run_sync(
            function, argument, abandon_on_cancel=True, limiter=self._files
        )

    async def _request(self, line: bytes) -> BatchLine:
        """Decode a line.  Called in the order of the lines: of two equal custom_ids the first is taken.

        Raises:
            HTTPError: the line is not answered by any route.
        """
        if len(line) > self._max_line:
            raise HTTPError(
                400, "line_too_large", f"a line must have at most {self._max_line} bytes"
            )
        request: BatchLine = (await decode(line, BatchLine, self._app.service.threads)).request
        digest = custom_id_key(request.custom_id)
        if digest in self._seen:
            message = "an earlier line has the same"
            raise HTTPError(400, "duplicate_custom_id", message, param="custom_id")
        self._seen.add(digest)
        if request.url not in URLS:
            raise HTTPError(400, "invalid_url", f"must be one of {', '.join(URLS)}", param="url")
        if field_of(request.body, "stream") is True:
            raise HTTPError(
                400, "invalid_value", "is not supported in a batch", param="body.stream"
            )
        return request

    async def _answer(self, request: BatchLine, answers: Answers, slot: "_Slot") -> None:
        call = _InProcessCall(bytes(request.body))
        await self._app(call.scope(request.url), call.receive, call.send)
        if self._app.service.died.is_set():
            # The writer ends the batch, and the next run sends the request again.
            slot.put(0)
            return
        reply = BatchReply(answer_id(request, self._origin), request.custom_id, call.response)
        await self._save(reply, answers, slot, field_of(request.body, "model"))


class _Named(msgspec.Struct):
    custom_id: str | None = None


class _Slot:
    """The place of one line among the replies."""

    def __init__(self) -> None:
        self.is_filled = anyio.Event()
        self.position = 0  # of the answer, once it is saved

    def put(self, position: int) -> None:
        self.position = position
        self.is_filled.set()


class _InProcessCall:
    """One request to the application in this process, and its reply."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        # Other replies are written as a JSON string.
        self._is_json = True
        self.response = BatchResponse()

    def scope(self, url: str) -> dict[str, Any]:
        return {
            "type": "http", "method": "POST", "path": url, "raw_path": url.encode(),
            "query_string": b"", "root_path": "", "http_version": "1.1",
            "headers": [(b"content-type", JSON)],
        }  # fmt: skip

    async def receive(self) -> dict[str, Any]:
        body, self._body = self._body, None
        if body is None:
            await anyio.sleep_forever()  # this client never leaves
        await anyio.lowlevel.checkpoint()
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Any) -> None:
        await anyio.lowlevel.checkpoint()
        if message["type"] == "http.response.start":
            self.response.status_code = message["status"]
            headers = dict(message["headers"])
            self.response.request_id = headers[b"x-request-id"].decode()
            self._is_json = headers.get(b"content-type") == JSON
        else:
            body = message["body"]
            self.response.body = msgspec.Raw(body if self._is_json else encode_line(body))


def _not_asked(number: int, line: bytes, problem: ErrorBody) -> BatchReply:
    name = f"{problem.param}: " if problem.param else ""
    message = name + problem.message.removeprefix(name)
    error = BatchError(problem.code, f"line {number}: {message}")
    return BatchReply(refusal_id(), _custom_id(line), error=error)


def _custom_id(line: bytes) -> str | None:
    """Return the custom_id of a malformed line, or None if it has none."""
    try:
        return msgspec.json.decode(line, type=_Named).custom_id
    except msgspec.MsgspecError:
        return None
