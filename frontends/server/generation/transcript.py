"""Convert the conversations of all APIs to the engine's format.  Pure.

The Messages and Responses APIs have their own formats; `Transcript` builds the messages of a chat from them and maps each back to the
client's field, for errors.  `seal` encodes text, such as past reasoning or a summary, as a string that the client sends back later.
Sealing hides nothing, because the client can read the same text in the answer.  The prefix distinguishes this server's strings from the
encrypted ones of other servers.
"""

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Any, Literal, cast

from trouper.actors.rendering.media.parts import is_media
from trouper.errors import invalid
from trouper.frontends.server.generation.tools import tool_use
from trouper.frontends.server.shared.settings import ServerSettings

MAX_MESSAGES = 4096
MAX_PARTS = 256  # in one message


def chat_prompt(request: Any, settings: ServerSettings) -> dict[str, Any]:
    """Convert the conversation of any request, with its tools, template and template variables, to the prompt for the renderer.

    Raises:
        TrouperValidationError, UnsupportedFeatureError: a field is invalid; the error names it.
    """
    _check_messages(request.messages)
    if request.chat_template is not None and not settings.trust_request_chat_template:
        rule = "is refused, because the server was started without --trust-request-chat-template"
        raise invalid("chat_template", rule)
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
    prompt |= _media_options(request, settings)
    choice = getattr(request, "tool_choice", "none")
    tool_use(request.tools, choice)
    if request.chat_template is not None:
        prompt["foreign_chat_template"] = request.chat_template
    for name in (
        "add_generation_prompt",
        "continue_final_message",
        "tools",
        "documents",
        "cache_salt",
    ):
        value = getattr(request, name, None)
        # An empty list means the same as none, but templates may test whether the variable is defined.
        if value is not None and value != []:
            prompt[name] = value
    if choice == "none" and settings.exclude_tools_when_tool_choice_none:
        prompt.pop("tools", None)
    return prompt


def _media_options(request: Any, settings: ServerSettings) -> dict[str, Any]:
    """Return the request's options for the image processor, which need trust because they can demand images of any size."""
    found: dict[str, Any] = {}
    for name in ("mm_processor_kwargs", "media_io_kwargs"):
        if value := getattr(request, name, None):
            if not settings.trust_request_mm_kwargs:
                rule = (
                    "is refused, because the server was started without --trust-request-mm-kwargs"
                )
                raise invalid(name, rule)
            found[name] = value
    return found


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
    """Build the messages of a chat, and map each back to the client's name of its source.

    Reasoning, text and calls of one turn of the assistant become one message, because chat templates expect that.
    """

    def __init__(self) -> None:
        self.messages: list[JSONObject] = []
        self._places: list[str] = []
        # By index of a message: the client's names of its parts, if the client numbers them differently.
        self._part_places: dict[int, list[str]] = {}
        self._call_ids: set[str] = set()
        # Images of the latest tool results, each with the client's name.
        self._result_images: list[tuple[str, JSONObject]] = []

    def __repr__(self) -> str:
        return f"<Transcript of {len(self.messages)} messages>"

    def append(self, place: str, role: Any, content: Any) -> None:
        self._append(place, {"role": role, "content": content})

    def add_part(self, place: str, role: str, where: str, part: JSONObject) -> None:
        """Append a part to the last message if that has this role and a list of parts, or else to a new message.

        Args:
            place: the client's name of the message.
            where: the client's name of the part.
        """
        self.place_images()
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != role or not isinstance(last.get("content"), list):
            self.append(place, role, [])
        number = len(self.messages) - 1
        self.messages[number]["content"].append(part)
        self._part_places.setdefault(number, []).append(where)

    def assistant(self, place: str, *ends_at: str) -> JSONObject:
        """Return the assistant's current message, to extend it.

        Starts a new message if the last one has another role or one of the fields `ends_at`.
        """
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(name in last for name in ends_at):
            self._append(place, {"role": "assistant"})
        return self.messages[-1]

    def add_call(self, place: str, call_id: str, name: str, arguments: str) -> None:
        self._call_ids.add(call_id)
        function = {"name": name, "arguments": arguments}
        calls = self.assistant(place).setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def add_result(
        self, place: str, name: str, call_id: Any, content: Any, content_name: str
    ) -> None:
        """Append the result of a tool call.

        Its images go to a message of the user after all results of the turn, because few templates render images in messages of tools.

        Args:
            place: the client's name of the result.
            name: the client's name of the field with the call's id.
            content_name: the client's name of the field with the content.

        Raises:
            TrouperValidationError: no earlier call has this id.
        """
        if not isinstance(call_id, str) or call_id not in self._call_ids:
            raise invalid(f"{place}.{name}", "must be the id of an earlier tool call", call_id)
        if isinstance(content, list):
            parts = cast("list[Any]", content)
            where = f"{place}.{content_name}"
            self._result_images += [
                (f"{where}[{i}]", part) for i, part in enumerate(parts) if is_media(part)
            ]
            content = [part for part in parts if not is_media(part)] or ""
        self._append(place, {"role": "tool", "tool_call_id": call_id, "content": content})

    def place_images(self) -> None:
        """Append the images of the latest tool results, if any, as a message of the user."""
        images, self._result_images = self._result_images, []
        for where, part in images:
            self.add_part(where, "user", where, part)

    def drop_empty_end(self) -> None:
        """Drop the last message if it is an empty message of the assistant, because it contains no beginning of an answer."""
        last = self.messages[-1] if self.messages else {}
        if last.keys() != {"role", "content"} or last["role"] != "assistant":
            return
        if not any(part["text"] for part in last["content"]):
            del self.messages[-1], self._places[-1]
            self._part_places.pop(len(self.messages), None)

    def client_name(self, parameter: str) -> str:
        """Translate `messages[i]…`, a path in the chat, to the client's path of the same field."""
        number, bracket, rest = parameter.removeprefix("messages[").partition("]")
        if not bracket or not number.isdigit() or int(number) >= len(self._places):
            return parameter
        parts = self._part_places.get(int(number), [])
        part, bracket, tail = rest.removeprefix(".content[").partition("]")
        if bracket and part.isdigit() and int(part) < len(parts):
            return parts[int(part)] + tail
        return self._places[int(number)] + rest

    def _append(self, place: str, message: JSONObject) -> None:
        if message["role"] != "tool":
            self.place_images()
        self.messages.append(message)
        self._places.append(place)


Kind = Literal["reasoning", "compaction"]
PREFIX = "trouper:{kind}:"


def seal(kind: Kind, text: str) -> str:
    """Encode a text as a string that the client stores and sends back.

    It is not encrypted, because it is part of the client's own conversation and only has to return unchanged.
    """
    return PREFIX.format(kind=kind) + urlsafe_b64encode(text.encode(errors="replace")).decode()


def unseal(kind: Kind, content: object) -> str | None:
    """Return the text of a sealed string, or None if `content` is not one, for example because another provider made it."""
    prefix = PREFIX.format(kind=kind)
    if not isinstance(content, str) or not content.startswith(prefix):
        return None
    try:
        return urlsafe_b64decode(content.removeprefix(prefix)).decode()
    except (binascii.Error, ValueError):
        return None
