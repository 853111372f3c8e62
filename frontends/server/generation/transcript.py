"""Convert the conversations of all APIs to the engine's form.  Pure.

The Messages and Responses APIs have their own forms of conversations; `Transcript` builds the messages of a chat from them and
remembers the client's name of each, for errors.  `seal` packs text, such as past reasoning or a summary, into a string that the
client sends back later.  Sealing hides nothing, because the client may read the same text in the answer; its prefix distinguishes
this server's strings from the encrypted ones of other servers.
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
    """Convert the conversation of any request to the engine's form.

    Raises:
        TrouperValidationError, UnsupportedFeatureError: a field is invalid; the error names it.

    It includes tools, template variables and the choice of a template; the renderer needs nothing else of the
    request.
    """
    _check_messages(request.messages)
    if request.chat_template is not None and not settings.trust_request_chat_template:
        raise invalid("chat_template", "needs a server started with --trust-request-chat-template")
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
        # An empty list asks for nothing, but templates can test whether it is there.
        if value is not None and value != []:
            prompt[name] = value
    if choice == "none" and settings.exclude_tools_when_tool_choice_none:
        prompt.pop("tools", None)
    return prompt


def _media_options(request: Any, settings: ServerSettings) -> dict[str, Any]:
    """Return the request's options of the image processor, which may ask for images of any size."""
    found: dict[str, Any] = {}
    for name in ("mm_processor_kwargs", "media_io_kwargs"):
        if value := getattr(request, name, None):
            if not settings.trust_request_mm_kwargs:
                raise invalid(name, "needs a server started with --trust-request-mm-kwargs")
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
    """The messages so far, and the client's name for each.

    All parts of one turn of the assistant (reasoning, text and calls) become one message, because chat templates expect that.
    """

    def __init__(self) -> None:
        self.messages: list[JSONObject] = []
        self._places: list[str] = []
        # The client's names of parts, for messages whose parts have other numbers than the client gave them.
        self._part_places: dict[int, list[str]] = {}
        self._call_ids: set[str] = set()
        # Images of the last results, with the client's names of them.
        self._result_images: list[tuple[str, JSONObject]] = []

    def __repr__(self) -> str:
        return f"<Transcript of {len(self.messages)} messages>"

    def append(self, place: str, role: Any, content: Any) -> None:
        self._append(place, {"role": role, "content": content})

    def add_part(self, place: str, role: str, where: str, part: JSONObject) -> None:
        """Append a part to the last message if it has this role and parts, or else to a new message.

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
        """Return the assistant's last message to extend it, or a new one if the last message has one of these fields.

        Reasoning, text and calls of one turn are separate items in some APIs, but one message in a chat.
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

        Images go to a message of the user behind all results of the turn: templates show images there, and few show
        those in messages of tools.

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
        """Append the images of the last results, if there are any, as a message of the user."""
        images, self._result_images = self._result_images, []
        for where, part in images:
            self.add_part(where, "user", where, part)

    def drop_empty_end(self) -> None:
        """Drop the last message if it is an empty one of the assistant, which starts no answer."""
        last = self.messages[-1] if self.messages else {}
        if last.keys() != {"role", "content"} or last["role"] != "assistant":
            return
        if not any(part["text"] for part in last["content"]):
            del self.messages[-1], self._places[-1]
            self._part_places.pop(len(self.messages), None)

    def client_name(self, parameter: str) -> str:
        """Translate `messages[i]…`, a place in the chat, to the client's name of that place.

        Each message remembers from which item of the client's input it came.
        """
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
    """Pack a text into a string for the client to keep.

    The text is encoded, not encrypted: it is the client's own conversation, and only has to return unchanged.
    """
    return PREFIX.format(kind=kind) + urlsafe_b64encode(text.encode(errors="replace")).decode()


def unseal(kind: Kind, content: object) -> str | None:
    """Return the text of a sealed string, or None if this server did not make it.

    A string of another provider is no error; the caller then ignores it.
    """
    prefix = PREFIX.format(kind=kind)
    if not isinstance(content, str) or not content.startswith(prefix):
        return None
    try:
        return urlsafe_b64decode(content.removeprefix(prefix)).decode()
    except (binascii.Error, ValueError):
        return None
