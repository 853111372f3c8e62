"""Parsers of a model's answers for programs that have the text already, and dialects that a file adds."""

import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from trouper.actors.rendering.tokenizers.tokenizer import Tokenizer
from trouper.config.args import EngineArgs
from trouper.config.model import ModelConfig, tokenizer_path
from trouper.errors import TrouperValidationError, invalid
from trouper.frontends.dialects.answer_format import AUTO, AnswerFormat, answer_format
from trouper.frontends.dialects.core import AnswerParser
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
    """Make a parser of one answer of a model: `feed` it text, then `end` it; both return events.

    Reads the model's config and tokenizer, and loads no weights.

    Args:
        model: folder or hub id.
        tools: as `LLM.chat` takes them; without any no calls are looked for.
        tool_call_parser, reasoning_parser: as the options of `trouper serve`.
        prompt: the rendered prompt, which may have opened the reasoning.

    Raises:
        TrouperValidationError: a parser that is not known, or a tool that is no function.
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
    """Find the format of a model's answers.

    Args:
        chat_template: in place of the tokenizer's own.
        more: dialects beside those of the table.
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
    """Run a Python file of the operator's and return its `DIALECTS`.

    Raises:
        TrouperValidationError: it cannot be run, or names no dialects.
    """
    try:
        found: Any = runpy.run_path(str(path)).get("DIALECTS")
    except (Exception, SystemExit) as error:
        raise TrouperValidationError(
            f"{PLUGIN}: {path} cannot be run: {error!r}", parameter=PLUGIN, value=str(path)
        ) from error
    dialects = cast("Sequence[Any]", found) if isinstance(found, list | tuple) else ()
    if not dialects or not all(isinstance(each, Dialect) for each in dialects):
        raise invalid(PLUGIN, "must define DIALECTS, a list of Dialect", str(path))
    return tuple(dialects)


def _schema(tool: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    function: Any = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(name := function.get("name"), str):  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        raise invalid("tools", "each must have a function with a name", tool)
    fields = cast("Mapping[str, Any]", function)
    return name, fields.get("parameters") or {}
