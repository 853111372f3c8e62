"""A request's body, as its pieces come in.

Joining the pieces at the end would hold the event loop for 50 ms at 90 MB.  So from `LARGE` on they are copied
one by one to where they stay, in a room: mapped memory, which the system hands out as it is written, in small
pages, so nobody can claim more than was sent.

Each page is 2.5 µs the first time and 0.4 when it is written again (two Zen 3 cores, a virtual machine): of 57 ms of
the loop for 90 MB, 8 are left where the room has been used before.  So one is kept.
"""

import mmap
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np

LARGE = 2**20  # bytes, copied in 0.1 ms
KEPT = 2**27  # bytes of a room that stay with the server when nobody uses it


class Rooms:
    """Memory for large bodies.  Each room has `capacity` bytes; the one that was given back last is taken first.

    Args:
        leave_core: called with each megabyte that comes.
    """

    def __init__(self, capacity: int, leave_core: Callable[[], object] = lambda: None) -> None:
        self.capacity = capacity
        self.leave_core = leave_core
        # Filled by whichever thread drops the last view of a body.
        self._free: deque[mmap.mmap] = deque(maxlen=1)

    def take(self) -> memoryview:
        """A room, until nobody has a view of it any more.  What was in it before may be in it still."""
        try:
            room = self._free.pop()
        except IndexError:
            room = mmap.mmap(-1, self.capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        held = np.frombuffer(room, np.uint8)  # whose end can be heard of
        weakref.finalize(held, self._give_back, room).atexit = False
        return held.data

    def _give_back(self, room: mmap.mmap) -> None:
        if self.capacity > KEPT:
            room.madvise(mmap.MADV_DONTNEED, KEPT)
        self._free.append(room)


class Body:
    """At most `rooms.capacity` bytes; whoever adds has checked it."""

    def __init__(self, rooms: Rooms) -> None:
        self.size = 0
        self._rooms = rooms
        self._pieces: list[bytes] = []
        self._room: memoryview | None = None

    def add(self, piece: bytes) -> None:
        end = self.size + len(piece)
        if self._room is None and self._pieces and end > LARGE:
            self._room = self._rooms.take()
            self._room[: self.size] = b"".join(self._pieces)
            self._pieces.clear()
        if self._room is None:
            self._pieces.append(piece)
        else:
            self._room[self.size : end] = piece
            if self.size // LARGE < end // LARGE:
                self._rooms.leave_core()
        self.size = end

    def whole(self) -> bytes | memoryview:
        return b"".join(self._pieces) if self._room is None else self._room[: self.size]
