"""Tools of a chat: their check, and the calls of the answer as replies have them.  Pure."""

import re
from collections.abc import Sequence
from typing import Any, cast

from trouper.errors import invalid
from trouper.frontends.dialects.events import Arguments, CallStarted, ParserEvent
from trouper.frontends.server.openai.responses_types import FunctionCall, ToolCall
from trouper.frontends.server.unsupported import NO_GRAMMAR, unsupported

MAX_TOOLS = 512
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

JSONObject = dict[str, Any]


def tool_schemas(tools: list[JSONObject] | None, choice: object) -> dict[str, JSONObject]:
    """Return the parameters' JSON schema of each tool that may be called; none where no call is wanted.

    Raises:
        TrouperValidationError, UnsupportedFeatureError: naming the field.
    """
    if tools is None:
        if choice not in (None, "none"):
            raise invalid("tool_choice", "needs tools")
        return {}
    if not tools:
        raise invalid("tools", "must not be empty")
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"at most {MAX_TOOLS} tools")
    if choice == "none":
        return {}
    if choice == "required" or isinstance(choice, dict):
        raise unsupported("tool_choice", f"only none and auto are; {NO_GRAMMAR}")
    if choice not in (None, "auto"):
        raise invalid("tool_choice", "must be none, auto, required or a tool's name")
    return dict(_named_schema(tool, f"tools[{i}]") for i, tool in enumerate(tools))


def _named_schema(tool: JSONObject, place: str) -> tuple[str, JSONObject]:
    if tool.get("type", "function") != "function":
        raise invalid(f"{place}.type", "must be function")
    function: Any = tool.get("function")
    if not isinstance(function, dict):
        raise invalid(f"{place}.function", "must be an object")
    fields = cast("JSONObject", function)
    name, parameters = fields.get("name"), fields.get("parameters")
    if not isinstance(name, str) or TOOL_NAME.fullmatch(name) is None:
        raise invalid(
            f"{place}.function.name", "must be 1 to 64 of the characters A-Z a-z 0-9 _ . -"
        )
    if parameters is not None and not isinstance(parameters, dict):
        raise invalid(f"{place}.function.parameters", "must be an object")
    return name, cast("JSONObject", parameters or {})


class CallDeltas:
    """Numbers and names the calls of one choice."""

    def __init__(self, request_id: str, choice: int) -> None:
        self._id = f"call_{request_id}_{choice}"
        self.has_calls = False

    def render(self, parts: Sequence[ParserEvent]) -> list[ToolCall]:
        """Return the parts that belong to calls: id and name once, then pieces of the arguments."""
        deltas: list[ToolCall] = []
        for part in parts:
            if isinstance(part, CallStarted):
                self.has_calls = True
                function = FunctionCall(name=part.name, arguments="")
                id = f"{self._id}_{part.index}"
                deltas.append(ToolCall(index=part.index, id=id, type="function", function=function))
            elif isinstance(part, Arguments):
                if deltas and deltas[-1].index == part.index:
                    deltas[-1].function.arguments += part.text
                else:
                    function = FunctionCall(arguments=part.text)
                    deltas.append(ToolCall(index=part.index, function=function))
        return deltas
