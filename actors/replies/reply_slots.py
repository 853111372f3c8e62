"""The reply slots of the two kinds of requests: `ReplySlot` of a generation, and `PoolingSlot` with one output at the end.

Unread text, tokens and logprobs of a generation are merged, so memory is bounded by the output itself, however slow the reader.
"""

import msgspec
import numpy as np

from trouper.actors.replies.slot import Prefills, Slot
from trouper.outputs import (
    Array,
    CompletionOutput,
    FinishReason,
    LogprobsOnePosition,
    PoolingOutput,
    PoolingRequestOutput,
    RequestError,
    RequestOutput,
)
from trouper.params import RequestOutputKind, SamplingParams


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

    def start(self, prompt: str | None, prompt_token_ids: tuple[int, ...]) -> None:
        """Note the rendered prompt.

        It arrives from the renderer before any token, and each output repeats it.
        """
        self._prompt = prompt
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
