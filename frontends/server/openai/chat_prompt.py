"""Conversations as clients send them, in the engine's form.  Pure."""

from typing import Any, cast

from trouper.errors import invalid
from trouper.frontends.server.openai.tools import tool_use
from trouper.frontends.server.settings import ServerSettings

MAX_MESSAGES = 4096
MAX_PARTS = 256  # in one message


def chat_prompt(request: Any, settings: ServerSettings) -> dict[str, Any]:
    """Return a conversation in the engine's form, from any request that carries one.

    Raises:
        TrouperValidationError, UnsupportedFeatureError: naming the field.
    """
    _check_messages(request.messages)
    if request.chat_template is not None and not settings.trust_request_chat_template:
        raise invalid("chat_template", "this server renders its own template only")
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
        raise invalid("messages", f"at most {MAX_MESSAGES} messages", len(messages))
    for i, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list) and len(cast("list[Any]", content)) > MAX_PARTS:
            raise invalid(f"messages[{i}].content", f"at most {MAX_PARTS} parts")
