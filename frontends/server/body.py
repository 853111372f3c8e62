"""A request's body, as its pieces come in.

Joining the pieces at the end would hold the event loop for 50 ms at 90 MB.  So from `LARGE` on they are copied
one by one to where they stay; the system hands that memory out as it is written, so nobody can claim more
than was sent.
"""

import numpy as np

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
            self._room = memoryview(np.empty(self._capacity, np.uint8))
            self._room[: self.size] = b"".join(self._pieces)
            self._pieces.clear()
        if self._room is None:
            self._pieces.append(piece)
        else:
            self._room[self.size : end] = piece
        self.size = end

    def whole(self) -> bytes | memoryview:
        return b"".join(self._pieces) if self._room is None else self._room[: self.size]
