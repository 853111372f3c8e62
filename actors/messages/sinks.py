"""The writing end of a future, as a message lends it to the actor that does the work.

The writing ends of reply slots, as a request lends them to the actors that work for it.

Writing never waits and never fails: a slot merges what has not been read, and swallows what comes after
it was closed.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import anyio

from trouper.outputs import (
    Array,
    FinishReason,
    LogprobsOnePosition,
    RequestError,
    RequestStateStats,
)

T = TypeVar("T", contravariant=True)


class Promise(Protocol[T]):
    """A result to be delivered once.  Delivering never waits and never fails, whether it is read or not."""

    def set(self, value: T) -> None:
        """Deliver the result."""

    def fail(self, error: BaseException) -> None:
        """Deliver an error, which is raised where the result is waited for."""


class VisibleText(Protocol):
    """Tells what the reader of one output will see of its text: not its reasoning, nor the calls in it."""

    def feed(self, text: str, *, is_last: bool = False) -> str:
        """Take more of the text; return what more of it is sure to be seen.  With the last piece nothing is held back."""
        ...


# By the text of the prompt, where there is one, and its ids.
MakeVisible = Callable[[str | None, Sequence[int]], VisibleText]


class ReplySink(Protocol):
    """The part of a sink that requests of every kind have."""

    request_id: str  # the client's name for it: echoed, never a key
    stats: RequestStateStats

    @property
    def is_closed(self) -> bool:
        """Whether the client has stopped reading."""
        ...

    @property
    def is_aborted(self) -> bool:
        """Whether the request is no longer wanted: closed, or cancelled while it is still read."""
        ...

    @property
    def scope(self) -> anyio.CancelScope:
        """A new scope for a rendering of the request, which an abort cancels; one is in use at a time."""
        ...

    def fail(self, error: Exception) -> None:
        """End the request with an exception for its client."""

    def abort(self) -> None:
        """End with `abort` what has not ended."""


class GenerationSink(ReplySink, Protocol):
    """Text, tokens and logprobs of `n` completions."""

    def start(self, prompt: str | None, prompt_token_ids: tuple[int, ...]) -> None:
        """Note the rendered prompt."""

    def note_expected(self, seconds: float, *, is_least: bool, error: float | None) -> None:
        """Note when the first token is expected, as an `Expected` says."""

    def note_cached_tokens(self, num_cached_tokens: int) -> None:
        """Note how many prompt tokens the prefix cache held."""

    def note_error(self, error: RequestError) -> None:
        """Note why completions end with `error`."""

    def extend_prompt_logprobs(self, positions: list[LogprobsOnePosition]) -> None:
        """Append the logprobs of the next prompt positions."""

    def write(
        self,
        index: int,
        text: str,
        token_ids: tuple[int, ...],
        *,
        logprobs: list[LogprobsOnePosition] | None = None,
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
    ) -> None:
        """Append to one completion, and end it where a finish reason is given."""


class PoolingSink(ReplySink, Protocol):
    """One array, at the end."""

    def start(self, prompt_token_ids: tuple[int, ...]) -> None:
        """Note the rendered prompt."""

    def write(self, array: Array, error: RequestError | None = None) -> None:
        """Deliver the result; only the first one counts."""
