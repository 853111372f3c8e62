"""`--stats`: tokens and seconds of each answer."""

import sys
from collections.abc import Callable
from typing import Annotated, NamedTuple

import anyio
import msgspec
import typer

StatsOption = Annotated[
    bool, typer.Option("--stats", help="Print tokens and times of each answer on stderr.")
]
ASKED = {"stream_options": {"include_usage": True}}  # fields that request the counts from a server


class AnswerUsage(msgspec.Struct):
    """The tokens of one answer and its prompt."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class AnswerEnd(NamedTuple):
    """How an answer ended.  Servers that send no counts leave `usage` out."""

    usage: AnswerUsage | None = None
    finish_reason: str | None = None


class Stopwatch:
    """Times of one answer, from the construction on; `hear` passes each piece of it to `show`."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._began = anyio.current_time()
        self._first_s: float | None = None

    def hear(self, text: str) -> None:
        self._show(text)
        if text and self._first_s is None:
            self._first_s = anyio.current_time() - self._began

    def report(self, usage: AnswerUsage | None) -> None:
        print(stats_line(usage, self._first_s, anyio.current_time() - self._began), file=sys.stderr)


def stats_line(usage: AnswerUsage | None, first_s: float | None, whole_s: float) -> str:
    """Return the line of one answer.

    Args:
        usage: None when the answer was cut off or the server sends no counts.
        first_s: None when the answer has no text.
    """
    times = f"{whole_s:.2f} s"
    if first_s is not None:
        times += f", first text after {first_s:.2f} s"
    if usage is None:
        return times
    num_tokens = usage.completion_tokens
    if first_s is not None and num_tokens > 1 and whole_s > first_s:
        times += f", then {(num_tokens - 1) / (whole_s - first_s):.1f} tokens/s"
    return f"{usage.prompt_tokens} prompt tokens, {num_tokens} tokens in {times}"
