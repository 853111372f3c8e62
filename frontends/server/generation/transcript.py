"""Convert the conversations of all APIs to the engine's form.  Pure.

The Messages and Responses APIs have their own forms of conversations; `Transcript` builds the messages of a chat from them and
remembers the client's name of each, for errors.  `seal` packs text, such as past reasoning or a summary, into a string that the
client sends back later.  Sealing hides nothing, because the client may read the same text in the answer; its prefix distinguishes
this server's strings from the encrypted ones of other servers.
"""

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Any, Literal, cast

from trouper.errors import invalid
from trouper.frontends.server.generation.tools import tool_use
from trouper.frontends.server.shared.settings import ServerSettings

MAX_MESSAGES = 4096
MAX_PARTS = 256  # in one message


def chat_prompt(request: Any, settings: ServerSettings) -> dict[str, Any]:
    """Convert the conversation of any request to the engine's form.

    Raises:
        TrouperValidationError, UnsupportedFeatureError: a field is invalid; the error names it.
    """
    _check_messages(request.messages)
    if request.chat_template is not None and not settings.trust_request_chat_template:
        raise invalid("chat_template", "needs a server started with --trust-request-chat-template")
    choice = getattr(request, "tool_choice", "none")
    tool_use(request.tools, choice)
    defaults = dict(settings.default_chat_template_kwargs)
    if (effort := getattr(request, "reasoning_effort", None)) is not None:
        defaults["reasoning_effort"] = effort
    if (thinks := getattr(request, "enable_thinking", None)) is not None:
        defaults["enable_thinking"] = thinks
    defaults |= getattr(request, "template_defaults", {})
    prompt: dict[str, Any] = {
        "messages": request.messages,
        "chat_template_kwargs": request.chat_template_kwargs or {},
    }
    if defaults:
        prompt["template_defaults"] = defaults
    if request.chat_template is not None:
        prompt["foreign_chat_template"] = request.chat_template
    for name in (
        "add_generation_prompt",
        "continue_final_message",
        "tools",
        "documents",
        "cache_salt",
    ):
        if (value := getattr(request, name, None)) is not None:
            prompt[name] = value
    if choice == "none" and settings.exclude_tools_when_tool_choice_none:
        prompt.pop("tools", None)
    return prompt


def _check_messages(messages: list[dict[str, Any]]) -> None:
    if not messages:
        raise invalid("messages", "must not be empty")
    if len(messages) > MAX_MESSAGES:
        raise invalid("messages", f"must contain at most {MAX_MESSAGES} messages", len(messages))
    for i, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list) and len(cast("list[Any]", content)) > MAX_PARTS:
            raise invalid(f"messages[{i}].content", f"must contain at most {MAX_PARTS} parts")


JSONObject = dict[str, Any]


class Transcript:
    """The messages so far, and the client's name for each.

    All parts of one turn of the assistant (reasoning, text and calls) become one message, because chat templates expect that.
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
        """Return the assistant's last message to extend it, or a new one if the last message has one of these fields."""
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
        """Append the result of a tool call.  `name` is the client's name of the field with the call's id.

        Raises:
            TrouperValidationError: no earlier call has this id.
        """
        if not isinstance(call_id, str) or call_id not in self._call_ids:
            raise invalid(f"{place}.{name}", "must be the id of an earlier tool call", call_id)
        self._append(place, {"role": "tool", "tool_call_id": call_id, "content": content})

    def client_name(self, parameter: str) -> str:
        """Translate `messages[i]…`, a place in the chat, to the client's name of that place."""
        number, bracket, rest = parameter.removeprefix("messages[").partition("]")
        if not bracket or not number.isdigit() or int(number) >= len(self._places):
            return parameter
        return self._places[int(number)] + rest

    def _append(self, place: str, message: JSONObject) -> None:
        self.messages.append(message)
        self._places.append(place)


Kind = Literal["reasoning", "compaction"]
PREFIX = "trouper:{kind}:"


def seal(kind: Kind, text: str) -> str:
    """Pack a text into a string for the client to keep."""
    return PREFIX.format(kind=kind) + urlsafe_b64encode(text.encode(errors="replace")).decode()


def unseal(kind: Kind, content: object) -> str | None:
    """Return the text of a sealed string, or None if this server did not make it."""
    prefix = PREFIX.format(kind=kind)
    if not isinstance(content, str) or not content.startswith(prefix):
        return None
    try:
        return urlsafe_b64decode(content.removeprefix(prefix)).decode()
    except (binascii.Error, ValueError):
        return None
