"""Define the lines of OpenAI's batch files, and match saved answers with their requests.

An interrupted run is continued by `custom_id`.  Equal ids do not prove that a saved answer belongs to the present input, because
generated inputs often number their lines from 1.  So the `id` of an answer contains two digests: one of the request, and one of everything
else that determines the answer (the `origin`: model, seed, options).  Answers of other programs have other ids and are matched
only by their custom_id.
"""

import re
from hashlib import blake2b
from itertools import count
from typing import Any, BinaryIO, Literal, Protocol
from uuid import uuid4

import msgspec

REQUEST_BYTES = 12
ORIGIN_BYTES = 4
KEY_BYTES = 16
OWN_ID = re.compile(
    rf"batch_req_([0-9a-f]{{{2 * REQUEST_BYTES}}})_([0-9a-f]{{{2 * ORIGIN_BYTES}}})"
)
MAX_REASONS = 8
MAX_MODELS = 5
MODEL_NOT_FOUND = "model_not_found"
Reason = tuple[int | None, str, str | None]  # HTTP status, code, parameter
encode_line = msgspec.json.Encoder().encode


class BatchLine(msgspec.Struct, kw_only=True):
    """One line of the input file.

    `body` stays undecoded until its turn, because a file can be larger than memory.
    """

    custom_id: str
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


class BatchResponse(msgspec.Struct):
    """The route's reply, which may be an error.

    It has the status and the body that a client would have received over HTTP.
    """

    status_code: int = 0
    request_id: str = ""
    body: msgspec.Raw = msgspec.Raw()


class BatchError(msgspec.Struct):
    """The reason why a line was not sent to any route."""

    code: str
    message: str


class BatchReply(msgspec.Struct):
    """One line of the output file.

    Either `response` or `error` is set.  `custom_id` is the one of the request, because answers may be in another
    order.
    """

    id: str
    custom_id: str | None = None
    response: BatchResponse | None = None
    error: BatchError | None = None

    @property
    def has_failed(self) -> bool:
        return self.response is None or self.response.status_code >= 400


class Answers(Protocol):
    """The output of a batch.  Positions are the values returned by `add` and `find`."""

    def find(self, request: BatchLine) -> int | None:
        """Return the position of an earlier run's answer.  Raises TrouperError if it belongs to another request.

        It is called for each request of the input, in order, before the request is run.
        """
        ...

    def add(self, line: bytes) -> int:
        """Save one answer and return its position.  Answers are added in the order of completion.

        The order of the requests is established later, by `keep`.
        """
        ...

    def keep(self, position: int) -> None:
        """Put the answer at `position` next in the order of the requests."""
        ...


class StreamAnswers:
    """Answers written to a pipe or a device in the order of the requests.  Early ones wait in memory.

    At most `max_inflight` wait, the number of lines that a batch keeps.
    """

    def __init__(self, sink: BinaryIO) -> None:
        self._sink = sink
        self._waiting: dict[int, bytes] = {}
        self._numbers = count(1)  # its `next` is one step, so threads may add at once

    def find(self, request: BatchLine) -> int | None:
        return None

    def add(self, line: bytes) -> int:
        position = next(self._numbers)
        self._waiting[position] = line
        return position

    def keep(self, position: int) -> None:
        self._sink.write(self._waiting.pop(position))
        self._sink.flush()


class _RequestFields(msgspec.Struct):
    model: Any = None
    stream: Any = None


class _ErrorFields(msgspec.Struct):
    message: Any = None
    code: Any = None
    type: Any = None
    param: Any = None


class _ErrorReply(msgspec.Struct):
    error: _ErrorFields = msgspec.field(default_factory=_ErrorFields)


def custom_id_key(custom_id: str) -> bytes:
    """Return a short digest to remember instead of the custom_id.

    A batch may have millions of ids, and the digests of all of them are kept in memory.
    """
    return blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=KEY_BYTES).digest()


def origin_of(*facts: object) -> str:
    """Return a digest of everything besides the request that determines an answer.

    A saved answer is reused only if this digest is unchanged; another model or other settings change it.
    """
    return blake2b(repr(facts).encode(), digest_size=ORIGIN_BYTES).hexdigest()


def request_digest(request: BatchLine) -> str:
    """Return a digest that does not depend on the order of members or on white space.

    Two runs over equivalent files thus find each other's answers.
    """
    body = bytes(request.body)
    try:
        body = msgspec.json.encode(msgspec.json.decode(body), order="sorted")
    except (msgspec.MsgspecError, RecursionError):
        # No route accepts this body, so its bytes identify it well enough.
        pass
    whole = encode_line([request.custom_id, request.url]) + body
    return blake2b(whole, digest_size=REQUEST_BYTES).hexdigest()


def answer_id(request: BatchLine, origin: str) -> str:
    return f"batch_req_{request_digest(request)}_{origin}"


def refusal_id() -> str:
    """Return the id of an answer to a malformed line, which a later run never reuses."""
    return f"batch_req_{uuid4().hex}"


def differs(saved_id: str, request: BatchLine, origin: str) -> Literal["request", "origin"] | None:
    """Return the difference between a saved answer and the answer to `request`, or None if the saved one can be used."""
    found = OWN_ID.fullmatch(saved_id)
    if found is None:
        return None
    if found[1] != request_digest(request):
        return "request"
    return "origin" if found[2] != origin else None


def field_of(body: msgspec.Raw, name: Literal["model", "stream"]) -> Any:
    """Return one member of a request's body; None if the body is not a JSON object.

    The whole body is decoded later, by its route.
    """
    try:
        return getattr(msgspec.json.decode(body, type=_RequestFields), name)
    except msgspec.MsgspecError:
        return None


class Failures:
    """Failed requests by reason, in bounded memory, for the summary of a batch.

    The summary shows each reason with one example, even if a million lines have failed.
    """

    def __init__(self) -> None:
        self._counts: dict[Reason, int] = {}
        self._examples: dict[Reason, str] = {}
        self._models: dict[str, None] = {}  # an ordered set
        # The number of failures for reasons beyond the first MAX_REASONS.
        self._num_more = 0

    def note(self, reply: BatchReply, model: object = None) -> None:
        """Count a failed reply.  `model` is the model in its request."""
        reason, message = _reason(reply)
        if reason not in self._counts and len(self._counts) == MAX_REASONS:
            self._num_more += 1
            return
        self._counts[reason] = self._counts.get(reason, 0) + 1
        self._examples.setdefault(reason, message)
        if reason[1] == MODEL_NOT_FOUND and len(self._models) < MAX_MODELS:
            self._models[str(model)] = None

    def lines(self) -> list[str]:
        """Return one line for each reason, the most frequent first."""
        ordered = sorted(self._counts.items(), key=lambda item: -item[1])
        lines = [self._line(reason, num) for reason, num in ordered]
        if self._num_more:
            lines.append(f"{self._num_more} × other reasons")
        return lines

    def _line(self, reason: Reason, num: int) -> str:
        status, code, _ = reason
        head = f"{num} × {code}" if status is None else f"{num} × {status} {code}"
        if code == MODEL_NOT_FOUND and self._models:
            names = ", ".join(map(repr, self._models))
            options = " ".join(f"--served-model-name {_quoted(name)}" for name in self._models)
            return f"{head}: no model here has the name {names}; run again with {options}"
        first = "the first: " if num > 1 else ""
        return f"{head}: {first}{self._examples[reason]}"


def _reason(reply: BatchReply) -> tuple[Reason, str]:
    if reply.response is None:
        error = reply.error or BatchError("unknown", "")
        return (None, error.code, None), error.message
    try:
        found = msgspec.json.decode(reply.response.body, type=_ErrorReply).error
    except msgspec.MsgspecError:
        found = _ErrorFields()
    param = found.param if isinstance(found.param, str) else None
    code = str(found.code or found.type or "error")
    return (reply.response.status_code, code, param), str(found.message or "")


def _quoted(name: str) -> str:
    """Quote a name for a shell."""
    return name if re.fullmatch(r"[\w./:@-]+", name) else "'" + name.replace("'", "'\\''") + "'"
