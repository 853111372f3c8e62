"""trouper: an LLM inference engine played by a troupe of actors.

The public names below are loaded on first use, so `import trouper` costs milliseconds and no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trouper.compat import install

if TYPE_CHECKING:
    from trouper.config.args import AsyncEngineArgs, EngineArgs
    from trouper.config.checkpoint.pooler import PoolerConfig
    from trouper.frontends.python.async_engine import AsyncLLM, AsyncLLMEngine
    from trouper.frontends.python.llm import LLM
    from trouper.frontends.python.llm_engine import LLMEngine
    from trouper.inputs import TextPrompt, TokensPrompt
    from trouper.lora import LoRARequest
    from trouper.outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from trouper.params import (
        BeamSearchParams,
        RepetitionDetectionParams,
        RequestOutputKind,
        SamplingParams,
    )
    from trouper.pooling import PoolingParams
    from trouper.structured_outputs import StructuredOutputsParams

__version__ = "0.1.0"
install()

_HOMES = {
    "ClassificationOutput": "trouper.outputs",
    "ClassificationRequestOutput": "trouper.outputs",
    "EmbeddingOutput": "trouper.outputs",
    "EmbeddingRequestOutput": "trouper.outputs",
    "PoolingOutput": "trouper.outputs",
    "PoolingRequestOutput": "trouper.outputs",
    "ScoringOutput": "trouper.outputs",
    "ScoringRequestOutput": "trouper.outputs",
    "PoolerConfig": "trouper.config.checkpoint.pooler",
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
