"""The files of a journal in one folder, which belongs to one server at a time."""

import fcntl
import os
from pathlib import Path
from typing import Protocol

from trouper.config.checks import check_private_folder
from trouper.errors import invalid

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
