"""Define the outputs of generative and pooling models for callers.

Pooled results are float32 numpy arrays; `PoolingOutput.data` is a tensor over the same memory.  numpy is not imported
here, because a program that only generates has no need to wait for it.
"""

from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar

import msgspec

from trouper.errors import (
    ExecutionError,
    GenerationError,
    RetryableRequestError,
    TrouperError,
    TrouperValidationError,
)
from trouper.lora import LoRARequest

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[np.float32]]

FinishReason = Literal["stop", "length", "abort", "error", "repetition"]
# By modality: the first token of each item in the prompt, and its number of tokens.
Placeholders = dict[str, list[tuple[int, int]]]
T = TypeVar("T")


def __getattr__(name: str) -> Any:
    """Create the type `Array` on first use, so that importing this module does not import numpy."""
    if name != "Array":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import numpy as np

    return np.ndarray[Any, np.dtype[np.float32]]


class Logprob(msgspec.Struct, frozen=True):
    """One candidate token at one position of an output or a prompt.

    `logprob` is the natural logarithm of its probability.  `rank` counts from 1 for the most likely
    token.  `decoded_token` is its text.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsOnePosition = dict[int, Logprob]


class RequestError(msgspec.Struct, frozen=True):
    """The reason why one request failed, as a value that actors can send.

    `code` is one of a fixed set and determines the HTTP status.  `message` is for people only; no code depends on it.
    """

    code: str
    message: str
    retryable: bool = False

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"

    def to_exception(self, request_id: str = "") -> TrouperError:
        if self.code == "validation_error":
            return TrouperValidationError(self.message)
        if self.code == "execution_error":
            return ExecutionError(self.message, [request_id])
        if self.retryable:
            return RetryableRequestError(self.message, self.code)
        return GenerationError(self.message, self.code)


class RequestStateStats(msgspec.Struct):
    """Times of one request in seconds on the engine's monotonic clock.

    A time is None before its event.  Durations cover everything between their events, including
    preemptions.
    """

    # The same moment as `arrival_ts`, on the wall clock.
    arrival_time: float = 0.0
    arrival_ts: float = 0.0
    # When the rendered prompt was passed to the scheduler.
    queued_ts: float | None = None
    # When the first step with tokens of the request was planned.
    scheduled_ts: float | None = None
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
        """The decode time for each token after the first, in seconds.

        None before the second token.  With several completions the longest one counts, because they are generated in
        parallel.
        """
        num_steps = self.max_num_generation_tokens - 1
        return None if self.decode_s is None or num_steps < 1 else self.decode_s / num_steps

    @property
    def e2e_s(self) -> float | None:
        return _between(self.arrival_ts, self.finished_ts)


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else end - begin


class CompletionOutput(msgspec.Struct):
    """One of the `n` completions of a request.

    `text` and `token_ids` hold everything so far or only the new part, as `output_kind` requests.
    `finish_reason` is None until the completion ends; `stop_reason` is the stop string or token id
    that ended it.
    """

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
    """An output of `generate`: everything so far, or only the new part, as `output_kind` requests.

    `finished` is True in the last output of the request.  If the request failed, `error` is set and its
    completions end with `finish_reason="error"`.
    """

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
    multi_modal_placeholders: Placeholders | None = None
    audio_seconds: float | None = None

    def add(self, next_output: "RequestOutput", aggregate: bool) -> None:
        """Merge a later output of the same request into this one.

        With `aggregate`, text, token ids and logprobs are appended (for DELTA); otherwise each later completion
        replaces the earlier one with the same index.
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


class PoolingOutput(msgspec.Struct, frozen=True, eq=False):
    """The result of a pooling request as a float32 array.

    Its shape is [size] for a text, [tokens, size] for token tasks, and [] for a score.  `data` is a torch tensor that
    shares its memory.
    """

    array: "Array"

    @property
    def data(self) -> Any:
        """The result as a torch tensor that shares the array's memory."""
        from torch import from_numpy  # pyright: ignore[reportUnknownVariableType]  # partly typed

        return from_numpy(self.array)


class EmbeddingOutput(msgspec.Struct, frozen=True):
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)

    @classmethod
    def from_base(cls, output: PoolingOutput) -> Self:
        """Convert a finished result to a list of floats.

        Raises:

            ValueError: the result has not exactly one dimension, for example because the task was `token_embed`.
        """
        return cls(_one_dimension(output, "embedding"))


class ClassificationOutput(msgspec.Struct, frozen=True):
    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)

    @classmethod
    def from_base(cls, output: PoolingOutput) -> Self:
        """Convert a finished result to a list of class probabilities.

        Raises:

            ValueError: the result has not exactly one dimension, for example because the task was `token_classify`.
        """
        return cls(_one_dimension(output, "class probabilities"))


class ScoringOutput(msgspec.Struct, frozen=True):
    score: float

    @classmethod
    def from_base(cls, output: PoolingOutput) -> Self:
        """Convert a finished result; raises ValueError unless the result is one number."""
        if output.array.size != 1:
            raise ValueError(
                f"a score must be one number, not an array of shape {output.array.shape}"
            )
        return cls(float(output.array.reshape(())))


class PoolingRequestOutput(msgspec.Struct, Generic[T]):
    """The one output of a pooling request.

    An aborted request has empty data and `error.code == "aborted"`.  `num_cached_tokens` counts
    prompt tokens that the prefix cache saved.
    """

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    error: RequestError | None = None
    late_chunking: None = None
    metrics: RequestStateStats | None = None


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    @classmethod
    def from_base(cls, output: PoolingRequestOutput[PoolingOutput]) -> Self:
        empty = EmbeddingOutput([])
        made = empty if output.error else EmbeddingOutput.from_base(output.outputs)
        return cls(**_fields(output, made))


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    @classmethod
    def from_base(cls, output: PoolingRequestOutput[PoolingOutput]) -> Self:
        empty = ClassificationOutput([])
        made = empty if output.error else ClassificationOutput.from_base(output.outputs)
        return cls(**_fields(output, made))


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    @classmethod
    def from_base(cls, output: PoolingRequestOutput[PoolingOutput]) -> Self:
        made = ScoringOutput(0.0) if output.error else ScoringOutput.from_base(output.outputs)
        return cls(**_fields(output, made))


def _fields(output: PoolingRequestOutput[PoolingOutput], made: object) -> dict[str, Any]:
    return {name: getattr(output, name) for name in output.__struct_fields__} | {"outputs": made}


def _one_dimension(output: PoolingOutput, what: str) -> list[float]:
    if output.array.ndim != 1:
        raise ValueError(f"{what} must have one dimension, but the shape is {output.array.shape}")
    return output.array.tolist()
