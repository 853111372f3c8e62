"""Write the records of all streams to the files of a journal, and recover them.  Synchronous: call it from one thread at a time.

A folder belongs to one server at a time.  Its files are called segments.  These laws keep every record that has reached the disk readable
after a crash at any moment:

1. A segment is append-only, and only the process that created it appends.  A later process repeats the recovered records in a new segment.
2. After a short write or a failed fsync, a segment is abandoned and all live records are repeated in a new one: the kernel may have dropped
   its dirty pages, although a second fsync would succeed.
3. Earlier segments are removed only after the new one, which repeats all live records, was synced.
4. New streams are refused when the live records would exceed half of `max_bytes`, so that an old and a new segment fit together.
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
    """Access the files of a journal.  Every method may raise OSError and may block: call it from a thread."""

    def names(self) -> list[str]:
        """List the names of the segments, the oldest first."""
        ...

    def read(self, name: str) -> bytes: ...

    def create(self, name: str) -> int:
        """Create a segment.  Returns the descriptor to write to."""
        ...

    def write(self, file: int, data: bytes) -> int:
        """Append bytes.  Returns the number of bytes written, which may be smaller."""
        ...

    def sync(self, file: int) -> None:
        """Wait until all written bytes survive a power failure.  After an error, never call it again for this file."""
        ...

    def close(self, file: int) -> None: ...

    def unlink(self, name: str) -> None: ...

    def sync_folder(self) -> None: ...

    def release(self) -> None:
        """Unlock the folder for another server.  The next `names` locks it again."""
        ...


class FolderDisk:
    """Keep segments in a folder of the file system, locked against other servers.

    Raises:
        TrouperValidationError: the folder belongs to another user, is writable for others, or is in use by another server.
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
        """Lock the folder if this server does not hold it.  Raises BlockingIOError if another server uses it."""
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
    """Report that the journal cannot be written, because the disk is full or fails."""


class Segments:
    """Write the journal of one process and mirror its live streams in memory, in `streams`.

    Args:
        fingerprint: identifies the model in the header of each segment.
        new_id: makes the random id of a segment.
        max_bytes: the limit of the folder's size.
        syncs: whether every write includes an fsync.
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
        # By operation and by name of the error.
        self.errors: Counter[tuple[str, str]] = Counter()
        self._disk, self._new_id = disk, new_id
        self._max_bytes, self._syncs = max_bytes, syncs
        # The size of each live stream, and their sum, which other threads may read.
        self._sizes: dict[str, int] = {}
        self.kept_bytes = 0
        self._file: int | None = None
        # The file in the sync thread, which must stay open meanwhile.
        self._syncing: int | None = None
        self._id = b""
        self._number = self._num_bytes = self._last = 0

    def __repr__(self) -> str:
        return f"<Segments: {len(self.streams)} streams, segment {self._last}, {self._num_bytes} bytes>"

    @property
    def num_bytes(self) -> int:
        """Return the size of the current segment in bytes."""
        return self._num_bytes

    def has_room(self, num_bytes: int) -> bool:
        """Return whether the folder has room for a new stream with a request of this size, without its tokens."""
        return 2 * (self.kept_bytes + num_bytes) <= self._max_bytes

    def ended_before(self, at: float) -> list[str]:
        """List the ids of the streams that ended before `at`, in seconds of the wall clock."""
        ends = ((id, stream.ended) for id, stream in self.streams.items())
        return [id for id, ended in ends if ended is not None and ended.at < at]

    def begin(self) -> None:
        """Recover the streams of earlier processes, and repeat their records in a new segment.

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
        """Write records.  After the call they survive a crash of the process, and with `syncs` also a power failure.

        Raises:
            JournalError: neither this segment nor a new one can be written.  The records stay in memory for the next attempt.
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
        """Wait until the content of a file survives a power failure.  Another thread may write meanwhile.  Raises OSError."""
        self._disk.sync(file)

    def end_sync(self, file: int, error: OSError | None) -> None:
        """Handle the outcome of `sync`.  After an error, all records are repeated in a new segment.

        An error is ignored if `file` was replaced meanwhile, because its successor repeats its records and was synced.

        Raises:
            JournalError: the sync has failed, and no new segment can be written.
        """
        was_open, self._syncing = self._syncing == file, None
        if not was_open:
            # `close` has already closed it.
            return
        if file != self._file:
            self._close(file)
        elif error is not None:
            self._count("sync", error)
            self._abandon()
            self.rotate()

    def rotate(self) -> None:
        """Repeat all live records in a new segment, sync it, and remove the earlier segments.

        Raises:
            JournalError: the new segment cannot be written.  The earlier segments remain.
        """
        self._abandon()
        file: int | None = None
        try:
            earlier = self._disk.names()
            # Read from the disk, because a successor that has given up may have created segments, too.
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
                # Harmless: recovery ignores it, and the next rotation tries again.
                pass

    def close(self, *, syncs: bool = False) -> None:
        """Close all files, with `syncs` after an fsync.  Idempotent."""
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
        """Close the segment and unlock the folder for another server.  The next write locks it again and starts a new segment."""
        self._abandon()
        self._disk.release()

    def note(self, records: Iterable[Record]) -> None:
        """Keep records in memory for the next segment, without writing them now."""
        self._note_all(records)

    def _note_all(self, records: Iterable[Record]) -> list[Record]:
        """Apply records to `streams` and their sizes.  Returns the records as a list."""
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
        """Write all bytes or raise OSError: nothing may follow a torn frame in its file."""
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
