"""Pooling parameters under the module name that vLLM's programs import."""

from trouper.pooling import PoolingParams

__all__ = ["PoolingParams"]
