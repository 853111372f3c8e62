"""A link between two workers: hidden states from a stage to the next, tokens from the last to the first.

On one machine a link is a ring in memory that both sides have, between machines a connection.
"""

import os
import stat
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from trouper.actors.executor.parallel.rings import Ring, RingFiles
from trouper.actors.executor.parallel.tcp_link import TcpLink


class Link(Protocol):
    """One side of a link between two stages."""

    def send(self, step: int, payload: np.ndarray) -> None:
        """Send a message; waits for room."""
        ...

    def receive(self, out: np.ndarray, *, wait: bool) -> tuple[int, int] | None:
        """Copy the next message to the beginning of `out`; returns its step and its size, or None if it has not come."""
        ...

    def close(self) -> None:
        """Give memory and descriptors back.  Idempotent."""
        ...


def close_files(files: Iterable[Sequence[int]]) -> None:
    """Close descriptors, each once."""
    for file in {file for some in files for file in some}:
        os.close(file)


def open_next(files: list[int], num_entries: int, entry_bytes: int) -> Link:
    """Open the link whose descriptors come first, and take them out of the list: three of a ring, one of a connection."""
    if stat.S_ISSOCK(os.fstat(files[0]).st_mode):
        return TcpLink(files.pop(0), entry_bytes)
    ring, files[:3] = RingFiles(*files[:3]), []
    return Ring(ring, num_entries, entry_bytes)
