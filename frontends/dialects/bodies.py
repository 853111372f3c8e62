"""Readers of the calls of an answer, one for each kind of call body.

A reader starts behind the opening mark and returns when the calls end.  Its caller returns text to the content if it turns
out not to be a call.
"""

import json
from collections.abc import Callable

from trouper.frontends.dialects.calls import CallWriter, ObjectWriter, json_object
from trouper.frontends.dialects.literals import read_calls, read_literals
from trouper.frontends.dialects.reader import Parse, Reader
from trouper.frontends.dialects.table import Dialect, Tags
from trouper.frontends.dialects.value_types import TEXT, ValueTypes, as_json

ARGUMENT_KEYS = ("arguments", "parameters")
MAX_NAME = 128
_NAME_STOPS = ' \t\r\n"{}()[]<>,;'


def read_section(reader: Reader, dialect: Dialect, calls: CallWriter) -> Parse[None]:
    """Read all calls behind the first mark of an answer, and the closing mark.

    Some dialects enclose all calls in one pair of marks, others each call, and others use both; the dialect's row
    decides.
    """
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
    """Read a closing mark and the blanks before it.  A model may omit both."""
    if mark:
        yield from reader.skip_blanks_before((mark,))
        yield from reader.accept(mark)


# Format: {"name": ..., "arguments": {...}}


def read_object(reader: Reader, dialect: Dialect, calls: CallWriter) -> Parse[None]:
    """Read one call, and further calls behind the dialect's separators.

    A call is a JSON object with a name and its arguments or parameters, in any order.
    """
    while (yield from _object(reader, calls)):
        if not dialect.separators:
            return
        yield from reader.skip_blanks_before(dialect.separators)
        if not (yield from reader.accept(*dialect.separators)):
            return


def _object(reader: Reader, calls: CallWriter) -> Parse[bool]:
    """Read a JSON object with the name of a tool and its arguments.  Returns whether it is a complete call."""
    yield from reader.skip_blanks()
    if not (yield from reader.accept("{")):
        return False
    seen: set[str] = set()
    is_complete = yield from _members(reader, calls, seen)
    # The model may have omitted the last brackets.
    is_whole = is_complete or (reader.is_at_end and "arguments" in seen)
    return calls.end(is_whole=is_whole) and is_complete


def _members(reader: Reader, calls: CallWriter, seen: set[str]) -> Parse[bool]:
    """Read members up to the closing bracket.  Returns whether the bracket was found.

    A member that occurs twice is an error, because its meaning is undefined.
    """
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
        member = "arguments" if key in ARGUMENT_KEYS else key
        if member in seen or not (yield from _member_value(reader, calls, member)):
            return False
        if member in ("name", "arguments"):
            seen.add(member)
        yield from reader.skip_blanks()
        yield from reader.accept(",")


def _member_value(reader: Reader, calls: CallWriter, member: str) -> Parse[bool]:
    """Read the value of a member.  Returns whether it is complete and valid."""
    if member == "name":
        name = yield from _string(reader)
        return name is not None and calls.start(name)
    if member == "arguments":
        return (yield from _arguments(reader, calls))
    return (yield from reader.json_value(_ignore))


def _arguments(reader: Reader, calls: CallWriter) -> Parse[bool]:
    """Read arguments: an object, a string that contains one, or null.  Returns whether they are complete."""
    char = yield from reader.peek()
    if char == "{":
        return (yield from reader.json_value(calls.arguments))
    if char == '"':
        text = yield from _string(reader)
        if text is None:
            return False
        arguments = json_object(text)
        if arguments is not None:
            calls.arguments(arguments)
        return arguments is not None
    return bool((yield from reader.accept("null")))


def _string(reader: Reader) -> Parse[str | None]:
    """Read a JSON string.  Returns its value, or None if there is no valid string."""
    pieces: list[str] = []
    if (yield from reader.peek()) != '"' or not (yield from reader.json_value(pieces.append)):
        return None
    try:
        text: str = json.loads("".join(pieces), strict=False)
        # This raises an error for a lone surrogate, which could not be sent.
        text.encode()
    except ValueError:
        return None
    return text


def _ignore(text: str) -> None:
    """Discard a value."""


# Format: [{"name": ..., "arguments": {...}}, ...]


def read_array(reader: Reader, dialect: Dialect, calls: CallWriter) -> Parse[None]:
    """Read an array of objects, or a single object.

    Models write a single call with or without the brackets.  Every object is one call.
    """
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


# Format: name{...}


def read_named(reader: Reader, dialect: Dialect, calls: CallWriter) -> Parse[None]:
    """Read a name and its arguments, with or without a mark between them; or an array.

    The arguments are a JSON object, possibly in a fence of Markdown.
    """
    yield from reader.skip_blanks()
    if (yield from reader.peek()) == "[":
        yield from read_array(reader, dialect, calls)
        return
    name = yield from reader.word(_NAME_STOPS, MAX_NAME)
    if dialect.call_id and (yield from reader.accept(dialect.call_id)):
        yield from reader.word(_NAME_STOPS, MAX_NAME)
    mark = yield from reader.accept(*dialect.name_end)
    # The word was a kind; the name follows.
    if mark and name == "function":
        name = yield from reader.word(_NAME_STOPS, MAX_NAME)
    yield from reader.skip_blanks()
    is_fenced = bool((yield from reader.accept("```json")))
    yield from reader.skip_blanks()
    has_object = (yield from reader.peek()) == "{"
    if not name or not (has_object or (mark and reader.is_cut)):
        return
    if not calls.start(_plain_name(name, dialect)):
        return
    is_whole = yield from reader.json_value(calls.arguments)
    if calls.end(is_whole=is_whole) and is_fenced:
        yield from _closing(reader, "```")


def _plain_name(name: str, dialect: Dialect) -> str:
    """Remove the dialect's prefix and the number of the call, as in "functions.get_weather:0"."""
    if dialect.name_prefix:
        name = name.removeprefix(dialect.name_prefix).partition(":")[0]
    return name


# Format: <function=name><parameter=key>value</parameter></function>


def read_tagged(reader: Reader, dialect: Dialect, calls: CallWriter) -> Parse[None]:
    """Read calls with arguments in tags, one for each key.

    Values are bare text, so the schema of the tool decides whether a value is a string or JSON.
    """
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
        is_whole = yield from _tagged_arguments(reader, tags, calls, has_key=mark == tags.key)
        if not calls.end(is_whole=is_whole) or not tags.name:
            return


def _tagged_arguments(
    reader: Reader, tags: Tags, calls: CallWriter, *, has_key: bool
) -> Parse[bool]:
    """Read the arguments of a call to its end.  Returns whether they are complete."""
    written = ObjectWriter(calls)
    while has_key or (yield from reader.accept(tags.key)):
        has_key = False
        if not calls.step():
            return False
        text, mark = yield from reader.until_soon((tags.key_end,), 2 * MAX_NAME)
        if not mark:
            return False
        key, kind = _key_and_kind(text)
        if tags.value:
            yield from reader.skip_blanks()
            if not (yield from reader.accept(tags.value)):
                return False
        types = calls.types_of(key)
        if kind:
            types = TEXT if kind == "string" else types.without_text()
        if not (yield from _tagged_value(reader, tags, written, key, types)):
            return False
        yield from reader.skip_blanks()
    yield from reader.peek()
    if reader.is_cut:
        return False
    written.end()
    if tags.end:
        yield from _closing(reader, tags.end)
    return True


def _key_and_kind(text: str) -> tuple[str, str]:
    """Split `key" string="true` into the key and the kind of value that the model declares, if any."""
    key, _, rest = text.partition('"')
    kind = "string" if 'string="true"' in rest else "other" if 'string="false"' in rest else ""
    return key.strip(), kind


def _tagged_value(
    reader: Reader, tags: Tags, written: ObjectWriter, key: str, types: ValueTypes
) -> Parse[bool]:
    """Read a value up to its end.  Returns whether it ended.

    A string is passed on as it arrives, any other value when it is complete.
    """
    pad = "\n" if any(mark.startswith("\n") for mark in tags.value_end) else ""
    if pad:
        yield from reader.accept(pad)
    written.key(key)
    if types.is_text and types.choices is None:
        nulls = [f"null{end}" for end in tags.value_end] if types.takes_null else []
        if nulls and (yield from reader.accept(*nulls)):
            written.value("null")
            return True
        written.value('"')
        if not (yield from reader.until(tags.value_end, written.string_piece)):
            return False
        written.value('"')
        return True
    pieces: list[str] = []
    if not (yield from reader.until(tags.value_end, pieces.append)):
        return False
    written.value(as_json("".join(pieces), types))
    return True


# Format: [name(key=value), ...]


def read_python(reader: Reader, dialect: Dialect, calls: CallWriter) -> Parse[None]:
    """Read calls in Python syntax."""
    yield from read_calls(reader, calls)


_BODIES: dict[str, Callable[[Reader, Dialect, CallWriter], Parse[None]]] = {
    "object": read_object,
    "array": read_array,
    "named": read_named,
    "tagged": read_tagged,
    "literals": read_literals,
    "python": read_python,
}
