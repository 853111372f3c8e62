"""A streaming client for OpenAI-compatible servers, for use at a terminal.

It works with any such server, so it reads only the fields it needs and trusts nothing else. If the server refuses the
request (400, 401, 404 …), that is a client error; every other failure until the end of an answer is a RemoteError. No
request is sent twice, because the user can decide better whether to repeat it.
"""

import dataclasses
import re
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Self, cast

import anyio
import msgspec
import typer
from anyio import AsyncContextManagerMixin

from trouper.errors import RemoteError, TrouperClientError, TrouperValidationError
from trouper.frontends.cli.chat.conversation import AnswerEnd, AnswerUsage, ContextFullError

if TYPE_CHECKING:
    from httpx2 import URL, AsyncClient, EventSource, Response

CONNECTING = "connecting …"
DEFAULT_URL = "http://127.0.0.1:8000/v1"
CONNECT_S = 10.0
# A slow machine needs minutes until the first token of a long prompt.
SILENCE_S = 600.0
# Seconds to wait after `[DONE]` for the end of the response, so that its connection can be reused.
CLOSING_S = 1.0
# Maximum size of a response without a stream, in bytes.
MAX_BODY = 2**20
MAX_MESSAGE = 400
TRY_AGAIN = (408, 429)
TOO_LONG = (400, 413, 422)
# How trouper, vLLM, OpenAI, llama.cpp and Ollama report an overlong prompt: their error codes, or texts if they send no code.
FULL = re.compile(
    r"context_length_exceeded|exceed_context_size|context (length|size|window)|max_model_len",
    re.IGNORECASE,
)

Show = Callable[[str], None]


def _option(text: str, **more: Any) -> Any:
    return typer.Option(help=text, rich_help_panel="Server", **more)


@dataclasses.dataclass
class RemoteOptions:
    """Options for a server: its address, the model and the API key.

    Without an address, commands that can do so load the model in their own process.
    """

    url: Annotated[str | None, _option("Base address of an OpenAI-compatible server.")] = None
    model_name: Annotated[str | None, _option("Model to use; by default the server's first.")] = (
        None
    )
    api_key: Annotated[
        str | None, _option("API key to send to the server.", envvar="TROUPER_API_KEY")
    ] = None


class RemoteModel(msgspec.Struct):
    """A model in the list of a server; only vLLM and trouper include its maximum length.

    Other servers leave the length out, and the session then relies on their errors.
    """

    id: str
    max_model_len: int | None = None


class RemoteServer(AsyncContextManagerMixin):
    """A connection to one model of a server; entering it requests the server's first model if none is named."""

    def __init__(self, options: RemoteOptions) -> None:
        """Check the options without connecting.  Raises TrouperValidationError for a bad address or key."""
        self._url = _base_url(options.url or DEFAULT_URL)
        self._model = options.model_name
        self._headers: dict[str, str] = {}
        if options.api_key is not None:
            if not (options.api_key.isascii() and options.api_key.isprintable()):
                raise TrouperValidationError("must be printable ASCII", parameter="api_key")
            self._headers["authorization"] = f"Bearer {options.api_key}"
        self._client: AsyncClient
        # None if the server does not report it.
        self.max_model_len: int | None = None

    @property
    def facts(self) -> dict[str, str]:
        """The address and the model, for `/show`."""
        return {"server": str(self._url), "model": self._model or ""}

    def __repr__(self) -> str:
        return f"<RemoteServer {self._url}>"

    @property
    def url(self) -> str:
        """The base address of the API, without a final slash.

        `/v1` was added to an address without a path, so the user may give only the server's host and port.
        """
        return str(self._url).rstrip("/")

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        import httpx2

        timeout = httpx2.Timeout(SILENCE_S, connect=CONNECT_S)
        async with httpx2.AsyncClient(
            base_url=self._url, headers=self._headers, timeout=timeout
        ) as self._client:
            if self._model is None:
                first = (await self._models())[0]
                self._model, self.max_model_len = first.id, first.max_model_len
            yield self

    async def chat(
        self, fields: dict[str, Any], messages: list[dict[str, Any]], show: Show
    ) -> AnswerEnd:
        """Request the answer to a conversation and stream its text to `show`; returns and errors as in `complete`."""
        return await self._ask("chat/completions", {"messages": messages, **fields}, show)

    async def complete(self, fields: dict[str, Any], prompt: str, show: Show) -> AnswerEnd:
        """Request the completion of a prompt and stream its text to `show`.

        Cancelling it closes the connection, which aborts the request. Returns how the answer ended, with the numbers
        of tokens if `fields` request them (`stream_options`).

        Raises:
            ContextFullError: the server refuses the request because it is too long.
            TrouperClientError: the server refuses the request for another reason.
            RemoteError: the server failed or the connection broke, possibly in the middle of the answer.
        """
        return await self._ask("completions", {"prompt": prompt, **fields}, show)

    async def _ask(self, path: str, fields: dict[str, Any], show: Show) -> AnswerEnd:
        body = {"model": self._model, **fields, "stream": True}
        with self._explained():
            async with self._client.sse(path, method="POST", json=body) as source:
                await _check_status(source.response)
                return await _read(source, show)

    async def model(self) -> RemoteModel:
        """Return the model from the server's list.

        Raises:
            TrouperValidationError: the list does not contain the model.
            TrouperClientError, RemoteError: the server returns no list.
        """
        models = await self._models()
        found = next((model for model in models if model.id == self._model), None)
        if found is None:
            names = _plain(", ".join(model.id for model in models))
            rule = f"the server does not have this model; it has: {names}"
            raise TrouperValidationError(rule, parameter="model_name", value=self._model)
        return found

    async def _models(self) -> list[RemoteModel]:
        """Return the server's list of models.  Raises RemoteError if it is empty."""
        with self._explained():
            async with self._client.stream("GET", "models") as response:
                await _check_status(response)
                body = await _bounded_body(response)
        try:
            models = msgspec.json.decode(body, type=_Models).data
        except msgspec.MsgspecError:
            models = []
        if not models:
            raise RemoteError(
                f"{self._url}models lists no models: is this an OpenAI-compatible server? "
                "(--model-name chooses a model without the list)"
            )
        return models

    @contextmanager
    def _explained(self) -> Generator[None]:
        """Turn the HTTP client's exceptions into RemoteError with a message for the user."""
        import httpx2

        try:
            yield
        except httpx2.ConnectError as error:
            raise RemoteError(f"cannot connect to {self._url}: {_plain(str(error))}") from error
        except httpx2.TimeoutException as error:
            raise RemoteError(f"no answer from {self._url} in time") from error
        except httpx2.TransportError as error:
            reason = _plain(str(error)) or type(error).__name__
            raise RemoteError(f"the connection to {self._url} broke off: {reason}") from error


class _RemoteDelta(msgspec.Struct):
    content: str | None = None


class _RemoteChoice(msgspec.Struct):
    text: str | None = None
    delta: _RemoteDelta | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_RemoteChoice] = msgspec.field(default_factory=list[_RemoteChoice])
    error: Any = None
    usage: AnswerUsage | None = None


class _Models(msgspec.Struct):
    data: list[RemoteModel]


async def _read(source: "EventSource", show: Show) -> AnswerEnd:
    """Read a stream to its end and pass its text to `show`."""
    error: Exception | None = None
    usage: AnswerUsage | None = None
    reason: str | None = None
    is_over = False
    # An error cancels the iteration instead of leaving the loop: the library's generators close their connection
    # only at their end or when they are cancelled.
    with anyio.CancelScope() as rest:
        async for event in source:
            if event.data == "[DONE]":
                is_over = True
                rest.deadline = anyio.current_time() + CLOSING_S
                continue
            try:
                chunk = _show_chunk(event.data, show)
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    reason = choice.finish_reason or reason
            except Exception as raised:
                error = raised
                rest.cancel()
    if error is not None:
        raise error
    if not is_over and reason is None:
        raise RemoteError("the connection broke off before the end of the answer")
    return AnswerEnd(usage, reason)


def _show_chunk(data: str, show: Show) -> _Chunk:
    try:
        chunk = msgspec.json.decode(data, type=_Chunk)
    except msgspec.MsgspecError:
        raise RemoteError(
            "the server sent an invalid event: is this an OpenAI-compatible server?"
        ) from None
    if chunk.error is not None:
        raise RemoteError(f"the server failed: {_message_of(chunk.error)}")
    for choice in chunk.choices:
        text = choice.text or (choice.delta and choice.delta.content)
        if text:
            show(text)
    return chunk


async def _check_status(response: "Response") -> None:
    status = response.status_code
    if status == 200:
        return
    body = await _bounded_body(response)
    try:
        error = msgspec.json.decode(body, type=dict[str, Any]).get("error")
    except msgspec.MsgspecError:
        error = None
    message = _message_of(error)
    text = f"the server answered {status}: {message or response.reason_phrase}"
    if status in TOO_LONG and FULL.search(f"{_code_of(error)} {message}"):
        raise ContextFullError(text)
    if 400 <= status < 500 and status not in TRY_AGAIN:
        raise TrouperClientError(text)
    raise RemoteError(text)


def _message_of(error: Any) -> str:
    message = cast("dict[str, Any]", error).get("message") if isinstance(error, dict) else error
    return _plain(message) if isinstance(message, str) else ""


def _code_of(error: Any) -> str:
    found = cast("dict[str, Any]", error) if isinstance(error, dict) else {}
    return f"{found.get('code')} {found.get('type')}"


async def _bounded_body(response: "Response") -> bytes:
    body = bytearray()
    async for piece in response.aiter_bytes():
        if len(body) < MAX_BODY:
            body += piece
    return bytes(body)


def _plain(text: str) -> str:
    """Make a server's text safe to print at a terminal: shorten it and replace control characters."""
    return "".join(c if c.isprintable() else " " for c in text[:MAX_MESSAGE])


def _base_url(text: str) -> "URL":
    """Parse the base address of the API; an address without a path gets `/v1`."""
    import httpx2

    try:
        url = httpx2.URL(text)
    except httpx2.InvalidURL as error:
        raise TrouperValidationError(str(error), parameter="url") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise TrouperValidationError("must be http://… or https://…", parameter="url", value=text)
    return url.copy_with(path=f"{url.path.rstrip('/') or '/v1'}/")
