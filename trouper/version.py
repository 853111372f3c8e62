"""Version of the package, under the module name that vLLM's programs import."""

from trouper import __version__

__all__ = ["__version__"]
