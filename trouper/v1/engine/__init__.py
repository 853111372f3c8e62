"""Engines under the module names that newer programs of vLLM import."""
