"""Exchange data between workers on one machine through ring buffers in shared memory, with the step of each entry.

A ring has one sender and one receiver. Its memory is an anonymous file; two eventfd counters hold the numbers of
filled and of empty entries, so a side can sleep until the other acts. Workers inherit all three descriptors, so the
operating system frees everything when the processes end. Law: a side accesses an entry only after it has decremented
one counter and before it increments the other; both calls order memory accesses.
"""

import contextlib
import mmap
import os
import select
import time
from typing import NamedTuple

import numpy as np

from trouper.errors import DeviceStartError

HEADER = np.dtype([("step", np.int64), ("num_bytes", np.int64)])
# Bytes of an entry's header, so that the payload begins on a cache line.
LINE = 64
# Seconds of polling before a side sleeps, so that a prompt answer arrives without a context switch.
AWAKE_S = 2e-5


class RingFiles(NamedTuple):
    """Hold the descriptors of a ring: its memory, and its counters of filled and of empty entries.

    Worker processes inherit them from the process that created the ring.
    """

    memory: int
    filled: int
    empty: int


def create_ring(num_entries: int, entry_bytes: int) -> RingFiles:
    """Create a ring with entries of at most `entry_bytes` bytes, and allocate its memory.

    Raises:
        DeviceStartError: no memory or no descriptors are available.
    """
    size = num_entries * _stride(entry_bytes)
    files: list[int] = []
    try:
        files.append(os.memfd_create("trouper-ring", os.MFD_CLOEXEC))
        os.posix_fallocate(files[0], 0, size)
        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE
        files.append(os.eventfd(0, flags))
        files.append(os.eventfd(num_entries, flags))
    except OSError as error:
        for file in files:
            os.close(file)
        raise DeviceStartError(f"cannot share {size} bytes between stages: {error}") from None
    return RingFiles(*files)


class Ring:
    """Send to a ring or receive from it.

    Each side owns its copies of the descriptors and closes them.  A waiting side polls briefly, and then sleeps.
    """

    def __init__(self, files: RingFiles, num_entries: int, entry_bytes: int) -> None:
        self._files = files
        self._stride, self._entry_bytes = _stride(entry_bytes), entry_bytes
        self._num_entries = num_entries
        self._memory = mmap.mmap(files.memory, num_entries * self._stride)
        self._bytes = np.frombuffer(self._memory, dtype=np.uint8).reshape(num_entries, -1)
        self._next = 0

    def __repr__(self) -> str:
        return (
            f"<Ring of {self._num_entries} entries of {self._entry_bytes} bytes, at {self._next}>"
        )

    def send(self, step: int, payload: np.ndarray) -> None:
        """Copy a payload of contiguous uint8 into the next entry. Waits until one is empty.

        Raises:
            ValueError: the payload is larger than an entry.
        """
        if len(payload) > self._entry_bytes:
            raise ValueError(f"the payload has {len(payload)} bytes (maximum {self._entry_bytes})")
        _take(self._files.empty, wait=True)
        entry = self._bytes[self._next % self._num_entries]
        entry[: HEADER.itemsize].view(HEADER)[0] = step, len(payload)
        entry[LINE : LINE + len(payload)] = payload
        self._next += 1
        os.eventfd_write(self._files.filled, 1)

    def receive(self, out: np.ndarray, *, wait: bool) -> tuple[int, int] | None:
        """Copy the payload of the next entry to the beginning of `out`.

        Returns:
            The entry's step and number of bytes, or None if there is no entry and `wait` is False.
        """
        if not _take(self._files.filled, wait=wait):
            return None
        entry = self._bytes[self._next % self._num_entries]
        step, num_bytes = entry[: HEADER.itemsize].view(HEADER)[0].tolist()
        out[:num_bytes] = entry[LINE : LINE + num_bytes]
        self._next += 1
        os.eventfd_write(self._files.empty, 1)
        return step, num_bytes

    def close(self) -> None:
        """Release this side's mapping and descriptors.  Idempotent.  The memory is freed when both sides have closed it."""
        self._bytes = np.zeros((0, 0), dtype=np.uint8)
        self._memory.close()
        for file in self._files:
            with contextlib.suppress(OSError):
                os.close(file)
        self._files = RingFiles(-1, -1, -1)


def _stride(entry_bytes: int) -> int:
    return LINE + -(-entry_bytes // LINE) * LINE


def _take(counter: int, *, wait: bool) -> bool:
    """Decrement an eventfd counter.  Returns False if it is zero and `wait` is False; otherwise polls briefly, then sleeps."""
    awake_until = time.perf_counter() + AWAKE_S
    while True:
        try:
            os.eventfd_read(counter)
        except BlockingIOError:
            if not wait:
                return False
        else:
            return True
        if time.perf_counter() > awake_until:
            poll = select.poll()
            poll.register(counter, select.POLLIN)
            poll.poll()
