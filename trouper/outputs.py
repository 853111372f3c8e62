"""Outputs of generation as callers get them.  Part of the shared vocabulary."""

from importlib import import_module
from typing import Any, Literal

import msgspec

from trouper.errors import (
    ExecutionError,
    GenerationError,
    RetryableRequestError,
    TrouperError,
    TrouperValidationError,
)
from trouper.lora import LoRARequest

POOLED = (
    "ClassificationOutput", "ClassificationRequestOutput", "EmbeddingOutput", "EmbeddingRequestOutput",
    "PoolingOutput", "PoolingRequestOutput", "ScoringOutput", "ScoringRequestOutput",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    """Find the outputs of pooling here too, as vLLM's programs do; loaded on first use, because they need numpy."""
    if name not in POOLED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("trouper.pooling_outputs"), name)


FinishReason = Literal["stop", "length", "abort", "error", "repetition"]


class Logprob(msgspec.Struct, frozen=True):
    """One candidate of one position."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsOnePosition = dict[int, Logprob]


class RequestError(msgspec.Struct, frozen=True):
    """A per-request failure as data; `code` is one of a fixed set."""

    code: str
    message: str
    retryable: bool = False

    def to_exception(self, request_id: str = "") -> TrouperError:
        if self.code == "validation_error":
            return TrouperValidationError(self.message)
        if self.code == "execution_error":
            return ExecutionError(self.message, [request_id])
        if self.retryable:
            return RetryableRequestError(self.message)
        return GenerationError(self.message, self.code)


class RequestStateStats(msgspec.Struct):
    """Times of one request in seconds on the engine's monotonic clock; None: that has not happened.

    The durations count what they span, preemptions included.
    """

    arrival_time: float = 0.0  # the same moment as arrival_ts, on the wall clock
    arrival_ts: float = 0.0
    queued_ts: float | None = None  # rendered, and handed to the scheduler
    scheduled_ts: float | None = None  # first in a step
    first_token_ts: float | None = None
    last_token_ts: float | None = None
    finished_ts: float | None = None
    num_generation_tokens: int = 0  # of all completions
    max_num_generation_tokens: int = 0  # of the longest one
    num_preemptions: int = 0

    @property
    def queue_s(self) -> float | None:
        return _between(self.queued_ts, self.scheduled_ts)

    @property
    def prefill_s(self) -> float | None:
        return _between(self.scheduled_ts, self.first_token_ts)

    @property
    def decode_s(self) -> float | None:
        return _between(self.first_token_ts, self.last_token_ts)

    @property
    def inference_s(self) -> float | None:
        return _between(self.scheduled_ts, self.last_token_ts)

    @property
    def time_to_first_token_s(self) -> float | None:
        return _between(self.arrival_ts, self.first_token_ts)

    @property
    def time_per_output_token_s(self) -> float | None:
        """Decode time for each token after the first."""
        num_steps = self.max_num_generation_tokens - 1
        return None if self.decode_s is None or num_steps < 1 else self.decode_s / num_steps

    @property
    def e2e_s(self) -> float | None:
        return _between(self.arrival_ts, self.finished_ts)


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else end - begin


class CompletionOutput(msgspec.Struct):
    """One of the n completions of a request."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[LogprobsOnePosition] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


class RequestOutput(msgspec.Struct):
    """Output that `generate` yields: the whole text so far, or only what is new, by `output_kind`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[LogprobsOnePosition | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestStateStats | None = None
    num_cached_tokens: int | None = None
    error: RequestError | None = None
    lora_request: LoRARequest | None = None

    def add(self, next_output: "RequestOutput", aggregate: bool) -> None:
        """Merge a later output of the same request into this one.

        `aggregate` appends text, token ids and logprobs (DELTA); otherwise the later completion
        replaces the earlier one of its index.
        """
        self.finished |= next_output.finished
        self.error = next_output.error or self.error
        mine = {completion.index: i for i, completion in enumerate(self.outputs)}
        for new in next_output.outputs:
            i = mine.get(new.index)
            if i is None:
                self.outputs.append(new)
            elif not aggregate:
                self.outputs[i] = new
            else:
                old = self.outputs[i]
                old.text += new.text
                old.token_ids.extend(new.token_ids)
                if new.logprobs:
                    old.logprobs = [*(old.logprobs or ()), *new.logprobs]
                old.cumulative_logprob = new.cumulative_logprob
                old.finish_reason = new.finish_reason
                old.stop_reason = new.stop_reason
