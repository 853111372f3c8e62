"""Make the command-line options of `trouper serve` from the declarations of its settings.

`ServeSettings` declares each setting with its default and its help.  This module turns a declaration into an option that
typer understands, and the parsed options back into settings.
"""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, cast, get_args, get_origin

import msgspec
import typer

from trouper.frontends.cli.values import json_object, lora_modules
from trouper.frontends.server.shared.settings import CommandOption, ServeSettings


def option_names() -> list[str]:
    """Return the names of the options of the server, with underscores.

    The same names are keys of a configuration file, and in upper case, behind `TROUPER_`, environment variables.
    """
    return [option.name or field.name for field, option in _declared()]


def variables_of(name: str) -> tuple[str, ...]:
    """Return the environment variables that set the option of this name.

    The first is trouper's own name of the variable.  Others follow for compatibility, in the order of precedence.
    """
    (option,) = (option for field, option in _declared() if name in (option.name, field.name))
    return (f"TROUPER_{name.upper()}", *option.variables)


def setting_parameters() -> list[inspect.Parameter]:
    """Return one parameter for each option, in the form that typer reads: listeners first, then the application."""
    return [_parameter(field, option) for field, option in _declared()]


def settings_from(values: Mapping[str, Any]) -> ServeSettings:
    """Make the settings from parsed options, which `setting_parameters` names.

    An option at None keeps the default of its field.

    Raises:
        TrouperValidationError: a value breaks a rule of `ServerSettings`, or two adapters have one name.
        TrouperClientError: the file of a dialect cannot be read.
    """
    given = {
        field.name: _converted(field.name, value)
        for field, option in _declared()
        if (value := values.get(option.name or field.name)) is not None
    }
    return ServeSettings(**given)


def _declared() -> list[tuple[Any, CommandOption]]:
    """Return the fields that have an option.  Fields of the subclass come first."""
    fields = msgspec.structs.fields(ServeSettings)
    own = len(ServeSettings.__base__.__struct_fields__)  # type: ignore[union-attr]  # a Struct has it
    ordered = (*fields[own:], *fields[:own])
    return [
        (field, metadata)
        for field in ordered
        for metadata in getattr(field.type, "__metadata__", ())
        if isinstance(metadata, CommandOption)
    ]


def _parameter(field: Any, option: CommandOption) -> inspect.Parameter:
    name = option.name or field.name
    kind, default, more = _shape(get_args(field.type)[0], field.default)
    bounds = {"min": option.min, "max": option.max}
    shown = typer.Option(
        *option.flags,
        help=option.help,
        rich_help_panel="Server",
        metavar=option.metavar,
        hidden=option.is_hidden,
        envvar=list(option.variables) or None,
        # A flag with two spellings shows its default by them.
        show_default=not any("/" in flag for flag in option.flags),
        **{end: value for end, value in bounds.items() if value is not None},
        **more,
    )
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=default, annotation=Annotated[kind, shown])


def _shape(kind: Any, default: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Return the type of an option, its default, and the options of typer that the type needs."""
    if get_origin(kind) is dict:
        return dict[str, Any] | None, None, {"parser": json_object}
    if get_origin(kind) is not tuple:
        return kind, default, {}
    if get_args(kind)[0].__name__ == "Dialect":
        return Path | None, None, {}
    return list[str] | None, None, {}


def _converted(name: str, value: Any) -> Any:
    reader = READERS.get(name)
    if reader is not None:
        return reader(value)
    return tuple(cast("list[str]", value)) if isinstance(value, list) else value


def _read_dialects(path: Path) -> Any:
    from trouper.frontends.python.parsing import read_plugin

    return read_plugin(path)


READERS: dict[str, Callable[[Any], Any]] = {
    "lora_modules": lora_modules,
    "dialects": _read_dialects,
}
