"""Outputs of a pooling model as callers get them.

Results are numpy arrays, float32; `PoolingOutput.data` shows the same memory as a tensor.
"""

from typing import Any, Generic, Self, TypeVar

import msgspec
import numpy as np

from trouper.outputs import RequestError, RequestStateStats

Array = np.ndarray[Any, np.dtype[np.float32]]
T = TypeVar("T")


class PoolingOutput(msgspec.Struct, frozen=True, eq=False):
    """The finished result: [size] for a text, [tokens, size] for token tasks, [] for a score."""

    array: Array

    @property
    def data(self) -> Any:
        """Make a torch tensor over the same memory."""
        from torch import from_numpy  # pyright: ignore[reportUnknownVariableType]  # partly typed

        return from_numpy(self.array)


class EmbeddingOutput(msgspec.Struct, frozen=True):
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)

    @classmethod
    def from_base(cls, output: PoolingOutput) -> Self:
        """Convert a finished result; raises ValueError unless the result has one dimension."""
        return cls(_one_dimension(output, "embedding"))


class ClassificationOutput(msgspec.Struct, frozen=True):
    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)

    @classmethod
    def from_base(cls, output: PoolingOutput) -> Self:
        """Convert a finished result; raises ValueError unless the result has one dimension."""
        return cls(_one_dimension(output, "class probabilities"))


class ScoringOutput(msgspec.Struct, frozen=True):
    score: float

    @classmethod
    def from_base(cls, output: PoolingOutput) -> Self:
        """Convert a finished result; raises ValueError unless the result is one number."""
        if output.array.size != 1:
            raise ValueError(f"a score is one number, not {output.array.shape}")
        return cls(float(output.array.reshape(())))


class PoolingRequestOutput(msgspec.Struct, Generic[T]):
    """The one output of a pooling request.  An aborted one has empty data and `error.code == "aborted"`."""

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
        raise ValueError(f"{what} have one dimension, not the shape {output.array.shape}")
    return output.array.tolist()
