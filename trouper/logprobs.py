"""Logprobs under the module name that vLLM's programs import."""

from trouper.outputs import Logprob, LogprobsOnePosition

__all__ = ["Logprob", "LogprobsOnePosition"]
