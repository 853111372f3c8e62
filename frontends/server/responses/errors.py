"""Errors of the Responses API: bodies as everywhere, and events of its own."""

from typing import Any

from trouper.frontends.server.errors import (
    MAX_MESSAGE,
    MAX_PARAM,
    OPENAI_ERRORS,
    ErrorBody,
    ErrorForm,
    clean,
)


def _render_event(problem: ErrorBody, number: int) -> dict[str, Any]:
    """Return the typed event `error`, with the body that makes OpenAI's clients raise."""
    return {
        "type": "error",
        "sequence_number": number,
        "code": problem.code,
        "message": clean(problem.message, MAX_MESSAGE),
        "param": None if problem.param is None else clean(problem.param, MAX_PARAM),
        **problem.body,
    }


RESPONSES_ERRORS = ErrorForm(
    OPENAI_ERRORS.render, event="error", stream_end=b"", render_event=_render_event
)
