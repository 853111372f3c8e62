"""Engine stepped by hand, under the module name that newer programs of vLLM import."""

from trouper.frontends.python.llm_engine import LLMEngine

__all__ = ["LLMEngine"]
