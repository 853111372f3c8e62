"""Standard error that may be closed, full or without a reader: what cannot be written is dropped and counted.

A server, and a run of hours, must not end or stand still because nothing reads its messages.  Results go to stdout, where a failure
to write is an error.
"""

import io
import os
import select
import sys
from typing import Any

PIECE_BYTES = 4096  # that a pipe takes whole, or not at all, where it says that it takes any
PATIENCE_MS = 1000  # for a reader that is slow; for one that was too slow before there is none


class DroppingStream(io.RawIOBase):
    """A descriptor to which writing never fails.

    Args:
        file: the descriptor, which stays open.
    """

    def __init__(self, file: int) -> None:
        super().__init__()
        self._file = file
        self._poll = select.poll()
        self._poll.register(file, select.POLLOUT)
        self._num_dropped = 0  # lines, since the last that was written

    def __repr__(self) -> str:
        return f"<DroppingStream {self._file}: {self._num_dropped} lines dropped>"

    def fileno(self) -> int:
        return self._file

    def isatty(self) -> bool:
        return os.isatty(self._file)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        given = text = bytes(data)
        if self._num_dropped:
            notice = b"trouper: %d lines could not be written here\n" % self._num_dropped
            text = notice + given if self._is_ready() else given
        for start in range(0, len(text), PIECE_BYTES):
            if not self._write(text[start : start + PIECE_BYTES]):
                self._num_dropped += max(1, min(text.count(b"\n", start), given.count(b"\n")))
                break
        return len(given)

    def _write(self, piece: bytes) -> bool:
        try:
            while piece and self._is_ready():
                piece = piece[os.write(self._file, piece) :]
                self._num_dropped = 0
        except OSError:  # no space, no reader, no descriptor
            return False
        return not piece

    def _is_ready(self) -> bool:
        found = self._poll.poll(0 if self._num_dropped else PATIENCE_MS)
        return bool(found) and not found[0][1] & (select.POLLERR | select.POLLNVAL)


def open_standard_files() -> None:
    """Fill the places of standard files that are closed: a socket that took one would be written to as if it were it."""
    for file, flags in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(file)
        except OSError:
            opened = os.open(os.devnull, flags)  # the lowest that is free, so this one
            assert opened == file
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]  # it was closed
        sys.stdout = os.fdopen(1, "w", closefd=False)  # writing fails: results would be lost


def drop_what_stderr_does_not_take() -> None:
    """Exchange this process's stderr for one to which writing never fails; another's, as a test's, stays."""
    if sys.stderr is None or sys.stderr is sys.__stderr__:  # pyright: ignore[reportUnnecessaryComparison]  # it was closed
        encoding = "utf-8" if sys.stderr is None else sys.stderr.encoding  # pyright: ignore[reportUnnecessaryComparison]
        stream: Any = DroppingStream(2)
        sys.stderr = sys.__stderr__ = io.TextIOWrapper(  # pyright: ignore[reportConstantRedefinition]
            stream, encoding, "replace", write_through=True
        )
