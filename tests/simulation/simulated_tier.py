"""The tier of KV blocks on disk, in virtual time: the production thread and folder, on a simulated file system.

`TierThread` and `TierFolder` are themselves.  Their operating system, their clock and their disk belong to the test: the thread is none, so
an order takes a drawn time, during which plans run; files are in memory; and the disk tears, loses, changes, misdirects and refuses what
it is given, or hangs.
"""

import errno
import math
import os
import random
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import anyio

from trouper.actors.executor.steps import tier_files, tier_thread
from trouper.actors.executor.steps.tier_files import HEAD_BYTES, RefusedError
from trouper.actors.executor.steps.tier_thread import TierThread
from trouper.actors.messages.steps import TierAnswer, TierOrder
from trouper.config.tier import TierConfig

from .scenario import DiskWeather
from .simulated_device import SimulatedPages, SimulatedStates

FOLDER, SPACE = "/tier", b"s" * 16
FOLDER_OF_SPACE = f"{FOLDER}/{SPACE.hex()}"
# Virtual time begins at this second of the wall clock.
EPOCH_S = 1e9


class _File:
    def __init__(self, data: bytes, mtime_s: float) -> None:
        self.data, self.mtime_s = bytearray(data), mtime_s


class SimulatedFiles:
    """The calls of `os` that a `TierFolder` makes, and the files of its folder by path."""

    path, O_RDWR, O_CREAT, O_NOFOLLOW, O_CLOEXEC = os.path, 0, 0, 0, 0

    def __init__(self) -> None:
        self.files: dict[str, _File] = {}
        self._changed_ns: dict[str, int] = {}

    @property
    def num_bytes(self) -> int:
        return sum(len(file.data) for file in self.files.values())

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        return 0

    def close(self, file: int) -> None: ...

    def makedirs(self, path: str, mode: int = 0o777, exist_ok: bool = False) -> None:
        self._changed_ns.setdefault(path.rstrip("/"), 0)

    @contextmanager
    def scandir(self, path: str) -> Iterator[Iterable[Any]]:
        path = path.rstrip("/")
        if path == FOLDER:
            yield [
                _entry(where, st_mtime_ns=changed_ns)
                for where, changed_ns in self._changed_ns.items()
            ]
        else:
            yield [
                _entry(where, st_mode=stat.S_IFREG | 0o600, st_size=len(file.data), st_mtime=file.mtime_s)
                for where, file in self.files.items()
            ]  # fmt: skip

    def unlink(self, path: str) -> None:
        if self.files.pop(path, None) is None:
            raise FileNotFoundError(path)
        self._note_change()

    def rename(self, old: str, new: str) -> None:
        if old not in self.files:
            raise FileNotFoundError(old)
        self.files[new] = self.files.pop(old)
        self._note_change()

    def utime(self, path: str, times: tuple[float, float], *, follow_symlinks: bool) -> None:
        if path not in self.files:
            raise FileNotFoundError(path)
        self.files[path].mtime_s = times[1]

    def add(self, path: str, data: bytes) -> None:
        self.files[path] = _File(data, now_s())
        self._note_change()

    def _note_change(self) -> None:
        self._changed_ns[FOLDER_OF_SPACE] = int(now_s() * 1e9)


def _entry(path: str, **status: Any) -> Any:
    return SimpleNamespace(
        name=os.path.basename(path),
        path=path,
        is_dir=lambda follow_symlinks: "st_mode" not in status,
        stat=lambda follow_symlinks: SimpleNamespace(**status),
    )


def now_s() -> float:
    return EPOCH_S + anyio.current_time()


class FaultyTierDisk:
    """A `TierDisk` with faults of each kind, drawn for each call."""

    def __init__(self, dice: random.Random, weather: DiskWeather, files: SimulatedFiles) -> None:
        self._dice, self._weather, self._files = dice, weather, files
        # Bytes that came to the folder behind the tier's back.
        self.num_foreign = 0
        self.num_faults = 0

    def _fault(self, *kinds: str) -> str | None:
        if self._dice.random() >= self._weather.fault_rate:
            return None
        self.num_faults += 1
        return self._dice.choice(kinds)

    def read(self, path: str, most: int) -> bytearray:
        if path not in self._files.files:
            raise FileNotFoundError(path)
        data = bytearray(self._files.files[path].data)
        match self._fault("rotten", "short", "error"):
            case "rotten" if data:
                self._flip(data)
            case "short":
                del data[self._dice.randrange(len(data) + 1) :]
            case "error":
                raise OSError(errno.EIO, "rotten sector")
            case _:
                pass
        if len(data) > most:
            raise RefusedError("size")
        return data

    def write(self, path: str, parts: tuple[bytes | memoryview, ...]) -> None:
        data = b"".join(map(bytes, parts))
        cut = data[: self._dice.randrange(len(data))]
        match self._fault("torn", "lost", "full", "rotten", "misdirected"):
            case "torn":
                data = cut
            case "lost":
                return
            case "full":
                self._files.add(path, cut)
                raise OSError(errno.ENOSPC, "full")
            case "rotten":
                data = cut + bytes(len(data) - len(cut))
            case "misdirected" if self._files.files:
                self._overwrite(self._dice.choice(sorted(self._files.files)), data)
                return
            case _:
                pass
        self._files.add(path, data)

    def num_free(self, path: str) -> tuple[int, int]:
        return (0 if self._fault("full") else 2**40), 2**41

    def damage(self) -> None:
        """Damage a file at rest, as other programs and time may do."""
        paths = sorted(self._files.files)
        if not paths or self._dice.random() >= self._weather.damage_rate:
            return
        self.num_faults += 1
        path = self._dice.choice(paths)
        data = bytearray(self._files.files[path].data)
        match self._dice.randrange(4):
            case 0:
                self._files.unlink(path)
                return
            case 1 if data:
                self._flip(data)
            case 2:
                data = self._files.files[self._dice.choice(paths)].data
            case _:
                del data[self._dice.randrange(len(data) + 1) :]
        self._overwrite(path, bytes(data))

    def _flip(self, data: bytearray) -> None:
        """Flip a bit, half of the time in the last bytes, which are of a block."""
        first = max(0, len(data) - 16) if self._dice.random() < 0.5 else 0
        data[self._dice.randrange(first, len(data))] ^= 1 << self._dice.randrange(8)

    def _overwrite(self, path: str, data: bytes) -> None:
        self.num_foreign += max(0, len(data) - len(self._files.files[path].data))
        self._files.files[path].data[:] = data


class _NoThread:
    """Stand for a thread, and for an event without waiting tasks."""

    def __init__(self, **options: Any) -> None: ...

    def start(self) -> None: ...

    def join(self, timeout: float) -> None: ...

    def set(self) -> None: ...

    def wait(self, timeout: float) -> None: ...


class _DrawnThread(TierThread):
    """The production thread, whose turns the simulation takes."""

    duration_s = 0.0

    @property
    def has_work(self) -> bool:
        is_to_tell = self._is_anew and self._folder is not None and self._answer is not None
        is_to_open = self._is_stale and (self._folder is None or self._pages is not None)
        return bool(is_to_open or is_to_tell or self._fetches or self._others)

    def _report(self, number: int, num_done: int, seconds: float) -> None:
        super()._report(number, num_done, self.duration_s)


class SimulatedTier:
    """Perform the orders of a `SimulatedDevice` in virtual time.

    Args:
        weather: the size of the folder, and what goes wrong.
        block_bytes: of a block of the device.
    """

    def __init__(self, dice: random.Random, weather: DiskWeather, block_bytes: int) -> None:
        self._dice, self._weather = dice, weather
        self.files = SimulatedFiles()
        self.disk = FaultyTierDisk(dice, weather, self.files)
        max_bytes = weather.num_files * (HEAD_BYTES + block_bytes)
        self.config = TierConfig(FOLDER, max_bytes, 0.0, 2**40)
        # Without an answer: their numbers.
        self.open: set[int] = set()
        self._thread: _DrawnThread = None  # type: ignore[assignment]  # set when the device is loaded
        self._poison: Callable[[TierOrder], None] = lambda order: None
        self._work: tuple[TierOrder, int] | None = None
        self._is_done_at = math.inf
        self._num_begun = 0

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Let the production code use this file system, and virtual time."""
        clock = SimpleNamespace(time=now_s, monotonic=now_s, thread_time=lambda: 0.0)
        lock = SimpleNamespace(flock=lambda *args: None, LOCK_EX=0)
        no_thread = SimpleNamespace(
            Condition=threading.Condition, Event=_NoThread, Thread=_NoThread
        )
        with (
            patch.multiple(tier_files, os=self.files, fcntl=lock, time=clock),
            patch.multiple(tier_thread, threading=no_thread, time=clock, Pages=lambda pages, _: pages, StateRows=lambda states: states),
            patch.object(tier_thread.logger, "disabled", True),
        ):  # fmt: skip
            yield

    def start(
        self, poison: Callable[[TierOrder], None], answer: Callable[[TierAnswer], None]
    ) -> None:
        """Begin, when the model is loaded.

        Args:
            poison: overwrites what is being fetched.
        """
        self._poison = poison
        self._thread = _DrawnThread(self.config, lambda: SPACE, lambda: math.inf)
        self._thread._disk = self.disk  # type: ignore[assignment]

        def answered(found: TierAnswer) -> None:
            self.open.discard(found.number)
            answer(found)

        self._thread.begin(answered)

    def attach(self, pages: SimulatedPages, states: SimulatedStates) -> None:
        self._thread.attach(pages, 0, states)  # type: ignore[arg-type]

    def detach(self) -> None:
        self._thread.detach()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()

    def order(self, order: TierOrder) -> None:
        self._thread.order(order)

    @property
    def next_at(self) -> float:
        """When something is done.  Begin with the next order if nothing is under way."""
        if self._work is None and self._thread is not None and self._thread.has_work:
            self._begin()
        return self._is_done_at

    def _begin(self) -> None:
        self.disk.damage()
        self._work = self._thread._next()
        assert self._work is not None
        order, weather = self._work[0], self._weather
        self._num_begun += 1
        seconds = weather.order_s * self._dice.random()
        if self._dice.random() < 0.1:
            seconds *= 50
        if self._num_begun == weather.hangs_at:
            seconds = weather.hang_s
        self._thread.duration_s = seconds
        self._is_done_at = anyio.current_time() + seconds
        if order.kind == "fetch":
            self._poison(order)

    def finish(self) -> None:
        """Do what is due by now."""
        assert self._work is not None
        work, self._work, self._is_done_at = self._work, None, math.inf
        self._thread._handle(*work)
        if self.files.num_bytes > self.config.max_bytes + self.disk.num_foreign:
            raise AssertionError(
                f"the folder has {self.files.num_bytes} bytes, and the disk no room"
            )
