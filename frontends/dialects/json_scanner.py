"""Find the end of a JSON object, array or string in text that arrives in parts.

The scanner understands strings, escapes and the depth of brackets, but not the kinds of brackets, because the model's
text is passed on whether it is valid or not.  A short text is scanned bracket by bracket.  A long one is scanned by array
operations, which take the same time for every text.
"""

import re

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
