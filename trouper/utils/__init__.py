"""Helpers under the module names that vLLM's programs import."""
