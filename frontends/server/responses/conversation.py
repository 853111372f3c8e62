"""Convert items of the Responses API to the messages of a chat.  Pure."""

from collections.abc import Iterable
from typing import Any, cast

import msgspec

from trouper.errors import invalid
from trouper.frontends.server.generation.transcript import Transcript, unseal
from trouper.frontends.server.responses.tools import (
    SHELL,
    SHELL_SCHEMA,
    custom_arguments,
    function_name,
)
from trouper.frontends.server.shared.errors import unsupported

JSONObject = dict[str, Any]
ANSWERS = ("content", "tool_calls", "reasoning_content")
SHOWN_TEXT = ("reasoning_text", "summary_text")
TAKEN = "messages, reasoning, compactions, calls and their outputs"
RESULTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
# These items record what another server has done.  They hold nothing that a model could read.
PASSED_OVER = ("web_search_call", "ghost_snapshot")
SUMMARY = "Summary of the conversation so far:"


def add_items(transcript: Transcript, items: Iterable[JSONObject], name: str) -> None:
    """Append items.  `name` is the client's name of their list.

    Raises:
        TrouperValidationError, UnsupportedFeatureError: a field of an item is invalid; the error names it.

    Items of one turn, such as reasoning and calls, are combined into one message.
    """
    for i, item in enumerate(items):
        _add(transcript, f"{name}[{i}]", item)
    transcript.place_images()


def _add(transcript: Transcript, place: str, item: JSONObject) -> None:
    match item.get("type", "message"):
        case "message" if item.get("role") == "assistant":
            message = transcript.assistant(place, "content", "tool_calls")
            message["content"] = item.get("content")
        case "message":
            role = item.get("role")
            transcript.append(place, "system" if role == "developer" else role, item.get("content"))
        case "reasoning":
            text = _reasoning_text(place, item)
            if text is not None:
                message = transcript.assistant(place, *ANSWERS)
                message["reasoning_content"] = text
        case "function_call" | "custom_tool_call" | "local_shell_call":
            call_id = _string(place, item, "call_id")
            transcript.add_call(place, call_id, *_call(place, item))
        case kind if kind in RESULTS:
            _add_result(transcript, place, item)
        case "compaction" | "compaction_summary":
            transcript.append(place, "user", f"{SUMMARY}\n{_summary(place, item)}")
        case kind if kind in PASSED_OVER:
            pass
        case str(kind):
            text = f"items of type {kind[:64]} cannot be used; send {TAKEN}"
            raise unsupported(f"{place}.type", text)
        case _:
            raise invalid(f"{place}.type", "must be a string")


def _string(place: str, item: JSONObject, name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise invalid(f"{place}.{name}", "must be a string")
    return value


def _call(place: str, item: JSONObject) -> tuple[str, str]:
    """Return the name and arguments of the chat function for a call of any kind."""
    if item["type"] == "local_shell_call":
        given: Any = item.get("action")
        if not isinstance(given, dict):
            raise invalid(f"{place}.action", "must be an object")
        action = cast("JSONObject", given)
        fields = {name: action[name] for name in SHELL_SCHEMA["properties"] if action.get(name)}
        return SHELL, msgspec.json.encode(fields).decode()
    name = function_name(_string(place, item, "name"), item.get("namespace"))
    if item["type"] == "custom_tool_call":
        return name, custom_arguments(_string(place, item, "input"))
    return name, _string(place, item, "arguments")


def _add_result(transcript: Transcript, place: str, item: JSONObject) -> None:
    output = item.get("output")
    if not isinstance(output, str | list):
        raise invalid(f"{place}.output", "must be a string or a list of parts")
    # OpenAI's type for the output of a shell has the call's id in the field `id`.
    is_by_id = item["type"] == "local_shell_call_output" and "call_id" not in item
    name = "id" if is_by_id else "call_id"
    transcript.add_result(place, name, item.get(name), output, "output")


def _summary(place: str, item: JSONObject) -> str:
    summary = unseal("compaction", item.get("encrypted_content"))
    if summary is None:
        advice = "only a compaction of this server can be read"
        raise unsupported(f"{place}.encrypted_content", advice)
    return summary


def _reasoning_text(place: str, item: JSONObject) -> str | None:
    """Return the text of a reasoning item, or else its summary.

    Returns None if another server encrypted the reasoning, because it cannot be read here.
    """
    texts: list[str] = []
    sealed = unseal("reasoning", item.get("encrypted_content"))
    for name in ("content", "summary"):
        parts: Any = item.get(name) or ()
        for part in cast("list[Any]", parts) if isinstance(parts, list) else ():
            fields: JSONObject = cast("JSONObject", part) if isinstance(part, dict) else {}
            text = fields.get("text")
            if fields.get("type") not in SHOWN_TEXT or not isinstance(text, str):
                raise invalid(f"{place}.{name}", "must be a list of texts")
            texts.append(text)
        if texts:
            return "\n".join(texts)
        if sealed is not None:
            return sealed
    return None if item.get("encrypted_content") else ""
