"""The reply slot of one request: a cell that the engine writes without waiting and one reader empties.

Laws.  Writes never wait and never fail; a closed slot swallows them.  What has not been read yet merges:
memory is bounded by the text itself, however slow the reader.  An exception overrides everything
else.  The output with `finished=True` is handed out exactly once.  Source: spec sections 4.3 and 9.4.
"""

import anyio
import anyio.lowlevel
import msgspec

from trouper.actors.admission import Prefills
from trouper.outputs import (
    CompletionOutput,
    FinishReason,
    LogprobsOnePosition,
    RequestError,
    RequestOutput,
    RequestStateStats,
)
from trouper.params import RequestOutputKind, SamplingParams


class _Completion(msgspec.Struct):
    """One of the n completions.

    Under DELTA the lists hold what has not been handed out yet, else everything.  Text is kept in
    pieces, because appending to one growing string copies it each time.
    """

    texts: list[str] = msgspec.field(default_factory=list[str])
    token_ids: list[int] = msgspec.field(default_factory=list[int])
    logprobs: list[LogprobsOnePosition] = msgspec.field(default_factory=list[LogprobsOnePosition])
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_tokens: int = 0  # all that were ever written
    num_sent_tokens: int = 0


class ReplySlot:
    """Opened by the frontend, lent to the Renderer and the Detokenizer, closed by the frontend.

    `scope` is the request's own: cancelling it ends the rendering stage, and says to everybody who still
    holds the slot that the request is aborted.
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
        self.request_id = request_id  # the caller's name for it: echoed, never a key
        self.scope = anyio.CancelScope()
        self.stats = RequestStateStats()
        self._shows_stats = shows_stats
        self._prefills = prefills or Prefills()
        self._num_prefill = 0  # prompt tokens, until there is a first token
        self.n = params.n
        self._kind = params.output_kind
        self._wants_logprobs = params.logprobs is not None or params.logprob_token_ids is not None
        self._wants_prompt_logprobs = params.prompt_logprobs is not None
        self._interval = max(stream_interval, params.stream_interval or 1)
        self._completions = [_Completion() for _ in range(params.n)]
        self._num_open = params.n  # completions without a finish reason
        self._due: set[int] = set()  # completions with something that the reader should get now
        self._has_sent = False
        self._prompt: str | None = None
        self._prompt_token_ids: list[int] = []
        self._prompt_logprobs: list[LogprobsOnePosition | None] | None = None
        self._num_cached_tokens: int | None = None
        self._error: Exception | None = None
        self._request_error: RequestError | None = None
        self._is_closed = False
        # Capacity 1: a wake-up that nobody has taken yet stands for all the writes since.
        self._wake, self._woken = anyio.create_memory_object_stream[None](1)
        self._rendered = anyio.Event()
        self._over = anyio.Event()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "aborted" if self.is_aborted else "open"
        return f"<ReplySlot {self.request_id!r} {state}>"

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    @property
    def num_unread(self) -> int:
        """Completions whose finish reason has not been handed out."""
        return self._num_open + sum(
            self._completions[index].finish_reason is not None for index in self._due
        )

    @property
    def num_tokens(self) -> tuple[int, int]:
        """Of the prompt, once it is rendered; generated so far by all completions, read or not."""
        return len(self._prompt_token_ids), sum(mine.num_tokens for mine in self._completions)

    @property
    def is_aborted(self) -> bool:
        return self.scope.cancel_called

    def expect(self, num_prompt_tokens: int) -> None:
        """About so many tokens are about to be rendered."""
        self._count_prefill(num_prompt_tokens)

    def start(self, prompt: str | None, prompt_token_ids: tuple[int, ...]) -> None:
        """The prompt is rendered."""
        self._prompt = prompt
        self._prompt_token_ids = list(prompt_token_ids)
        self._count_prefill(len(prompt_token_ids))
        if self._wants_prompt_logprobs:
            self._prompt_logprobs = [None]  # of a prompt of one token this is all
        self._rendered.set()

    def note_cached_tokens(self, num_cached_tokens: int) -> None:
        self._num_cached_tokens = num_cached_tokens

    def extend_prompt_logprobs(self, positions: list[LogprobsOnePosition]) -> None:
        """Append prompt positions in order; position 0 has no logprob and is filled in here."""
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
        """Append news of completion `index`, and wake the reader if it is due any."""
        mine = self._completions[index]
        if self._is_closed or mine.finish_reason is not None:
            return
        if self._num_prefill and token_ids:
            self._count_prefill(0)
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
        if is_first or num_new >= self._interval or finish_reason is not None:
            self._due.add(index)
            if self._kind != RequestOutputKind.FINAL_ONLY or self._num_open == 0:
                self._wake_reader()

    def abort(self) -> None:
        """End what has not ended with `abort`: the request never reached the Detokenizer."""
        for index in range(len(self._completions)):
            self.write(index, "", (), finish_reason="abort")

    def fail(self, error: Exception) -> None:
        """The reader gets `error` instead of whatever it has not read."""
        if not self._is_closed and self._error is None:
            self._error = error
            self._end()
            self._wake_reader()

    def note_error(self, error: RequestError) -> None:
        """Note why completions end with `error`; the reader of a step loop gets it in the output."""
        self._request_error = error

    async def read(self) -> RequestOutput:
        """Wait until there is something to hand out, and take it.

        Raises:
            Exception: what `fail` was given.
        """
        if self._is_ready:
            await anyio.lowlevel.checkpoint()
        else:
            await self._woken.receive()
        while (
            output := self.read_nowait()
        ) is None:  # a stale wake-up: that output is taken already
            await self._woken.receive()
        return output

    async def wait_rendered(self) -> None:
        """Wait until the prompt is known to be good, or the request has ended.

        Raises:
            Exception: what `fail` was given.
        """
        await self._rendered.wait()
        if self._error is not None:
            raise self._error

    async def wait_over(self) -> None:
        """Wait until nothing will be written any more, read or not."""
        await self._over.wait()

    def read_nowait(self) -> RequestOutput | None:
        """What `read` would return now, or None."""
        if self._error is not None:
            raise self._error
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
        )

    def close(self) -> None:
        """Nobody reads any more.  Idempotent; cancels the rendering stage."""
        self._is_closed = True
        self._end()
        self.scope.cancel()
        self._wake.close()
        self._woken.close()

    def _count_prefill(self, num_tokens: int) -> None:
        if not self._over.is_set():
            self._prefills.num_tokens += num_tokens - self._num_prefill
            self._num_prefill = num_tokens

    def _end(self) -> None:
        self._count_prefill(0)
        self._rendered.set()
        self._over.set()

    @property
    def _is_ready(self) -> bool:
        is_due = bool(self._due) and (
            self._kind != RequestOutputKind.FINAL_ONLY or not self._num_open
        )
        return is_due or self._error is not None

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
        else:  # the output keeps the lists, so go on with copies
            mine.texts = [output.text]
            mine.token_ids = mine.token_ids.copy()
            mine.logprobs = mine.logprobs.copy()
        return output

    def _wake_reader(self) -> None:
        try:
            self._wake.send_nowait(None)
        except anyio.WouldBlock:
            pass  # the wake-up already there is enough
