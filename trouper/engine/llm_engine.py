"""Engine stepped by hand, under the module name that vLLM's programs import."""

from trouper.frontends.python.llm_engine import LLMEngine

__all__ = ["LLMEngine"]
