"""Reading command lines that were written for vLLM, llama.cpp or Ollama.

An option of vLLM that trouper has no use for is accepted at the value that changes nothing, and refused at others; an option of
another program is refused with what to use instead.  A line of log names what has no effect, and what an abbreviation means.
"""

import json
import logging
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from trouper.config.vllm_options import NOT_IMPLEMENTED
from trouper.errors import TrouperValidationError, UnsupportedFeatureError
from trouper.frontends.cli.foreign_options import ANY, OTHERS, SWITCHES, VLLM_SERVER, VLLM_SHORT

logger = logging.getLogger(__name__)

FOR_ENGINE = "trouper.foreign"  # where the context of a command keeps vLLM's engine options


def settle(params: Iterable[Any], arguments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Split a command line into the arguments that the command knows and vLLM's options for the engine.

    Raises:
        UnsupportedFeatureError: an option of another program that asks for something; the message says what to use.
        TrouperValidationError: one of vLLM's without its value.
    """
    options = [
        p for p in params if p.param_type_name == "option"
    ]  # a text may be an argument's name
    own = {name: p for p in options for name in (*p.opts, *p.secondary_opts)}
    has_engine, has_server = "--max-model-len" in own, "--root-path" in own
    kept: list[str] = []
    given: dict[str, Any] = {}
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            return [*kept, argument, *rest], given
        name, equals, text = _parts(argument, own, has_server)
        whole = _unabbreviated(name, own)
        if whole != name:
            logger.warning("%s is read as %s", name, whole)
        name = whole
        dest, is_on = _destination(name)
        if name in own:
            kept.append(name + equals + text)
            if not equals and not own[name].is_flag:
                kept.extend(islice(rest, 1))
        elif not is_on and f"--{name[5:]}" in own:
            # A switch without an opposite here: the later of the two counts.
            kept = [word for word in kept if word != f"--{name[5:]}"]
        elif (has_engine and dest in NOT_IMPLEMENTED) or (has_server and dest in VLLM_SERVER):
            value = is_on
            if not _is_switch(dest):
                value = _value(text if equals else next(rest, None), name)
            take(given, dest, value, name)
        else:
            refuse_others(name)
            kept.append(argument)
    return kept, given


def take(given: dict[str, Any], dest: str, value: Any, name: str) -> None:
    """Note an engine's option for its own check, and check a server's option.  Raises UnsupportedFeatureError."""
    if dest in NOT_IMPLEMENTED:
        given[dest] = value
        return
    accepted, hint = VLLM_SERVER[dest]
    if accepted is ANY:
        logger.warning("%s has no effect here", name)
    elif value is not None and value != accepted:
        raise UnsupportedFeatureError(f"{name} {value} is not supported: {hint}")


def _parts(argument: str, own: dict[str, Any], has_server: bool) -> tuple[str, str, str]:
    """Return the option, `=` and the value of an argument; the option under the name that it has here.

    vLLM takes underscores for dashes, and has short names of its own.
    """
    name, equals, text = argument.partition("=")
    if name in own or not name.startswith("-"):
        return name, equals, text
    if name[:2] == "-O" and name[2:].isdigit():  # -O3
        name, equals, text = "-O", "=", name[2:]
    if has_server and name in VLLM_SHORT:
        name = f"--{VLLM_SHORT[name]}"
    return name[:2] + name[2:].replace("_", "-"), equals, text


def _unabbreviated(name: str, own: dict[str, Any]) -> str:
    """Return the one option of this command that begins like a name, as vLLM's parser completes it; else the name."""
    if name in own or name in OTHERS or not name.startswith("--") or len(name) == len("--"):
        return name
    foreign = {
        f"--{dest.replace('_', '-')}" for dest in NOT_IMPLEMENTED.keys() | VLLM_SERVER.keys()
    }
    found = [each for each in own.keys() | foreign if each.startswith(name)]
    return found[0] if len(found) == 1 and name not in foreign else name


def _destination(name: str) -> tuple[str, bool]:
    """Return an option as vLLM's field, and whether a switch of this name turns it on."""
    if not name.startswith("--"):
        return "", True
    dest = name[2:].replace("-", "_")
    return (dest[3:], False) if dest.startswith("no_") else (dest, True)


def _is_switch(dest: str) -> bool:
    default = NOT_IMPLEMENTED[dest] if dest in NOT_IMPLEMENTED else VLLM_SERVER[dest][0]
    return isinstance(default, bool) or dest in SWITCHES


def _value(text: str | None, name: str) -> Any:
    if text is None:
        raise TrouperValidationError("needs a value", parameter=name)
    try:
        return json.loads(text)
    except ValueError:
        return None if text == "None" else text


def refuse_others(name: str) -> None:
    """Refuse an option of another program.  Raises UnsupportedFeatureError."""
    if name in OTHERS:
        program, hint = OTHERS[name]
        raise UnsupportedFeatureError(f"{name} is an option of {program}: {hint}")
