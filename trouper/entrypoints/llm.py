"""Blocking interface under the module name that vLLM's programs import."""

from trouper.frontends.python.llm import LLM

__all__ = ["LLM"]
