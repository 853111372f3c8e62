"""Decode JSON bodies into request types.

A body that two parsers could read differently is refused, so a proxy and this server never see two different requests.
msgspec refuses nearly all invalid JSON; a second pass finds duplicate keys and undeclared fields.  Errors show texts by trouper
or msgspec; texts of the interpreter would expose internals and are replaced.

Unknown fields and tools do not fail a request: its response names them in a header, and the log shows each name once.

vLLM decodes bodies with pydantic, whose lax mode accepts "5", 5.0 and true for a number, and "true" or 1 for a boolean.
Clients rely on it, mostly those that fill forms or shell templates.  msgspec's lax mode has other rules: it reads the text
"null" as a missing value, for example.  A body is relaxed here only after its strict reading has failed.
"""

import json
import math
import re
import types
from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated, Any, NamedTuple, TypeGuard, TypeVar, Union, cast, get_args, get_origin

import anyio
import anyio.to_thread
import msgspec

from trouper.frontends.server.http.body import excerpt
from trouper.frontends.server.shared.errors import Headers, HTTPError, clean, logger
from trouper.frontends.server.shared.fields import NONE, Others, check_others

T = TypeVar("T", bound=msgspec.Struct)
THREAD_FROM = 2**16  # bytes; below it a thread hop costs more than the reading
MAX_COMMAS = (
    2**20
)  # 32 MiB could be 16 M integers, which take 0.5 GiB and a second of the interpreter
MAX_DEPTH = (
    128  # of arrays and objects; copying, encoding and rendering recurse, and stop at about 300
)
MAX_FIELD = 16 * 2**10  # bytes of an unknown field
MAX_ECHO = 200
TOO_DEEP = f"arrays and objects must not be nested deeper than {MAX_DEPTH} levels"
# The place of a wrong value in a dict.  msgspec does not name its key.
IN_DICT = re.compile(r"\$\.(\w+)\[\.\.\.\](.*)")
WHERE = re.compile(r" - at (?:`(?P<path>[^`]*)`|\S+)$")
MISSING = re.compile(r"missing required field `(\w+)`")
EXPECTED = re.compile(r"Expected `(\w+)")
VLLM_SENTENCES = {
    "int": "Input should be a valid integer",
    "float": "Input should be a valid number",
    "bool": "Input should be a valid boolean",
    "str": "Input should be a valid string",
    "array": "Input should be a valid list",
    "object": "Input should be a valid dictionary",
}


class Decoded(NamedTuple):
    """A decoded request, the names of its unknown fields, and whether it refers to bytes of the body.

    A request with views of the body keeps the body's memory occupied until it is released.
    """

    request: Any
    unknown: tuple[str, ...]
    holds_body: bool = False


async def decode(
    body: bytes | memoryview, kind: type[T], limiter: anyio.CapacityLimiter
) -> Decoded:
    """Decode a body, in a thread if it is large.  Raises HTTPError: 400 `invalid_json` or `invalid_schema`.

    A thread keeps a body of megabytes from stopping the event loop.
    """
    if len(body) < THREAD_FROM:
        return decode_now(body, kind)
    return await anyio.to_thread.run_sync(decode_now, body, kind, limiter=limiter)


def decode_now(body: bytes | memoryview, kind: type[T]) -> Decoded:
    """Decode in this thread.  A type with `put_back` gets its long strings as undecoded bytes of the body.

    Other types are decoded as a whole.  Raises the errors of `decode`.
    """
    short = excerpt(body) if hasattr(kind, "put_back") and len(body) >= THREAD_FROM else None
    if short is not None:
        decoded = _decode_whole(short.rest, kind)
        decoded.request.put_back(short.strings)
        if not short.strings:
            return decoded._replace(holds_body=True)
    return _decode_whole(_copied(body), kind)


def _copied(body: bytes | memoryview) -> bytes:
    if isinstance(body, bytes):
        return body
    whole = bytes(body)
    # Released here in a thread, because freeing its memory can take a while.
    body.release()
    return whole


def _decode_whole(body: bytes, kind: type[T]) -> Decoded:
    if body.count(b",") > MAX_COMMAS:
        raise HTTPError(
            400, "schema_too_complex", f"the body must contain at most {MAX_COMMAS} values"
        )
    try:
        request = _read_typed(body, kind)
        plain = _read_plain(body)
    except msgspec.ValidationError as error:
        raise bad_schema(error, body, kind) from None
    except (ValueError, RecursionError) as error:  # DecodeError is a ValueError
        message = f"the body is not valid JSON: {clean(_reason(error), MAX_ECHO)}"
        raise HTTPError(400, "invalid_json", message) from None
    table: Others = getattr(kind, "OTHERS", NONE)
    honoured = kind.__struct_encode_fields__
    others = {name: value for name, value in plain.items() if name not in honoured}
    unknown = check_others(others, table)
    for name in unknown:
        if len(msgspec.json.encode(others[name])) > MAX_FIELD:
            raise HTTPError(
                400,
                "invalid_schema",
                f"must have at most {MAX_FIELD} bytes",
                param=clean(name, MAX_ECHO),
            )
    return Decoded(request, unknown)


def _read_typed(body: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError:
        return msgspec.convert(relax(msgspec.json.decode(body), kind), kind)


def _read_plain(body: bytes) -> dict[str, Any]:
    """Read a body with the interpreter's parser, to check rules that msgspec does not.

    Raises:
        ValueError, RecursionError: the body breaks a rule.
    """
    # The body is decoded first because json takes encoded surrogates where it gets bytes.
    plain = json.loads(body.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    _check_depth(body, plain)
    return plain


class _InvalidJsonError(ValueError):
    """A broken rule of JSON, described for the client."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _InvalidJsonError("a key is there twice")
    return found


def _refuse_constant(name: str) -> None:
    raise _InvalidJsonError(f"{name} is no number")


def _check_depth(body: bytes, plain: Any) -> None:
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    level = [plain]
    for _ in range(MAX_DEPTH):
        level = [
            value
            for holder in level
            for value in (holder.values() if type(holder) is dict else holder)
            if type(value) is dict or type(value) is list
        ]
        if not level:
            return
    raise _InvalidJsonError(TOO_DEEP)


def _reason(error: Exception) -> str:
    if isinstance(error, _InvalidJsonError | msgspec.DecodeError):
        return str(error)
    if isinstance(error, RecursionError):
        return TOO_DEEP
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    return "a number has too many digits"


def bad_schema(error: msgspec.ValidationError, body: bytes, kind: type[Any]) -> HTTPError:
    """Return the error of a body that does not have the fields of its type: it names the field, in vLLM's words."""
    text = str(error)
    if "out of range" in text and "Number" in text:
        return HTTPError(
            400, "invalid_json", "the body is not valid JSON: a number is out of range"
        )
    where = WHERE.search(text)
    path = (where.group("path") or "$") if where else "$"
    if found := IN_DICT.match(path):
        path = f"$.{found[1]}{_wrong_key(found[1], body, kind)}{found[2]}"
    if missing := MISSING.search(text):
        path += f".{missing.group(1)}"
    message = _sentence(text)
    if "Invalid enum value" in text:
        message = f"Input should be {_choices(kind, path)} (literal_error). {message}"
    param = path.removeprefix("$").removeprefix(".") or None
    if param is not None:
        message = f"{param}: {message}"
    return HTTPError(400, "invalid_schema", clean(message, MAX_ECHO), param=param)


def _choices(kind: type[Any], path: str) -> str:
    """Return the allowed values of a field in pydantic's format."""
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    members = get_args(fields.get(path.removeprefix("$.")))
    values = [value for member in members for value in get_args(member)]
    return ", ".join(map(repr, values)) or "one of the known values"


def _sentence(text: str) -> str:
    """Return vLLM's sentence for an error of the schema, which clients may compare, followed by msgspec's."""
    expected = EXPECTED.search(text)
    first = "Field required" if MISSING.search(text) else None
    if expected:
        first = VLLM_SENTENCES.get(expected[1])
    said = WHERE.sub("", text).replace("`", "")
    return f"{first}. {said}" if first else said


def _wrong_key(field: str, body: bytes, kind: type[Any]) -> str:
    """Return the key of the first invalid value in a dict, after a dot."""
    wanted = next(each.type for each in msgspec.structs.fields(kind) if each.encode_name == field)
    try:
        given: dict[str, Any] = json.loads(body.decode())[field]
        for key, value in given.items():
            try:
                msgspec.convert({key: value}, wanted)
            except msgspec.ValidationError:
                return f".{key}"
    except (ValueError, RecursionError):  # what comes after it is no JSON
        pass
    return "[...]"


# The most characters of a name in a header or log line.
MAX_NAME = 64
# The most names in the header of one response: with commas 1 KiB.
MAX_NAMES = 16
# Remembered names, 16 KiB.  Clients must not be able to fill the log.
MAX_LOGGED = 256


class Ignored(NamedTuple):
    """A kind of ignored input: the response header that lists it, and the text of its log line.

    The header informs the client and the log line informs the operator, so nothing is ignored silently.
    """

    header: bytes
    text: str


FIELDS = Ignored(b"x-trouper-ignored-fields", "ignored the unknown field %r")
TOOLS = Ignored(b"x-trouper-ignored-tools", "left out the tool %r, which this server cannot run")


class UnknownFields:
    """Count ignored fields, and warn of each name once.

    Ignoring a field silently would hide typing errors; refusing it would break clients with extensions of other
    servers.
    """

    def __init__(self) -> None:
        self.num = 0
        self._logged: set[str] = set()

    def note(self, path: str, names: Sequence[str], kind: Ignored = FIELDS) -> Headers:
        """Count the ignored names of one request, log the new ones, and return the header that lists them.

        The header has a bounded length.  Names come from clients and are cleaned before they are logged.
        """
        self.num += len(names)
        shown = sorted(clean(name, MAX_NAME).encode("ascii", "replace").decode() for name in names)
        for name in shown:
            if name not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(name)
                logger.warning(f"%s: {kind.text}", path, name)
        more = ("…",) if len(shown) > MAX_NAMES else ()
        return ((kind.header, ", ".join((*shown[:MAX_NAMES], *more)).encode("ascii", "replace")),)


# The most digits of a number in quotes.  A plain number in JSON is limited by the interpreter.
MAX_DIGITS = 64
TRUE = frozenset(("1", "on", "t", "true", "y", "yes"))
FALSE = frozenset(("0", "off", "f", "false", "n", "no"))


def relax(value: Any, wanted: Any) -> Any:
    """Convert a value to the type `wanted` by pydantic's lax rules.  Returns it unchanged if they refuse it.

    Nested lists, objects and unions are converted, too.  The strict decoder then reports what still does not fit.
    """
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
    # JSON has no infinity and no NaN.
    return number if math.isfinite(number) else value


def _boolean(value: Any) -> Any:
    if isinstance(value, int | float):
        return bool(value) if value in (0, 1) else value
    if not isinstance(value, str):
        return value
    text = value.lower()
    return text in TRUE if text in TRUE or text in FALSE else value


SCALARS: dict[Any, Callable[[Any], Any]] = {int: _integer, float: _number, bool: _boolean}
