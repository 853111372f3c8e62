"""Parse a model's answers into text, reasoning and tool calls outside of the server.

The server parses answers while it streams them. Programs that already have the text use `trouper.parsing`, which is
this module. Operators can add dialects of tool calls with a Python file (`--tool-parser-plugin`), read here too.
"""

import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from trouper.actors.rendering.tokenizer import Tokenizer
from trouper.config.args import EngineArgs
from trouper.config.model import ModelConfig, tokenizer_path
from trouper.errors import TrouperValidationError, invalid
from trouper.frontends.dialects.core import AUTO, AnswerFormat, AnswerParser, answer_format
from trouper.frontends.dialects.table import Dialect

PLUGIN = "tool_parser_plugin"


def parser_for(
    model: str,
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    tool_call_parser: str = AUTO,
    reasoning_parser: str = AUTO,
    prompt: str = "",
) -> AnswerParser:
    """Create a parser for one answer of a model: call `feed` with text, then `end`; both return events.

    It reads the model's config and tokenizer but loads no weights.

    Args:
        model: folder or hub id.
        tools: tools in the format of `LLM.chat`; without tools, tool calls remain text.
        tool_call_parser, reasoning_parser: values of the same options of `trouper serve`.
        prompt: the rendered prompt, because some templates open the reasoning there.

    Raises:
        TrouperValidationError: a parser is unknown, or a tool is not a function with a name.
    """
    args = EngineArgs(model=model)
    tokenizer = Tokenizer.load(tokenizer_path(args, ModelConfig.load(args)))
    found = format_of(
        tokenizer, None, tool_call_parser=tool_call_parser, reasoning_parser=reasoning_parser
    )
    return found.parser(dict(map(_schema, tools)), prompt)


def format_of(
    tokenizer: Tokenizer,
    chat_template: str | None,
    *,
    tool_call_parser: str,
    reasoning_parser: str,
    more: Sequence[Dialect] = (),
) -> AnswerFormat:
    """Determine how a model writes reasoning and tool calls, from its chat template and special tokens.

    Args:
        chat_template: replaces the tokenizer's own templates.
        more: dialects in addition to the built-in table.
    """
    added = tokenizer.added_tokens
    return answer_format(
        tokenizer.chat_templates.values() if chat_template is None else [chat_template],
        {text: id for id, text in added.items()},
        {text for id, text in added.items() if id in tokenizer.special_ids},
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        more=more,
    )


def read_plugin(path: Path) -> tuple[Dialect, ...]:
    """Run the operator's Python file and return its `DIALECTS`.

    Raises:
        TrouperValidationError: the file raises an error, or does not define `DIALECTS`.
    """
    try:
        found: Any = runpy.run_path(str(path)).get("DIALECTS")
    except (Exception, SystemExit) as error:
        raise TrouperValidationError(
            f"{PLUGIN}: {path} cannot be run: {error!r}", parameter=PLUGIN, value=str(path)
        ) from error
    dialects = cast("Sequence[Any]", found) if isinstance(found, list | tuple) else ()
    if not dialects or not all(isinstance(each, Dialect) for each in dialects):
        raise invalid(PLUGIN, "must define DIALECTS, a list of Dialect objects", str(path))
    return tuple(dialects)


def _schema(tool: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    function: Any = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(name := function.get("name"), str):  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        raise invalid("tools", "each must have a function with a name", tool)
    fields = cast("Mapping[str, Any]", function)
    return name, fields.get("parameters") or {}
