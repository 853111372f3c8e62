"""Read calls in two syntaxes without JSON, and write their arguments as JSON.

    read_literals   call:name{key:<escape>value<escape>,other:1}   bare keys, strings between the dialect's quotes
    read_calls      [f(x=1, names=['a']), g()]                     Python syntax

Nothing is evaluated: the readers accept strings, numbers, True, False, None, lists, tuples and dicts only.
"""

import ast
import json
import re

from trouper.frontends.dialects.calls import (
    NUMBER,
    NUMBERS,
    CallWriter,
    ObjectWriter,
    quoted,
    spaced,
)
from trouper.frontends.dialects.reader import Parse, Reader, Sink
from trouper.frontends.dialects.table import Dialect
from trouper.frontends.dialects.value_types import as_json

MAX_NAME = 128
_KEY_STOPS = ' \t\r\n"{}()[]<>,;'
MAX_LITERAL_DEPTH = 32
_LITERAL_STOPS = ":,{}[]<"


def read_literals(reader: Reader, dialect: Dialect, calls: CallWriter) -> Parse[None]:
    """Read one call.

    Its keys are bare and its strings are enclosed in the dialect's own marks; the arguments are converted to JSON.
    """
    yield from reader.skip_blanks()
    if not (yield from reader.accept("call:")):
        return
    name = yield from reader.word(_KEY_STOPS, MAX_NAME)
    if not name or (yield from reader.peek()) != "{":
        return
    if not calls.start(name):
        return
    is_whole = yield from _literal(reader, dialect.literal_quote, calls, 0)
    calls.end(is_whole=is_whole)


def _literal(reader: Reader, quote: str, calls: CallWriter, depth: int) -> Parse[bool]:
    """Read one value and write it as JSON.  Returns False if it is cut off or nested too deeply."""
    sink = calls.arguments
    yield from reader.skip_blanks()
    if numbers := reader.matching(NUMBERS):
        sink(spaced(numbers))
    if (yield from reader.accept(quote)):
        sink('"')
        if not calls.step():
            return False
        is_closed = yield from reader.until((quote,), lambda text: sink(quoted(text)))
        if is_closed:
            sink('"')
        return bool(is_closed)
    opened = yield from reader.accept("{", "[")
    if not opened:
        word = yield from reader.word(_LITERAL_STOPS, MAX_NAME)
        if not word or reader.is_at_end:
            return False
        sink(as_json(word))
        return NUMBER.fullmatch(word) is not None or calls.step()
    if depth == MAX_LITERAL_DEPTH or not calls.step():
        return False
    sink(opened)
    return (yield from _literal_members(reader, quote, calls, depth, is_object=opened == "{"))


def _literal_members(
    reader: Reader, quote: str, calls: CallWriter, depth: int, *, is_object: bool
) -> Parse[bool]:
    sink = calls.arguments
    closing, is_first = ("}" if is_object else "]"), True
    while True:
        yield from reader.skip_blanks()
        if (yield from reader.accept(closing)):
            sink(closing)
            return True
        if not is_first:
            if not (yield from reader.accept(",")):
                return False
            sink(", ")
            yield from reader.skip_blanks()
        is_first = False
        if is_object:
            key = yield from reader.word(_LITERAL_STOPS, MAX_NAME)
            if not key or not calls.step() or not (yield from reader.accept(":")):
                return False
            sink(json.dumps(key, ensure_ascii=False) + ": ")
        if not (yield from _literal(reader, quote, calls, depth + 1)):
            return False


MAX_DEPTH = 32
_NAME_STOPS = " \t\r\n\"'{}()[]<>,;=:"
_WORD_STOPS = " \t\r\n\"'{}()[]<>,:="


def read_calls(reader: Reader, calls: CallWriter) -> Parse[None]:
    """Read calls in brackets, or one on each line, until other text follows.

    Arguments are Python literals, which are converted to JSON.  Nothing is evaluated.
    """
    yield from reader.skip_blanks()
    is_list = bool((yield from reader.accept("[")))
    while (yield from _call(reader, calls)):
        if is_list:
            yield from reader.skip_blanks()
            if not (yield from reader.accept(",")):
                break
    if is_list:
        yield from reader.accept("]")


def _call(reader: Reader, calls: CallWriter) -> Parse[bool]:
    """Read one call.  Returns False if there is none, or if it is cut off."""
    yield from reader.skip_blanks()
    name = yield from reader.word(_NAME_STOPS, MAX_NAME)
    if not name or not (yield from reader.accept("(")) or not calls.start(name):
        return False
    written = ObjectWriter(calls)
    is_complete = yield from _keywords(reader, written)
    if is_complete:
        written.end()
    return calls.end(is_whole=is_complete)


def _keywords(reader: Reader, written: ObjectWriter) -> Parse[bool]:
    while True:
        yield from reader.skip_blanks()
        if (yield from reader.accept(")")):
            return True
        key = yield from reader.word(_NAME_STOPS, MAX_NAME)
        yield from reader.skip_blanks()
        if not key or not (yield from reader.accept("=")):
            return False
        written.key(key)
        if not (yield from _value(reader, written, written.value, 0)):
            return False
        yield from reader.skip_blanks()
        yield from reader.accept(",")


def _value(reader: Reader, written: ObjectWriter, sink: Sink, depth: int) -> Parse[bool]:
    """Read one value and write it as JSON to `sink`.  Returns whether it is complete.

    Args:
        written: counts the steps.
    """
    yield from reader.skip_blanks()
    if numbers := reader.matching(NUMBERS):
        sink(spaced(numbers))
    char = yield from reader.peek()
    if char in ("'", '"'):
        return written.step() and (yield from _string(reader, sink))
    opened = yield from reader.accept("[", "{", "(")
    if not opened:
        word = yield from reader.word(_WORD_STOPS, 4096)
        if not word or reader.is_at_end:
            return False
        sink(as_json(word))
        return NUMBER.fullmatch(word) is not None or written.step()
    if depth == MAX_DEPTH or not written.step():
        return False
    closing = {"[": "]", "(": ")", "{": "}"}[opened]
    sink("{" if opened == "{" else "[")
    if not (yield from _items(reader, written, sink, depth, closing)):
        return False
    sink("}" if opened == "{" else "]")
    return True


def _items(
    reader: Reader, written: ObjectWriter, sink: Sink, depth: int, closing: str
) -> Parse[bool]:
    is_first = True
    while True:
        yield from reader.skip_blanks()
        if (yield from reader.accept(closing)):
            return True
        if not is_first:
            if not (yield from reader.accept(",")):
                return False
            yield from reader.skip_blanks()
            if (yield from reader.accept(closing)):  # a trailing comma
                return True
            sink(", ")
        is_first = False
        if closing == "}":
            key: list[str] = []
            if not (yield from _value(reader, written, key.append, MAX_DEPTH)):
                return False
            text = "".join(key)
            sink(text if text.startswith('"') else json.dumps(text))
            yield from reader.skip_blanks()
            if not (yield from reader.accept(":")):
                return False
            sink(": ")
        if not (yield from _value(reader, written, sink, depth + 1)):
            return False


def _string(reader: Reader, sink: Sink) -> Parse[bool]:
    """Read a string literal.  Returns whether it is complete.

    Text is passed on as it arrives, or as a whole if it has escapes that need Python's rules.
    """
    quote = yield from reader.accept("'''", '"""', "'", '"')
    sink('"')
    while True:
        found = yield from reader.until((quote, "\\"), lambda text: sink(quoted(text)))
        if found != "\\":
            if found:
                sink('"')
            return bool(found)
        if simple := reader.matching(_PAIRS):
            sink(quoted("".join([_SIMPLE[char] for char in ("\\" + simple)[1::2]])))
            continue
        sink(quoted((yield from _escape(reader))))


def _escape(reader: Reader) -> Parse[str]:
    """Read the characters behind a backslash, and return the character that they represent."""
    kind = yield from reader.take(1)
    digits = {"x": 2, "u": 4, "U": 8}.get(kind)
    if digits is None:
        return _SIMPLE.get(kind, "\\" + kind)
    code = yield from reader.take(digits)
    try:
        return ast.literal_eval(f"'\\{kind}{code}'") if code.isalnum() else "\\" + kind + code
    except (SyntaxError, ValueError):
        return "\\" + kind + code


_SIMPLE = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0",
    "\\": "\\", "'": "'", '"': '"', "\n": "", "": "\\",
}  # fmt: skip
# Several consecutive simple escapes, without the first backslash.
_PAIRS = re.compile(r"""(?:[ntrbfav\\'"]\\)+(?=[ntrbfav\\'"])[ntrbfav\\'"]""")
