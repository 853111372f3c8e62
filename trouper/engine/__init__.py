"""Engines and their options under the module names that vLLM's programs import."""
