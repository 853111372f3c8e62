"""Read the files of a model folder, which may come from an untrusted source.

Sizes are bounded, and reading never waits for a writer.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from trouper.errors import invalid

# Ten times the size of the largest known tokenizer_config.json; parsing this much takes about a second.
MAX_TEXT_BYTES = 32 * 2**20
T = TypeVar("T")


def check_folder(folder: Path, parameter: str = "model") -> None:
    """Check that a folder contains no pipes, sockets or devices, because opening one may block forever.

    Raises:
        TrouperValidationError: the message names the file.
    """
    if not folder.is_dir():
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                mode = entry.stat().st_mode
            except OSError:
                # A broken link; readers do not find it either.
                continue
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise invalid(parameter, f"{entry.name} is not a regular file", entry.path)


def read_text(path: Path, parameter: str = "model") -> str:
    """Read a small text file.

    Raises:
        FileNotFoundError: the file does not exist.
        TrouperValidationError: it is not a regular file, too large, or unreadable; the message names it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise invalid(parameter, f"{path.name} is not a regular file", str(path))
            content = file.read(MAX_TEXT_BYTES + 1)
        if len(content) > MAX_TEXT_BYTES:
            rule = f"{path.name} is larger than {MAX_TEXT_BYTES // 2**20} MiB"
            raise invalid(parameter, rule, str(path))
        return content.decode()
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(path) from None
    except (OSError, UnicodeDecodeError) as error:
        raise invalid(parameter, f"{path.name} cannot be read: {error}", str(path)) from None


def read_json(path: Path, parameter: str = "model") -> Any:
    """Parse a JSON file of a model folder.

    Returns None if it does not exist. `parameter` is the option to name in errors.

    Raises:

        TrouperValidationError: the file is not readable, too large, or not JSON.
    """
    try:
        text = read_text(path, parameter)
    except FileNotFoundError:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(parameter, f"{path.name} cannot be read: {error}", str(path)) from None


def read_object(path: Path, parameter: str = "model") -> dict[str, Any] | None:
    """Parse a JSON file that must contain an object.  Returns None if it does not exist.

    Raises:
        TrouperValidationError: the errors of `read_json`, or the file contains something else.
    """
    value = read_json(path, parameter)
    if value is not None and not isinstance(value, dict):
        raise invalid(parameter, f"{path.name} is not an object", str(path))
    return cast("dict[str, Any] | None", value)


def checked(value: Any, kind: type[T], file: str, parameter: str = "model") -> T:
    """Convert parsed JSON to a type, with its bounds.

    Args:

        file: the name to show in errors.
        parameter: the option that selected the file.

    Raises:

        TrouperValidationError: the message names the file and the field and shows its value.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        rule, _, where = str(error).partition(" - at `")
        field = where.rpartition("$")[2].removesuffix("`").removeprefix(".")
        found = _at(value, field)
        place = f"{file}: {field}" if field else file
        raise invalid(parameter, f"{place}: {rule[:1].lower()}{rule[1:]}", found) from None


def _at(value: Any, field: str) -> Any:
    """Return the value at a path such as `a.b[1]`, or the last value that the path reaches."""
    for name in field.replace("[", ".[").split("."):
        try:
            value = value[int(name[1:-1])] if name.startswith("[") else value[name]
        except (LookupError, TypeError, ValueError):
            break
    return value
