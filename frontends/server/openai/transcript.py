"""The messages of a chat, made from a conversation that has another form.  Pure."""

from typing import Any

from trouper.errors import invalid

JSONObject = dict[str, Any]


class Transcript:
    """The messages so far, and the client's name for each.

    What the assistant has thought, said and called in one turn is one message, as templates want it.
    """

    def __init__(self) -> None:
        self.messages: list[JSONObject] = []
        self._places: list[str] = []
        self._call_ids: set[str] = set()

    def __repr__(self) -> str:
        return f"<Transcript of {len(self.messages)} messages>"

    def append(self, place: str, role: Any, content: Any) -> None:
        self._append(place, {"role": role, "content": content})

    def assistant(self, place: str, *ends_at: str) -> JSONObject:
        """Return the assistant's message that goes on here: a new one where the last has one of these fields."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(name in last for name in ends_at):
            self._append(place, {"role": "assistant"})
        return self.messages[-1]

    def add_call(self, place: str, call_id: str, name: str, arguments: str) -> None:
        self._call_ids.add(call_id)
        function = {"name": name, "arguments": arguments}
        calls = self.assistant(place).setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def add_result(self, place: str, name: str, call_id: Any, content: Any) -> None:
        """Append the result of a call; `name` is what the client calls the id of the call.

        Raises:
            TrouperValidationError: there is no such call before it.
        """
        if not isinstance(call_id, str) or call_id not in self._call_ids:
            raise invalid(f"{place}.{name}", "must be that of a call before it", call_id)
        self._append(place, {"role": "tool", "tool_call_id": call_id, "content": content})

    def client_name(self, parameter: str) -> str:
        """Return the client's name of a part of a message, which is `messages[i]…` here."""
        number, bracket, rest = parameter.removeprefix("messages[").partition("]")
        if not bracket or not number.isdigit() or int(number) >= len(self._places):
            return parameter
        return self._places[int(number)] + rest

    def _append(self, place: str, message: JSONObject) -> None:
        self.messages.append(message)
        self._places.append(place)
