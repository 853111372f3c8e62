"""Tools of the Messages API as tools of a chat.  Pure."""

from typing import Any

from trouper.errors import invalid
from trouper.frontends.server.unsupported import NO_TOOLS, unsupported

JSONObject = dict[str, Any]
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_tools(tools: list[JSONObject] | None) -> list[JSONObject] | None:
    """Return the client's tools as functions; None: there are none.

    Raises:
        TrouperValidationError: a tool is not in its form.
        UnsupportedFeatureError: one is a tool that the server itself would have to know.
    """
    return [_chat_tool(f"tools[{i}]", tool) for i, tool in enumerate(tools or ())] or None


def chat_tool_choice(choice: JSONObject | None, *, has_tools: bool) -> str | JSONObject | None:
    """Return the choice as a chat has it.

    Raises:
        TrouperValidationError: it is not in its form.
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
    """Return the client's name of a part of a tool, which is `tools[i].function…` in a chat."""
    name = parameter.replace(".function", "", 1)
    return name.replace(".parameters", ".input_schema", 1)


def _chat_tool(place: str, tool: JSONObject) -> JSONObject:
    kind = tool.get("type", "custom")
    if not isinstance(kind, str):
        raise invalid(f"{place}.type", "must be custom", kind)
    if kind != "custom":
        reason = f"{kind[:64]} is a built-in tool, only those with an input_schema are; {NO_TOOLS}"
        raise unsupported(f"{place}.type", reason)
    if not isinstance(tool.get("input_schema"), dict):
        raise invalid(f"{place}.input_schema", "must be an object")
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    function |= {
        name: tool[name] for name in ("description", "strict") if tool.get(name) is not None
    }
    return {"type": "function", "function": function}
