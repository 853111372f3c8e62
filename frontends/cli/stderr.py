"""Write to a stderr that may be closed, full or without a reader: drop lines that cannot be written, and count them.

A server or an hour-long run must neither stop nor block because its messages are not read. Results go to stdout, where
a failed write is an error.
"""

import io
import os
import select
import sys
from typing import Any

# A pipe that is ready accepts this many bytes at once, so a write of this size never blocks.
PIECE_BYTES = 4096
# Wait this long for a slow reader, but not at all after it has been too slow once.
PATIENCE_MS = 1000


class DroppingStream(io.RawIOBase):
    """A stream over a file descriptor on which writing neither fails nor blocks for long.

    Args:
        file: the descriptor; closing the stream does not close it.
    """

    def __init__(self, file: int) -> None:
        super().__init__()
        self._file = file
        self._poll = select.poll()
        self._poll.register(file, select.POLLOUT)
        # Lines dropped since the last successful write.
        self._num_dropped = 0

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
        except OSError:
            # The disk is full, or the reader or the descriptor is closed.
            return False
        return not piece

    def _is_ready(self) -> bool:
        found = self._poll.poll(0 if self._num_dropped else PATIENCE_MS)
        return bool(found) and not found[0][1] & (select.POLLERR | select.POLLNVAL)


def open_standard_files() -> None:
    """Open /dev/null for each closed standard descriptor, so that a later socket cannot get its number.

    Messages would otherwise be written into that socket.
    """
    for file, flags in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(file)
        except OSError:
            # The system uses the lowest free number, which is this one.
            opened = os.open(os.devnull, flags)
            assert opened == file
    # Python sets it to None if the descriptor was closed at start.
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]
        # Opened for reading above, so that writing results raises an error instead of losing them.
        sys.stdout = os.fdopen(1, "w", closefd=False)


def drop_what_stderr_does_not_take() -> None:
    """Replace the process's stderr by a `DroppingStream`; a stderr that a test has replaced stays."""
    if sys.stderr is None or sys.stderr is sys.__stderr__:  # pyright: ignore[reportUnnecessaryComparison]  # it was closed
        encoding = "utf-8" if sys.stderr is None else sys.stderr.encoding  # pyright: ignore[reportUnnecessaryComparison]
        stream: Any = DroppingStream(2)
        sys.stderr = sys.__stderr__ = io.TextIOWrapper(  # pyright: ignore[reportConstantRedefinition]
            stream, encoding, "replace", write_through=True
        )
