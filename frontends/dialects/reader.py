"""Read a text that arrives in parts as if it were complete, and find the ends of JSON values in it.

A parser is a generator.  A bare `yield` asks for more text, and the parser continues after `Reader.feed` has added some, or
after the text has ended.  So each format is written once, from top to bottom, and the way the text is split cannot change
the result.

Every character is scanned once and copied once: a scan that waits continues where it stopped.  `JSONScanner` understands strings,
escapes and the depth of brackets, but not the kinds of brackets, because the model's text is passed on whether it is valid or not.
A short text is scanned bracket by bracket.  A long one is scanned by array operations, which take the same time for every text.
"""

import json
import re
from collections.abc import Callable, Generator, Iterable
from functools import cache
from typing import TypeVar

import numpy as np

# The deepest nesting of JSON.  A deeper text is not a call.
MAX_DEPTH = 64
# From this number of characters on, array operations are faster in the worst case.
LONG = 96
# The number of characters of one pass; its arrays take a megabyte.
AT_ONCE = 1 << 16
_TELLING = re.compile(r'["\\{}\[\]\x00-\x1f]')
_QUOTE, _BACKSLASH = ord('"'), ord("\\")
# The change of the depth by each character.
_DEPTHS = np.zeros(256, dtype=np.int8)
_DEPTHS[[ord("{"), ord("[")]] = 1
_DEPTHS[[ord("}"), ord("]")]] = -1


class JSONScanner:
    """The state of the scan of one value, which begins with a bracket or a quote.

    It keeps only the depth and whether it is inside a string, so a value of any size costs constant memory.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False  # applies to the next character
        self.is_too_deep = False
        # The indices of control characters in strings of the last text.
        self.raw: list[int] = []
        # The number of characters to scan at once.  It grows, so that the scan of a short value reads little behind its end.
        self._length = LONG

    def __repr__(self) -> str:
        return f"<JSONScanner: depth {self._depth}{', in a string' if self._in_string else ''}>"

    def end_in(self, text: str, start: int) -> int:
        """Continue the scan.

        Returns:
            The index behind the value's last character; the index of the bracket that nests too deeply; or -1 if the value
            continues behind this text.
        """
        self.raw.clear()
        while start < len(text):
            stop = min(start + self._length, len(text))
            is_short = stop - start <= LONG
            end = self._step(text, start, stop) if is_short else self._sweep(text, start, stop)
            if end >= 0:
                return end
            start, self._length = stop, min(2 * self._length, AT_ONCE)
        return -1

    def _step(self, text: str, start: int, stop: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            start += 1
        while found := _TELLING.search(text, start, stop):
            start, char = found.end(), found[0]
            if char == "\\":
                self._is_escaped = start == stop
                start += 1
            elif char < " ":
                if self._in_string:
                    self.raw.append(start - 1)
                continue
            elif char == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if char in "{[" else -1
                if self._depth > MAX_DEPTH:
                    self.is_too_deep = True
                    return start - 1
            else:
                continue
            if char != "\\" and self._depth <= 0 and not self._in_string:
                return start
        return -1

    def _sweep(self, text: str, start: int, stop: int) -> int:
        codes = np.frombuffer(text[start:stop].encode("latin-1", "replace"), dtype=np.uint8)
        is_quote = codes == _QUOTE
        escaped = self._escaped(codes)
        if escaped is not None:
            is_quote &= ~escaped
        # An odd number means inside a string; a closing quote is outside.
        num_quotes = np.cumsum(is_quote, dtype=np.int32) + int(self._in_string)
        is_inside = (num_quotes & 1).astype(bool)
        steps = _DEPTHS[codes]
        steps[is_inside] = 0
        if escaped is not None:
            steps[escaped] = 0
        depths = np.cumsum(steps, dtype=np.int32) + self._depth
        is_end = (depths <= 0) & ~is_inside & (is_quote | (steps < 0))
        is_end |= depths > MAX_DEPTH
        end = int(is_end.argmax())
        self._note_raw(codes, is_inside, escaped, start, end if is_end[end] else len(codes))
        if is_end[end]:
            self.is_too_deep = bool(depths[end] > MAX_DEPTH)
            return start + end + (not self.is_too_deep)
        self._depth, self._in_string = int(depths[-1]), bool(is_inside[-1])
        return -1

    def _note_raw(
        self,
        codes: np.ndarray,
        is_inside: np.ndarray,
        escaped: np.ndarray | None,
        start: int,
        end: int,
    ) -> None:
        is_raw = (codes < ord(" ")) & is_inside
        if escaped is not None:
            is_raw &= ~escaped
        if is_raw.any():
            self.raw += (np.flatnonzero(is_raw[:end]) + start).tolist()

    def _escaped(self, codes: np.ndarray) -> np.ndarray | None:
        """Return which characters follow an odd number of backslashes, or None if there are no backslashes."""
        is_backslash = codes == _BACKSLASH
        was_escaped, self._is_escaped = self._is_escaped, False
        if not was_escaped and not is_backslash.any():
            return None
        places = np.arange(len(codes), dtype=np.int32)
        # The index of the last other character before each index; one before the text if the text begins escaped.
        is_other = ~is_backslash
        if was_escaped:
            is_other[0] = True
        last_other = np.maximum.accumulate(np.where(is_other, places, np.int32(-1)))
        # The number of backslashes directly before each index.
        num_before = np.empty_like(places)
        num_before[0] = 0
        num_before[1:] = places[:-1] - last_other[:-1]
        escaped = (num_before & 1).astype(bool)
        escaped[0] = was_escaped
        self._is_escaped = bool(is_backslash[-1] and not escaped[-1])
        return escaped


T = TypeVar("T")
Parse = Generator[None, None, T]
Sink = Callable[[str], None]

BLANK = frozenset(" \t\r\n")
MAX_MARK = 64  # characters of the longest mark
# The number of blanks that are held back until the text behind them is known.
MAX_BLANKS = 256
_BLANKS = re.compile(r"[ \t\r\n]+")


class Reader:
    """The text so far, and the position up to which it has been read.

    Methods that return `Parse` are generators: use `yield from`, because they wait for more text if the present text
    does not suffice.
    """

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._has_ended = False
        self._was_cut = False
        # The text read since `hold`, except for the part that is still in `_text`.
        self._held: list[str] | None = None
        self._held_from = 0

    def __repr__(self) -> str:
        state = "ended" if self._has_ended else "open"
        return f"<Reader: {state}, {len(self._text) - self._position} characters not read>"

    def feed(self, text: str) -> None:
        """Append text, and forget the text that has been read, unless it is held."""
        if self._held is not None:
            self._held.append(self._text[self._held_from : self._position])
            self._held_from = 0
        self._text = self._text[self._position :] + text
        self._position = 0

    def end(self, *, is_cut: bool = False) -> None:
        """End the text.  `is_cut` means that the model was interrupted."""
        self._has_ended, self._was_cut = True, is_cut

    @property
    def is_at_end(self) -> bool:
        """Whether all text has been read and no more will arrive."""
        return self._has_ended and self._position == len(self._text)

    @property
    def is_cut(self) -> bool:
        """Whether all text of an interrupted answer has been read."""
        return self._was_cut and self.is_at_end

    def hold(self) -> None:
        """Keep the text from here on, until `give_back` or `rewind`.

        A parser that may turn out to be wrong holds its start, and either returns there or hands the text out as
        content.
        """
        self._held, self._held_from = [], self._position

    @property
    def num_held(self) -> int:
        """The number of characters read since `hold`."""
        return sum(map(len, self._held or ())) + self._position - self._held_from

    def rewind(self) -> None:
        """Return to the position of `hold`."""
        self._text = self.give_back() + self._text[self._position :]
        self._position = 0

    def give_back(self) -> str:
        """Return the text read since `hold`, and stop keeping it."""
        held = [*(self._held or ()), self._text[self._held_from : self._position]]
        self._held = None
        return "".join(held)

    # The following methods are generators: `result = yield from reader.peek()`.

    def peek(self) -> Parse[str]:
        """Return the next character without reading it, or "" at the end.

        Waits for the next text if all has been read.  The empty string is returned at the end only.
        """
        while self._position == len(self._text):
            if self._has_ended:
                return ""
            yield
        return self._text[self._position]

    def skip_blanks(self) -> Parse[str]:
        """Read white space and return it."""
        skipped: list[str] = []
        while (yield from self.peek()) in BLANK:
            found = _BLANKS.match(self._text, self._position)
            assert found is not None
            skipped.append(found[0])
            self._position = found.end()
        return "".join(skipped)

    def skip_blanks_before(self, marks: Iterable[str]) -> Parse[None]:
        """Read white space if one of the marks, or the end, follows it.  Otherwise read nothing.

        White space in front of other text belongs to the content and must not be lost.
        """
        marks, num_blanks = tuple(marks), 0
        while True:
            start = self._position + num_blanks
            limit = min(len(self._text), self._position + MAX_BLANKS)
            while start < limit and self._text[start] in BLANK:
                start += 1
            if start == self._position + MAX_BLANKS:
                return
            num_blanks, rest = start - self._position, self._text[start : start + MAX_MARK]
            if (not rest and self._has_ended) or any(map(rest.startswith, marks)):
                self._position = start
                return
            is_cut = any(mark.startswith(rest) for mark in marks)
            if self._has_ended or (rest and not is_cut):
                return
            yield

    def accept(self, *marks: str) -> Parse[str]:
        """Read and return the first of the marks that follows directly.  Returns "" without reading if there is none."""
        while True:
            rest = len(self._text) - self._position
            for mark in marks:
                if self._text.startswith(mark, self._position):
                    self._position += len(mark)
                    return mark
                is_cut = rest < len(mark) and mark.startswith(self._text[self._position :])
                if is_cut and not self._has_ended:
                    break
            else:
                return ""
            yield

    def until(self, marks: Iterable[str], sink: Sink) -> Parse[str]:
        """Read up to and including the first mark.  The text before it goes to `sink` as it arrives.

        Args:
            marks: none of them is the beginning of another.

        Returns:
            The mark, or "" at the end of the text.  Only the possible beginning of a mark is held back.
        """
        marks = tuple(marks)
        pattern, longest = _any_of(marks), max(map(len, marks))
        while True:
            found = pattern.search(self._text, self._position)
            if found is not None:
                sink(self._text[self._position : found.start()])
                self._position = found.end()
                return found[0]
            keep = 0 if self._has_ended else self._overlap(marks, longest)
            sink(self._text[self._position : len(self._text) - keep])
            self._position = len(self._text) - keep
            if self._has_ended:
                return ""
            yield

    def until_soon(self, marks: tuple[str, ...], max_length: int) -> Parse[tuple[str, str]]:
        """Read up to and including the first mark, if it follows within `max_length` characters.

        Returns:
            The text before the mark, and the mark.  If there is no such mark, the mark is "", and the text is one character
            longer than `max_length`, or all the remaining text.
        """
        pattern, longest = _any_of(marks), max(map(len, marks))
        while True:
            start, limit = self._position, self._position + max_length
            found = pattern.search(self._text, start, limit + longest)
            if found is not None and found.start() <= limit:
                self._position = found.end()
                return self._text[start : found.start()], found[0]
            if self._has_ended or len(self._text) >= limit + longest:
                self._position = min(limit + 1, len(self._text))
                return self._text[start : self._position], ""
            yield

    def take(self, length: int) -> Parse[str]:
        """Read this number of characters, or fewer at the end."""
        while len(self._text) - self._position < length and not self._has_ended:
            yield
        taken = self._text[self._position : self._position + length]
        self._position += len(taken)
        return taken

    def rest(self, sink: Sink) -> Parse[None]:
        """Read all the remaining text.

        Each part goes to `sink` as it arrives, so plain content is streamed without delay.
        """
        while True:
            sink(self._text[self._position :])
            self._position = len(self._text)
            if self._has_ended:
                return
            yield

    def _overlap(self, marks: tuple[str, ...], longest: int) -> int:
        """Count the characters at the end of the text that may begin a mark."""
        tail = self._text[max(self._position, len(self._text) - longest + 1) :]
        for i, char in enumerate(tail):
            for mark in marks:
                if char == mark[0] and mark.startswith(tail[i:]):
                    return len(tail) - i
        return 0

    def word(self, stops: str, max_length: int) -> Parse[str]:
        """Read a word: the text up to one of the `stops`, at most `max_length` characters."""
        pattern, start = _none_of(stops), 0
        while True:
            found = pattern.match(self._text, self._position + start, self._position + max_length)
            end = self._position + start if found is None else found.end()
            start = end - self._position
            is_cut = end == len(self._text) and start < max_length
            if not is_cut or self._has_ended:
                word = self._text[self._position : end]
                self._position = end
                return word
            yield

    def matching(self, pattern: re.Pattern[str]) -> str:
        """Read the match of a pattern in the text that has arrived, or "" if there is none.  It does not wait."""
        found = pattern.match(self._text, self._position)
        if found is None:
            return ""
        self._position = found.end()
        return found[0]

    def json_value(self, sink: Sink) -> Parse[bool]:
        """Read one JSON value and write its characters to `sink`.

        Raw line breaks and other control characters in strings, which JSON does not allow, become escapes.

        Returns:
            Whether the value is complete and not nested too deeply.
        """
        if (yield from self.peek()) not in ('"', "{", "["):
            word = yield from self.word(_AFTER_LITERAL, MAX_LITERAL)
            sink(word)
            return bool(word)
        scanner = JSONScanner()
        while True:
            end = scanner.end_in(self._text, self._position)
            is_open = end < 0
            end = len(self._text) if is_open else end
            sink(_with_escapes(self._text, self._position, end, scanner.raw))
            self._position = end
            if not is_open or self._has_ended:
                return not is_open and not scanner.is_too_deep
            yield


def _with_escapes(text: str, start: int, end: int, places: Iterable[int]) -> str:
    """Return a part of a text with the characters at these indices as JSON escapes."""
    pieces: list[str] = []
    for place in places:
        pieces += (text[start:place], json.dumps(text[place])[1:-1])
        start = place + 1
    return "".join([*pieces, text[start:end]])


MAX_LITERAL = 4096  # characters of a number or a word
_AFTER_LITERAL = ",}] \t\r\n;<"


@cache
def _any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    """Match the first mark in the text, and the longest of several at one position."""
    longest_first = sorted(marks, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)))


@cache
def _none_of(stops: str) -> re.Pattern[str]:
    return re.compile(f"[^{re.escape(stops)}]+")
