"""Map every exception to one HTTP response, in one table.

Laws.  Only errors that trouper raises on purpose for a request become a 4xx.  Every other exception becomes a 500 with
a neutral message, and the log gets its text and traceback.  The size of a response does not depend on the request.  Codes
are fields of the errors: this table reads no sentence.

`unsupported` makes the refusal of fields that other servers support and this one does not, with what to use in their place.
"""

import logging
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import msgspec

from trouper.errors import (
    AdaptersInUseError,
    ContextLengthError,
    EngineDeadError,
    EnginePausedError,
    ExecutionError,
    GenerationError,
    GracefulHTTPError,
    MediaError,
    MissingExtraError,
    QueueOverflowError,
    RetryableRequestError,
    TrouperClientError,
    TrouperError,
    TrouperNotFoundError,
    TrouperUnprocessableEntityError,
    UnsupportedFeatureError,
)
from trouper.frontends.server.shared.usage import Usage

Headers = tuple[tuple[bytes, bytes], ...]
logger = logging.getLogger("trouper.server")

MAX_MESSAGE = 1024
MAX_RULE = (
    400  # of an error whose text may quote the request: our rules are under 200, the quote too
)
MAX_PARAM = 200
# The most characters of a wrong text in an error.
MAX_VALUE = 40
TYPES = {
    400: "BadRequestError", 401: "AuthenticationError", 403: "PermissionDeniedError",
    404: "NotFoundError", 405: "MethodNotAllowedError", 408: "RequestTimeoutError",
    409: "Conflict", 410: "GoneError", 413: "RequestTooLargeError", 414: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError", 422: "UnprocessableEntityError", 429: "RateLimitError",
    431: "HeadersTooLargeError", 500: "InternalServerError", 501: "NotImplementedError",
    503: "ServiceUnavailableError", 504: "DeadlineExceededError",
}  # fmt: skip
# Statuses with which a client is asked to wait and try again.
RETRIED = (429, 503)
NO_RETRY = ((b"x-should-retry", b"false"),)  # what the OpenAI clients look at first
CONTROLS = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]+")


class HTTPError(TrouperError):
    """Carry an error response from a handler, or from the application itself, to the client.

    With status 429 or 503, the client is also asked to wait `retry_after_s` seconds.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Headers = (),
        usage: Usage | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = headers
        self.usage = usage
        self.retry_after_s = 1.0  # of a 429 or 503


class ErrorBody(msgspec.Struct, frozen=True):
    """One error as data, from which each API renders a body in its own format.

    Attributes:
        param: the client's name of the wrong field.
        usage: tokens that the request had used when its deadline passed.
        limit, length: the size of the context and the length of the prompt, if the prompt is too long.
    """

    status: int
    code: str
    message: str
    param: str | None = None
    headers: Headers = ()
    usage: Usage | None = None
    limit: int | None = None
    length: int | None = None

    @property
    def body(self) -> dict[str, Any]:
        error = {
            "message": clean(self.message, MAX_MESSAGE),
            "type": TYPES[self.status],
            "param": None if self.param is None else clean(self.param, MAX_PARAM),
            "code": self.code,
        }
        return {"error": error} if self.usage is None else {"error": error, "usage": self.usage}


class ErrorForm(NamedTuple):
    """The error format of one API: its bodies, and its events in a started stream.

    OpenAI, Anthropic and Ollama use different shapes for the same facts.
    """

    # Gets the problem and the id of the request.
    render: Callable[[ErrorBody, str], object]
    # The name of an error's event in a stream.
    event: str | None
    # Sent behind that event.
    stream_end: bytes
    render_event: Callable[[ErrorBody, int], object] | None = (
        None  # if it differs; takes its number
    )
    # The name of the body's description in the OpenAPI document.
    schema: str = "Error"


def _openai_body(problem: ErrorBody, request_id: str) -> object:
    return problem.body


OPENAI_ERRORS = ErrorForm(_openai_body, event=None, stream_end=b"data: [DONE]\n\n")


def unavailable(code: str, message: str) -> HTTPError:
    return HTTPError(503, code, message)


def aborted() -> HTTPError:
    return unavailable("aborted", "the request was aborted before all of its parts started")


def describe(error: BaseException) -> ErrorBody:  # noqa: C901  # a table, a line a class
    """Map an exception to its response.  The first matching class decides, so subclasses come first.

    Of a group of exceptions, the first one is described.
    """
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    match error:
        case HTTPError():
            headers = error.headers
            if error.status in RETRIED:
                headers += _retry(error.retry_after_s)
            return ErrorBody(
                error.status, error.code, str(error), error.param, headers, error.usage
            )
        case TrouperUnprocessableEntityError():
            return _told(422, "media_unavailable", error)
        case TrouperNotFoundError():
            return _told(404, "model_not_found", error)
        case ContextLengthError():
            problem = _told(400, error.code, error)
            return msgspec.structs.replace(problem, limit=error.limit, length=error.length)
        case MediaError(code="media_url_blocked"):
            return _told(403, error.code, error)
        case TrouperClientError():
            return _told(400, getattr(error, "code", "invalid_value"), error)
        case MissingExtraError():
            text = (
                error.refusal if error.parameter is None else f"{error.parameter}: {error.refusal}"
            )
            return ErrorBody(400, "not_supported", text, error.parameter)
        case UnsupportedFeatureError():
            # Clients would repeat the request after a 5xx.
            return _told(400, "not_supported", error)
        case QueueOverflowError():
            text = "the server is full, try again later"
            return ErrorBody(503, "overloaded", text, headers=_retry())
        case GracefulHTTPError():
            code = "overloaded" if error.status == 503 else "conflict"
            headers = _retry() if error.status in RETRIED else ()
            return ErrorBody(error.status, code, clean(str(error), MAX_RULE), headers=headers)
        case AdaptersInUseError():  # the engine takes other requests
            return ErrorBody(503, error.code, clean(str(error), MAX_RULE), headers=_retry())
        case RetryableRequestError() | EnginePausedError():
            code = getattr(error, "code", "engine_paused")
            text = "the engine accepts no requests at the moment, try again later"
            return ErrorBody(503, code, text, headers=_retry())
        case EngineDeadError():
            return ErrorBody(500, "engine_failed", "the engine has failed", headers=NO_RETRY)
        # The step failed with only this request in it, so the same request would fail again.
        case ExecutionError():
            text = "the model failed on this request"
            return ErrorBody(500, "poisoned_request", text, headers=NO_RETRY)
        # No token satisfies the constraints, or the grammar is too ambiguous: the client can change both.
        case GenerationError(code="no_valid_token" | "grammar_error"):
            return ErrorBody(400, error.code, clean(str(error), MAX_RULE), headers=NO_RETRY)
        case GenerationError(
            code="numerical_error" | "poisoned_request" | "device_failed"
        ):  # nor this one
            text = clean(str(error), MAX_RULE)
            return ErrorBody(500, error.code, text, headers=NO_RETRY)
        case TrouperError():
            return ErrorBody(500, "internal_error", "the request failed inside the engine")
        case _:
            return ErrorBody(500, "internal_error", "internal server error")


def log(problem: ErrorBody, error: BaseException, request_id: str) -> None:
    """Log a 500 with its traceback, and other errors in one line that only --log-level debug shows.

    A dead engine with a known cause fails every open request, so each of them gets only one line.
    """
    if isinstance(error, EngineDeadError) and isinstance(error.__cause__, TrouperError):
        logger.error("request %s failed: %s", request_id, clean(str(error), MAX_MESSAGE))
    elif problem.status == 500:
        logger.error("request %s failed", request_id, exc_info=error)
    else:
        logger.debug("request %s: %d %s", request_id, problem.status, problem.code)


def clean(text: str, limit: int) -> str:
    """Return one line of at most `limit` characters that any encoder accepts.

    Text from clients goes through it before it appears in logs, headers or errors.
    """
    text = CONTROLS.sub(" ", text[: 2 * limit])
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _told(status: int, code: str, error: Exception) -> ErrorBody:
    message = clean(str(getattr(error, "message", None) or error), MAX_RULE)
    param = getattr(error, "parameter", None)
    return ErrorBody(status, code, message + _named_value(message, error), param)


def _named_value(message: str, error: Exception) -> str:
    """Return `, got <value>` for the end of a message, or nothing if the value is long or already named."""
    match getattr(error, "value", None):
        case bool() | float() as value:
            shown = str(value)
        case int() as value:  # str() of some is refused
            shown = str(value) if -(2**63) <= value < 2**64 else "a huge number"
        case str() as value if len(value) <= MAX_VALUE:
            shown = repr(clean(value, MAX_VALUE))
        case _:
            return ""
    is_named = re.search(rf"(?<![\w.-]){re.escape(shown)}(?!\w)", message) is not None
    return "" if is_named else f", got {shown}"


def _retry(wait_s: float = 1.0) -> Headers:
    """Return the standard header in seconds and OpenAI's in milliseconds."""
    return (
        (b"retry-after", b"%d" % math.ceil(wait_s)),
        (b"retry-after-ms", b"%d" % (1000 * wait_s)),
    )


# Anthropic's code for a thread that the server does not have.
THREAD_NOT_FOUND = "thread_not_found"
NO_MEDIA = "send text only"
NO_TOOLS = "describe the functions in a message and parse the answer"
NO_MEMORY = (
    "this server keeps no responses (--responses-store-bytes 0); send the whole "
    "conversation with every request"
)
NO_MEMORY_OF_ITEMS = "use previous_response_id, or send the whole conversation with every request"


def unsupported(name: str, advice: str, value: Any = None) -> UnsupportedFeatureError:
    """Make the error for a known field that this server does not support, with advice what to use instead.

    The server answers with status 400; ignoring the field would give another answer than the client expects.
    """
    text = f"{name} is not supported: {advice}"
    return UnsupportedFeatureError(text, parameter=name, value=value)
