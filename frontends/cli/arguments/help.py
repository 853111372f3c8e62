"""The help of commands: plain text by panels, in which no width of a terminal cuts a name or a sentence."""

from collections.abc import Iterator
from typing import Any

from typer.core import TyperCommand, TyperGroup

from trouper.errors import UnsupportedFeatureError
from trouper.frontends.cli.arguments.misplaced import check_command_first, check_no_text
from trouper.frontends.cli.arguments.other_programs import COMMANDS, FOR_ENGINE, settle

ARGUMENTS, OPTIONS = "Arguments", "Options"  # panels of parameters that name none
Row = tuple[str, str]


class PanelCommand(TyperCommand):
    """A command whose help lists its options by the panel that each of them names."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        kept, ctx.meta[FOR_ENGINE] = settle(self.params, args)
        return super().parse_args(ctx, kept)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[Row]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                usual = ARGUMENTS if param.param_type_name == "argument" else OPTIONS
                panel = getattr(param, "rich_help_panel", None) or usual
                panels.setdefault(panel, []).extend(_rows(record, formatter.width))
        # Those that belong to this command alone come first.
        for panel in sorted(panels, key=lambda name: name not in (ARGUMENTS, OPTIONS)):
            with formatter.section(panel):
                formatter.write_dl(panels[panel])


class TextCommand(PanelCommand):
    """A command that takes its text by `-q`, and says so where the text follows the arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.allow_extra_args = True
        rest = super().parse_args(ctx, args)
        check_no_text(ctx)
        return rest


class WholeSentenceGroup(TyperGroup):
    """A group of commands whose help shows the first paragraph of each, whole."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Ollama's commands have hints of their own.
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
    """Yield the row of an option; a switch and its opposite take a line each where one is too short."""
    names, text = record
    names = names.replace(" range>", ">")  # the range itself stands behind the text
    if len(names) + 2 > width and " / " in names:
        names, opposite = names.split(" / ")
        yield f"{names} /", ""
        names = opposite
    yield names, text
