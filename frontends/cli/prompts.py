"""Prompts from the command line, a file or a pipe."""

import sys
from pathlib import Path

import typer

from trouper.errors import TrouperValidationError
from trouper.frontends.cli import output


def read_prompts(prompts: list[str] | None, prompt_file: str | None) -> list[str]:
    """Return prompts from the arguments, then from the file; the whole of stdin when there are neither."""
    texts = list(prompts or ())
    if prompt_file is not None:
        lines = _read(prompt_file).splitlines()
        texts += [line for line in lines if line.strip()]
        if not texts:
            raise typer.BadParameter(f"no prompt in {prompt_file}", param_hint="--prompt-file")
    elif not texts:
        if output.is_terminal(sys.stdin):
            raise typer.BadParameter("give one, or --prompt-file, or a pipe", param_hint="PROMPT")
        texts = [_read("-").removesuffix("\n")]
    if not all(texts):
        raise TrouperValidationError("the prompt is empty", parameter="prompt")
    return texts


def _read(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text()
    except UnicodeDecodeError:
        raise TrouperValidationError("not text in UTF-8", parameter="prompt", value=name) from None
    except OSError as error:
        raise TrouperValidationError(
            f"cannot be read: {error.strerror}", parameter="prompt_file", value=name
        ) from None
