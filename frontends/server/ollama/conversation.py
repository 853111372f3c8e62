"""Requests of Ollama's API as chats and completions.  Pure."""

import json
from typing import Any, cast

from trouper.actors.rendering.media.parts import Base64File
from trouper.errors import invalid
from trouper.frontends.server.generation.requests import ResponseFormat
from trouper.frontends.server.generation.structured import closed
from trouper.frontends.server.ollama.requests import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaOptions,
    OllamaRequest,
    sampling_fields,
)
from trouper.frontends.server.openai.requests import CompletionRequest, DerivedChat

JSONObject = dict[str, Any]
EFFORTS = ("low", "medium", "high", "max")


def chat_of(request: OllamaChatRequest, options: OllamaOptions) -> DerivedChat:
    """Convert a conversation to a chat.

    Calls of earlier turns are converted, and results of tools get the names of their calls.

    Raises:

        TrouperValidationError, UnsupportedFeatureError: naming the field.
    """
    messages = [_message(i, each) for i, each in enumerate(request.messages or ())]
    _name_results(messages)
    return DerivedChat(messages=messages, tools=request.tools or None, **_shared(request, options))


def chat_of_prompt(request: OllamaGenerateRequest, options: OllamaOptions) -> DerivedChat:
    """Convert a prompt, and the system's if there is one, to a chat of one turn.

    `/api/generate` uses the chat template unless the request is raw, as Ollama does.
    """
    system = [{"role": "system", "content": request.system}] if request.system else []
    content = _with_images("images", request.images, request.prompt)
    messages = [*system, {"role": "user", "content": content}]
    return DerivedChat(messages=messages, **_shared(request, options))


def completion_of(
    request: OllamaGenerateRequest, options: OllamaOptions, max_tokens: int
) -> CompletionRequest:
    """Convert a prompt that no template changes.

    Args:
        max_tokens: the limit of a request that gives none: completions of OpenAI's API would stop at 16.
    """
    if request.system:
        rule = "is not used with raw or suffix; put it into the prompt"
        raise invalid("system", rule)
    if request.images:
        raise invalid("images", "are not used with raw or suffix; use /api/chat")
    if request.think:
        raise invalid("think", "is not used with raw or suffix, whose answers are not parsed")
    shared = _shared(request, options)
    for name in ("reasoning_effort", "include_reasoning", "template_defaults", "top_logprobs"):
        shared.pop(name, None)
    if shared.pop("logprobs", None):
        shared["logprobs"] = request.top_logprobs or 0
    shared.setdefault("max_tokens", max_tokens)
    return CompletionRequest(prompt=request.prompt, suffix=request.suffix, **shared)


def _shared(request: OllamaRequest, options: OllamaOptions) -> JSONObject:
    return {
        **sampling_fields(options),
        **_thinking(request.think),
        "model": request.model,
        # Ollama streams by default.
        "stream": request.stream is not False,
        "response_format": _response_format(request.format),
        "logprobs": request.logprobs or None,
        "top_logprobs": request.top_logprobs or None,
    }


def _thinking(think: bool | str | None) -> JSONObject:
    if think is None or think == "":
        return {}
    if isinstance(think, bool):
        fields: JSONObject = {"template_defaults": {"enable_thinking": think}}
        return fields if think else {**fields, "include_reasoning": False}
    if think not in EFFORTS:
        raise invalid("think", f"must be true, false or one of {', '.join(EFFORTS)}", think)
    return {"reasoning_effort": think, "template_defaults": {"enable_thinking": True}}


def _response_format(given: str | JSONObject | None) -> ResponseFormat | None:
    if given is None or given == "":
        return None
    if given == "json":
        return ResponseFormat(type="json_object")
    if isinstance(given, str):
        raise invalid("format", 'must be "json" or a JSON schema, which is an object', given)
    return ResponseFormat(type="json_schema", json_schema={"schema": closed(given)})


def _message(i: int, given: JSONObject) -> JSONObject:
    """Convert one message; fields that are not named here go to the template as they are."""
    place = f"messages[{i}]"
    message = {name: value for name, value in given.items() if value is not None}
    role, content = message.get("role"), message.setdefault("content", "")
    if not isinstance(role, str):
        raise invalid(f"{place}.role", "must be a string")
    if not isinstance(content, str):
        raise invalid(f"{place}.content", "must be a string")
    message["content"] = _with_images(f"{place}.images", message.pop("images", None), content)
    message["role"] = role.lower()
    thinking = message.pop("thinking", "")
    if not isinstance(thinking, str):
        raise invalid(f"{place}.thinking", "must be a string")
    if thinking:
        message["reasoning_content"] = thinking
    if calls := message.pop("tool_calls", None):
        if not isinstance(calls, list):
            raise invalid(f"{place}.tool_calls", "must be a list")
        message["tool_calls"] = [
            _call(f"{place}.tool_calls[{j}]", f"call_{i}_{j}", each)
            for j, each in enumerate(cast("list[Any]", calls))
        ]
    return message


def _with_images(place: str, images: Any, text: str) -> Any:
    """Return the content of a message: Ollama puts images in front of the text."""
    if not images:
        return text
    if not isinstance(images, list):
        raise invalid(place, "must be a list of files in base64")
    parts: list[JSONObject] = []
    for i, file in enumerate(cast("list[Any]", images)):
        if not isinstance(file, str | memoryview):
            raise invalid(f"{place}[{i}]", "must be a file in base64")
        text_of_file = cast("str | memoryview", file)
        parts.append({"type": "image", "image": Base64File(text_of_file)})
    return [*parts, {"type": "text", "text": text}] if text else parts


def _call(place: str, call_id: str, given: Any) -> JSONObject:
    function: Any = cast("JSONObject", given).get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict):
        raise invalid(f"{place}.function", "must be an object")
    fields = cast("JSONObject", function)
    name: Any = fields.get("name")
    arguments: Any = fields.get("arguments") or {}
    if not isinstance(name, str):
        raise invalid(f"{place}.function.name", "must be a string")
    if not isinstance(arguments, dict):
        raise invalid(f"{place}.function.arguments", "must be an object")
    text = json.dumps(arguments, ensure_ascii=False)
    id = cast("JSONObject", given).get("id")
    return {
        "id": id if isinstance(id, str) and id else call_id,
        "type": "function",
        "function": {"name": name, "arguments": text},
    }


def _name_results(messages: list[JSONObject]) -> None:
    """Give each result the id of its call: the last of that name, or without a name the next that has no result."""
    open_calls: list[JSONObject] = []
    for message in messages:
        if message["role"] == "assistant":
            open_calls += message.get("tool_calls", ())
        if message["role"] != "tool":
            continue
        name, call_id = message.pop("tool_name", None), message.get("tool_call_id")
        by_id = [each for each in open_calls if each["id"] == call_id]
        by_name = [each for each in open_calls if each["function"]["name"] == name]
        found = by_id or (by_name if name else open_calls)
        if found:
            message["tool_call_id"] = found[0]["id"]
            open_calls.remove(found[0])
