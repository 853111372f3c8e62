"""A request's body, as its pieces come in.

Joining the pieces at the end would hold the event loop for 50 ms at 90 MB.  So from `LARGE` on they are copied
one by one to where they stay.  That is mapped memory: the system hands it out as it is written, in small pages,
so nobody can claim more than was sent; and taking it back, which is 10 ms, leaves the interpreter to others
when it happens in a thread.
"""

import mmap

LARGE = 2**20  # bytes, copied in 0.1 ms


class Body:
    """At most `capacity` bytes; whoever adds has checked it."""

    def __init__(self, capacity: int) -> None:
        self.size = 0
        self._capacity = capacity
        self._pieces: list[bytes] = []
        self._room: memoryview | None = None

    def add(self, piece: bytes) -> None:
        end = self.size + len(piece)
        if self._room is None and self._pieces and end > LARGE:
            self._room = memoryview(_mapped(self._capacity))
            self._room[: self.size] = b"".join(self._pieces)
            self._pieces.clear()
        if self._room is None:
            self._pieces.append(piece)
        else:
            self._room[self.size : end] = piece
        self.size = end

    def whole(self) -> bytes | memoryview:
        return b"".join(self._pieces) if self._room is None else self._room[: self.size]


def _mapped(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
