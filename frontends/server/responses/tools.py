"""Tools of the Responses API, which have their fields beside the type, as tools of a chat.  Pure."""

from typing import Any, cast

from trouper.errors import invalid
from trouper.frontends.server.unsupported import NO_TOOLS, unsupported

JSONObject = dict[str, Any]
FUNCTION_FIELDS = ("name", "description", "parameters", "strict")


def chat_tools(tools: list[JSONObject] | None) -> list[JSONObject] | None:
    """Return the functions as a chat has them; None: there are none.

    Raises:
        UnsupportedFeatureError: one is no function but a tool that the server itself would have to run.
    """
    for i, tool in enumerate(tools or ()):
        _check_function(tool, f"tools[{i}]")
    return [_chat_tool(tool) for tool in tools or ()] or None


def chat_tool_choice(
    choice: str | JSONObject | None, *, has_tools: bool
) -> str | JSONObject | None:
    """Return the choice as a chat has it.

    Raises:
        TrouperValidationError, UnsupportedFeatureError: it names a tool that is no function.
    """
    if not isinstance(choice, dict):
        return None if choice == "auto" and not has_tools else choice
    if choice.get("type") != "allowed_tools":
        _check_function(choice, "tool_choice")
        return _chat_tool(choice, ("name",))
    tools = choice.get("tools")
    if not isinstance(tools, list):
        raise invalid("tool_choice.tools", "must be a list of tools")
    for i, tool in enumerate(cast("list[Any]", tools)):
        _check_function(tool, f"tool_choice.tools[{i}]")
    allowed = [_chat_tool(tool, ("name",)) for tool in cast("list[JSONObject]", tools)]
    return {
        "type": "allowed_tools",
        "allowed_tools": {"mode": choice.get("mode", "auto"), "tools": allowed},
    }


def _check_function(tool: Any, place: str) -> None:
    kind: Any = cast("JSONObject", tool).get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str):
        raise invalid(f"{place}.type", "must be function", kind)
    if kind != "function":
        reason = f"{kind[:64]} is a built-in tool, only functions are taken; {NO_TOOLS}"
        raise unsupported(f"{place}.type", reason)


def _chat_tool(tool: JSONObject, names: tuple[str, ...] = FUNCTION_FIELDS) -> JSONObject:
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}
