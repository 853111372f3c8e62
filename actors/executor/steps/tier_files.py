"""Store KV blocks and recurrent states as files: their format, the folder, its size limit and the order of eviction.

    DIR/lock                            held while a file is written or files are evicted
    DIR/weights.json                    digests of weight files, by device, inode, size and times
    DIR/weights.lock                    held while a process hashes weight files
    DIR/SPACE/NAME.PARENT               one block; NAME has 64 hex digits, PARENT is the first 16 digits of the previous block's name
    DIR/SPACE/NAMEff.PARENT             the recurrent state at the end of block NAME; its PARENT is NAME itself, so the state goes first

SPACE is a digest of everything that determines KV values except the tokens: weights, config, code, processor.  Equal paths therefore
mean equal contents, and a lookup only tests whether the file exists.  There is no index on the disk.

No file is trusted: its length, space, name, layout and a checksum of the *unpacked* values must match, and it must be a regular file
owned by this user.  Otherwise it is removed and counts as a miss.  Nothing is synced to disk, because a file that a power failure
damages fails the checksum.  Every method may block on the disk, so only a thread on which nothing waits may call them.
"""

import fcntl
import heapq
import os
import re
import stat
import struct
import time
import zlib
from collections.abc import Generator
from contextlib import contextmanager, suppress

import msgspec
import numpy as np
from numpy.typing import NDArray

from trouper.config.tier import TierConfig

Bytes = NDArray[np.uint8]
# Magic, version, payload code, number of parts, unpacked bytes, payload bytes, space, name, checksum of the unpacked bytes.
# The last byte of the name is 0 for a block, and the kind for a state.
HEAD = struct.Struct("<4sBBHQQ16s33sQ")
MAGIC, VERSION, NAME_BYTES = b"TRKV", 2, 33
# A CRC-32 of the head and of the part sizes that follow it.
HEAD_SUM = struct.Struct("<I")
HEAD_BYTES = HEAD.size + HEAD_SUM.size
# Payload codes: unpacked values, and bfloat16 values packed into twelve bits each (`kernels/cpu/pack_kv.py`).
RAW, PACKED = 0, 12
FILE_NAME = re.compile(r"([0-9a-f]{64}(?:ff)?)\.([0-9a-f]{16})")
FIRST_PARENT = "0" * 16
# The limit for all spaces together. This many entries take 40 MB of memory.
MAX_FILES = 2**17
# The limit of parts in a block (layers × 2 × heads).
MAX_PARTS = 2**16
# Evict until this share of the size limit is free, so that not every write has to evict.
SLACK = 1 / 32
# Update a file's time of last use at most once in this many seconds.
TOUCH_S = 60.0
# If a folder changed less than this before it was scanned, it may have changed again within the same tick of the file system's clock.
TICK_NS = 20_000_000
# Scan a changed folder again only after this many times the duration of its last scan.
REST = 20
FOLD = 0xD6E8FEB86659FD93
MASK = 2**64 - 1


def _multipliers() -> NDArray[np.uint64]:
    """Return 16,384 odd numbers, one factor for each word of 128 KiB."""
    places = np.arange(2**14, dtype=np.uint64) + np.uint64(1)
    return places * np.uint64(0x9E3779B97F4A7C15) | np.uint64(1)


class Checksum:
    """Compute a 64-bit checksum of bytes and their order.

    It detects every change of a single word, and other changes with high probability.
    It runs at 16 GB/s, four times as fast as CRC-32, which would slow down unpacking.
    """

    def __init__(self) -> None:
        self._multipliers = _multipliers()
        self._room = np.empty_like(self._multipliers)

    def of(self, data: Bytes, name: bytes) -> int:
        """Return the checksum of the data of the block or state with this name."""
        total = int.from_bytes(name[:8], "little") ^ int.from_bytes(name[32:]) << 56 ^ len(data)
        num_words = len(data) // 8
        words = data[: 8 * num_words].view(np.uint64)
        for start in range(0, num_words, len(self._room)):
            part = words[start : start + len(self._room)]
            room = self._room[: len(part)]
            np.multiply(part, self._multipliers[: len(part)], out=room)
            total = (total ^ int(room.sum())) * FOLD & MASK
            total ^= total >> 29
        return total ^ zlib.crc32(data[8 * num_words :].tobytes())


class RefusedError(Exception):
    """Report that a file was not used or not written.  `args[0]` is the reason: one word, the label of the metric."""


class PackedBlock(msgspec.Struct, frozen=True):
    """Hold the contents of a file without its head.  `sizes` has the bytes of each part of a packed payload."""

    code: int
    sizes: NDArray[np.uint32]
    payload: Bytes
    num_raw: int
    checksum: int


def encode_head(block: PackedBlock, space: bytes, name: bytes) -> bytes:
    """Return the bytes that precede the payload in the file."""
    counts = len(block.sizes), block.num_raw, len(block.payload)
    head = HEAD.pack(MAGIC, VERSION, block.code, *counts, space, name, block.checksum)
    head += block.sizes.astype("<u4").tobytes()
    return head + HEAD_SUM.pack(zlib.crc32(head))


def decode(data: bytes | bytearray, space: bytes, name: bytes, num_raw: int) -> PackedBlock:
    """Decode a file, and check everything except the checksum of its unpacked values.

    Raises:
        RefusedError: the file belongs to another block, or it is damaged.
    """
    if len(data) < HEAD_BYTES:
        raise RefusedError("size")
    magic, version, code, num_parts, raw, num_payload, its_space, its_name, checksum = (
        HEAD.unpack_from(data)
    )
    end = HEAD.size + 4 * num_parts
    start = end + HEAD_SUM.size
    if magic != MAGIC or version != VERSION:
        raise RefusedError("version")
    if len(data) != start + num_payload or raw != num_raw:
        raise RefusedError("size")
    if HEAD_SUM.unpack_from(data, end)[0] != zlib.crc32(memoryview(data)[:end]):
        raise RefusedError("sum")
    if its_space != space or its_name != name.ljust(NAME_BYTES, b"\0"):
        raise RefusedError("name")
    sizes = np.frombuffer(data, "<u4", num_parts, HEAD.size).astype(np.uint32)
    payload = np.frombuffer(data, np.uint8, num_payload, start)
    return PackedBlock(code, sizes, payload, raw, checksum)


class TierDisk:
    """Make all calls to the file system.  Tests replace it with a slow, full or hanging disk."""

    def read(self, path: str, most: int) -> bytearray:
        """Return the contents of a regular file owned by this user.

        Raises:
            RefusedError: the path is anything else, or the file is longer than `most` bytes.
            OSError: the file cannot be read.
        """
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(path, flags)
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                raise RefusedError("owner")
            if found.st_size > most:
                raise RefusedError("size")
            data = bytearray(found.st_size)
            view, num_read = memoryview(data), 0
            while num_read < len(data):
                count = os.preadv(file, [view[num_read:]], num_read)
                if count == 0:
                    raise RefusedError("size")
                num_read += count
            return data
        finally:
            os.close(file)

    def write(self, path: str, parts: tuple[bytes | memoryview, ...]) -> None:
        """Write a new file that only this user may read.  Raises FileExistsError if there is one."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(path, flags, 0o600)
        with open(file, "wb", buffering=0) as writer:
            for part in parts:
                view = memoryview(part)
                while view:
                    # A short write is not an error; the next write raises its cause, such as a full disk.
                    view = view[writer.write(view) or 0 :]

    def num_free(self, path: str) -> tuple[int, int]:
        """Return the free bytes and the total bytes of the file system."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize


class TierEntry(msgspec.Struct):
    """Describe one file, with its full name in bytes."""

    name: bytes
    parent: str
    num_bytes: int
    used_s: float
    # The file's modification time, by which other processes see its last use.
    marked_s: float


# A space, and the first 16 hex digits of a name, followed by the kind if it is a state.
Key = tuple[str, str]


def key_of(space: str, name: bytes) -> Key:
    """Return the key of a block or state in the index.

    64 bits of the name suffice: if two blocks ever had the same key, the second one would just not be stored.
    """
    return space, name[:8].hex() + name[32:].hex()


def removals(entries: dict[Key, TierEntry], num_bytes: int, num_files: int = 0) -> list[Key]:
    """Choose files to evict until this many bytes and files are freed: children before parents, least recently used first.

    A block is useless without its predecessors, so a parent counts as used whenever one of its children was.
    """
    num_children: dict[Key, int] = {}
    for (space, _), entry in entries.items():
        parent = space, entry.parent
        if parent in entries:
            num_children[parent] = num_children.get(parent, 0) + 1
    leaves = [(entry.used_s, key) for key, entry in entries.items() if key not in num_children]
    heapq.heapify(leaves)
    found: list[Key] = []
    while leaves and (num_bytes > 0 or num_files > 0):
        used_s, key = heapq.heappop(leaves)
        entry, parent = entries[key], (key[0], entries[key].parent)
        found.append(key)
        num_bytes, num_files = num_bytes - entry.num_bytes, num_files - 1
        if parent in num_children:
            num_children[parent] -= 1
            if not num_children[parent]:
                heapq.heappush(leaves, (max(used_s, entries[parent].used_s), parent))
    # Names that form a cycle have no leaf. Only files of another program can do that.
    rest = entries.keys() - set(found)
    while rest and not leaves and (num_bytes > 0 or num_files > 0):
        found.append(key := rest.pop())
        num_bytes, num_files = num_bytes - entries[key].num_bytes, num_files - 1
    return found


class TierFolder:
    """Manage the files of one model's space, and the size limit for the files of all models in the folder."""

    def __init__(self, config: TierConfig, space: bytes, disk: TierDisk | None = None) -> None:
        self._config, self._space = config, space
        self._name = space.hex()
        self._disk = disk or TierDisk()
        self._root = config.folder
        self._entries: dict[Key, TierEntry] = {}
        self._num_bytes = 0
        # Names that appeared in this space (True) or vanished (False) since the last `take_changes`.
        self._changes: dict[bytes, bool] = {}
        # By space: its modification time at the last scan, when the scan began, and how long it took.
        self._read: dict[str, tuple[int, float, float]] = {}
        os.makedirs(self._path(), mode=0o700, exist_ok=True)
        with self._locked():
            is_exact = self._refresh()
            # The size limit may be smaller than at the last start.
            with suppress(RefusedError):
                self._make_room(0, is_exact=is_exact)

    def __repr__(self) -> str:
        return f"<TierFolder {self._root}: {len(self._entries)} files, {self._num_bytes} bytes>"

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def num_files(self) -> int:
        return len(self._entries)

    def __contains__(self, name: bytes) -> bool:
        entry = self._entries.get(key_of(self._name, name))
        return entry is not None and entry.name == name

    def take_changes(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Return the names that appeared and the names that vanished since the last call."""
        changes, self._changes = self._changes, {}
        return tuple(n for n, is_here in changes.items() if is_here), tuple(
            n for n, is_here in changes.items() if not is_here
        )

    def look(self) -> None:
        """Update the index from files that other processes added or removed."""
        with self._locked():
            self._refresh()

    def _path(self, name: str = "") -> str:
        return os.path.join(self._root, self._name, name)

    def _file(self, key: Key) -> str:
        entry = self._entries[key]
        return os.path.join(self._root, key[0], f"{entry.name.hex()}.{entry.parent}")

    @contextmanager
    def _locked(self) -> Generator[None]:
        """Hold the lock of the folder, so that all writers together respect its size limit."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(os.path.join(self._root, "lock"), flags, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)

    def _refresh(self) -> bool:
        """Scan the changed spaces.  Returns False if a scan was skipped, because that space is large and was scanned a moment ago.

        The caller holds the lock, so a half-written file belongs to a dead process and is removed.
        """
        spaces: dict[str, int] = {key[0]: -1 for key in self._entries}
        is_exact = True
        with os.scandir(self._root) as found:
            for each in found:
                if len(each.name) == len(self._name) and each.is_dir(follow_symlinks=False):
                    spaces[each.name] = each.stat(follow_symlinks=False).st_mtime_ns
        for space, changed_ns in spaces.items():
            known_ns, read_s, took_s = self._read.get(space, (0, 0.0, 0.0))
            if known_ns == changed_ns and read_s * 1e9 - changed_ns > TICK_NS:
                continue
            if time.time() - read_s < REST * took_s:
                is_exact = False
            else:
                self._read_space(space, changed_ns)
        return is_exact

    def _read_space(self, space: str, changed_ns: int) -> None:
        began_s, found = time.time(), set[Key]()
        with suppress(FileNotFoundError), os.scandir(os.path.join(self._root, space)) as files:
            for each in files:
                match = FILE_NAME.fullmatch(each.name)
                status = None
                with suppress(FileNotFoundError):
                    status = each.stat(follow_symlinks=False)
                if match is None or status is None or not stat.S_ISREG(status.st_mode):
                    if each.name.endswith(".tmp"):
                        self._unlink(each.path)
                    continue
                name = bytes.fromhex(match[1])
                key = key_of(space, name)
                if key in found:
                    self._unlink(each.path)
                    continue
                found.add(key)
                self._add(
                    key, TierEntry(name, match[2], status.st_size, status.st_mtime, status.st_mtime)
                )
        for key in [key for key in self._entries if key[0] == space and key not in found]:
            self._drop(key)
        self._read[space] = changed_ns, began_s, time.time() - began_s

    def _add(self, key: Key, entry: TierEntry) -> None:
        known = self._entries.get(key)
        if known is not None:
            entry.used_s = max(entry.used_s, known.used_s)
            self._num_bytes -= known.num_bytes
        elif key[0] == self._name:
            self._changes[entry.name] = True
        self._entries[key] = entry
        self._num_bytes += entry.num_bytes

    def _drop(self, key: Key) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._num_bytes -= entry.num_bytes
            if key[0] == self._name:
                self._changes[entry.name] = False

    def _unlink(self, path: str) -> bool:
        """Remove a file.  Returns False if the operating system refuses."""
        try:
            os.unlink(path)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def read(self, name: bytes, num_raw: int) -> PackedBlock:
        """Read the block of this name.  A file that does not match is removed.

        Raises:
            RefusedError: the file does not exist, or it does not match.
        """
        key = key_of(self._name, name)
        if name not in self:
            raise RefusedError("gone")
        try:
            # Packing is used only if it shrinks a block, so the file is at most this long.
            most = num_raw + HEAD_BYTES + 4 * MAX_PARTS
            return decode(self._disk.read(self._file(key), most), self._space, name, num_raw)
        except FileNotFoundError:
            self._drop(key)
            raise RefusedError("gone") from None
        except OSError:
            self.remove(name)
            raise RefusedError("io") from None
        except RefusedError:
            self.remove(name)
            raise

    def remove(self, name: bytes) -> None:
        """Remove the file of a block, and its entry in the index even if the file cannot be removed."""
        key = key_of(self._name, name)
        if name in self:
            self._unlink(self._file(key))
            self._drop(key)

    def write(self, name: bytes, parent: bytes, block: PackedBlock) -> None:
        """Write a block within the size limit, and evict others for it.  Does nothing if the block is already stored.

        Raises:
            RefusedError: the parent is not stored, or evicting cannot make enough room.
            OSError: the disk refuses.
        """
        key, label = key_of(self._name, name), parent.hex()[:16] or FIRST_PARENT
        head = encode_head(block, self._space, name)
        needed = len(head) + len(block.payload)
        with self._locked():
            is_exact = self._refresh()
            if key in self._entries:
                return
            if parent and parent not in self:
                raise RefusedError("parent")
            self._make_room(needed, is_exact=is_exact)
            if parent and parent not in self:
                raise RefusedError("full")
            temporary = self._path(f"{name.hex()}.tmp")
            try:
                self._disk.write(temporary, (head, block.payload.data))
                os.rename(temporary, self._path(f"{name.hex()}.{label}"))
            except BaseException:
                self._unlink(temporary)
                raise
            now = time.time()
            self._add(key, TierEntry(name, label, needed, now, now))

    def _make_room(self, needed: int, *, is_exact: bool) -> None:
        """Evict files until `needed` bytes fit into the size limit and into the file system.

        Raises:
            RefusedError: they would not fit even if all files were evicted.
        """
        bound = self._config.max_bytes
        if not is_exact:
            bound -= int(SLACK * bound)
        free, whole = self._disk.num_free(self._root)
        low = int(self._config.min_free * whole) + needed - free
        excess = max(self._num_bytes + needed - bound, low)
        too_many = len(self._entries) + 1 - MAX_FILES
        if excess <= 0 and too_many <= 0:
            return
        if excess > self._num_bytes:
            raise RefusedError("full")
        wanted = min(self._num_bytes, excess + int(SLACK * bound)) if excess > 0 else 0
        for key in removals(self._entries, wanted, too_many):
            if self._unlink(self._file(key)):
                excess -= self._entries[key].num_bytes
                self._drop(key)
        if excess > 0:
            raise RefusedError("full")

    def touch(self, name: bytes) -> None:
        """Record a use of a block and of all its predecessors."""
        now, key, seen = time.time(), key_of(self._name, name), set[Key]()
        while (entry := self._entries.get(key)) is not None and key not in seen:
            seen.add(key)
            entry.used_s = now
            if now - entry.marked_s > TOUCH_S:
                entry.marked_s = now
                with suppress(OSError):
                    os.utime(self._file(key), (now, now), follow_symlinks=False)
            key = self._name, entry.parent

    def clear(self) -> None:
        """Remove all files of this space."""
        with self._locked():
            self._read.pop(self._name, None)
            self._refresh()
            for key in [key for key in self._entries if key[0] == self._name]:
                self._unlink(self._file(key))
                self._drop(key)
