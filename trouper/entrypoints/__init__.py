"""Interfaces to an engine under the module names that vLLM's programs import."""
