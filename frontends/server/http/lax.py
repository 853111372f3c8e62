"""Read numbers and booleans in the loose forms that vLLM accepts.

vLLM decodes bodies with pydantic.  Its lax mode accepts "5", 5.0 and true for a number, and "true" or 1 for a boolean.
Clients rely on it, mostly those that fill forms or shell templates. msgspec has a lax mode, too, but with other rules: it reads
the text "null" as a missing value, for example. A body is relaxed only after its strict reading has failed.
"""

import math
import types
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, TypeGuard, Union, cast, get_args, get_origin

import msgspec

MAX_DIGITS = 64  # of a number in quotes; a number in JSON may have as many as the interpreter reads
TRUE = frozenset(("1", "on", "t", "true", "y", "yes"))
FALSE = frozenset(("0", "off", "f", "false", "n", "no"))


def relax(value: Any, wanted: Any) -> Any:
    """Convert a value to the type `wanted` by pydantic's lax rules.  Returns it unchanged if they refuse it."""
    if wanted in SCALARS:
        return SCALARS[wanted](value)
    if _fits(value, wanted):
        return value
    origin, members = get_origin(wanted), get_args(wanted)
    if origin is Annotated:
        return relax(value, members[0])
    if origin in (Union, types.UnionType):
        readings = (relax(value, member) for member in members)
        return next((reading for reading in readings if _fits(reading, wanted)), value)
    if origin is list and isinstance(value, list):
        return [relax(item, members[0]) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        given = cast("dict[str, Any]", value)
        if origin is dict:
            return {key: relax(item, members[1]) for key, item in given.items()}
        if _is_record(wanted):
            kinds = _fields(wanted)
            return {
                name: relax(item, kinds[name]) if name in kinds else item
                for name, item in given.items()
            }
    return cast("Any", value)


def _fits(value: Any, wanted: Any) -> bool:
    try:
        msgspec.convert(value, wanted)
    except msgspec.ValidationError:
        return False
    return True


def _is_record(wanted: Any) -> TypeGuard[type[Any]]:
    return isinstance(wanted, type) and issubclass(wanted, msgspec.Struct)


@cache  # by the request types, which are a fixed few
def _fields(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.encode_name: field.type for field in msgspec.structs.fields(kind)}


def _may_be_number(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and len(value) <= MAX_DIGITS and value.isascii()


def _integer(value: Any) -> Any:
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 2**63 else value
    if not _may_be_number(value):
        return value
    whole, dot, fraction = value.strip().partition(".")
    try:
        return value if fraction.strip("0") or (dot and not fraction) else int(whole)
    except ValueError:
        return value


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        return float(value)
    if not _may_be_number(value):
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    return number if math.isfinite(number) else value  # JSON has no other numbers


def _boolean(value: Any) -> Any:
    if isinstance(value, int | float):
        return bool(value) if value in (0, 1) else value
    if not isinstance(value, str):
        return value
    text = value.lower()
    return text in TRUE if text in TRUE or text in FALSE else value


SCALARS: dict[Any, Callable[[Any], Any]] = {int: _integer, float: _number, bool: _boolean}
