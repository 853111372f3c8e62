"""The tier with the real thread and files, on a disk that loses, tears, changes and misdirects what it is given.

The worlds of `test_tier.py` play on: only what their thread does is the production code, and the order in which it does it is drawn.
Whatever the disk does, all tokens are right, the folder keeps its bound, and every request ends.
"""

import errno
import os
import random
import threading
from types import SimpleNamespace
from unittest.mock import MagicMock

import msgspec
import numpy as np
import pytest

from tests.scheduling.test_tier import SIZE, World, settle
from trouper.actors.executor.steps import tier_files, tier_thread
from trouper.actors.executor.steps.tier_files import (
    HEAD_BYTES,
    Checksum,
    TierDisk,
    TierFolder,
)
from trouper.actors.executor.steps.tier_thread import TierThread
from trouper.config.tier import TierConfig

SPACE = b"s" * 16
FILE_BYTES = HEAD_BYTES + 8 * SIZE


class Killed(BaseException):
    """The process ends within a write."""


class FaultyDisk(TierDisk):
    """A disk with faults of each kind, drawn for each call."""

    def __init__(self, draw, folder):
        self.random, self.folder, self.rate = draw, folder, draw.choice((0.0, 0.05, 0.2))
        # Bytes that came to the folder behind the tier's back.
        self.num_foreign = 0

    def fault(self, *kinds):
        return self.random.choice(kinds) if self.random.random() < self.rate else None

    def read(self, path, most):
        data = super().read(path, most)
        match self.fault("rotten", "short", "error"):
            case "rotten" if data:
                data[a_place(self.random, data)] ^= 1 << self.random.randrange(8)
            case "short":
                del data[self.random.randrange(len(data) + 1) :]
            case "error":
                raise OSError(errno.EIO, "rotten sector")
        return data

    def write(self, path, parts):
        data = b"".join(map(bytes, parts))
        cut = data[: self.random.randrange(len(data))]
        match self.fault("torn", "lost", "full", "rotten", "misdirected", "killed"):
            case "torn":
                data = cut
            case "lost":
                return
            case "full":
                super().write(path, (cut,))
                raise OSError(errno.ENOSPC, "full")
            case "rotten":
                data = cut + bytes(len(data) - len(cut))
            case "misdirected":
                others = blocks_in(self.folder)
                if others:
                    self.overwrite(self.random.choice(others), data)
                    return
            case "killed":
                self.num_foreign += len(cut)
                raise Killed(path, cut)
        super().write(path, (data,))

    def overwrite(self, path, data):
        self.num_foreign += max(0, len(data) - path.stat().st_size)
        path.write_bytes(data)

    def num_free(self, path):
        return (0 if self.fault("full") else 2**40), 2**41


def a_place(draw, data):
    """Return a place of a file, half of the time in its payload."""
    first = max(0, len(data) - 8 * SIZE) if draw.random() < 0.5 else 0
    return draw.randrange(first, len(data))


def blocks_in(folder):
    return sorted(path for path in (folder / SPACE.hex()).iterdir() if len(path.name) == 81)


class TokenPages:
    """The blocks of the device as bytes, in place of a KV cache."""

    codec, num_bytes = None, 8 * SIZE

    def __init__(self, device):
        self.memory = device.memory

    def copy_out(self, block, raw):
        raw[:] = np.array(self.memory[block], np.int64).view(np.uint8)

    def copy_in(self, block, raw):
        self.memory[block][:] = raw.view(np.int64).tolist()


class Drawn(TierThread):
    """The thread without a thread: the world decides when it handles an order."""

    def __bool__(self):
        return bool(
            self._is_stale or self._fetches or self._others
            or (self._is_anew and self._folder is not None)
        )  # fmt: skip

    def step(self):
        self._handle(*self._next())


class DiskWorld(World):
    """A world whose files are real.  `folder` survives it."""

    def __init__(self, seed, folder, bound, **options):
        self.folder = folder
        super().__init__(seed, {}, **options)
        self.config = TierConfig(str(folder), bound * FILE_BYTES, 0.0, 2**40)
        self.disk = FaultyDisk(self.random, folder)
        self.begin()

    def begin(self):
        """Start the thread, as a worker does."""
        self.news = []
        self.thread = Drawn(self.config, lambda: SPACE, lambda: 1.0)
        self.thread._disk = self.disk
        self.thread._pages = TokenPages(self.device)
        self.thread._answer = lambda answer: self.answers.append(
            msgspec.structs.replace(answer, seconds=0.001)
        )

    def compute(self):
        if isinstance(self.frames[0], msgspec.Struct) and hasattr(self.frames[0], "names"):
            self.thread.order(self.frames.popleft())
        else:
            super().compute()

    def perform(self):
        try:
            self.thread.step()
        except Killed as death:
            path, cut = death.args
            with open(path, "wb") as writer:
                writer.write(cut)
            self.lose(keeps_memory=False)
        size = sum(entry.stat().st_size for entry in os.scandir(self.folder / SPACE.hex()))
        assert size <= self.config.max_bytes + self.disk.num_foreign

    def lose(self, *, keeps_memory):
        old, self.thread = self.thread, []
        super().lose(keeps_memory=keeps_memory)
        old._answer = None
        self.begin()

    def damage(self):
        files = blocks_in(self.folder)
        if not files:
            return
        path, data = self.random.choice(files), b""
        match self.random.randrange(5):
            case 0:
                path.unlink()
                return
            case 1:
                data = bytearray(path.read_bytes() or b"T")
                data[a_place(self.random, data)] ^= 1 << self.random.randrange(8)
            case 2:
                data = self.random.choice(files).read_bytes()
            case 3:
                data = path.read_bytes()[: self.random.randrange(FILE_BYTES)]
        self.disk.overwrite(path, data)


def play_lives(seed, folder):
    """Let three engines follow each other on one disk.  Returns how many blocks they fetched."""
    draw, count = random.Random(-seed - 1), 0
    bound = draw.choice((5, 40))
    (folder / SPACE.hex()).mkdir(parents=True)
    heads = [[draw.randrange(2, 40) for _ in range(16)] for _ in range(2)]
    for life in range(3):
        world = DiskWorld(3 * seed + life, folder, bound, num_blocks=draw.choice((13, 20)))
        world.play(heads).is_hanging = False
        settle(world)
        for _ in range(draw.randrange(3)):
            world.damage()
        count += world.tier.counts["hit"]
    return count


@pytest.fixture(autouse=True)
def without_time_and_threads(monkeypatch):
    """Read changed folders at once, so that nothing depends on time, and start no thread."""
    monkeypatch.setattr(tier_files, "REST", 0)
    monkeypatch.setattr(tier_files, "TICK_NS", 10**18)
    parts = {"Condition": threading.Condition, "Event": threading.Event, "Thread": MagicMock()}
    monkeypatch.setattr(tier_thread, "threading", SimpleNamespace(**parts))


def test_order_to_remove_leaves_no_file(tmp_path):
    (tmp_path / SPACE.hex()).mkdir()
    world = DiskWorld(1, tmp_path, 40)
    settle(world)
    world.admit(list(range(2, 15)))
    world.finish()
    settle(world)
    path = max(blocks_in(tmp_path))
    world.tier._distrusted[bytes.fromhex(path.name.partition(".")[0])] = None
    settle(world)
    assert path not in blocks_in(tmp_path)
    assert not world.tier._distrusted


def test_no_fault_of_a_disk_changes_a_token(tmp_path):
    assert sum(play_lives(seed, tmp_path / str(seed)) for seed in range(12)) > 20


def without_checks(right):
    """Believe a file's head, whatever block it is of."""
    return lambda data, space, name, num_raw: right(
        data, bytes(data[24:40]), bytes(data[40:72]), num_raw
    )


def writes_what_it_has(right):
    """Copy a refused block as far as it was read, and answer that it is there."""

    def fetch(self, folder, block, name, generation):
        done = right(self, folder, block, name, generation)
        self._pages.copy_in(block, self._raw)
        return done or self._raw.any()

    return fetch


BUGS = {
    "no sum": (Checksum, "of", lambda right: lambda self, data, name: 0),
    "neither name nor sum knows the block": (
        tier_files, "decode", without_checks, (Checksum, "of", lambda right: lambda self, data, name: right(self, data, bytes(8)))
    ),
    "a refused block is used": (TierThread, "_fetch", writes_what_it_has),
    "bound is checked after": (TierFolder, "_make_room", lambda right: lambda self, needed, *, is_exact: None),
    "counts from 0 after a restart": (
        TierFolder, "_read_space", lambda right: lambda self, space, changed_ns: None
    ),
    "cancelled orders are performed": (TierThread, "_forget", lambda right: lambda self: []),
    "failures are not answered": (
        TierThread, "_report", lambda right: lambda self, number, num_done, seconds: (number and not num_done) or right(self, number, num_done, seconds)
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_of_the_files_is_found(name, monkeypatch, tmp_path):
    owner, method, make, *more = BUGS[name]
    for place, attribute, change in [(owner, method, make), *more]:
        monkeypatch.setattr(place, attribute, change(getattr(place, attribute)))
    for seed in range(500):
        try:
            play_lives(seed, tmp_path / str(seed))
        except (AssertionError, pytest.fail.Exception):
            return
    pytest.fail("not found within 500 schedules")
