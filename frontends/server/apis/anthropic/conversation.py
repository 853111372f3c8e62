"""Convert between the Messages API and a chat: bodies, conversations and tools in, content blocks out.  Pure.

An answer's blocks become the content of a message, or its events in a stream.  In a body, a null means that the field is not
given; the table in `fields.py` decides about all other fields.
"""

import json
import math
from typing import Any, ClassVar, cast

import msgspec

from trouper.actors.rendering.media.parts import Base64File
from trouper.errors import invalid
from trouper.frontends.server.apis.openai.requests import ChatRequest, DerivedChat
from trouper.frontends.server.generation.adapter import StreamEvent
from trouper.frontends.server.generation.parsers import (
    AnswerBlock,
    BlockEnded,
    BlockEvent,
    BlockGrown,
    BlockStarted,
)
from trouper.frontends.server.generation.request_fields import ResponseFormat, SamplingFields
from trouper.frontends.server.generation.transcript import Transcript, seal, unseal
from trouper.frontends.server.shared import fields
from trouper.frontends.server.shared.errors import (
    NO_TOOLS,
    THREAD_NOT_FOUND,
    HTTPError,
    unsupported,
)

JSONObject = dict[str, Any]
DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
# Anthropic's proposed key for arguments without a JSON object.
INVALID = "INVALID_JSON"


def render_block(change: BlockEvent, *, omits_thinking: bool = False) -> list[StreamEvent]:
    """Return the events for one change of a block.

    A block begins with an event that contains its type, continues with deltas and ends with an event of its own.
    """
    is_omitted = omits_thinking and change.block.kind == "reasoning"
    match change:
        case BlockStarted(block):
            begun = content_block(block)
            if block.kind == "call":
                begun["input"] = {}  # clients append the deltas to it
            return [_event("start", block, content_block=begun)]
        case BlockGrown() if is_omitted:
            return []
        case BlockGrown(block, text):
            kind, name = DELTAS[block.kind]
            return [_event("delta", block, delta={"type": kind, name: text})]
        case BlockEnded(block) if is_omitted:
            signed = {"type": "signature_delta", "signature": seal("reasoning", block.text)}
            return [_event("delta", block, delta=signed), _event("stop", block)]
        case BlockEnded(block):
            return [_event("stop", block)]


def content_block(block: AnswerBlock, *, omits_thinking: bool = False) -> JSONObject:
    """Return a block in the format of the API.  Hidden thinking is only in the signature, which the client sends back.

    The arguments of a call are parsed, because the API wants an object and not a text.
    """
    match block.kind:
        case "text":
            return {"type": "text", "text": block.text}
        case "reasoning" if omits_thinking:
            return {"type": "thinking", "thinking": "", "signature": seal("reasoning", block.text)}
        case "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        case "call":
            return {
                "type": "tool_use",
                "id": block.call_id,
                "name": block.name,
                "input": _input(block.text),
            }


def _input(arguments: str) -> JSONObject:
    """Decode the arguments of a call.  Cut arguments, or other JSON than an object, become a text."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except msgspec.DecodeError:
        return {INVALID: arguments}


def _event(moment: str, block: AnswerBlock, **content: Any) -> StreamEvent:
    kind = f"content_block_{moment}"
    return StreamEvent({"type": kind, "index": block.index, **content}, kind)


class CountTokensRequest(SamplingFields, kw_only=True):
    """The body of `POST /v1/messages/count_tokens`.  Fields without an influence on the count are accepted."""

    OTHERS: ClassVar[fields.Others] = fields.COUNTING

    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    context_management: Any = None
    # A new thread asks the server to keep the conversation; the client still has it all.
    thread: dict[str, Any] | None = None

    def put_back(self, strings: dict[str, memoryview]) -> None:
        """Replace placeholders of images, also of those in results of tools, by their bytes, taken out of `strings`."""
        for message in self.messages:
            _put_back_blocks(message.get("content"), strings)


class MessagesRequest(CountTokensRequest, kw_only=True):
    """The body of `POST /v1/messages`.

    `max_tokens` is required, as in Anthropic's API.  Sampling fields of the other APIs are accepted, too.
    """

    OTHERS: ClassVar[fields.Others] = fields.MESSAGES

    max_tokens: int
    stop_sequences: list[str] | None = None


def _put_back_blocks(content: Any, strings: dict[str, memoryview]) -> None:
    for block in cast("list[Any]", content) if isinstance(content, list) else ():
        match block:
            case {"type": "image", "source": {"data": str(data)}}:
                block["source"]["data"] = strings.pop(data, data)
            case {"type": "tool_result", "content": list()}:
                _put_back_blocks(block["content"], strings)
            case _:
                pass


IN_USER = "can be in messages of the user and in results of tools"
NOT_BUILT = {
    "image": f"images {IN_USER}",
    "document": f"documents {IN_USER}",
    "search_result": f"search results {IN_USER}",
    "server_tool_use": NO_TOOLS,
}
NO_FILES = "send its text as a source of type text, or each page as an image"
ROLES = ("user", "assistant", "system")
# Claude Code puts a line with this name in front of its system prompt.  The line is meant for the biller and changes
# from request to request, so with it no two prompts would share a prefix.
BILLING = "x-anthropic-billing-header:"
EFFORT = "output_config.effort"
FORMAT = "output_config.format"
BUDGET = "thinking.budget_tokens"


def chat_of(request: CountTokensRequest, transcript: Transcript) -> ChatRequest:
    """Convert a request to a chat.  Its messages go to `transcript`.

    Consecutive messages of one role become one message.  A last message of the assistant is the start of the reply.

    Raises:
        TrouperValidationError, UnsupportedFeatureError, HTTPError: a field is invalid; the error names it.
    """
    if not request.messages:
        raise invalid("messages", "must not be empty")
    _check_thread(request.thread or {})
    _add_messages(transcript, request)
    tools = chat_tools(request.tools)
    choice = request.tool_choice or {}
    fields = request.shared()
    if isinstance(request, MessagesRequest):
        fields |= {"max_tokens": request.max_tokens, "stop": request.stop_sequences}
    last = transcript.messages[-1]
    if last["role"] == "assistant":
        if not last.get("content"):
            place = transcript.client_name(f"messages[{len(transcript.messages) - 1}]")
            raise invalid(f"{place}.content", "must have text, which the answer continues")
        fields |= {"add_generation_prompt": False, "continue_final_message": True}
    response_format = _response_format(request)
    if response_format is not None and fields.get("structured_outputs") is not None:
        raise invalid("structured_outputs", f"cannot be combined with {FORMAT}")
    return DerivedChat(
        messages=transcript.messages,
        response_format=response_format,
        reasoning_effort=_effort(request),
        tools=tools,
        tool_choice=chat_tool_choice(request.tool_choice, has_tools=tools is not None),
        parallel_tool_calls=False if choice.get("disable_parallel_tool_use") else None,
        **fields | _thinking(request),
    )


def _check_thread(thread: JSONObject) -> None:
    """Refuse to continue a conversation that the server would have to keep.  Clients then send all messages."""
    match thread.get("type"):
        case None | "create":
            pass
        case "continue":
            rule = "this server keeps no conversations; send all messages"
            raise HTTPError(404, THREAD_NOT_FOUND, rule, param="thread")
        case kind:
            raise invalid("thread.type", "must be create or continue", kind)


def _thinking(request: CountTokensRequest) -> JSONObject:
    """Return the fields of a chat that control whether the model reasons, and for how many tokens."""
    thinking = request.thinking
    if thinking is None:
        return {}
    kind, budget = thinking.get("type"), thinking.get("budget_tokens")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise invalid("thinking.type", "must be enabled, adaptive or disabled", kind)
    display = thinking.get("display")
    if display not in (None, "summarized", "omitted"):
        raise invalid("thinking.display", "must be summarized or omitted", display)
    fields: JSONObject = {"template_defaults": {"enable_thinking": kind != "disabled"}}
    if kind == "disabled":
        return {**fields, "include_reasoning": False}
    if kind == "enabled" or budget is not None:
        max_tokens = getattr(request, "max_tokens", math.inf)  # counting has none
        if not isinstance(budget, int) or isinstance(budget, bool) or not 0 < budget < max_tokens:
            raise invalid(BUDGET, "must be a positive integer below max_tokens", budget)
        fields["thinking_token_budget"] = budget
    return fields


def _effort(request: CountTokensRequest) -> str | None:
    effort: Any = (request.output_config or {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise invalid(EFFORT, "must be a string", effort)
    return effort


def _response_format(request: CountTokensRequest) -> ResponseFormat | None:
    given: Any = (request.output_config or {}).get("format")
    if given is None:
        return None
    fields = cast("JSONObject", given) if isinstance(given, dict) else {}
    if fields.get("type") != "json_schema" or not isinstance(fields.get("schema"), dict):
        raise invalid(FORMAT, "must be of type json_schema and have a schema, an object")
    if unknown := fields.keys() - {"type", "schema"}:
        raise invalid(FORMAT, f"unknown members: {', '.join(sorted(unknown))[:128]}")
    return ResponseFormat(type="json_schema", json_schema={"schema": fields["schema"]})


def _add_messages(transcript: Transcript, request: CountTokensRequest) -> None:
    """Append the messages, starting with the system prompt."""
    system = _system_texts(request.system)
    if system:
        transcript.append("system", "system", system)
    for i, message in enumerate(request.messages):
        place = f"messages[{i}]"
        role = message.get("role")
        if role not in ROLES:
            raise invalid(f"{place}.role", f"must be {', '.join(ROLES[:-1])} or {ROLES[-1]}", role)
        content = message.get("content")
        if role == "system":
            transcript.append(place, "system", _texts(f"{place}.content", content))
            continue
        if role == "assistant" and content == []:
            continue
        for where, block in _blocks(f"{place}.content", content):
            add = _add_to_user if role == "user" else _add_to_assistant
            add(transcript, place, where, block)
    transcript.drop_empty_end()
    if not transcript.messages:
        raise invalid("messages", "must contain something that this model can read")
    transcript.place_images()
    _check_results(transcript)
    for message in transcript.messages:
        match message.get("content"):
            case [{"type": "text", "text": text}]:
                message["content"] = text
            case _:
                pass


def _check_results(transcript: Transcript) -> None:
    """Refuse a call without a result: the next turn must contain one for each call."""
    wanted: set[str] = set()
    place = ""
    messages: list[JSONObject] = [*transcript.messages, {"role": "assistant"}]
    for i, message in enumerate(messages):
        if message["role"] == "tool":
            wanted.discard(message["tool_call_id"])
        elif message["role"] == "assistant":
            if wanted:
                missing = sorted(wanted)[0][:64]
                rule = f"every tool_use needs a tool_result after it; {missing!r} has none"
                raise invalid(f"{place}.content", rule)
            calls: list[JSONObject] = message.get("tool_calls") or []
            wanted = {call["id"] for call in calls}
            place = transcript.client_name(f"messages[{i}]")


def _system_texts(system: object) -> list[JSONObject]:
    """Return the blocks of the system prompt without the biller's line."""
    texts = _texts("system", system) if system else []
    if texts and texts[0]["text"].startswith(BILLING):
        _, _, texts[0]["text"] = texts[0]["text"].partition("\n")
    return [block for block in texts if block["text"]]


def _add_to_user(transcript: Transcript, place: str, where: str, block: JSONObject) -> None:
    if block.get("type") == "tool_result":
        content = block.get("content")
        result = [] if content in (None, [], "") else _parts(f"{where}.content", content)
        if _is_error(where, block):
            result = _as_error(result)
        call_id = block.get("tool_use_id")
        transcript.add_result(where, "tool_use_id", call_id, result or "", "content")
    else:
        transcript.add_part(place, "user", where, _part(where, block))


def _as_error(result: list[JSONObject]) -> list[JSONObject]:
    """Return the parts of a failed call, whose first text states that it is an error."""
    texts = [part for part in result if part["type"] == "text"]
    if not texts:
        return [*result, {"type": "text", "text": "Error: no details"}]
    first = texts[0]
    return [
        {**part, "text": f"Error: {part['text']}"} if part is first else part for part in result
    ]


def _is_error(where: str, block: JSONObject) -> bool:
    is_error = block.get("is_error")
    if is_error is not None and not isinstance(is_error, bool):
        raise invalid(f"{where}.is_error", "must be true or false", is_error)
    return bool(is_error)


def _add_to_assistant(transcript: Transcript, place: str, where: str, block: JSONObject) -> None:
    match block.get("type"):
        case "tool_use":
            fields = {name: block.get(name) for name in ("id", "name", "input")}
            for (name, value), kind in zip(fields.items(), (str, str, dict), strict=True):
                if not isinstance(value, kind):
                    needed = "an object" if kind is dict else "a string"
                    raise invalid(f"{where}.{name}", f"must be {needed}")
            arguments = json.dumps(fields["input"], ensure_ascii=False)
            transcript.add_call(place, str(fields["id"]), str(fields["name"]), arguments)
        case "thinking":
            thought = block.get("thinking")
            if not isinstance(thought, str):
                raise invalid(f"{where}.thinking", "must be a string")
            thought = thought or unseal("reasoning", block.get("signature")) or ""
            message = transcript.assistant(place)
            message["reasoning_content"] = message.get("reasoning_content", "") + thought
        case "redacted_thinking":
            # Only the server that encrypted it can read it.
            pass
        case _:
            message = transcript.assistant(place)
            message.setdefault("content", []).append(_text(where, block))


def _blocks(place: str, content: object) -> list[tuple[str, JSONObject]]:
    """Return the blocks of a message, each with the client's name for it."""
    if isinstance(content, str):
        return [(place, {"type": "text", "text": content})]
    if not isinstance(content, list) or not content:
        raise invalid(place, "must be a string or a non-empty list of blocks")
    found: list[tuple[str, JSONObject]] = []
    for i, block in enumerate(cast("list[object]", content)):
        if not isinstance(block, dict):
            raise invalid(f"{place}[{i}]", "must be a block")
        found.append((f"{place}[{i}]", cast("JSONObject", block)))
    return found


def _texts(place: str, content: object) -> list[JSONObject]:
    return [_text(where, block) for where, block in _blocks(place, content)]


def _parts(place: str, content: object) -> list[JSONObject]:
    return [_part(where, block) for where, block in _blocks(place, content)]


def _part(place: str, block: JSONObject) -> JSONObject:
    """Convert a block to a part of a chat: an image, or the text of any other block."""
    match block.get("type"):
        case "image":
            return _image(place, block)
        case "document":
            text = _document(place, block)
        case "search_result":
            _no_citations(place, block)
            found = _strings(place, block, ("title", "source"), is_required=True)
            text = "\n".join([*found, _joined(f"{place}.content", block.get("content"))])
        case "tool_reference":
            # All tools are in the prompt, also those that the client wanted to be loaded later.
            (name,) = _strings(place, block, ("tool_name",), is_required=True)
            text = f"The tool {name} is available."
        case _:
            return _text(place, block)
    return {"type": "text", "text": text}


def _document(place: str, block: JSONObject) -> str:
    """Return the title, context and text of a document.  Raises UnsupportedFeatureError for files."""
    _no_citations(place, block)
    given: Any = block.get("source")
    source = cast("JSONObject", given) if isinstance(given, dict) else {}
    match source.get("type"):
        case "text":
            (text,) = _strings(f"{place}.source", source, ("data",), is_required=True)
        case "content":
            text = _joined(f"{place}.source.content", source.get("content"))
        case "base64" | "url" | "file" as kind:
            raise unsupported(f"{place}.source.type", NO_FILES, kind)
        case kind:
            raise invalid(f"{place}.source.type", "must be text or content", kind)
    return "\n".join([*_strings(place, block, ("title", "context"), is_required=False), text])


def _no_citations(place: str, block: JSONObject) -> None:
    match block.get("citations"):
        case {"enabled": True}:
            raise unsupported(f"{place}.citations", "answers have no citations; leave it out")
        case _:
            pass


def _strings(
    place: str, block: JSONObject, names: tuple[str, ...], *, is_required: bool
) -> list[str]:
    """Return members of a block that must be strings, without the missing ones."""
    found: list[str] = []
    for name in names:
        value = block.get(name)
        if isinstance(value, str):
            found.append(value)
        elif is_required or value is not None:
            raise invalid(f"{place}.{name}", "must be a string")
    return found


def _joined(place: str, content: object) -> str:
    return "\n".join(each["text"] for each in _texts(place, content))


def _image(place: str, block: JSONObject) -> JSONObject:
    given: Any = block.get("source")
    source = cast("JSONObject", given) if isinstance(given, dict) else {}
    match source.get("type"):
        case "base64":
            data, media_type = source.get("data"), source.get("media_type")
            if not isinstance(data, str | memoryview):
                raise invalid(f"{place}.source.data", "must be a file in base64")
            if media_type is not None and not isinstance(media_type, str):
                raise invalid(f"{place}.source.media_type", "must be a string", media_type)
            text = cast("str | memoryview", data)
            return {"type": "image", "image": Base64File(text, ".source.data")}
        case "url":
            return {"type": "image_url", "image_url": source.get("url")}
        case "file":
            advice = "files are not stored here; use a source of type base64"
            raise unsupported(f"{place}.source.type", advice)
        case kind:
            raise invalid(f"{place}.source.type", "must be base64 or url", kind)


def _text(place: str, block: JSONObject) -> JSONObject:
    kind, text = block.get("type"), block.get("text")
    if isinstance(kind, str) and kind in NOT_BUILT:
        raise unsupported(
            f"{place}.type", f"blocks of type {kind} cannot be used; {NOT_BUILT[kind]}"
        )
    if kind != "text":
        raise invalid(f"{place}.type", "must be a type allowed here, such as text", kind)
    if not isinstance(text, str):
        raise invalid(f"{place}.text", "must be a string")
    return {"type": "text", "text": text}


CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_tools(tools: list[JSONObject] | None) -> list[JSONObject] | None:
    """Convert the client's tools to chat functions.  Returns None without tools.

    Raises:
        TrouperValidationError: a tool is malformed.
        UnsupportedFeatureError: a tool would have to run on the server.
    """
    return [_chat_tool(f"tools[{i}]", tool) for i, tool in enumerate(tools or ())] or None


def chat_tool_choice(choice: JSONObject | None, *, has_tools: bool) -> str | JSONObject | None:
    """Convert `tool_choice` to the chat format.

    Raises:
        TrouperValidationError: it is malformed.

    `any` becomes `required`.  Returns None without tools, where a choice would have no meaning.
    """
    if choice is None:
        return None
    kind, name = choice.get("type"), choice.get("name")
    if kind == "tool":
        if not isinstance(name, str):
            raise invalid("tool_choice.name", "must be the name of a tool")
        return {"type": "function", "function": {"name": name}}
    if not isinstance(kind, str) or kind not in CHOICES:
        raise invalid("tool_choice.type", "must be auto, any, tool or none", kind)
    return None if kind == "auto" and not has_tools else CHOICES[kind]


def client_name(parameter: str) -> str:
    """Translate `tools[i].function…`, a place in the chat, to the client's name of that place.

    Errors then mention a field that the client has really sent, such as `tools[0].input_schema`.
    """
    name = parameter.replace(".function", "", 1)
    return name.replace(".parameters", ".input_schema", 1)


def _chat_tool(place: str, tool: JSONObject) -> JSONObject:
    kind = tool.get("type", "custom")
    if not isinstance(kind, str):
        raise invalid(f"{place}.type", "must be custom", kind)
    if kind != "custom":
        reason = f"{kind[:64]} is a built-in tool, and only tools with an input_schema can be used; {NO_TOOLS}"
        raise unsupported(f"{place}.type", reason)
    if not isinstance(tool.get("input_schema"), dict):
        raise invalid(f"{place}.input_schema", "must be an object")
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    function |= {
        name: tool[name] for name in ("description", "strict") if tool.get(name) is not None
    }
    return {"type": "function", "function": function}
