"""Read the calls of an answer, each body in its dialect's way.

A reader of calls begins behind the opening mark and returns when the calls have ended. It leaves it to its caller to
give back as content what turned out to be no call.
"""

import json
from collections.abc import Callable

from trouper.frontends.dialects.calls import CallWriter, ObjectWriter, as_json
from trouper.frontends.dialects.literals import read_literals
from trouper.frontends.dialects.python_literals import read_calls
from trouper.frontends.dialects.reader import Parse, Reader
from trouper.frontends.dialects.table import Dialect, Tags

ARGUMENT_KEYS = ("arguments", "parameters")
MAX_NAME = 128
_NAME_STOPS = ' \t\r\n"{}()[]<>,;'


def read_section(reader: Reader, dialect: Dialect, calls: CallWriter) -> Parse[None]:
    """Read all calls behind the first mark of an answer, and the mark that ends them."""
    read_body = _BODIES[dialect.body]
    begin, end = dialect.section
    if not begin or not dialect.call[0]:
        yield from read_body(reader, dialect, calls)
        yield from _closing(reader, end if begin else dialect.call[1])
        return
    while True:
        yield from reader.skip_blanks()
        if not (yield from reader.accept(dialect.call[0])):
            break
        yield from read_body(reader, dialect, calls)
        yield from _closing(reader, dialect.call[1])
    yield from _closing(reader, end)


def _closing(reader: Reader, mark: str) -> Parse[None]:
    """Read a closing mark and the blanks before it; a model may leave it out."""
    if mark:
        yield from reader.skip_blanks_before((mark,))
        yield from reader.accept(mark)


# {"name": ..., "arguments": {...}}


def read_object(reader: Reader, dialect: Dialect, calls: CallWriter) -> Parse[None]:
    """Read one call, and further ones behind the dialect's separators."""
    while (yield from _object(reader, calls)):
        if not dialect.separators:
            return
        yield from reader.skip_blanks_before(dialect.separators)
        if not (yield from reader.accept(*dialect.separators)):
            return


def _object(reader: Reader, calls: CallWriter) -> Parse[bool]:
    """Read a JSON object that names a tool and gives its arguments.  Returns whether it was one, and complete."""
    yield from reader.skip_blanks()
    if not (yield from reader.accept("{")):
        return False
    is_complete = yield from _members(reader, calls)
    has_name = calls.is_open
    calls.end()
    return is_complete and has_name


def _members(reader: Reader, calls: CallWriter) -> Parse[bool]:
    while True:
        yield from reader.skip_blanks()
        if (yield from reader.accept("}")):
            return True
        if not calls.step():
            return False
        key = yield from _string(reader)
        yield from reader.skip_blanks()
        if key is None or not (yield from reader.accept(":")):
            return False
        yield from reader.skip_blanks()
        if key == "name" and not calls.is_open:
            name = yield from _string(reader)
            if name is None or not calls.start(name):
                return False
        elif key in ARGUMENT_KEYS:
            if not (yield from _arguments(reader, calls)):
                return False
        elif not (yield from reader.json_value(_ignore)):
            return False
        yield from reader.skip_blanks()
        yield from reader.accept(",")


def _arguments(reader: Reader, calls: CallWriter) -> Parse[bool]:
    """Read arguments: an object as it stands, or a string that holds one."""
    char = yield from reader.peek()
    if char == "{":
        return (yield from reader.json_value(calls.arguments))
    if char == '"':
        text = yield from _string(reader)
        calls.arguments(text or "")
        return text is not None
    return (yield from reader.json_value(_ignore))  # null


def _string(reader: Reader) -> Parse[str | None]:
    """Read a JSON string and return what it says; None if there is none."""
    pieces: list[str] = []
    if (yield from reader.peek()) != '"' or not (yield from reader.json_value(pieces.append)):
        return None
    try:
        text: str = json.loads("".join(pieces), strict=False)
        text.encode()  # a lone surrogate could not be sent
    except ValueError:
        return None
    return text


def _ignore(text: str) -> None:
    """Take what is of no interest."""


# [{"name": ..., "arguments": {...}}, ...]


def read_array(reader: Reader, dialect: Dialect, calls: CallWriter) -> Parse[None]:
    """Read an array of such objects, or one of them alone."""
    yield from reader.skip_blanks()
    if not (yield from reader.accept("[")):
        yield from _object(reader, calls)
        return
    while (yield from _object(reader, calls)):
        yield from reader.skip_blanks()
        if not (yield from reader.accept(",")):
            break
    yield from reader.skip_blanks_before(("]",))
    yield from reader.accept("]")


# name{...}


def read_named(reader: Reader, dialect: Dialect, calls: CallWriter) -> Parse[None]:
    """Read a name and then its arguments, with a mark between them or without; or an array instead."""
    yield from reader.skip_blanks()
    if (yield from reader.peek()) == "[":
        yield from read_array(reader, dialect, calls)
        return
    name = yield from reader.word(_NAME_STOPS, MAX_NAME)
    if dialect.call_id and (yield from reader.accept(dialect.call_id)):
        yield from reader.word(_NAME_STOPS, MAX_NAME)
    if (
        yield from reader.accept(*dialect.name_end)
    ) and name == "function":  # a kind, and then the name
        name = yield from reader.word(_NAME_STOPS, MAX_NAME)
    yield from reader.skip_blanks()
    is_fenced = bool((yield from reader.accept("```json")))
    yield from reader.skip_blanks()
    if not name or (yield from reader.peek()) != "{":
        return
    if not calls.start(_plain_name(name, dialect)):
        return
    yield from reader.json_value(calls.arguments)
    calls.end()
    if is_fenced:
        yield from _closing(reader, "```")


def _plain_name(name: str, dialect: Dialect) -> str:
    """Take the dialect's prefix and the number of the call off, as in "functions.get_weather:0"."""
    if dialect.name_prefix:
        name = name.removeprefix(dialect.name_prefix).partition(":")[0]
    return name


# <function=name><parameter=key>value</parameter></function>


def read_tagged(reader: Reader, dialect: Dialect, calls: CallWriter) -> Parse[None]:
    """Read calls whose arguments are written key by key."""
    tags = dialect.tags
    assert tags is not None
    while True:
        yield from reader.skip_blanks()
        if tags.name and not (yield from reader.accept(tags.name)):
            return
        name, mark = yield from reader.until_soon(tags.name_end, MAX_NAME)
        if not mark or not calls.start(name.strip()):
            return
        if mark != tags.key:
            yield from reader.skip_blanks()
        yield from _tagged_arguments(reader, tags, calls, has_key=mark == tags.key)
        calls.end()
        if not tags.name:
            return


def _tagged_arguments(
    reader: Reader, tags: Tags, calls: CallWriter, *, has_key: bool
) -> Parse[None]:
    written = ObjectWriter(calls)
    while has_key or (yield from reader.accept(tags.key)):
        has_key = False
        if not calls.step():
            break
        text, mark = yield from reader.until_soon((tags.key_end,), 2 * MAX_NAME)
        if not mark:
            break
        key, is_string = _key_and_kind(text)
        if tags.value:
            yield from reader.skip_blanks()
            if not (yield from reader.accept(tags.value)):
                break
        kind = calls.type_of(key)
        yield from _tagged_value(reader, tags, written, key, "string" if is_string else kind)
        yield from reader.skip_blanks()
    written.end()
    if tags.end:
        yield from _closing(reader, tags.end)


def _key_and_kind(text: str) -> tuple[str, bool]:
    """Take `key" string="true` apart."""
    key, _, rest = text.partition('"')
    return key.strip(), 'string="true"' in rest


def _tagged_value(
    reader: Reader, tags: Tags, written: ObjectWriter, key: str, kind: str | None
) -> Parse[None]:
    """Read a value up to its end: a string piece by piece, anything else when it is whole."""
    if any(mark.startswith("\n") for mark in tags.value_end):
        yield from reader.accept("\n")
    written.key(key)
    if kind == "string":
        written.value('"')
        yield from reader.until(tags.value_end, written.string_piece)
        written.value('"')
    else:
        pieces: list[str] = []
        yield from reader.until(tags.value_end, pieces.append)
        written.value(as_json("".join(pieces), kind))


# [name(key=value), ...]


def read_python(reader: Reader, dialect: Dialect, calls: CallWriter) -> Parse[None]:
    """Read calls as Python writes them."""
    yield from read_calls(reader, calls)


_BODIES: dict[str, Callable[[Reader, Dialect, CallWriter], Parse[None]]] = {
    "object": read_object,
    "array": read_array,
    "named": read_named,
    "tagged": read_tagged,
    "literals": read_literals,
    "python": read_python,
}
