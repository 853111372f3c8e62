"""Run the command of a study as `trouper bench` runs its own."""

from collections.abc import Callable, Sequence
from typing import Any

import typer

from trouper.frontends.cli.main import run_line
from trouper.frontends.cli.values import PanelCommand


def run_study(command: Callable[..., Any], arguments: Sequence[str] | None = None) -> int:
    """Run a command with these arguments, by default the process's own, and return its exit code.

    Options, reports and one-line errors are those of `trouper bench`, so a study needs no parser of its own.
    """
    study = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
    study.command(cls=PanelCommand)(command)
    return run_line(None if arguments is None else list(arguments), study)
