"""The help of every command is complete at 80 columns and in a pipe, and shell completion works."""

import re
from pathlib import Path

import pytest
import typer.main

from trouper.frontends.cli.main import app, run_line

GOLDEN = Path(__file__).parent / "help.txt"
WIDTH = 80


def commands(command, *path):
    """Yield the full name and the command of each leaf below a command group."""
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, *path, name)
    if not hasattr(command, "commands"):
        yield path, command


COMMANDS = dict(commands(typer.main.get_command(app)))


@pytest.fixture(autouse=True)
def narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.delenv("_TROUPER_COMPLETE", raising=False)


@pytest.mark.parametrize("arguments", [["--help"], []], ids=["help", "no arguments"])
def test_the_first_help_is_the_golden_one(capsys, arguments):
    assert run_line(arguments) == 0
    assert capsys.readouterr().out == GOLDEN.read_text()


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_has_whole_names_and_narrow_lines(capsys, path):
    assert run_line([*path, "--help"]) == 0
    text = capsys.readouterr().out
    shown = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*(?![\w…])", text))
    names = {name for p in COMMANDS[path].params if not getattr(p, "hidden", False)
             for name in [*p.opts, *p.secondary_opts] if name.startswith("-")}  # fmt: skip
    assert names <= shown
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "..." not in text.replace("...]", "")  # `[PROMPT]...` is repeatable


def test_a_switch_is_shown_with_its_opposite(capsys):
    run_line(["serve", "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert "  --enable-prefix-caching / --no-enable-prefix-caching" in lines
    assert "  --no-long-prefill-token-threshold-adaptive" in lines


def test_help_of_a_group_has_whole_sentences(capsys):
    assert run_line(["bench", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for path, command in COMMANDS.items():
        if path[0] == "bench":
            assert " ".join(command.help.split("\n\n")[0].split()) in text


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("trouper se", {"serve"}),
        ("trouper serve --max-num-se", {"--max-num-seqs"}),
        ("trouper bench th", {"throughput"}),
        ("trouper serve --loop ", {"asyncio", "trio"}),
    ],
)
def test_shells_complete_commands_options_and_values(capsys, monkeypatch, line, wanted):
    monkeypatch.setenv("_TROUPER_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
    with pytest.raises(SystemExit) as ended:
        run_line([])
    assert ended.value.code == 0
    assert set(capsys.readouterr().out.split()) == wanted


def test_the_script_of_a_shell_is_printed(capsys, monkeypatch):
    monkeypatch.setenv("_TROUPER_COMPLETE", "source_zsh")
    with pytest.raises(SystemExit):
        run_line([])
    assert "#compdef trouper" in capsys.readouterr().out
