"""Engine of an async program, under the module name that vLLM's programs import."""

from trouper.frontends.python.async_engine import AsyncLLMEngine

__all__ = ["AsyncLLMEngine"]
