"""Errors in the form of the Messages API."""

import re
from typing import Any

from trouper.frontends.server.errors import MAX_MESSAGE, MAX_PARAM, ErrorBody, ErrorForm, clean

TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 500: "api_error",
    503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
OTHERS = "invalid_request_error"
# Anthropic's words for it, by which clients know that the conversation must be shortened
TOO_LONG = "prompt is too long"
COUNTS = re.compile(r"length is (?P<limit>\d+) tokens.*?(?P<length>\d+) input tokens")


def _render(problem: ErrorBody, request_id: str) -> dict[str, Any]:
    """Return the body of an error; its message begins with the name of the parameter."""
    message = problem.message
    if problem.code == "context_length_exceeded":
        counts = COUNTS.search(message)
        shown = f": {counts['length']} tokens > {counts['limit']} maximum" if counts else ""
        message = f"{TOO_LONG}{shown}; {message}"
    if problem.param is not None and problem.param not in message:
        message = f"{clean(problem.param, MAX_PARAM)}: {message}"
    error = {"type": TYPES.get(problem.status, OTHERS), "message": clean(message, MAX_MESSAGE)}
    return {"type": "error", "error": error, "request_id": request_id}


ANTHROPIC_ERRORS = ErrorForm(_render, event="error", stream_end=b"")
