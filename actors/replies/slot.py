"""The count of prompt tokens in prefill, which admission reads and the reply slots write.

The reply slot's life, whatever it carries: a cell that the engine writes without waiting and one reader
empties.

Laws.  Writes never wait and never fail; a closed slot swallows them.  An exception overrides everything
else.  The output with `finished=True` is handed out exactly once.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import anyio
import anyio.lowlevel

from trouper.lora import LoRARequest
from trouper.outputs import RequestStateStats


class Prefills:
    """Prompt tokens of requests that have no token yet."""

    def __init__(self) -> None:
        self.num_tokens = 0


Output = TypeVar("Output", covariant=True)


class Once:
    """Flag that is set once.  An event is made only if a task waits, which is rare."""

    # Not in an `__init__`, which each request would call twice.
    is_set = False
    _event: anyio.Event | None = None

    def set(self) -> None:
        self.is_set = True
        if self._event is not None:
            self._event.set()

    async def wait(self) -> None:
        if self.is_set:
            await anyio.lowlevel.checkpoint()
            return
        if self._event is None:
            self._event = anyio.Event()
        await self._event.wait()


class ExpectedToken(NamedTuple):
    """The time to the first token, as it was foretold when the request was taken in."""

    seconds: float
    is_least: bool  # a lower bound
    error: float | None  # relative, that nine of ten are within; None: not known yet


class Slot(ABC, Generic[Output]):
    """Cell between one request's reader and the actors that write it: the frontend opens and closes it, actors borrow it.

    `scope` is the request's own. Cancelling it ends the rendering stage, and marks the request as
    aborted for every actor that still holds the slot.
    """

    def __init__(
        self,
        request_id: str,
        n: int = 1,
        *,
        prefills: Prefills | None = None,
        shows_stats: bool = True,
    ) -> None:
        self.request_id = request_id  # the caller's name for it: echoed, never a key
        self._scope: anyio.CancelScope | None = None  # made at its first use
        self.stats = RequestStateStats()
        self.n = n
        self.lora_request: LoRARequest | None = None
        self.on_over: Callable[[], object] | None = None  # called at the end, read or not
        self._shows_stats = shows_stats
        self._prefills = prefills or Prefills()
        self._num_prefill = 0  # as `count_prefill` was told
        self._prompt_token_ids: list[int] = []
        self._error: Exception | None = None
        self._is_closed = self._is_cancelled = False
        self._woken: anyio.Event | None = None  # for the tasks that wait
        self._rendered = Once()
        self._over = Once()
        self.expected: ExpectedToken | None = None
        self._foretold = Once()  # something is expected, or there is something to read

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "aborted" if self.is_aborted else "open"
        return f"<{type(self).__name__} {self.request_id!r} {state}>"

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def is_over(self) -> bool:
        return self._over.is_set

    @property
    def scope(self) -> anyio.CancelScope:
        self._scope = anyio.CancelScope()
        if self.is_aborted:
            self._scope.cancel()
        return self._scope

    def cancel(self) -> None:
        """Cancel the scope, if there is one or will be.  Legal where no task runs: anyio makes no scope there."""
        self._is_cancelled = True
        if self._scope is not None:
            self._scope.cancel()

    @property
    def is_aborted(self) -> bool:
        return self._is_closed or self._is_cancelled

    @property
    def num_tokens(self) -> tuple[int, int]:
        """Numbers of tokens of the prompt, once it is rendered, and generated so far by all completions, read or not."""
        return len(self._prompt_token_ids), 0

    @property
    @abstractmethod
    def num_unread(self) -> int:
        """Completions whose end has not been handed out."""

    @abstractmethod
    def abort(self) -> None:
        """End what has not ended with `abort`."""

    @abstractmethod
    def _take_output(self) -> Output | None:
        """Take the output that is due now, or None."""

    @property
    @abstractmethod
    def _is_ready(self) -> bool:
        """There is something to hand out."""

    def fail(self, error: Exception) -> None:
        """The reader gets `error` instead of whatever it has not read."""
        if not self._is_closed and self._error is None:
            self._error = error
            self._end()
            self._wake_reader()

    async def read(self) -> Output:
        """Wait until there is something to hand out, and take it.

        Raises:
            Exception: what `fail` was given.
            ClosedResourceError: the slot is closed.
        """
        if self._is_ready or self._error is not None:
            await anyio.lowlevel.checkpoint()
        while (output := self.read_nowait()) is None:
            if self._is_closed:
                raise anyio.ClosedResourceError
            if self._woken is None:  # all waiting tasks share it
                self._woken = anyio.Event()
            await self._woken.wait()
        return output

    def read_nowait(self) -> Output | None:
        """Return what `read` would return now, or None."""
        if self._error is not None:
            raise self._error
        return self._take_output()

    async def wait_rendered(self) -> None:
        """Wait until the prompt is known to be good, or the request has ended.

        Raises:
            Exception: what `fail` was given.
        """
        if not self._rendered.is_set:  # of many that were rendered together only the first waits
            await self._rendered.wait()
        if self._error is not None:
            await anyio.lowlevel.checkpoint()  # a prompt rendered alone has not waited
            raise self._error

    def note_expected(self, seconds: float, *, is_least: bool, error: float | None) -> None:
        """Note when the first token is expected."""
        self.expected = ExpectedToken(seconds, is_least, error)
        self._foretold.set()

    async def wait_foretold(self) -> ExpectedToken | None:
        """Wait until the first token is foretold; None: it is there, or the request has ended, before that."""
        if not self._is_ready and self._error is None:
            await self._foretold.wait()
        return self.expected

    async def wait_over(self) -> None:
        """Wait until nothing will be written any more, read or not."""
        await self._over.wait()

    def close(self) -> None:
        """End reading.  Idempotent; cancels the rendering stage."""
        self._is_closed = True
        if not self._over.is_set:
            self._end()
        self.cancel()
        self._wake_reader()

    def count_prefill(self, num_tokens: int) -> None:
        """Count the prompt's tokens as in prefill until its first result: an estimate before it is rendered, then exactly."""
        if not self._over.is_set:
            self._prefills.num_tokens += num_tokens - self._num_prefill
            self._num_prefill = num_tokens

    def _start(self, prompt_token_ids: tuple[int, ...]) -> None:
        """The prompt is rendered."""
        self._prompt_token_ids = list(prompt_token_ids)
        self.count_prefill(len(prompt_token_ids))
        self._rendered.set()

    def _end(self) -> None:
        self.count_prefill(0)
        self._rendered.set()
        self._over.set()
        self._foretold.set()
        on_over, self.on_over = self.on_over, None
        if on_over is not None:
            on_over()

    def _wake_reader(self) -> None:
        self._foretold.set()
        if self._woken is not None:
            self._woken.set()
            self._woken = None
