"""Files of KV blocks and recurrent states: their format, their folder, its bound and the order in which files are removed.

    DIR/lock                            held while a file is written or files are removed
    DIR/weights.json                    digests of weight files, by device, inode, size and time
    DIR/weights.lock                    held while a process reads weight files for their digests
    DIR/SPACE/NAME.PARENT               one block; NAME has 64 digits, and PARENT the first 16 of the name of the block before it
    DIR/SPACE/NAMEff.PARENT             the recurrent state behind the block of this name, which is its parent: it is removed before it

SPACE is a digest of everything that decides about KV except the tokens: weights, config, code, processor.  So two files of one path
have the same contents, and a block is found by existence.  There is no index on the disk.

A file is recognised, never trusted: length, space, name, layout and a sum over the *unpacked* values must match, and it must be a plain
file of this user.  Otherwise it is removed and counts as missing.  Nothing is synced: what a loss of power takes does not match.
All methods may wait for the disk, so a thread calls them that nothing waits for.
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
# Magic, version, code of the payload, number of parts, bytes unpacked, bytes of the payload, space, name, sum of the unpacked bytes.
# The name of a block ends with a zero, that of a state with its kind.
HEAD = struct.Struct("<4sBBHQQ16s33sQ")
MAGIC, VERSION, NAME_BYTES = b"TRKV", 2, 33
# The sum of the head and of the sizes behind it.
HEAD_SUM = struct.Struct("<I")
HEAD_BYTES = HEAD.size + HEAD_SUM.size
# The codes of a payload: the values as they are, and bfloat16 in twelve bits (`kernels/cpu/pack_kv.py`).
RAW, PACKED = 0, 12
FILE_NAME = re.compile(r"([0-9a-f]{64}(?:ff)?)\.([0-9a-f]{16})")
FIRST_PARENT = "0" * 16
# Files of all spaces: their entries take 40 MB.
MAX_FILES = 2**17
# The parts of a block: layers × 2 × heads.
MAX_PARTS = 2**16
# After a removal, this share of the bound is free, so that not every write removes files.
SLACK = 1 / 32
# Seconds between two changes of the time of use of a file.
TOUCH_S = 60.0
# A folder that changed in this time before it was read may have changed again, in the same tick of the file system's clock.
TICK_NS = 20_000_000
# A folder that others change is read again after this many times the time of its last reading.
REST = 20
FOLD = 0xD6E8FEB86659FD93
MASK = 2**64 - 1


def _multipliers() -> NDArray[np.uint64]:
    """Make 16,384 odd numbers, the factors of the words of 128 KiB."""
    places = np.arange(2**14, dtype=np.uint64) + np.uint64(1)
    return places * np.uint64(0x9E3779B97F4A7C15) | np.uint64(1)


class Checksum:
    """A 64-bit sum of bytes and their places.  It finds any change of one word, and others but for chance.

    It runs at 16 GB/s, four times as fast as CRC-32, since unpacking would otherwise wait for it.
    """

    def __init__(self) -> None:
        self._multipliers = _multipliers()
        self._room = np.empty_like(self._multipliers)

    def of(self, data: Bytes, name: bytes) -> int:
        """Sum up the data of the block or state with this name."""
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
    """A file that does not match: `args[0]` is the reason, a word for the metric."""


class PackedBlock(msgspec.Struct, frozen=True):
    """The contents of a file without its head.  `sizes` are the bytes of each part of a packed payload."""

    code: int
    sizes: NDArray[np.uint32]
    payload: Bytes
    num_raw: int
    checksum: int


def encode_head(block: PackedBlock, space: bytes, name: bytes) -> bytes:
    """Return the bytes in front of the payload."""
    counts = len(block.sizes), block.num_raw, len(block.payload)
    head = HEAD.pack(MAGIC, VERSION, block.code, *counts, space, name, block.checksum)
    head += block.sizes.astype("<u4").tobytes()
    return head + HEAD_SUM.pack(zlib.crc32(head))


def decode(data: bytes | bytearray, space: bytes, name: bytes, num_raw: int) -> PackedBlock:
    """Check everything about a file but the sum of its unpacked values.

    Raises:
        RefusedError: it is not the block with this name, or it is damaged.
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
    """The calls to the file system.  Tests replace it by a slow, full or hanging one."""

    def read(self, path: str, most: int) -> bytearray:
        """Return the contents of a plain file of this user.

        Raises:
            RefusedError: it is something else, or longer than `most`.
            OSError: it cannot be read.
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
        """Make a new file that only this user may read."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(path, flags, 0o600)
        with open(file, "wb", buffering=0) as writer:
            for part in parts:
                view = memoryview(part)
                while view:
                    # A short write is no error: the next one has its cause.
                    view = view[writer.write(view) or 0 :]

    def num_free(self, path: str) -> tuple[int, int]:
        """Return the free bytes of the file system, and all of them."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize


class TierEntry(msgspec.Struct):
    """A file of a folder, with its full name in bytes."""

    name: bytes
    parent: str
    num_bytes: int
    used_s: float
    # The time of use in the file system.
    marked_s: float


# A space, and the first 16 digits of a name, with the kind of a state.
Key = tuple[str, str]


def key_of(space: str, name: bytes) -> Key:
    """Return the key of a block or state in the index.

    64 bits of a name are enough: the second of two blocks with one key would not be stored.
    """
    return space, name[:8].hex() + name[32:].hex()


def removals(entries: dict[Key, TierEntry], num_bytes: int, num_files: int = 0) -> list[Key]:
    """Choose files to remove, until these bytes and files are freed: children before parents, the least recently used first.

    A chain is used as often as its last block, so a parent counts as used when its latest child was.
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
    # A circle of names, which only a stranger makes, has no leaf.
    rest = entries.keys() - set(found)
    while rest and not leaves and (num_bytes > 0 or num_files > 0):
        found.append(key := rest.pop())
        num_bytes, num_files = num_bytes - entries[key].num_bytes, num_files - 1
    return found


class TierFolder:
    """The files of all models in one folder, and the space of one of them."""

    def __init__(self, config: TierConfig, space: bytes, disk: TierDisk | None = None) -> None:
        self._config, self._space = config, space
        self._name = space.hex()
        self._disk = disk or TierDisk()
        self._root = config.folder
        self._entries: dict[Key, TierEntry] = {}
        self._num_bytes = 0
        # Names of this space that came and went since `take_changes`.
        self._changes: dict[bytes, bool] = {}
        # By space: the time of the last change seen, when it was read, and how long that took.
        self._read: dict[str, tuple[int, float, float]] = {}
        os.makedirs(self._path(), mode=0o700, exist_ok=True)
        with self._locked():
            is_exact = self._refresh()
            # The bound may be smaller than in an earlier start.
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
        """Take the names that came and those that went since the last call."""
        changes, self._changes = self._changes, {}
        return tuple(n for n, is_here in changes.items() if is_here), tuple(
            n for n, is_here in changes.items() if not is_here
        )

    def look(self) -> None:
        """Find out what other processes have changed."""
        with self._locked():
            self._refresh()

    def _path(self, name: str = "") -> str:
        return os.path.join(self._root, self._name, name)

    def _file(self, key: Key) -> str:
        entry = self._entries[key]
        return os.path.join(self._root, key[0], f"{entry.name.hex()}.{entry.parent}")

    @contextmanager
    def _locked(self) -> Generator[None]:
        """Hold the lock of the folder, so that all writers together respect its bound."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(os.path.join(self._root, "lock"), flags, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)

    def _refresh(self) -> bool:
        """Read the changed spaces.  Returns False if a large one was read a moment ago and is not read again.

        Called with the lock held, so a half-written file belongs to a dead process.
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
        """Remove a file.  Returns False if the system refuses."""
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
            RefusedError: it is not there, or it does not match.
        """
        key = key_of(self._name, name)
        if name not in self:
            raise RefusedError("gone")
        try:
            # A packed block is never larger than an unpacked one with the sizes of its parts.
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
        """Remove the file of a block, and forget it in any case."""
        key = key_of(self._name, name)
        if name in self:
            self._unlink(self._file(key))
            self._drop(key)

    def write(self, name: bytes, parent: bytes, block: PackedBlock) -> None:
        """Write a block within the bound.  A known block is not written again.

        Raises:
            RefusedError: its parent is not there, or there is no room.
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
        """Remove files until `needed` bytes fit into the bound and into the file system.

        Raises:
            RefusedError: they do not, whatever is removed.
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
        """Note a use of a block and of all blocks before it."""
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
