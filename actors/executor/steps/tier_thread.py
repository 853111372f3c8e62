"""Move KV blocks and recurrent states between a device's memory and the tier on disk, on a thread of the device.

The disk may be slow or hang, so nothing ever waits for this thread.  The thread holds a lock only while it copies a block into or out
of the device's memory, which takes a millisecond (a few for a large state); it waits for the disk without the lock.

Laws:
1. Orders come from the thread that runs the plans, between two plans.  So no earlier plan still writes a block that a fetch overwrites.
2. After `detach`, and after an order to cancel, no earlier order touches the device's memory.
3. A block is verified before it is copied into memory, and the copy is all or nothing.
4. Every order is answered, also if the disk fails.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from trouper.actors.executor.steps.cache_memory import KVCache, StatePool
from trouper.actors.executor.steps.tier_files import (
    HEAD_BYTES,
    MAX_PARTS,
    PACKED,
    RAW,
    Bytes,
    Checksum,
    PackedBlock,
    RefusedError,
    TierDisk,
    TierFolder,
)
from trouper.actors.messages.steps import TierAnswer, TierOrder, is_state
from trouper.config.tier import TierConfig
from trouper.errors import invalid
from trouper.kernels.cpu.pack_kv import KvCodec, can_pack

logger = logging.getLogger(__name__)
# The thread may write in one burst what the configured rate allows in this many seconds.
BURST_S = 4.0
# While the device computes, stores use this share of a core, after an initial burst of CPU seconds: unlimited packing
# and writing would slow down a small model by 8 %.
BUSY_SHARE, BUSY_BURST_S = 0.015, 0.1
# The device is idle after this many seconds without a plan, and is polled at this interval.
IDLE_S = 0.03
# Seconds between two scans for files of other processes, or between two attempts to open the folder.
LOOK_S = 5.0
# Seconds between two log lines about the same reason.
LOG_S = 60.0
# Seconds that start-up waits for the list of stored blocks, so that the first request can use them.
OPEN_S = 1.0
# Seconds that `close` waits for the file in progress.
CLOSE_S = 2.0
Answer = Callable[[TierAnswer], None]
# Two orders of the thread to itself: open the folder, and scan for files of other processes.
OPEN, LOOK = TierOrder(0, "clear"), TierOrder(0, "touch")


class Pages:
    """Copy blocks of KV caches to and from bytes, ordered by group, layer, keys before values, head, token."""

    def __init__(self, caches: Sequence[KVCache], block_size: int) -> None:
        self._size = block_size
        groups = [group for cache in caches for group in cache.groups]
        kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
        self._groups = [group.view(kinds[group.itemsize]).numpy() for group in groups]
        self._shapes = [(*g.shape[:3], block_size, g.shape[4]) for g in self._groups]
        # For each group: the number of parts (keys or values of one layer and head), and the numbers in each part.
        parts = [(int(np.prod(shape[:3])), shape[3] * shape[4]) for shape in self._shapes]
        is_bf16 = all(group.dtype == torch.bfloat16 for group in groups)
        can_shrink = is_bf16 and all(can_pack(length) for _, length in parts)
        is_small = 0 < sum(count for count, _ in parts) < MAX_PARTS
        # None for other dtypes and for short blocks: these are stored unpacked.
        self.codec = KvCodec(parts) if can_shrink and is_small else None
        self.num_bytes = sum(
            int(np.prod(shape)) * group.itemsize
            for shape, group in zip(self._shapes, self._groups, strict=True)
        )

    def copy_out(self, block: int, raw: Bytes) -> None:
        """Copy a block to `raw`."""
        for part, view in self._parts(block, raw):
            np.copyto(part, view)

    def copy_in(self, block: int, raw: Bytes) -> None:
        """Overwrite a block with `raw`."""
        for part, view in self._parts(block, raw):
            np.copyto(view, part)

    def _parts(self, block: int, raw: Bytes) -> Any:
        start = 0
        for group, shape in zip(self._groups, self._shapes, strict=True):
            end = start + int(np.prod(shape)) * group.itemsize
            part = raw[start:end].view(group.dtype).reshape(shape)
            yield part, group[:, :, :, block * self._size : (block + 1) * self._size]
            start = end


class StateRows:
    """Copy rows of a state pool to and from bytes: first the position of the state in tokens, then the state.

    A stage without recurrent layers has no pool, but still writes a file without values: a state is usable only if the files of all
    stages exist.
    """

    # Only bfloat16 can be packed, and states are float32.
    codec = None

    def __init__(self, states: StatePool | None) -> None:
        self._parts: tuple[Bytes, ...] = ()
        if states is not None:
            positions = states.positions.view(np.uint8).reshape(len(states.positions), -1)
            self._parts = positions, states.rows
        self.num_bytes = sum(part.shape[1] for part in self._parts)

    def copy_out(self, row: int, raw: Bytes) -> None:
        """Copy a row to `raw`."""
        for part, view in self._views(row, raw):
            np.copyto(view, part)

    def copy_in(self, row: int, raw: Bytes) -> None:
        """Overwrite a row with `raw`."""
        for part, view in self._views(row, raw):
            np.copyto(part, view)

    def _views(self, row: int, raw: Bytes) -> Any:
        start = 0
        for part in self._parts:
            end = start + part.shape[1]
            yield part[row], raw[start:end]
            start = end


class TierThread:
    """Perform orders one after another, fetches before stores.  The thread opens the folder while the model is loading.

    Args:
        find_space: returns the name of the model's space.  It may read all weights, so it is called on this thread.
        idle_s: returns the seconds since the device last computed.
    """

    def __init__(
        self, config: TierConfig, find_space: Callable[[], bytes], idle_s: Callable[[], float]
    ) -> None:
        self._config, self._find_space = config, find_space
        self._idle_s = idle_s
        self._disk = TierDisk()
        self._checksum = Checksum()
        self._changed = threading.Condition()
        # Guarded by the lock.  The scheduler bounds the orders in flight: see `scheduling/state/tier.py`.
        self._fetches: deque[TierOrder] = deque()
        self._others: deque[TierOrder] = deque()
        self._pages: Pages | None = None
        self._states: StateRows | None = None
        self._generation = 0
        self._is_closing = False
        # Whether the folder must be opened: at start, and after a detach, since the weights may have changed.
        self._is_stale = True
        # Called with each answer, on either thread.  None until the engine expects answers.
        self._answer: Answer | None = None
        self._is_known = threading.Event()
        # The fields below belong to the tier's thread.
        self._folder: TierFolder | None = None
        self._is_anew = True
        self._raw: Bytes = np.empty(0, np.uint8)
        self._refused: Counter[str] = Counter()
        self._logged_s: dict[str, float] = {}
        # The bytes that may be written now, and the CPU seconds that may be used.
        self._allowance, self._core_s = BURST_S * config.write_rate, BUSY_BURST_S
        self._filled_s = time.monotonic()
        self._thread = threading.Thread(target=self._serve, name="trouper-tier", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<TierThread {self._folder!r}, {len(self._fetches)}, {len(self._others)} orders>"

    # Methods called by the thread that runs the plans.

    def begin(self, answer: Answer) -> None:
        """Send answers from now on, beginning with the names of the stored blocks.  Waits at most one second for these.

        Args:
            answer: called with each answer, on this thread or on the caller's.
        """
        with self._changed:
            self._answer = answer
            self._changed.notify()
        self._is_known.wait(OPEN_S)

    def attach(
        self, caches: Sequence[KVCache], block_size: int, states: StatePool | None = None
    ) -> None:
        """Copy blocks and states to and from this memory from now on.

        Args:
            caches: the caches of the model and of its draft model, which share block numbers.

        Raises:
            TrouperValidationError: a single block or state is larger than `kv_tier_size`.
        """
        pages, rows = Pages(caches, block_size), StateRows(states)
        for label, memory in (("block", pages), ("state", rows)):
            if memory.num_bytes + HEAD_BYTES > self._config.max_bytes:
                rule = f"is too small for one {label} of {memory.num_bytes} bytes"
                raise invalid("kv_tier_size", rule, self._config.max_bytes)
        with self._changed:
            self._pages, self._states = pages, rows
            self._changed.notify()

    def detach(self) -> None:
        """Stop using the attached memory.  Earlier orders are answered as not performed."""
        with self._changed:
            self._pages = self._states = None
            # The weights may have changed when memory is attached again.
            self._is_stale = True
            dropped = self._forget()
        self._refuse(dropped)

    def order(self, order: TierOrder) -> None:
        """Queue an order.  An order to cancel or to clear discards all queued orders at once."""
        dropped: list[TierOrder] = []
        with self._changed:
            if order.kind in ("cancel", "clear"):
                dropped = self._forget()
            if order.kind == "cancel":
                dropped.append(order)
            elif order.kind == "fetch":
                self._fetches.append(order)
            else:
                self._others.append(order)
            self._changed.notify()
        self._refuse(dropped)

    def close(self) -> None:
        """Stop the thread after the file in progress.  If the disk hangs, it is abandoned after `CLOSE_S` seconds."""
        with self._changed:
            self._pages = self._states = self._answer = None
            self._forget()
            self._is_closing = True
            self._changed.notify()
        self._thread.join(CLOSE_S)

    def _forget(self) -> list[TierOrder]:
        self._generation += 1
        dropped = [*self._fetches, *self._others]
        self._fetches.clear()
        self._others.clear()
        return dropped

    def _refuse(self, orders: Sequence[TierOrder]) -> None:
        folder = self._folder
        sizes = (0, 0) if folder is None else (folder.num_bytes, folder.num_files)
        answer = self._answer
        for order in orders:
            if answer is not None:
                answer(TierAnswer(order.number, num_bytes=sizes[0], num_files=sizes[1]))

    # Methods called on the tier's own thread.

    def _serve(self) -> None:
        while (work := self._next()) is not None:
            self._handle(*work)

    def _handle(self, order: TierOrder, generation: int) -> None:
        began_s, num_done = time.monotonic(), 0
        try:
            num_done = self._perform(order, generation)
        # A device must not fail because of its disk.
        except Exception as error:
            self._note_refusal("io" if isinstance(error, OSError) else "error", error)
        self._report(order.number, num_done, time.monotonic() - began_s)

    def _next(self) -> tuple[TierOrder, int] | None:
        """Wait for the next order.  Returns OPEN or LOOK if one of these is due, and None when the thread must end."""
        with self._changed:
            while not self._is_closing:
                if self._is_stale and (self._folder is None or self._pages is not None):
                    self._is_stale = False
                    return OPEN, self._generation
                if self._is_anew and self._folder is not None and self._answer is not None:
                    return LOOK, self._generation
                if self._fetches:
                    return self._fetches.popleft(), self._generation
                wait_s = LOOK_S
                if self._others:
                    wait_s = self._wait_s() if self._others[0].kind == "store" else 0.0
                    if wait_s <= 0:
                        return self._others.popleft(), self._generation
                if not self._changed.wait(wait_s) and not self._others:
                    return LOOK, self._generation
        return None

    def _wait_s(self) -> float:
        """Return the seconds until the next block may be written."""
        now, rate = time.monotonic(), self._config.write_rate
        passed_s, self._filled_s = now - self._filled_s, now
        self._allowance = min(BURST_S * rate, self._allowance + passed_s * rate)
        self._core_s = min(BUSY_BURST_S, self._core_s + passed_s * BUSY_SHARE)
        wait_s = -self._allowance / rate
        if self._core_s < 0 and self._idle_s() < IDLE_S:
            wait_s = max(wait_s, IDLE_S)
        return wait_s

    def _perform(self, order: TierOrder, generation: int) -> int:
        """Perform an order.  Returns how many of its blocks were stored or fetched."""
        folder = self._folder
        if order is OPEN or (order is LOOK and folder is None):
            self._folder = None
            self._is_anew = True
            self._folder = TierFolder(self._config, self._find_space(), self._disk)
        elif order is LOOK and folder is not None:
            folder.look()
        elif folder is not None:
            return self._obey(folder, order, generation)
        return 0

    def _obey(self, folder: TierFolder, order: TierOrder, generation: int) -> int:
        match order.kind:
            case "store":
                began_s = time.thread_time()
                try:
                    return self._store(folder, order, generation)
                finally:
                    self._core_s -= time.thread_time() - began_s
            case "fetch":
                for done, (block, name) in enumerate(zip(order.blocks, order.names, strict=True)):
                    if not self._fetch(folder, block, name, generation):
                        return done
                return len(order.blocks)
            case "touch":
                folder.touch(order.names[0])
            case "remove":
                folder.remove(order.names[0])
            case "clear":
                folder.clear()
                self._is_anew = True
            case "cancel":
                pass
        return 0

    def _memory_of(self, name: bytes) -> Pages | StateRows | None:
        """Return the attached memory for the block or state of this name, or None if none is attached."""
        return self._states if is_state(name) else self._pages

    def _store(self, folder: TierFolder, order: TierOrder, generation: int) -> int:
        block, name = order.blocks[0], order.names[0]
        pages = self._memory_of(name)
        if pages is None:
            return 0
        raw = self._room(pages)
        if name in folder and self._read(folder, pages, name, raw):
            return 1
        with self._changed:
            if self._memory_of(name) is not pages or generation != self._generation:
                return 0
            pages.copy_out(block, raw)
        try:
            packed = self._pack(pages, raw, name)
            folder.write(name, order.parent, packed)
        except RefusedError as error:
            self._note_refusal(str(error), error)
            return 0
        self._allowance -= len(packed.payload)
        return 1

    def _fetch(self, folder: TierFolder, block: int, name: bytes, generation: int) -> bool:
        pages = self._memory_of(name)
        if pages is None:
            return False
        raw = self._room(pages)
        if not self._read(folder, pages, name, raw):
            return False
        with self._changed:
            if self._memory_of(name) is not pages or generation != self._generation:
                return False
            pages.copy_in(block, raw)
        return True

    def _read(self, folder: TierFolder, pages: Pages | StateRows, name: bytes, raw: Bytes) -> bool:
        """Read a block or a state.  Returns False, and removes the file, if it does not match."""
        try:
            packed = folder.read(name, len(raw))
            self._unpack(pages, packed, raw)
            if self._checksum.of(raw, name) != packed.checksum:
                raise RefusedError("sum")
        except RefusedError as error:
            folder.remove(name)
            self._note_refusal(str(error), error)
            return False
        return True

    def _room(self, pages: Pages | StateRows) -> Bytes:
        if len(self._raw) < pages.num_bytes:
            self._raw = np.empty(pages.num_bytes, np.uint8)
        return self._raw[: pages.num_bytes]

    def _pack(self, pages: Pages | StateRows, raw: Bytes, name: bytes) -> PackedBlock:
        checksum = self._checksum.of(raw, name)
        if pages.codec is not None:
            payload, sizes = pages.codec.pack(raw)
            if len(payload) + sizes.nbytes < len(raw):
                return PackedBlock(PACKED, sizes, payload, len(raw), checksum)
        return PackedBlock(RAW, np.empty(0, np.uint32), raw, len(raw), checksum)

    def _unpack(self, pages: Pages | StateRows, packed: PackedBlock, raw: Bytes) -> None:
        if packed.code == PACKED and pages.codec is not None:
            if not pages.codec.unpack(packed.payload, packed.sizes, raw):
                raise RefusedError("size")
        elif packed.code != RAW or len(packed.payload) != len(raw):
            raise RefusedError("version")
        else:
            np.copyto(raw, packed.payload)

    def _note_refusal(self, reason: str, error: Exception) -> None:
        """Count a reason, and log it at most once a minute."""
        self._refused[reason] += 1
        now = time.monotonic()
        if now - self._logged_s.get(reason, -LOG_S) >= LOG_S:
            self._logged_s[reason] = now
            logger.warning(
                "the KV tier in %s could not read or write a block (%s): %s; the affected prompts are computed again",
                self._config.folder,
                reason,
                error,
            )

    def _report(self, number: int, num_done: int, seconds: float) -> None:
        """Send the answer to an order, with the changes on the disk.  Sends nothing if an internal order changed nothing."""
        folder, answer = self._folder, self._answer
        if answer is None:
            return
        added: tuple[bytes, ...] = ()
        removed: tuple[bytes, ...] = ()
        sizes, is_anew = (0, 0), False
        if folder is not None:
            added, removed = folder.take_changes()
            sizes = folder.num_bytes, folder.num_files
            is_anew, self._is_anew = self._is_anew, False
        if number or is_anew or added or removed:
            refused = tuple(self._refused.items())
            self._refused.clear()
            answer(TierAnswer(number, num_done, seconds, is_anew, added, removed, *sizes, refused))
        if is_anew:
            self._is_known.set()
