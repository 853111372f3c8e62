"""The reply slot: a cell that the engine writes without waiting, and that one client empties.

A queue for each client could grow without bound when the client is slow.  A slot merges unread text, tokens and logprobs instead,
so its memory is bounded by the output itself.  `Slot` is the part that generation and pooling share.  `ReplySlot` is the slot
of a generation, and `PoolingSlot` that of a pooling request, which has one output at the end.

Laws: Writes never wait and never fail, and a closed slot ignores them.  An exception replaces everything unread.  The output with
`finished=True` is handed out exactly once.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import anyio
import anyio.lowlevel
import msgspec
import numpy as np

from trouper.lora import LoRARequest
from trouper.outputs import (
    Array,
    CompletionOutput,
    FinishReason,
    LogprobsOnePosition,
    Placeholders,
    PoolingOutput,
    PoolingRequestOutput,
    RequestError,
    RequestOutput,
    RequestStateStats,
)
from trouper.params import RequestOutputKind, SamplingParams


class Prefills:
    """Count the prompt tokens of all requests without a first token.  Reply slots write it, and admission reads it.

    It is kept as a running sum, because admission reads it for every request.
    """

    def __init__(self) -> None:
        self.num_tokens = 0


Output = TypeVar("Output", covariant=True)


class Once:
    """A flag to be set once.  An event is created only if a task waits, a rare case.

    Waiting after the flag was set returns immediately.
    """

    # Class attributes instead of an `__init__`, which each request would call twice.
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
    """The predicted time to the first token, made when the request was admitted.

    Clients can use it to decide whether to wait; it is not corrected later.
    """

    seconds: float
    # Whether it is a lower bound.
    is_least: bool
    # Nine of ten predictions are within this relative error.  None until it is known.
    error: float | None


class Slot(ABC, Generic[Output]):
    """The cell between the reader of one request and the actors that write to it.

    The frontend opens and closes it; actors only borrow it.  Cancelling its `scope` ends the rendering stage, and marks the request
    as aborted for every actor that still holds the slot.
    """

    def __init__(
        self,
        request_id: str,
        n: int = 1,
        *,
        prefills: Prefills | None = None,
        shows_stats: bool = True,
    ) -> None:
        # The caller's name for the request.  It is echoed, and never used as a key.
        self.request_id = request_id
        # Created at its first use.
        self._scope: anyio.CancelScope | None = None
        self.stats = RequestStateStats()
        self.n = n
        self.lora_request: LoRARequest | None = None
        # Called when the request ends, whether its output is read or not.
        self.on_over: Callable[[], object] | None = None
        self._shows_stats = shows_stats
        self._prefills = prefills or Prefills()
        # The last argument of `count_prefill`.
        self._num_prefill = 0
        self._prompt_token_ids: list[int] = []
        self._error: Exception | None = None
        self._is_closed = self._is_cancelled = False
        # Shared by all waiting tasks.
        self._woken: anyio.Event | None = None
        self._rendered = Once()
        self._over = Once()
        self.expected: ExpectedToken | None = None
        # There is a prediction, or something to read.
        self._expected = Once()

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
        """Cancel the present scope, or the next one.  It is legal outside of a task, where anyio cannot create a scope."""
        self._is_cancelled = True
        if self._scope is not None:
            self._scope.cancel()

    @property
    def is_aborted(self) -> bool:
        return self._is_closed or self._is_cancelled

    @property
    def num_tokens(self) -> tuple[int, int]:
        """Return the tokens of the rendered prompt, and the tokens generated so far by all completions, read or not."""
        return len(self._prompt_token_ids), 0

    @property
    @abstractmethod
    def num_unread(self) -> int:
        """Count the completions without an end that the reader has seen."""

    @abstractmethod
    def abort(self) -> None:
        """End all unfinished completions with `abort`.

        Completions already ended keep their own reason.
        """

    @abstractmethod
    def _take_output(self) -> Output | None:
        """Take the output to hand out now.  Returns None if there is none."""

    @property
    @abstractmethod
    def _is_ready(self) -> bool:
        """Whether there is something to hand out."""

    def fail(self, error: Exception) -> None:
        """Give the reader an error in place of everything unread.

        The first error counts.  Further outputs are ignored.
        """
        if not self._is_closed and self._error is None:
            self._error = error
            self._end()
            self._wake_reader()

    async def read(self) -> Output:
        """Wait until there is an output, and take it.

        Only one task reads a slot.

        Raises:

            Exception: the error passed to `fail`.
            ClosedResourceError: the slot is closed.
        """
        if self._is_ready or self._error is not None:
            await anyio.lowlevel.checkpoint()
        while (output := self.read_nowait()) is None:
            if self._is_closed:
                raise anyio.ClosedResourceError
            if self._woken is None:
                self._woken = anyio.Event()
            await self._woken.wait()
        return output

    def read_nowait(self) -> Output | None:
        """Return the result of `read`, or None if `read` would wait.

        Raises the error passed to `fail`.  It never yields to other tasks.
        """
        if self._error is not None:
            raise self._error
        return self._take_output()

    async def wait_rendered(self) -> None:
        """Wait until the prompt has been accepted, or the request has ended.

        A caller thus learns about an invalid prompt before it commits itself, for example to status 200.

        Raises:

            Exception: the error passed to `fail`.
        """
        # Of many prompts rendered together, only the first one waits.
        if not self._rendered.is_set:
            await self._rendered.wait()
        if self._error is not None:
            # The prompt may have failed before, without a wait.
            await anyio.lowlevel.checkpoint()
            raise self._error

    def note_expected(self, seconds: float, *, is_least: bool, error: float | None) -> None:
        """Note when the first token is expected.

        It is made once, when the scheduler admits the request.
        """
        self.expected = ExpectedToken(seconds, is_least, error)
        self._expected.set()

    async def wait_expected(self) -> ExpectedToken | None:
        """Wait for the predicted time of the first token.  Returns None if the token or the end of the request comes first."""
        if not self._is_ready and self._error is None:
            await self._expected.wait()
        return self.expected

    async def wait_over(self) -> None:
        """Wait until the request has ended, whether its output is read or not.

        A draining engine waits for this, because unread outputs need no computation.
        """
        await self._over.wait()

    def close(self) -> None:
        """End reading, and drop unread outputs.

        Idempotent. A rendering stage still at work on the request is cancelled, and waiting readers are woken.
        Further writes are ignored.
        """
        self._is_closed = True
        if not self._over.is_set:
            self._end()
        self.cancel()
        self._wake_reader()

    def count_prefill(self, num_tokens: int) -> None:
        """Count the tokens of the prompt as in prefill until its first result.

        Args:
            num_tokens: an estimate until the prompt is rendered, then the exact number.
        """
        if not self._over.is_set:
            self._prefills.num_tokens += num_tokens - self._num_prefill
            self._num_prefill = num_tokens

    def _start(self, prompt_token_ids: tuple[int, ...]) -> None:
        """Note the rendered prompt."""
        self._prompt_token_ids = list(prompt_token_ids)
        self.count_prefill(len(prompt_token_ids))
        self._rendered.set()

    def _end(self) -> None:
        self.count_prefill(0)
        self._rendered.set()
        self._over.set()
        self._expected.set()
        on_over, self.on_over = self.on_over, None
        if on_over is not None:
            on_over()

    def _wake_reader(self) -> None:
        self._expected.set()
        if self._woken is not None:
            self._woken.set()
            self._woken = None


class _Completion(msgspec.Struct):
    """One of the n completions.

    For the output kind DELTA the lists contain only unread results, otherwise everything.  Text is a list of strings, because
    appending to one growing string copies it each time.
    """

    texts: list[str] = msgspec.field(default_factory=list[str])
    token_ids: list[int] = msgspec.field(default_factory=list[int])
    logprobs: list[LogprobsOnePosition] = msgspec.field(default_factory=list[LogprobsOnePosition])
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    # All tokens ever written.
    num_tokens: int = 0
    num_sent_tokens: int = 0


class ReplySlot(Slot[RequestOutput]):
    """The slot of a generation: text, tokens and logprobs of n completions.

    Unread outputs are merged, so its memory is bounded by the length of the answer, however slowly the client reads.
    """

    def __init__(
        self,
        request_id: str,
        params: SamplingParams,
        stream_interval: int = 1,
        *,
        prefills: Prefills | None = None,
        shows_stats: bool = True,
    ) -> None:
        super().__init__(request_id, params.n, prefills=prefills, shows_stats=shows_stats)
        self._kind = params.output_kind
        self._wants_logprobs = params.logprobs is not None or params.logprob_token_ids is not None
        self._wants_prompt_logprobs = params.prompt_logprobs is not None
        self._interval = max(params.stream_interval or 1, stream_interval)
        self._completions = [_Completion() for _ in range(params.n)]
        # Completions without a finish reason.
        self._num_open = params.n
        # Completions with results for the reader.
        self._due: set[int] = set()
        self._has_sent = False
        self._prompt: str | None = None
        self._placeholders: Placeholders | None = None
        self._audio_seconds: float | None = None
        self._prompt_logprobs: list[LogprobsOnePosition | None] | None = None
        self._num_cached_tokens: int | None = None
        self._request_error: RequestError | None = None

    @property
    def num_unread(self) -> int:
        """Count the completions without a finish reason that the reader has seen.

        The request stays open for the client while this is not 0.
        """
        return self._num_open + sum(
            self._completions[index].finish_reason is not None for index in self._due
        )

    @property
    def num_tokens(self) -> tuple[int, int]:
        return len(self._prompt_token_ids), sum(mine.num_tokens for mine in self._completions)

    def start(
        self,
        prompt: str | None,
        prompt_token_ids: tuple[int, ...],
        placeholders: Placeholders | None = None,
        audio_seconds: float | None = None,
    ) -> None:
        """Note the rendered prompt.

        It arrives from the renderer before any token, and each output repeats it.
        """
        self._prompt, self._placeholders = prompt, placeholders
        self._audio_seconds = audio_seconds
        if self._wants_prompt_logprobs:
            self._prompt_logprobs = [None]  # of a prompt of one token this is all
        self._start(prompt_token_ids)

    def note_cached_tokens(self, num_cached_tokens: int) -> None:
        self._num_cached_tokens = num_cached_tokens

    def extend_prompt_logprobs(self, positions: list[LogprobsOnePosition]) -> None:
        """Append prompt positions in order; position 0 has no logprob and is filled in here.

        Parts of a long prompt arrive with several steps.
        """
        if self._prompt_logprobs is None:
            self._prompt_logprobs = [None]
        self._prompt_logprobs.extend(positions)

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
        """Append text, tokens and logprobs to a completion, or end it.

        Nothing is written after its end.  The reader is woken if the output kind allows an output now.
        """
        mine = self._completions[index]
        if self._is_closed or mine.finish_reason is not None:
            return
        if self._num_prefill and token_ids:
            self.count_prefill(0)
        if text:
            mine.texts.append(text)
        mine.token_ids.extend(token_ids)
        mine.num_tokens += len(token_ids)
        if self._wants_logprobs:
            mine.logprobs.extend(logprobs or ())
            gained = sum(
                position[token].logprob
                for position, token in zip(logprobs or (), token_ids, strict=False)
            )
            mine.cumulative_logprob = (mine.cumulative_logprob or 0.0) + gained
        if finish_reason is not None:
            mine.finish_reason = finish_reason
            mine.stop_reason = stop_reason
            self._num_open -= 1
            if self._num_open == 0:
                self._end()
        num_new = mine.num_tokens - mine.num_sent_tokens
        is_first = mine.num_sent_tokens == 0 and num_new > 0
        interval = self._interval
        if is_first or num_new >= interval or finish_reason is not None:
            self._due.add(index)
            if self._kind != RequestOutputKind.FINAL_ONLY or self._num_open == 0:
                self._wake_reader()

    def abort(self) -> None:
        """End all unfinished completions with `abort`, because the request has not reached the detokenizer."""
        for index in range(len(self._completions)):
            self.write(index, "", (), finish_reason="abort")

    def note_error(self, error: RequestError) -> None:
        """Record why completions end with the reason `error`, before their ends are written.

        The outputs of the request contain it from then on.
        """
        self._request_error = error

    def _take_output(self) -> RequestOutput | None:
        if not self._is_ready:
            return None
        prompt_logprobs = self._prompt_logprobs
        if self._kind == RequestOutputKind.DELTA and self._has_sent:
            prompt_logprobs = None
        self._has_sent = True
        outputs = [self._take(index) for index in sorted(self._due)]
        self._due.clear()
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=outputs,
            finished=self._num_open == 0,
            metrics=self.stats if self._shows_stats else None,
            num_cached_tokens=self._num_cached_tokens,
            error=self._request_error,
            lora_request=self.lora_request,
            multi_modal_placeholders=self._placeholders,
            audio_seconds=self._audio_seconds,
        )

    @property
    def _is_ready(self) -> bool:
        return bool(self._due) and (
            self._kind != RequestOutputKind.FINAL_ONLY or not self._num_open
        )

    def _take(self, index: int) -> CompletionOutput:
        mine = self._completions[index]
        output = CompletionOutput(
            index=index,
            text="".join(mine.texts),
            token_ids=mine.token_ids,
            cumulative_logprob=mine.cumulative_logprob,
            logprobs=mine.logprobs if self._wants_logprobs else None,
            finish_reason=mine.finish_reason,
            stop_reason=mine.stop_reason,
        )
        mine.num_sent_tokens = mine.num_tokens
        if self._kind == RequestOutputKind.DELTA:
            mine.texts, mine.token_ids, mine.logprobs = [], [], []
        else:
            # The output keeps the lists, so the slot continues with copies.
            mine.texts = [output.text]
            mine.token_ids = mine.token_ids.copy()
            mine.logprobs = mine.logprobs.copy()
        return output


class PoolingSlot(Slot[PoolingRequestOutput[PoolingOutput]]):
    """The slot of a pooling request: one output.

    It is filled once, so there is nothing to merge.
    """

    _output: PoolingRequestOutput[PoolingOutput] | None = None
    _is_taken = False

    @property
    def num_unread(self) -> int:
        return int(not self._is_taken)

    def start(self, prompt_token_ids: tuple[int, ...]) -> None:
        """Note the rendered prompt."""
        self._start(prompt_token_ids)

    def write(self, array: Array, error: RequestError | None = None) -> None:
        """Deliver the result.  Later results are ignored.

        The reader is woken.  With `error` the array is empty.
        """
        if self._is_closed or self._over.is_set:
            return
        self._output = PoolingRequestOutput(
            request_id=self.request_id,
            outputs=PoolingOutput(array),
            prompt_token_ids=self._prompt_token_ids,
            error=error,
            metrics=self.stats if self._shows_stats else None,
        )
        self._end()
        self._wake_reader()

    def abort(self) -> None:
        self.write(np.empty(0, np.float32), RequestError("aborted", "the request was aborted"))

    def _take_output(self) -> PoolingRequestOutput[PoolingOutput] | None:
        if self._is_taken or self._output is None:
            return None
        self._is_taken = True
        return self._output

    @property
    def _is_ready(self) -> bool:
        return self._output is not None and not self._is_taken
