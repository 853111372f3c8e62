"""Write the page of every command and option from the commands themselves: `python scripts/cli_page.py`.

The page is `docs/reference/cli.md`. Generating it keeps it complete; a test compares it with the commands.
"""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from trouper.frontends.cli.main import app

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "cli.md"
HEAD = """# Every command and option

This page is written from the commands by `scripts/cli_page.py`. `trouper COMMAND --help` shows the same at a terminal, and
[Command line](../command-line.md) explains what the commands do. An option that shows another behind a slash is a switch.
Every command takes `--debug`, which shows the traceback of an error, and `--help`. In `trouper serve` each option can also come from a variable, `--max-model-len` from `TROUPER_MAX_MODEL_LEN`, or from a file by `--config`.
"""
Row = tuple[str, str]
Panels = dict[str, list[Row]]


def leaves(command: Any, *path: str) -> Iterator[tuple[str, Any]]:
    """Yield the full name and the command of each leaf below a command group.

    The page has one section for each of them, in the order of the help.
    """
    for name in sorted(command.list_commands(None)):
        below = command.get_command(None, name)
        if hasattr(below, "commands"):
            yield from leaves(below, *path, name)
        else:
            yield " ".join((*path, name)), below


def panels_of(command: Any, context: Any) -> Panels:
    """Return the rows of a command's parameters, grouped by help panel.

    Parameters without a panel come first.  A page shows the panels in the same order as the help.
    """
    found: Panels = {"": []}
    for param in command.params:
        record = param.get_help_record(context)
        if record is not None and param.name != "debug":
            names, text = record
            panel = getattr(param, "rich_help_panel", None) or ""
            found.setdefault(panel, []).append((names, " ".join(text.split())))
    return found


def table(rows: list[Row]) -> str:
    lines = [f"| {code(names)} | {escaped(text)} |" for names, text in rows]
    return "\n".join(["| option | |", "|---|---|", *lines, ""])


def code(names: str) -> str:
    return "`" + names.replace(" range>", ">").replace("|", "\\|") + "`"


def escaped(text: str) -> str:
    """Return the text with Markdown's special characters escaped.

    The page must show option names and defaults exactly as they are typed at a terminal, also within a table.
    """
    return re.sub(r"([|<>*_\[\]])", r"\\\1", text)


def page() -> str:
    root = typer.main.get_command(app)
    context = root.make_context("trouper", ["collect-env"], resilient_parsing=True)
    # Benchmarks come last.
    commands = dict(sorted(leaves(root), key=lambda leaf: (leaf[0].startswith("bench "), leaf[0])))
    panels = {path: panels_of(command, context) for path, command in commands.items()}
    counts = Counter(
        (name, tuple(rows)) for found in panels.values() for name, rows in found.items()
    )
    # A panel with the same rows in several commands is shown once, after the commands.
    shared = {name: rows for (name, rows), count in sorted(counts.items()) if name and count > 1}
    parts = [HEAD]
    for path, command in commands.items():
        parts += [f"## trouper {path}\n", description(f"trouper {path}", command)]
        links: list[str] = []
        for name, rows in panels[path].items():
            if shared.get(name) == tuple(rows):
                links.append(f"[{name}](#options-{name.lower().replace(' ', '-')})")
            elif rows:
                parts += [f"**{name}**\n"] * bool(name) + [table(rows)]
        if links:
            parts.append(f"And the options of {', '.join(links)}.\n")
    for name, rows in shared.items():
        parts += [f"## Options: {name}\n", table(list(rows))]
    return "\n".join(parts)


def description(name: str, command: Any) -> str:
    context = command.make_context(name, [], resilient_parsing=True)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    text = "\n\n".join(" ".join(part.split()) for part in (command.help or "").split("\n\n"))
    return f"`{usage}`\n\n{escaped(text)}\n"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
