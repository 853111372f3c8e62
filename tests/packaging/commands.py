"""Parse command lines without running them."""

import shlex

import typer.main

from trouper.frontends.cli.main import app


def parse(words):
    """Parse the arguments of `trouper`. Returns the values of the command's parameters.

    Raises typer's own error for a mistake.
    """
    command, path = typer.main.get_command(app), "trouper"
    words = list(words)
    while hasattr(command, "commands") and words and command.get_command(None, words[0]):
        path = words.pop(0)
        command = command.get_command(None, path)
    return command.make_context(path, words, obj={"arguments": words}).params


def command_lines(text):
    """Yield the arguments of each `trouper` command in shell code, without comments and redirections."""
    for line in text.replace("\\\n", " ").splitlines():
        reader = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        reader.whitespace_split = True
        words: list[str] | None = None
        try:
            tokens = list(reader)
        except ValueError:  # an example of another language
            continue
        for token in [*tokens, ";"]:
            if set(token) <= set("|&;<>"):
                if words is not None:
                    yield words
                words = None
            elif words is not None:
                words.append(token)
            elif token == "trouper" or token.endswith("/trouper"):
                words = []
