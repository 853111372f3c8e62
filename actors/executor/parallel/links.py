"""The links of each stage: hidden states from one to the next, tokens from the last to the first.

On one machine a link is a ring in memory that both sides have, between machines a connection.
"""

import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from trouper.actors.executor.parallel.rings import Ring, RingFiles, create_ring
from trouper.actors.executor.parallel.tcp_link import TcpLink
from trouper.actors.stages import num_ring_entries
from trouper.config.resolve import EngineConfig
from trouper.errors import DeviceStartError

# Of hidden states: one that is sent while the other is read.  A sender may wait for room here; behind it nothing waits
# that the receiver needs.
HIDDEN_ENTRIES = 2
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class RingSizes(NamedTuple):
    """The sizes of all rings of a pipeline."""

    num_stages: int
    hidden_bytes: int  # of the hidden states of the largest step
    token_bytes: int  # of the tokens of a step with all sequences

    @classmethod
    def of(cls, config: EngineConfig, hidden_size: int) -> "RingSizes":
        width = hidden_size * ITEM_BYTES[config.dtype]
        scheduler = config.scheduler
        return cls(
            config.num_stages,
            scheduler.max_num_scheduled_tokens * width,
            scheduler.max_num_seqs * np.dtype(np.int64).itemsize,
        )

    @property
    def num_bytes(self) -> int:
        """The bytes of all of them together."""
        num_links = self.num_stages - 1
        tokens = num_ring_entries(self.num_stages) * self.token_bytes
        return num_links * HIDDEN_ENTRIES * self.hidden_bytes + tokens


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


class StageLinks(NamedTuple):
    """The links of one stage; None where it has no such neighbour."""

    hidden_in: Link | None
    hidden_out: Link | None
    tokens: Link | None

    def close(self) -> None:
        """Close all.  Idempotent."""
        for ring in self:
            if ring is not None:
                ring.close()


def create_files(sizes: RingSizes) -> list[tuple[int, ...]]:
    """Make the rings of a pipeline; returns the descriptors of each stage, of which two stages share every one.

    Raises:
        DeviceStartError: the system has not so much memory, or no descriptors.
    """
    free = free_bytes()
    if sizes.num_bytes > free:
        raise DeviceStartError(
            f"the stages share {sizes.num_bytes} bytes for their hidden states, {free} are free"
        )
    made: list[RingFiles] = []
    try:
        for _ in range(sizes.num_stages - 1):
            made.append(create_ring(HIDDEN_ENTRIES, sizes.hidden_bytes))  # noqa: PERF401  # closed if one fails
        made.append(create_ring(num_ring_entries(sizes.num_stages), sizes.token_bytes))
    except DeviceStartError:
        close_files(made)
        raise
    *hidden, tokens = made
    last = sizes.num_stages - 1
    return [
        (
            *(hidden[stage - 1] if stage > 0 else ()),
            *(hidden[stage] if stage < last else ()),
            *(tokens if stage in (0, last) else ()),
        )
        for stage in range(sizes.num_stages)
    ]


def close_files(files: Iterable[Sequence[int]]) -> None:
    """Close descriptors, each once."""
    for file in {file for some in files for file in some}:
        os.close(file)


def open_links(index: int, files: Sequence[int], sizes: RingSizes) -> StageLinks:
    """Open the links of a stage by the descriptors that it has inherited: three of a ring, one of a connection."""
    last = sizes.num_stages - 1
    rest = list(files)

    hidden = HIDDEN_ENTRIES, sizes.hidden_bytes
    tokens = num_ring_entries(sizes.num_stages), sizes.token_bytes
    return StageLinks(
        open_next(rest, *hidden) if index > 0 else None,
        open_next(rest, *hidden) if index < last else None,
        open_next(rest, *tokens) if index in (0, last) else None,
    )


def open_next(files: list[int], num_entries: int, entry_bytes: int) -> Link:
    """Open the link whose descriptors come first, and take them out of the list: three of a ring, one of a connection."""
    if stat.S_ISSOCK(os.fstat(files[0]).st_mode):
        return TcpLink(files.pop(0), entry_bytes)
    ring, files[:3] = RingFiles(*files[:3]), []
    return Ring(ring, num_entries, entry_bytes)


def free_bytes() -> int:
    """Read how much memory this machine, and this cgroup, can still give."""
    words = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(words["MemAvailable"].split()[0]) * 1024
    try:
        path = Path("/proc/self/cgroup").read_text().splitlines()[-1].rpartition(":")[2]
        folder = Path(f"/sys/fs/cgroup{path}")
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
    except (OSError, ValueError, IndexError):
        return free
    return free if limit == "max" else min(free, int(limit) - used)
