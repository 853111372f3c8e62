"""Base classes of all commands: help in plain text by panels, and checks of the command line before typer's.

typer's rich help truncates long option names and needs another dependency. This help wraps at any terminal width but
never cuts a name or a sentence. Options of vLLM, llama.cpp and Ollama are handled first, see `other_programs.py`.
"""

from collections.abc import Iterator
from typing import Any

from typer.core import TyperCommand, TyperGroup

from trouper.errors import UnsupportedFeatureError
from trouper.frontends.cli.arguments.misplaced import (
    check_command_first,
    check_no_text,
    check_one_model,
)
from trouper.frontends.cli.arguments.other_programs import COMMANDS, FOR_ENGINE, settle

# The panels of parameters that do not name one.
ARGUMENTS, OPTIONS = "Arguments", "Options"
Row = tuple[str, str]


class PanelCommand(TyperCommand):
    """A command that groups its options in the help by panel, and accepts options of vLLM.

    Long commands have dozens of options; panels with headings make the help readable, and vLLM's spellings keep
    scripts working.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        kept, ctx.meta[FOR_ENGINE] = settle(self.params, args)
        _, _, given = self.make_parser(ctx).parse_args(list(kept))
        check_one_model(ctx, given)
        return super().parse_args(ctx, kept)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[Row]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                usual = ARGUMENTS if param.param_type_name == "argument" else OPTIONS
                panel = getattr(param, "rich_help_panel", None) or usual
                panels.setdefault(panel, []).extend(_rows(record, formatter.width))
        # The command's own options precede those that it shares with others.
        for panel in sorted(panels, key=lambda name: name not in (ARGUMENTS, OPTIONS)):
            with formatter.section(panel):
                formatter.write_dl(panels[panel])


class TextCommand(PanelCommand):
    """A command with its text in `-q`; a text after the arguments is an error that names `-q`.

    Without this check a forgotten `-q` would silently start an interactive session.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.allow_extra_args = True
        rest = super().parse_args(ctx, args)
        check_no_text(ctx)
        return rest


class WholeSentenceGroup(TyperGroup):
    """A group of commands with the complete first paragraph of each command in its help.

    typer would cut each description at the width of the terminal, in the middle of a sentence.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # `resolve_command` has better hints for Ollama's commands.
        if ctx.parent is None and args[:1] and args[0] not in COMMANDS:
            check_command_first(ctx, args, self.commands)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name not in self.commands and name in COMMANDS and ctx.parent is None:
            raise UnsupportedFeatureError(f"{name} is a command of Ollama: {COMMANDS[name]}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows: list[Row] = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            text = (command and command.help) or ""
            rows.append((name, " ".join(text.split("\n\n")[0].split())))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _rows(record: Row, width: int) -> Iterator[Row]:
    """Yield the help row of an option, or two rows if a switch and its opposite do not fit in one line."""
    names, text = record
    # The range itself follows the text.
    names = names.replace(" range>", ">")
    if len(names) + 2 > width and " / " in names:
        names, opposite = names.split(" / ")
        yield f"{names} /", ""
        names = opposite
    yield names, text
