"""Items of the Responses API as the messages of a chat.  Pure."""

from collections.abc import Iterable
from typing import Any, cast

from trouper.errors import invalid
from trouper.frontends.server.openai.transcript import Transcript
from trouper.frontends.server.unsupported import unsupported

JSONObject = dict[str, Any]
ANSWERS = ("content", "tool_calls", "reasoning_content")
SHOWN_TEXT = ("reasoning_text", "summary_text")
TAKEN = "messages, reasoning, function calls and their outputs"


def add_items(transcript: Transcript, items: Iterable[JSONObject], name: str) -> None:
    """Append items; `name` is what the client calls the list of them.

    Raises:
        TrouperValidationError, UnsupportedFeatureError: naming the item's field.
    """
    for i, item in enumerate(items):
        _add(transcript, f"{name}[{i}]", item)


def _add(transcript: Transcript, place: str, item: JSONObject) -> None:
    match item.get("type", "message"):
        case "message" if item.get("role") == "assistant":
            message = transcript.assistant(place, "content", "tool_calls")
            message["content"] = item.get("content")
        case "message":
            role = item.get("role")
            transcript.append(place, "system" if role == "developer" else role, item.get("content"))
        case "reasoning":
            message = transcript.assistant(place, *ANSWERS)
            message["reasoning_content"] = _reasoning_text(place, item)
        case "function_call":
            names = ("call_id", "name", "arguments")
            transcript.add_call(place, *(_string(place, item, name) for name in names))
        case "function_call_output":
            output = item.get("output")
            if not isinstance(output, str | list):
                raise invalid(f"{place}.output", "must be a string or a list of parts")
            transcript.add_result(place, "call_id", item.get("call_id"), output)
        case str(kind):
            text = f"{kind[:64]} is no item that this server knows; send {TAKEN}"
            raise unsupported(f"{place}.type", text)
        case _:
            raise invalid(f"{place}.type", "must be a string")


def _string(place: str, item: JSONObject, name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise invalid(f"{place}.{name}", "must be a string")
    return value


def _reasoning_text(place: str, item: JSONObject) -> str:
    """Return what an item of reasoning shows: its text, or else the summary of it."""
    texts: list[str] = []
    for name in ("content", "summary"):
        parts: Any = item.get(name) or ()
        for part in cast("list[Any]", parts) if isinstance(parts, list) else ():
            fields: JSONObject = cast("JSONObject", part) if isinstance(part, dict) else {}
            text = fields.get("text")
            if fields.get("type") not in SHOWN_TEXT or not isinstance(text, str):
                raise invalid(f"{place}.{name}", "must be a list of texts")
            texts.append(text)
        if texts:
            break
    if not texts and item.get("encrypted_content"):
        advice = "leave items out whose reasoning is encrypted"
        raise unsupported(f"{place}.encrypted_content", advice)
    return "\n".join(texts)
