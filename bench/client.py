"""Send one streaming request to an OpenAI-compatible server and time it.

The client shares the machine with the server, so it must be cheap: it splits the bytes at line ends and decodes only
the fields below, which takes about 1 µs per event.
"""

from collections.abc import Iterator
from time import perf_counter
from typing import Any

import httpx2
import msgspec

# An error quotes at most this many characters of an answer.
ERROR_CHARS = 200


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        return bool(self.text or (self.delta is not None and self.delta.content))


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class Outcome(msgspec.Struct):
    """The outcome of one request; times are in seconds on the client's clock.

    Attributes:
        due: when the request should be sent; `sent` is later if the concurrency is limited.
        first, last: arrival of the first and the last text.
        gaps: seconds between consecutive events with text.
        num_prompt_tokens, num_output_tokens: the server's counts.
        is_finished: whether the server sent a finish reason.
        is_done: whether the server sent `[DONE]`.
    """

    due: float
    sent: float = 0.0
    first: float | None = None
    last: float = 0.0
    ended: float = 0.0
    gaps: list[float] = []
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    is_finished: bool = False
    is_done: bool = False
    error: str | None = None

    def note_text(self, now: float) -> None:
        if self.first is None:
            self.first = now
        else:
            self.gaps.append(now - self.last)
        self.last = now

    def figures(self) -> dict[str, float]:
        """Return the latencies in ms; `tpot` exists only with more than one token.

        They have vLLM's names, so the two programs' reports can be compared.
        """
        found = {"e2el": self.ended - self.sent, "client_queue_time": self.sent - self.due}
        if self.first is not None:
            found["ttft"] = self.first - self.sent
            if self.num_output_tokens > 1:
                found["tpot"] = (self.last - self.first) / (self.num_output_tokens - 1)
        return {name: 1000 * value for name, value in found.items()}


class EventCutter:
    """Extracts the payloads of `data:` lines from chunks of bytes; an event may span several chunks.

    Lines end with \\n or \\r\\n. Comments and other fields are ignored.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


_decode = msgspec.json.Decoder(_Event).decode


async def ask(client: httpx2.AsyncClient, path: str, body: bytes, outcome: Outcome) -> None:
    """Send a request and record its times in `outcome`; a failure is stored in `outcome.error`, not raised.

    Times are taken when bytes arrive, and parsing waits until the end of the answer.
    """
    outcome.sent = perf_counter()
    try:
        async with client.stream("POST", path, content=body) as response:
            if response.status_code == 200:
                await _read(response, outcome)
            else:
                await response.aread()
                outcome.error = f"HTTP {response.status_code}"
    except httpx2.HTTPError as error:
        outcome.error = type(error).__name__
    outcome.ended = perf_counter()


async def _read(response: httpx2.Response, outcome: Outcome) -> None:
    """Read a stream to its end, so that the connection can be reused."""
    cutter = EventCutter()
    async for chunk in response.aiter_raw():
        now = perf_counter()
        for payload in cutter.feed(chunk):
            if outcome.error is None:
                outcome.error = _take(payload, now, outcome)
    if outcome.error is None and not outcome.is_done:
        outcome.error = "the stream was cut"


def _take(payload: bytes, now: float, outcome: Outcome) -> str | None:
    """Record one event of the stream; return an error if it is invalid, else None."""
    if payload == b"[DONE]":
        outcome.is_done = True
        return None if outcome.is_finished else "no finish_reason"
    try:
        event = _decode(payload)
    except msgspec.DecodeError as error:
        return f"bad event: {error}"[:ERROR_CHARS]
    if event.error is not None:
        return f"error event: {event.error}"[:ERROR_CHARS]
    if event.usage is not None:
        outcome.num_prompt_tokens = event.usage.prompt_tokens
        outcome.num_output_tokens = event.usage.completion_tokens or 0
    for choice in event.choices:
        if choice.finish_reason in ("error", "abort"):
            return f"finish_reason {choice.finish_reason}"
        outcome.is_finished |= choice.finish_reason is not None
        if choice.has_text:
            outcome.note_text(now)
    return None
