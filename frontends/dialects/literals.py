"""Read calls with bare keys, and strings between quotes of the dialect's own: `call:name{key:<escape>value<escape>,other:1}`."""

import json

from trouper.frontends.dialects.calls import NUMBER, NUMBERS, CallWriter, quoted, spaced
from trouper.frontends.dialects.reader import Parse, Reader
from trouper.frontends.dialects.table import Dialect
from trouper.frontends.dialects.value_types import as_json

MAX_NAME = 128
_NAME_STOPS = ' \t\r\n"{}()[]<>,;'
MAX_LITERAL_DEPTH = 32
_LITERAL_STOPS = ":,{}[]<"


def read_literals(reader: Reader, dialect: Dialect, calls: CallWriter) -> Parse[None]:
    """Read one call."""
    yield from reader.skip_blanks()
    if not (yield from reader.accept("call:")):
        return
    name = yield from reader.word(_NAME_STOPS, MAX_NAME)
    if not name or (yield from reader.peek()) != "{":
        return
    if not calls.start(name):
        return
    is_whole = yield from _literal(reader, dialect.literal_quote, calls, 0)
    calls.end(is_whole=is_whole)


def _literal(reader: Reader, quote: str, calls: CallWriter, depth: int) -> Parse[bool]:
    """Read one value and write it as JSON; False where it is cut off or too deep."""
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
