"""Take long strings out of a JSON body before it is parsed.

A parser holds the interpreter lock for its whole run: 0.2 s for 90 MB of base64 that no code needs as a Python string.  Here
numpy finds the ends of all strings without the lock, a short reference replaces each long string, and the strict parser reads
the rest.

Laws.  Only strings without a backslash are taken out, so the parser would find the same ends.  The caller puts the string of
each reference back; if a reference remains, the caller parses the unchanged body.
"""

import time
from typing import NamedTuple
from uuid import uuid4

import numpy as np

# A shorter string is parsed in 50 µs.
LONG = 2**16
# The bytes to search in one turn of 0.2 ms.  Other threads run in between.
STEP = 2**20
PAUSE_S = 1e-4
# The most quotes and backslashes.  They are visited one by one in 5 ms.
MAX_MARKS = 2**16
QUOTE, BACKSLASH = b'"\\'


class Excerpt(NamedTuple):
    """A body without its long strings, and those by their references.

    The references stand for the strings in `rest`, which is valid JSON of moderate size.
    """

    rest: bytes
    strings: dict[str, memoryview]


def excerpt(body: bytes | memoryview) -> Excerpt | None:
    """Return a body without its long strings; None when there is nothing to take out.

    Only strings without escapes are taken out, because others would need decoding.
    """
    marks = _marks(body)
    if marks is None:
        return None
    # A name that no client can guess.
    view, name = memoryview(body), uuid4().hex
    parts: list[bytes] = []
    strings: dict[str, memoryview] = {}
    done = 0
    for begin, end in _plain_strings(view, marks):
        if end - begin > LONG:
            reference = f"{name}-{len(strings)}"
            strings[reference] = view[begin:end]
            parts += bytes(view[done:begin]), reference.encode()
            done = end
    if not strings:
        return None
    return Excerpt(b"".join((*parts, view[done:])), strings)


def _marks(body: bytes | memoryview) -> list[int] | None:
    """Find all quotes and backslashes; None when there are too many."""
    characters = np.frombuffer(body, np.uint8)
    found: list[np.ndarray] = []
    num = 0
    for begin in range(0, len(characters), STEP):
        part = characters[begin : begin + STEP]
        found.append(np.flatnonzero((part == QUOTE) | (part == BACKSLASH)) + begin)
        num += len(found[-1])
        if num > MAX_MARKS:
            return None
        if begin:
            time.sleep(PAUSE_S)
    return np.concatenate(found).tolist() if found else []


def _plain_strings(view: memoryview, marks: list[int]) -> list[tuple[int, int]]:
    """Find the begin and end of each string that holds no backslash, without its quotes."""
    found: list[tuple[int, int]] = []
    begin: int | None = None  # inside a string
    is_plain = True
    escaped = -1  # an escaped quote is no mark
    for at in marks:
        if at == escaped:
            continue
        if view[at] == BACKSLASH:
            escaped, is_plain = at + 1, False
        elif begin is None:
            begin, is_plain = at + 1, True
        else:
            if is_plain:
                found.append((begin, at))
            begin = None
    return found
