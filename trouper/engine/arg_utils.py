"""Options of an engine under the module name that vLLM's programs import."""

from trouper.config.args import AsyncEngineArgs, EngineArgs

__all__ = ["AsyncEngineArgs", "EngineArgs"]
