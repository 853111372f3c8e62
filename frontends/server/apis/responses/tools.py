"""Convert tools of the Responses API to chat functions, and calls of the functions back.  Pure.

A chat has only functions.  A namespace becomes its functions, a custom tool a function whose single argument is the text, and
`local_shell` a function with the arguments of its action.  A tool that the server itself would have to run is left out if other
tools remain.
"""

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any, Literal, NamedTuple, cast

import msgspec

from trouper.errors import invalid
from trouper.frontends.server.generation.tools import MAX_NAME
from trouper.frontends.server.shared.errors import NO_TOOLS, unsupported

JSONObject = dict[str, Any]
ToolKind = Literal["function", "custom", "local_shell"]
FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
# Bytes of the digest that replaces the end of an overlong name.
DIGEST = 4
SHELL = "local_shell"
SHELL_SCHEMA: JSONObject = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}},
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer"},
        "env": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "required": ["command"],
    "additionalProperties": False,
}
SHELL_DESCRIPTION = "Runs a command, given as a list of its words, on the user's machine."


class ClientTool(NamedTuple):
    """Name a tool that the client runs.  A call in the answer is converted back to this kind and these names."""

    kind: ToolKind
    name: str
    namespace: str | None = None


class CustomInput(msgspec.Struct):
    """Hold the arguments of the function that represents a custom tool."""

    input: str


class ResponseTools:
    """Translate the tools of one request to chat functions and back.

    Attributes:
        functions: the functions for the chat template.
        shown: the client's tools in use.
        left_out: the types of the tools that cannot run here.

    Args:
        given: the tools in the request.

    Raises:
        TrouperValidationError: a tool is malformed; the error names the field.
        UnsupportedFeatureError: all tools would have to run on the server.
    """

    def __init__(self, given: Sequence[JSONObject] | None) -> None:
        self.functions: list[JSONObject] = []
        self.shown: list[JSONObject] = []
        self.left_out: list[str] = []
        self._places: list[str] = []
        self._tools: dict[str, ClientTool] = {}
        for i, tool in enumerate(given or ()):
            self._add(f"tools[{i}]", tool)
        if self.left_out and not self.functions:
            kind = self.left_out[0]
            reason = f"{kind} is a built-in tool, which this server cannot run; {NO_TOOLS}"
            raise unsupported("tools[0].type", reason)

    def __repr__(self) -> str:
        return f"<ResponseTools {[*self._tools]}, without {self.left_out}>"

    def called(self, function: str) -> ClientTool:
        """Return the tool to which a call of this function belongs.

        An unknown function is treated as a function tool of the same name.
        """
        return self._tools.get(function) or ClientTool("function", function)

    def client_name(self, parameter: str) -> str:
        """Translate `tools[i].function…`, a path in the chat, to the client's path of the same field."""
        number, _, rest = parameter.removeprefix("tools[").partition("]")
        if not number.isdigit() or int(number) >= len(self._places):
            return parameter
        return self._places[int(number)] + rest.replace(".function", "", 1)

    def choice(self, choice: str | JSONObject | None) -> str | JSONObject | None:
        """Convert `tool_choice` to the chat format.

        Raises:
            TrouperValidationError, UnsupportedFeatureError: it names a tool that cannot be called.
        """
        if not isinstance(choice, dict):
            return None if choice == "auto" and not self.functions else choice
        if choice.get("type") != "allowed_tools":
            return self._chosen(choice, "tool_choice")
        given: Any = choice.get("tools")
        if not isinstance(given, list):
            raise invalid("tool_choice.tools", "must be a list of tools")
        places = [f"tool_choice.tools[{i}]" for i in range(len(cast("list[Any]", given)))]
        pairs = zip(cast("list[Any]", given), places, strict=True)
        tools = [self._chosen(tool, at) for tool, at in pairs if not self._is_left_out(tool)]
        mode = choice.get("mode", "auto")
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    def _add(self, place: str, tool: JSONObject) -> None:
        kind = _kind(tool, place)
        found = [*_callable_tools(place, tool)]
        if not found and kind != "namespace":
            self.left_out.append(kind[:64])
            return
        self.shown.append(tool)
        for where, known, function in found:
            name: Any = function.get("name")
            # The chat refuses other names than strings.
            if isinstance(name, str):
                if name in self._tools and self._tools[name] != known:
                    raise invalid(f"{where}.name", "two tools have this name", name)
                self._tools[name] = known
            self._places.append(where)
            self.functions.append({"type": "function", "function": function})

    def _is_left_out(self, tool: Any) -> bool:
        return isinstance(tool, dict) and cast("JSONObject", tool).get("type") in self.left_out

    def _chosen(self, tool: Any, place: str) -> JSONObject:
        """Return the one tool named by a choice, in the chat format."""
        kind = _kind(tool, place)
        if kind not in ("function", "custom", SHELL):
            reason = f"{kind[:64]} is not a tool that a client can run; {NO_TOOLS}"
            raise unsupported(f"{place}.type", reason)
        name, namespace = tool.get("name"), tool.get("namespace")
        if kind == SHELL:
            name = SHELL
        if not isinstance(name, str):
            raise invalid(f"{place}.name", "must be the name of a tool")
        return {"type": "function", "function": {"name": self._function(name, namespace)}}

    def _function(self, name: str, namespace: object) -> str:
        """Return the name of a tool's function.  The namespace is optional if the tool's name is unique."""
        if isinstance(namespace, str):
            return function_name(name, namespace)
        if name in self._tools:
            return name
        found = [function for function, tool in self._tools.items() if tool.name == name]
        return found[0] if len(found) == 1 else name


def function_name(name: str, namespace: str | None) -> str:
    """Return the name of a tool's function, which begins with the namespace.

    Long names are shortened with a digest, so they remain unique within the limit of the chat API.
    """
    if not namespace:
        return name
    whole = f"{namespace.removesuffix('__')}__{name}"
    if len(whole) <= MAX_NAME:
        return whole
    digest = blake2b(whole.encode(errors="replace"), digest_size=DIGEST).hexdigest()
    return f"{whole[: MAX_NAME - len(digest) - 1]}_{digest}"


def custom_arguments(text: str) -> str:
    """Return the arguments of the function for a custom tool.

    A custom tool takes free text, which a chat function can only carry as the member of an object.
    """
    return msgspec.json.encode(CustomInput(text)).decode()


def custom_input(arguments: str) -> str:
    """Return the input of a custom tool.  Malformed arguments become the input unchanged."""
    try:
        return msgspec.json.decode(arguments, type=CustomInput).input
    except msgspec.MsgspecError:
        return arguments


def shell_action(arguments: str) -> JSONObject | None:
    """Return the action of a `local_shell` call, or None if its arguments contain no command."""
    try:
        fields = msgspec.json.decode(arguments, type=dict[str, Any])
    except msgspec.MsgspecError:
        return None
    words: Any = fields.get("command")
    if not isinstance(words, list) or not all(isinstance(w, str) for w in cast("list[Any]", words)):
        return None
    return {
        "type": "exec",
        "env": {},
        **{k: fields[k] for k in SHELL_SCHEMA["properties"] if k in fields},
    }


def _kind(tool: Any, place: str) -> str:
    kind: Any = cast("JSONObject", tool).get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str):
        raise invalid(f"{place}.type", "must be the type of a tool", kind)
    return kind


def _callable_tools(
    place: str, tool: JSONObject, namespace: str | None = None
) -> Iterator[tuple[str, ClientTool, JSONObject]]:
    """Yield each tool that the client runs, with the client's name and the function."""
    name = tool.get("name")
    match _kind(tool, place):
        case "function":
            function = {key: tool[key] for key in FUNCTION_FIELDS if tool.get(key) is not None}
            if isinstance(name, str):
                function["name"] = function_name(name, namespace)
            yield place, ClientTool("function", str(name), namespace), function
        case "custom":
            known = ClientTool("custom", str(name), namespace)
            yield place, known, _custom_function(place, tool, namespace)
        case "local_shell":
            function = {"name": SHELL, "description": SHELL_DESCRIPTION, "parameters": SHELL_SCHEMA}
            yield place, ClientTool("local_shell", SHELL), function
        case "namespace":
            yield from _tools_of_namespace(place, tool)
        case _:
            pass


def _tools_of_namespace(
    place: str, given: JSONObject
) -> Iterator[tuple[str, ClientTool, JSONObject]]:
    """Yield the tools of a namespace.  The description of the namespace goes before the first tool's."""
    name, tools = given.get("name"), given.get("tools")
    if not isinstance(name, str) or not name:
        raise invalid(f"{place}.name", "must be the name of the namespace")
    if not isinstance(tools, list):
        raise invalid(f"{place}.tools", "must be a list of tools")
    about = given.get("description")
    for i, tool in enumerate(cast("list[Any]", tools)):
        at = f"{place}.tools[{i}]"
        if _kind(tool, at) not in ("function", "custom"):
            raise invalid(f"{at}.type", "must be function or custom in a namespace", tool["type"])
        for where, known, function in _callable_tools(at, tool, name):
            if isinstance(about, str) and about:
                own = function.get("description")
                described = f"{name}: {about}" + (f"\n\n{own}" if own else "")
                yield where, known, {**function, "description": described}
                about = None
            else:
                yield where, known, function


def _custom_function(place: str, tool: JSONObject, namespace: str | None) -> JSONObject:
    """Return a function with one argument, the text, for a custom tool.

    A regular expression constrains the argument.  A grammar only becomes part of the description, because a grammar of calls cannot contain
    another grammar inside a JSON string.
    """
    given: Any = tool.get("format")
    form = cast("JSONObject", given) if isinstance(given, dict) else {}
    about: Any = tool.get("description")
    text: JSONObject = {"type": "string"}
    function: JSONObject = {}
    description = about if isinstance(about, str) else ""
    if form.get("type") == "grammar":
        syntax, definition = form.get("syntax"), form.get("definition")
        if syntax not in ("lark", "regex") or not isinstance(definition, str):
            rule = "a grammar must have the syntax lark or regex and a definition"
            raise invalid(f"{place}.format", rule)
        if syntax == "regex":
            text["pattern"] = f"^(?:{definition})$"
            function["strict"] = True
        description += f"\n\nThe input must match this {syntax}:\n{definition}"
    elif form.get("type", "text") != "text":
        raise invalid(f"{place}.format.type", "must be text or grammar", form.get("type"))
    name = tool.get("name")
    if isinstance(name, str):
        function["name"] = function_name(name, namespace)
    return {
        **function,
        "description": description.strip(),
        "parameters": {
            "type": "object",
            "properties": {"input": text},
            "required": ["input"],
            "additionalProperties": False,
        },
    }
