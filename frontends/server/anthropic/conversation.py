"""Conversations of the Messages API as chats.  Pure."""

from typing import Any, cast

from trouper.errors import invalid
from trouper.frontends.server.anthropic.requests import CountTokensRequest, MessagesRequest
from trouper.frontends.server.openai.requests import ChatRequest
from trouper.frontends.server.unsupported import (
    NO_GRAMMAR,
    NO_MEDIA,
    NO_THINKING,
    NO_TOOLS,
    unsupported,
)

ROLES = ("user", "assistant")
NOT_BUILT = {
    "image": NO_MEDIA,
    "document": NO_MEDIA,
    "search_result": NO_MEDIA,
    "tool_use": NO_TOOLS,
    "tool_result": NO_TOOLS,
    "server_tool_use": NO_TOOLS,
    "thinking": NO_THINKING,
    "redacted_thinking": NO_THINKING,
}
SAME_NAME = ("model", "temperature", "top_p", "top_k", "max_tokens", "stream", "request_id")
Parts = list[dict[str, Any]]


def chat_of(request: CountTokensRequest) -> ChatRequest:
    """Return the conversation, and how it is to be continued, as a chat.

    Neighbours of one role become one message.  A last message of the assistant is the beginning of the reply.

    Raises:
        TrouperValidationError, UnsupportedFeatureError: naming the field.
    """
    if (request.output_config or {}).get("format") is not None:
        raise unsupported("output_config.format", NO_GRAMMAR)
    if not request.messages:
        raise invalid("messages", "must not be empty")
    messages = _messages(request)
    fields = {name: getattr(request, name, None) for name in SAME_NAME}
    if isinstance(request, MessagesRequest):
        fields["stop"] = request.stop_sequences
    if messages[-1]["role"] == "assistant":
        fields |= {"add_generation_prompt": False, "continue_final_message": True}
    return ChatRequest(messages=messages, **fields)


def _messages(request: CountTokensRequest) -> list[dict[str, Any]]:
    """Return the messages of a chat, the system's first."""
    messages: list[dict[str, Any]] = []
    if request.system:
        messages.append({"role": "system", "content": _parts("system", request.system)})
    for i, message in enumerate(request.messages):
        role = message.get("role")
        if role not in ROLES:
            raise invalid(
                f"messages[{i}].role", "must be user or assistant; the system's is a field"
            )
        parts = _parts(f"messages[{i}].content", message.get("content"))
        if messages[-1:] and messages[-1]["role"] == role:
            messages[-1]["content"] += parts
        else:
            messages.append({"role": role, "content": parts})
    for message in messages:
        if len(message["content"]) == 1:
            message["content"] = message["content"][0]["text"]
    return messages


def _parts(place: str, content: object) -> Parts:
    """Return the blocks of a message, which all are text."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not content:
        raise invalid(place, "must be a string or a list of blocks that is not empty")
    return [_part(f"{place}[{i}]", block) for i, block in enumerate(cast("list[object]", content))]


def _part(place: str, block: object) -> dict[str, Any]:
    if not isinstance(block, dict):
        raise invalid(place, "must be a block")
    fields = cast("dict[str, Any]", block)
    kind, text = fields.get("type"), fields.get("text")
    if isinstance(kind, str) and kind in NOT_BUILT:
        raise unsupported(f"{place}.type", f"no block of type {kind} is; {NOT_BUILT[kind]}")
    if kind != "text":
        raise invalid(f"{place}.type", "must be text")
    if not isinstance(text, str):
        raise invalid(f"{place}.text", "must be a string")
    return {"type": "text", "text": text}
