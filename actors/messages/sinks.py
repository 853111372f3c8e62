"""Writing ends that a message lends to its receiver: of a future (`Promise`), and of a client's reply slot (the sinks).

An actor must never wait for a client.  So writing never waits and never fails: a reply slot merges unread results, and ignores
writes after it is closed.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import anyio

from trouper.outputs import (
    FinishReason,
    LogprobsOnePosition,
    Placeholders,
    RequestError,
    RequestStateStats,
)

# The processes that try grammars import this module, and should not wait for numpy.
if TYPE_CHECKING:
    from trouper.outputs import Array

T = TypeVar("T", contravariant=True)


class Promise(Protocol[T]):
    """The writing end of a result to be delivered once.

    Delivering never waits and never fails, even if it is never read.  The receiver decides when to deliver it.
    """

    def set(self, value: T) -> None:
        """Deliver the result. It wakes the waiting task, and never waits itself."""

    def fail(self, error: BaseException) -> None:
        """Deliver an error; the task that waits for the result raises it."""


class VisibleText(Protocol):
    """Filter the text of one output for its visible part: without reasoning and tool calls.

    Stop strings must not be found in the hidden parts.
    """

    def feed(self, text: str, *, is_last: bool = False) -> str:
        """Append text, and return the further text known to be visible.  The last call returns all text held back."""
        ...


# From the text of the prompt, or None if it has no text, and from its token ids.
MakeVisible = Callable[[str | None, Sequence[int]], VisibleText]


class ReplySink(Protocol):
    """The part of a sink that generation and pooling share.

    It is the writer's view of a reply slot; the reader's methods are not visible to actors.
    """

    # The client's name for the request.  It is echoed, and never used as a key.
    request_id: str
    stats: RequestStateStats

    @property
    def is_closed(self) -> bool:
        """Whether the client has stopped reading.

        Nothing needs to be computed or written for it any more.
        """
        ...

    @property
    def is_aborted(self) -> bool:
        """Whether the request shall end: it is closed, or cancelled while its output is still read."""
        ...

    @property
    def scope(self) -> anyio.CancelScope:
        """Return a new cancel scope for rendering the request.  An abort cancels it; only one is in use at a time."""
        ...

    def fail(self, error: Exception) -> None:
        """End the request with an exception for its client."""

    def abort(self) -> None:
        """End all unfinished completions with `abort`.

        Outputs written earlier can still be read.
        """


class GenerationSink(ReplySink, Protocol):
    """Take text, tokens and logprobs of `n` completions.

    The detokenizer is its only writer after rendering.
    """

    def start(
        self,
        prompt: str | None,
        prompt_token_ids: tuple[int, ...],
        placeholders: Placeholders | None = None,
        audio_seconds: float | None = None,
    ) -> None:
        """Note the rendered prompt.

        It is called once, before anything else is written.

        Args:
            placeholders: the first token and the number of tokens of each image or recording.
            audio_seconds: the length of all recordings, or None without one.
        """

    def note_expected(self, seconds: float, *, is_least: bool, error: float | None) -> None:
        """Note when the first token is expected; the arguments are the fields of `Expected`."""

    def note_cached_tokens(self, num_cached_tokens: int) -> None:
        """Note how many prompt tokens the prefix cache held.

        It is known when the first token arrives, and appears in the usage. It is 0 without prefix caching.
        """

    def note_error(self, error: RequestError) -> None:
        """Note why completions end with `error`.

        It precedes the `write` that ends them.
        """

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
        """Append to one completion, and end it if a finish reason is given."""


class PoolingSink(ReplySink, Protocol):
    """Take one array, at the end of the request.

    The pooler is its only writer after rendering.
    """

    def start(self, prompt_token_ids: tuple[int, ...]) -> None:
        """Note the rendered prompt."""

    def write(self, array: "Array", error: RequestError | None = None) -> None:
        """Deliver the result.  Later results are ignored.

        `error` explains an empty array.  The client is woken.
        """
