"""Detect a model, a text or an option in the wrong place of a command line, and show the right command.

Ollama and llama.cpp expect models and texts in other places. Without these checks, the path of a model would be taken
as a prompt, and the demo model would continue it.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from trouper.errors import TrouperValidationError
from trouper.frontends.cli import output
from trouper.frontends.cli.arguments.other_programs import refuse_others

if TYPE_CHECKING:
    from trouper.config.engine_config import EngineConfig

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:\w+)?")
# What a pooling model does, by its task.
MAKES = {"embed": "makes embeddings", "token_embed": "makes embeddings of tokens"}


def check_texts(
    texts: Iterable[str] | None, model: str | None, command: str, argument: str
) -> None:
    """Refuse a text that is the path of a model, and warn about other paths, if no model is given.

    Args:
        command: name of the command, for the hint.
        argument: name of the argument with the texts, for the error.

    Raises:
        typer.BadParameter: a text is the name of a GGUF file or the path of a model folder.
    """
    for text in texts or () if model is None else ():
        fix = f"to use it as the model: trouper {command} -m {text}"
        if text.endswith(".gguf") or _is_model(text):
            raise typer.BadParameter(f"{text!r} names a model; {fix} TEXT", param_hint=argument)
        if _exists(text) or HUB_NAME.fullmatch(text):
            files = f"; for a file of texts: --prompt-file {text}"
            more = files if _exists(text) else ""
            output.complain(f"warning: {text!r} is used as a text; {fix}{more}")


def check_generates(config: "EngineConfig") -> None:
    """Raise TrouperValidationError if a command that generates text has a pooling model.

    The message names the command that fits the model, so a user of an embedding model is sent to `trouper embed`.
    """
    if config.pooler is None:
        return
    makes = MAKES.get(config.pooler.task, "classifies texts")
    fix = "embed" if makes != "classifies texts" else "embed --task classify"
    rule = f"the model {config.model.name!r} {makes} and does not generate text; use trouper {fix}"
    raise TrouperValidationError(rule, parameter="model")


def check_pools(config: "EngineConfig") -> None:
    """Raise TrouperValidationError if a command for pooling models has a model that generates text.

    The message names the commands that generate text, and the option that makes an embedding model of this one.
    """
    if config.pooler is not None:
        return
    rule = "generates text; use trouper generate, or add --runner pooling to embed with it"
    raise TrouperValidationError(f"the model {config.model.name!r} {rule}", parameter="model")


def check_no_text(ctx: Any) -> None:
    """Raise a usage error if a text follows the arguments of `chat` or `complete`, which expect it in -q.

    For `complete` the text may also be a model's file, because other programs expect one there.
    """
    text = " ".join(ctx.args)
    if not text:
        return
    if ctx.info_name == "complete" and (text.endswith(".gguf") or _exists(text)):
        ctx.fail(
            f"unexpected argument {text!r}: complete uses a server; for a local model: trouper generate -m {text} TEXT"
        )
    model = "" if ctx.info_name == "complete" else "MODEL "
    ctx.fail(
        f'unexpected argument {text!r}; give the text with -q: trouper {ctx.info_name} {model}-q "{text}"'
    )


def check_one_model(ctx: Any, given: Iterable[Any]) -> None:
    """Raise a usage error if `--model` occurs more than once, if the command uses one model.

    Without this check, the last one would silently replace the others. Other options keep this usual rule.

    Args:
        given: the parameters in the order of the command line, once for each occurrence.
    """
    options = [
        each.name for each in given if each.param_type_name == "option" and not each.multiple
    ]
    if options.count("model") > 1:
        ctx.fail(f"--model is given more than once, but {ctx.info_name} uses one model")


def check_command_first(ctx: Any, arguments: list[str], commands: Mapping[str, Any]) -> None:
    """Raise a usage error if an option of a command, or a model, is in the place of the command's name."""
    first = arguments[0]
    name = first.partition("=")[0]
    if first.startswith("-"):
        if not any(name in (*p.opts, *p.secondary_opts) for p in ctx.command.params):
            is_known = any(name in p.opts for c in commands.values() for p in c.params)
            command = next((word for word in arguments if word in commands), "chat")
            if is_known:
                words = " ".join(word for word in arguments if word != command)
                ctx.fail(f"{name} must follow a command: trouper {command} {words}")
            refuse_others(name)
    elif first not in commands and (first.endswith(".gguf") or _exists(first)):
        ctx.fail(f"no such command: {first}; to chat with this model: trouper chat -m {first}")


def _exists(text: str) -> bool:
    try:
        return bool(text) and Path(text).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        # The text is too long for a path, contains a zero byte, or names an unknown user after ~.
        return False


def _is_model(text: str) -> bool:
    return _exists(text) and (Path(text).expanduser() / "config.json").is_file()
