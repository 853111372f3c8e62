"""Engine of an async program, under the module name that newer programs of vLLM import."""

from trouper.frontends.python.async_engine import AsyncLLM

__all__ = ["AsyncLLM"]
