"""trouper: an LLM inference engine played by a troupe of actors.

The public names below are loaded on first use, so `import trouper` costs milliseconds and no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trouper.config.args import AsyncEngineArgs, EngineArgs
    from trouper.config.pooler import PoolerConfig
    from trouper.frontends.python.async_engine import AsyncLLM, AsyncLLMEngine
    from trouper.frontends.python.llm import LLM
    from trouper.frontends.python.llm_engine import LLMEngine
    from trouper.inputs import TextPrompt, TokensPrompt
    from trouper.lora import LoRARequest
    from trouper.outputs import CompletionOutput, RequestOutput
    from trouper.params import (
        BeamSearchParams,
        RepetitionDetectionParams,
        RequestOutputKind,
        SamplingParams,
    )
    from trouper.pooling import PoolingParams
    from trouper.pooling_outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from trouper.structured_outputs import StructuredOutputsParams

__version__ = "0.1.0"

_HOMES = {
    "ClassificationOutput": "trouper.pooling_outputs",
    "ClassificationRequestOutput": "trouper.pooling_outputs",
    "EmbeddingOutput": "trouper.pooling_outputs",
    "EmbeddingRequestOutput": "trouper.pooling_outputs",
    "PoolingOutput": "trouper.pooling_outputs",
    "PoolingRequestOutput": "trouper.pooling_outputs",
    "ScoringOutput": "trouper.pooling_outputs",
    "ScoringRequestOutput": "trouper.pooling_outputs",
    "PoolerConfig": "trouper.config.pooler",
    "PoolingParams": "trouper.pooling",
    "AsyncEngineArgs": "trouper.config.args",
    "BeamSearchParams": "trouper.params",
    "LLMEngine": "trouper.frontends.python.llm_engine",
    "AsyncLLM": "trouper.frontends.python.async_engine",
    "AsyncLLMEngine": "trouper.frontends.python.async_engine",
    "CompletionOutput": "trouper.outputs",
    "EngineArgs": "trouper.config.args",
    "LLM": "trouper.frontends.python.llm",
    "LoRARequest": "trouper.lora",
    "RepetitionDetectionParams": "trouper.params",
    "RequestOutput": "trouper.outputs",
    "RequestOutputKind": "trouper.params",
    "SamplingParams": "trouper.params",
    "StructuredOutputsParams": "trouper.structured_outputs",
    "TextPrompt": "trouper.inputs",
    "TokensPrompt": "trouper.inputs",
}

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "LLMEngine",
    "LoRARequest",
    "PoolerConfig",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "RepetitionDetectionParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'trouper' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
