"""The refusal of what is known from other servers and is not built here, with what to use in its place."""

from typing import Any

from trouper.errors import UnsupportedFeatureError

NO_MEDIA = "send text only"
NO_TOOLS = "describe the functions in a message and parse the answer"
NO_MEMORY = (
    "this server has been told to keep no responses by --responses-store-bytes 0; send the whole "
    "conversation with every request"
)
NO_MEMORY_OF_ITEMS = "use previous_response_id, or send the whole conversation with every request"


def unsupported(name: str, advice: str, value: Any = None) -> UnsupportedFeatureError:
    """Make the refusal of a field whose name, or whose value, is not built."""
    text = f"{name} is not supported: {advice}"
    return UnsupportedFeatureError(text, parameter=name, value=value)
