"""Write the records of all streams to the files of a journal, and find them again.  Synchronous: call it from one thread at a time.

A folder belongs to one server at a time.  Its files are called segments.  The laws make every record that was once on the disk readable after
a crash at any moment:

1. Segments only grow, and only by the process that made them.  A later process repeats what it found in a new segment.
2. A segment is never touched again after a short write or a failed fsync: its dirty pages may be lost although a second fsync succeeds.
   Everything is repeated in a new segment instead.
3. Earlier segments are removed only when the new one, with everything in it, has reached the disk.
4. The bytes of all kept streams never exceed half of `max_bytes`, so that an old and a new segment fit together.
"""

import errno
import fcntl
import os
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from trouper.config.checks import check_private_folder
from trouper.errors import invalid
from trouper.frontends.server.durable.records import (
    HEAD_BYTES,
    Frame,
    Gone,
    Record,
    SegmentHead,
    StreamRecord,
    Whole,
    encode_frame,
    encode_head,
    encode_records,
    join,
    num_bytes,
    recover,
    scan,
)

SUFFIX = ".trj"
LOCK = "lock"


class Disk(Protocol):
    """Do for a journal what concerns its folder.  Every method may raise OSError, and may take long: call it from a thread."""

    def names(self) -> list[str]:
        """List the segments, the oldest first."""
        ...

    def read(self, name: str) -> bytes: ...

    def create(self, name: str) -> int:
        """Create a segment.  Returns the descriptor to write to."""
        ...

    def write(self, file: int, data: bytes) -> int:
        """Append bytes.  Returns how many were written, which may be fewer."""
        ...

    def sync(self, file: int) -> None:
        """Wait until what was written survives a loss of power.  After an error, never call it again for this file."""
        ...

    def close(self, file: int) -> None: ...

    def unlink(self, name: str) -> None: ...

    def sync_folder(self) -> None: ...

    def release(self) -> None:
        """Give the folder to another server.  The next `names` asks for it again."""
        ...


class FolderDisk:
    """A folder of the file system.

    Raises:
        TrouperValidationError: the folder belongs to another user, others may write to it, or another server uses it.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        check_private_folder(self._path, "journal")
        self._folder = self._lock = -1
        try:
            self._hold()
        except BlockingIOError as error:
            raise invalid("journal", str(error), path) from None
        except OSError as error:
            raise invalid("journal", f"the folder cannot be used: {error.strerror}", path) from None

    def __repr__(self) -> str:
        return f"<FolderDisk {self._path}>"

    def _hold(self) -> None:
        """Take the folder, unless this server has it.  Raises BlockingIOError if another server uses it."""
        if self._folder >= 0:
            return
        try:
            self._folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._lock = os.open(LOCK, flags, 0o600, dir_fd=self._folder)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(self._lock, 20, 0).decode(errors="replace").strip()
                text = (
                    f"the folder is in use by process {holder}; --take-over asks that server for it"
                )
                raise BlockingIOError(text) from None
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, str(os.getpid()).encode(), 0)
        except BaseException:
            self.release()
            raise

    def names(self) -> list[str]:
        self._hold()
        found = [name for name in os.listdir(self._folder) if name.endswith(SUFFIX)]
        return sorted(name for name in found if name.removesuffix(SUFFIX).isdigit())

    def read(self, name: str) -> bytes:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder)
        with open(file, "rb") as reader:
            return reader.read()

    def create(self, name: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, 0o600, dir_fd=self._folder)

    def write(self, file: int, data: bytes) -> int:
        return os.write(file, data)

    def sync(self, file: int) -> None:
        os.fdatasync(file)

    def close(self, file: int) -> None:
        os.close(file)

    def unlink(self, name: str) -> None:
        os.unlink(name, dir_fd=self._folder)

    def sync_folder(self) -> None:
        os.fsync(self._folder)

    def release(self) -> None:
        for file in (self._lock, self._folder):
            if file >= 0:
                os.close(file)
        self._lock = self._folder = -1


# A segment of this size is replaced by one with only the kept streams, unless these fill half of it.
ROTATE_BYTES = 16 * 2**20
DIGITS = 12


class JournalError(Exception):
    """The journal cannot be written: the disk is full, or fails."""


class Segments:
    """The journal of one process.  `streams` is everything that it keeps.

    Args:
        fingerprint: names the model, in the head of each segment.
        new_id: makes the random id of a segment.
        max_bytes: the most bytes in the folder.
        syncs: whether every write waits for the disk.
    """

    def __init__(
        self,
        disk: Disk,
        fingerprint: bytes,
        new_id: Callable[[], bytes],
        *,
        max_bytes: int,
        syncs: bool = False,
    ) -> None:
        self.streams: dict[str, StreamRecord] = {}
        self.fingerprint = fingerprint
        # By what was done and by the error's name.
        self.errors: Counter[tuple[str, str]] = Counter()
        self._disk, self._new_id = disk, new_id
        self._max_bytes, self._syncs = max_bytes, syncs
        # The bytes of each kept stream, and of all.  Another thread may read the sum.
        self._sizes: dict[str, int] = {}
        self.kept_bytes = 0
        self._file: int | None = None
        # The file that another thread syncs, which must not be closed meanwhile.
        self._syncing: int | None = None
        self._id = b""
        self._number = self._num_bytes = self._last = 0

    def __repr__(self) -> str:
        return f"<Segments: {len(self.streams)} streams, segment {self._last}, {self._num_bytes} bytes>"

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the current segment."""
        return self._num_bytes

    def has_room(self, num_bytes: int) -> bool:
        """Return whether a new stream of this size may be kept.  The room for its tokens is checked as they come."""
        return 2 * (self.kept_bytes + num_bytes) <= self._max_bytes

    def ended_before(self, at: float) -> list[str]:
        """List the streams that ended before a time of the wall clock, and are kept no longer."""
        ends = ((id, stream.ended) for id, stream in self.streams.items())
        return [id for id, ended in ends if ended is not None and ended.at < at]

    def begin(self) -> None:
        """Find the streams of earlier processes, and repeat them in a segment of this one.

        Raises:
            JournalError: the new segment cannot be written.
            OSError: the folder cannot be read.
        """
        found: list[bytes] = []
        for name in self._disk.names():
            found.append(self._disk.read(name))
            self._last = max(self._last, _number_of(name))
        self.streams = recover(map(scan, found))
        for id, stream in self.streams.items():
            self._sizes[id] = sum(map(num_bytes, stream.records()))
        self.kept_bytes = sum(self._sizes.values())
        self.rotate()

    def write(self, records: Iterable[Record]) -> None:
        """Write records.  When it returns, they survive the end of the process, and with `syncs` a loss of power.

        Raises:
            JournalError: neither this segment nor a new one can be written.  The records are remembered for the next one.
        """
        noted = self._note_all(records)
        if not noted and self._file is not None:
            return
        if self._file is None or self._num_bytes > max(ROTATE_BYTES, 2 * self.kept_bytes):
            self.rotate()
            return
        try:
            self._append(self._file, encode_records(noted))
            if self._syncs:
                self._disk.sync(self._file)
        except OSError as error:
            self._count("write", error)
            self._abandon()
            self.rotate()

    def begin_sync(self) -> int:
        """Return the current file, for `sync` in another thread.  It stays open until `end_sync`."""
        assert self._file is not None
        self._syncing = self._file
        return self._file

    def sync(self, file: int) -> None:
        """Wait until everything in a file survives a loss of power.  Another thread may write meanwhile.  Raises OSError."""
        self._disk.sync(file)

    def end_sync(self, file: int, error: OSError | None) -> None:
        """Note that the disk has synced a file, or how this has failed.

        What a replaced file contains has reached the disk in its successor, so its failure does not matter.

        Raises:
            JournalError: it has failed, and no new segment can be written.
        """
        was_kept, self._syncing = self._syncing == file, None
        if not was_kept:
            # It was closed together with the segment.
            return
        if file != self._file:
            self._close(file)
        elif error is not None:
            self._count("sync", error)
            self._abandon()
            self.rotate()

    def rotate(self) -> None:
        """Repeat everything in a new segment, and remove the earlier ones.

        Raises:
            JournalError: it cannot be written.  The earlier segments are still there.
        """
        self._abandon()
        file: int | None = None
        try:
            earlier = self._disk.names()
            # A successor that did not take over may have made some, too.
            self._last = 1 + max(self._last, *map(_number_of, earlier), 0)
            name = f"{self._last:0{DIGITS}}{SUFFIX}"
            file = self._disk.create(name)
            self._id, self._number, self._num_bytes = self._new_id(), 0, HEAD_BYTES
            self._write_all(file, encode_head(SegmentHead(self._id, self.fingerprint)))
            repeated = (r for stream in self.streams.values() for r in stream.records())
            self._append(file, encode_records((*repeated, Whole())))
            self._disk.sync(file)
            self._disk.sync_folder()
        except OSError as error:
            self._count("rotate", error)
            if file is not None:
                self._close(file)
            raise JournalError(str(error)) from error
        self._file = file
        for old in earlier:
            try:
                self._disk.unlink(old)
            except OSError:
                # It no longer counts, and the next rotation tries again.
                pass

    def close(self, *, syncs: bool = False) -> None:
        """Close all files, with `syncs` once everything has reached the disk.  Idempotent."""
        late, self._syncing = self._syncing, None
        if late is not None and late != self._file:
            self._close(late)
        if syncs and self._file is not None:
            try:
                self._disk.sync(self._file)
            except OSError as error:
                self._count("sync", error)
        self._abandon()

    def release(self) -> None:
        """Close the segment and give the folder to another server.  The next write takes it back, in a new segment."""
        self._abandon()
        self._disk.release()

    def note(self, records: Iterable[Record]) -> None:
        """Remember records for the next segment, without writing them now."""
        self._note_all(records)

    def _note_all(self, records: Iterable[Record]) -> list[Record]:
        """Remember records.  Returns them as a list."""
        noted = list(records)
        for record in noted:
            is_joined = join(self.streams, record)
            if isinstance(record, Gone):
                self.kept_bytes -= self._sizes.pop(record.id, 0)
            elif not isinstance(record, Whole) and record.id in self.streams:
                size = num_bytes(record, is_joined=is_joined)
                self._sizes[record.id] = self._sizes.get(record.id, 0) + size
                self.kept_bytes += size
        return noted

    def _append(self, file: int, frames: Iterable[Frame]) -> None:
        data = bytearray()
        for frame in frames:
            data += encode_frame(self._id, self._number, frame)
            self._number += 1
        self._write_all(file, bytes(data))

    def _write_all(self, file: int, data: bytes) -> None:
        """Raises OSError if not everything was written: a torn frame must be the last of its file."""
        num_written = self._disk.write(file, data)
        self._num_bytes += num_written
        if num_written != len(data):
            raise OSError("short write")

    def _count(self, what: str, error: OSError) -> None:
        self.errors[what, errno.errorcode.get(error.errno or 0, "short")] += 1

    def _abandon(self) -> None:
        file, self._file = self._file, None
        if file is not None and file != self._syncing:
            self._close(file)

    def _close(self, file: int) -> None:
        try:
            self._disk.close(file)
        except OSError:
            pass


def _number_of(name: str) -> int:
    return int(name.removesuffix(SUFFIX))
