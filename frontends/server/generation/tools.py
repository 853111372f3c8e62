"""Check the tools of a chat, and convert the calls of its answer to OpenAI's format.  Pure.

Some models' chat templates render the ids of earlier calls and accept only ids of a certain format, which the table of dialects specifies.
An id is a function of the reply, the choice and the call, so it is unique and needs no state.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from string import ascii_letters, digits
from typing import Any, Literal, NamedTuple, cast

import msgspec
from msgspec import UNSET, UnsetType

from trouper.errors import invalid
from trouper.frontends.dialects.calls import Arguments, CallStarted, ParserEvent
from trouper.frontends.dialects.core import AnswerFormat
from trouper.frontends.dialects.grammar import forced_calls, strict_calls
from trouper.frontends.dialects.table import BY_NAME, IdForm

LETTERS = ascii_letters + digits
NUM_LETTERS = 9  # of Mistral's
RANDOM = "chatcmpl-tool-"  # vLLM's


class CallIds(NamedTuple):
    """Make the ids of the calls of one reply.

    Attributes:
        form: the format of ids in the model's dialect.
        seed: a string unique to the reply.
        num_before: the number of calls earlier in the conversation.
    """

    form: IdForm
    seed: str
    num_before: int = 0

    def of(self, index: int, name: str, choice: int = 0, prefix: str = "") -> str:
        """Return the id of a call.

        Args:
            index: the number of the call in its choice, from 0.
            name: the name of the tool.
            choice: the number of the choice.
            prefix: the API's prefix, for models that accept any id.  Without it, the id has vLLM's format.
        """
        if self.form == "numbered":
            return f"functions.{name}:{self.num_before + index}"
        if self.form == "letters" or not prefix:
            digest = blake2b(f"{self.seed}_{choice}_{index}".encode(), digest_size=16)
            if self.form != "letters":
                return RANDOM + digest.hexdigest()
            return _spelled(int.from_bytes(digest.digest()))
        return f"{prefix}_{self.seed}_{index}"


def num_calls(messages: Iterable[Mapping[str, Any]]) -> int:
    """Return the number of calls in a conversation, after which dialects with numbered calls continue to count."""
    given: list[Any] = [message.get("tool_calls") for message in messages]
    return sum(len(cast("list[Any]", calls)) for calls in given if isinstance(calls, list))


def _spelled(number: int) -> str:
    letters: list[str] = []
    for _ in range(NUM_LETTERS):
        number, place = divmod(number, len(LETTERS))
        letters.append(LETTERS[place])
    return "".join(letters)


MAX_TOOLS = 512
# The longest name of a tool in characters, as in Anthropic's API and in MCP servers.
MAX_NAME = 128
TOOL_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_NAME}}}")

JSONObject = dict[str, Any]


class FunctionCall(msgspec.Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """Represent a tool call, or a part of one in a stream.  Only parts have an index.

    In a stream, the first part has id and name, and later parts only more text of the arguments.
    """

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionCall


# The schema of a tool without `parameters`: by OpenAI's API it has none.
NO_PARAMETERS: JSONObject = {"type": "object", "properties": {}, "additionalProperties": False}
StrictLevel = Literal["auto", "function", "parameter"]


class ToolUse(msgspec.Struct, frozen=True):
    """The tool calls that a request allows in its answer.

    Attributes:
        schemas: schemas of the parameters by tool; empty if no calls are wanted.
        strict: names of the tools with `strict`; their arguments always match the schema, even in optional calls.
        is_forced: whether the answer must consist of calls.
        is_named: whether the request names the one tool to call.
        is_parallel: whether the answer may contain several calls.
    """

    schemas: dict[str, JSONObject] = {}
    strict: frozenset[str] = frozenset()
    is_forced: bool = False
    is_named: bool = False
    is_parallel: bool = True

    def grammar(self, answers: AnswerFormat, level: StrictLevel) -> str | None:
        """Return the grammar of the answer in Lark.  Returns None if the answer may be any text.

        Args:
            level: the constraints on optional calls: the arguments of strict tools (auto), also the names of all tools
                (function), or also the arguments of all tools (parameter).

        Raises:
            TrouperValidationError: the schema of a tool's parameters is not an object.
        """
        dialect = answers.tools or BY_NAME["json"]
        options: dict[str, Any] = {"is_parallel": self.is_parallel, "token_ids": answers.token_ids}
        if self.is_forced:
            return forced_calls(dialect, self.schemas, **options)
        if not self.schemas or (level == "auto" and not self.strict):
            return None
        is_checked = self.schemas.keys() if level == "parameter" else self.strict
        schemas = {n: s if n in is_checked else {} for n, s in self.schemas.items()}
        return strict_calls(dialect, schemas, **options)


NO_TOOL_USE = ToolUse()


def tool_use(
    tools: list[JSONObject] | None, choice: object, *, is_parallel: bool | None = None
) -> ToolUse:
    """Read the tools of a request and its `tool_choice`.

    Raises:
        TrouperValidationError: naming the field.

    Checks the number of tools, their names, and that a chosen tool exists.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice", "needs tools")
        return NO_TOOL_USE
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"must contain at most {MAX_TOOLS} tools", len(tools))
    known = [_function(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    schemas = {name: schema for name, schema, _ in known}
    if choice == "none":
        return NO_TOOL_USE
    is_forced, names = choice == "required", list(schemas)
    is_named = False
    if isinstance(choice, dict):
        given = cast("JSONObject", choice)
        is_named = given.get("type") == "function"
        is_forced, names = (True, [_chosen(given, "tool_choice")]) if is_named else _allowed(given)
        for name in names:
            if name not in schemas:
                raise invalid("tool_choice", "must name one of the tools", name)
    elif choice not in (None, "auto", "required"):
        raise invalid("tool_choice", "must be none, auto, required or a tool", choice)
    return ToolUse(
        schemas={name: schemas[name] for name in names},
        strict=frozenset(name for name, _, is_strict in known if is_strict and name in names),
        is_forced=is_forced,
        is_named=is_named,
        is_parallel=is_parallel is not False and not is_named,
    )


def _function(tool: JSONObject, place: str) -> tuple[str, JSONObject, bool]:
    """Return the name of a tool, the schema of its parameters, and whether it is strict."""
    if tool.get("type", "function") != "function":
        raise invalid(f"{place}.type", "must be function")
    function: Any = tool.get("function")
    if not isinstance(function, dict):
        raise invalid(f"{place}.function", "must be an object")
    fields = cast("JSONObject", function)
    name, parameters = fields.get("name"), fields.get("parameters")
    if not isinstance(name, str) or TOOL_NAME.fullmatch(name) is None:
        raise invalid(
            f"{place}.function.name",
            f"must be 1 to {MAX_NAME} of the characters A-Z a-z 0-9 _ . -",
        )
    if parameters is not None and not isinstance(parameters, dict):
        raise invalid(f"{place}.function.parameters", "must be an object")
    schema = NO_PARAMETERS if parameters is None else cast("JSONObject", parameters)
    return name, schema, fields.get("strict") is True


def _chosen(choice: JSONObject, place: str) -> str:
    """Return the name in `{"type": "function", "function": {"name": …}}`."""
    function: Any = choice.get("function")
    name: Any = cast("JSONObject", function).get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise invalid(place, "must name a function")
    return name


def _allowed(choice: JSONObject) -> tuple[bool, list[str]]:
    """Read a choice of the type `allowed_tools`: whether a call is required, and the names."""
    given: Any = choice.get("allowed_tools")
    if choice.get("type") != "allowed_tools" or not isinstance(given, dict):
        raise invalid("tool_choice", "type must be function or allowed_tools", choice.get("type"))
    fields = cast("JSONObject", given)
    mode, tools = fields.get("mode", "auto"), fields.get("tools")
    if mode not in ("auto", "required"):
        raise invalid("tool_choice", "the mode of allowed_tools must be auto or required", mode)
    if not isinstance(tools, list) or not tools:
        raise invalid("tool_choice", "allowed_tools must list tools")
    each = cast("list[Any]", tools)
    choices = [cast("JSONObject", tool) if isinstance(tool, dict) else {} for tool in each]
    return mode == "required", [_chosen(tool, "tool_choice") for tool in choices]


class CallDeltas:
    """Convert the parser's events of one choice to OpenAI's tool calls, with ids.

    It remembers whether there were calls, because the finish reason of the choice depends on it.
    """

    def __init__(self, ids: CallIds, choice: int) -> None:
        self._ids = ids
        self._choice = choice
        self.has_calls = False

    def render(self, parts: Sequence[ParserEvent]) -> list[ToolCall]:
        """Return the deltas of calls: one with id and name for each new call, then parts of the arguments.

        Adjacent parts of one call are merged into one delta.
        """
        deltas: list[ToolCall] = []
        for part in parts:
            if isinstance(part, CallStarted):
                self.has_calls = True
                function = FunctionCall(name=part.name, arguments="")
                id = self._ids.of(part.index, part.name, self._choice)
                deltas.append(ToolCall(index=part.index, id=id, type="function", function=function))
            elif isinstance(part, Arguments):
                if deltas and deltas[-1].index == part.index:
                    deltas[-1].function.arguments += part.text
                else:
                    function = FunctionCall(arguments=part.text)
                    deltas.append(ToolCall(index=part.index, function=function))
        return deltas
