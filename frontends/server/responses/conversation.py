"""Items of the Responses API as the messages of a chat.  Pure."""

from collections.abc import Iterable
from typing import Any, cast

from trouper.errors import invalid
from trouper.frontends.server.unsupported import unsupported

JSONObject = dict[str, Any]
SHOWN_TEXT = ("reasoning_text", "summary_text")


class Transcript:
    """The messages so far, and the client's name for each.

    What the assistant has said, thought and called in one turn is one message, as templates want it.
    """

    def __init__(self, instructions: str | None = None) -> None:
        self.messages: list[JSONObject] = []
        self.places: list[str] = []
        self._call_ids: set[str] = set()
        if instructions is not None:
            self._append("instructions", {"role": "system", "content": instructions})

    def __repr__(self) -> str:
        return f"<Transcript of {len(self.messages)} messages>"

    def extend(self, items: Iterable[JSONObject], name: str = "input") -> None:
        """Append items; `name` is what the client calls the list of them.

        Raises:
            TrouperValidationError, UnsupportedFeatureError: naming the item's field.
        """
        for i, item in enumerate(items):
            self._add(f"{name}[{i}]", item)

    def client_name(self, parameter: str) -> str:
        """Return the client's name of a part of a message, which is `messages[i]…` here."""
        number, bracket, rest = parameter.removeprefix("messages[").partition("]")
        if not bracket or not number.isdigit() or int(number) >= len(self.places):
            return parameter
        return self.places[int(number)] + rest

    def _add(self, place: str, item: JSONObject) -> None:
        match item.get("type", "message"):
            case "message" if item.get("role") == "assistant":
                message = self._assistant_message(place, "content", "tool_calls")
                message["content"] = item.get("content")
            case "message":
                role = item.get("role")
                role = "system" if role == "developer" else role
                self._append(place, {"role": role, "content": item.get("content")})
            case "function_call":
                self._add_call(place, item)
            case "function_call_output":
                self._add_call_output(place, item)
            case "reasoning":
                message = self._assistant_message(place, *ANSWERS)
                message["reasoning_content"] = _reasoning_text(place, item)
            case str(kind):
                taken = "messages, reasoning, function calls and their outputs"
                raise unsupported(
                    f"{place}.type", f"{kind[:64]} is no item of this server; {taken} are"
                )
            case _:
                raise invalid(f"{place}.type", "must be a string")

    def _add_call(self, place: str, item: JSONObject) -> None:
        fields = {name: item.get(name) for name in ("call_id", "name", "arguments")}
        for name, value in fields.items():
            if not isinstance(value, str):
                raise invalid(f"{place}.{name}", "must be a string")
        call_id = str(fields["call_id"])
        self._call_ids.add(call_id)
        function = {"name": fields["name"], "arguments": fields["arguments"]}
        call = {"id": call_id, "type": "function", "function": function}
        message = self._assistant_message(place)
        message.setdefault("tool_calls", []).append(call)

    def _add_call_output(self, place: str, item: JSONObject) -> None:
        call_id, output = item.get("call_id"), item.get("output")
        if not isinstance(call_id, str) or call_id not in self._call_ids:
            raise invalid(f"{place}.call_id", "must be that of a function_call before it", call_id)
        if not isinstance(output, str | list):
            raise invalid(f"{place}.output", "must be a string or a list of parts")
        self._append(place, {"role": "tool", "tool_call_id": call_id, "content": output})

    def _assistant_message(self, place: str, *ends_at: str) -> JSONObject:
        """Return the assistant's message that goes on here: a new one where the last has one of these fields."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(name in last for name in ends_at):
            self._append(place, {"role": "assistant"})
        return self.messages[-1]

    def _append(self, place: str, message: JSONObject) -> None:
        self.messages.append(message)
        self.places.append(place)


ANSWERS = ("content", "tool_calls", "reasoning_content")


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
