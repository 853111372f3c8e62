"""Connect the engine's process to the workers of one device: their frames, and the memory files that outlive them.

A frame is encoded once and sent to every worker, because all workers of a device receive the same plans.

Workers put their KV cache into memory files that the engine's process holds open.  When the workers die, the files still contain the
keys and values of every answered step, and the restarted workers use them.  This is safe because a worker answers a step only after its
last store, and only blocks of answered steps are offered as prefixes.

Laws of these files:
1. Either every worker of a device has a file or none has, because a block consists of the parts of all stages and ranks.
2. A file that a dying worker may have corrupted is closed, which frees its pages.  The next worker gets a new, empty one.
"""

import os
from collections.abc import Sequence

import anyio
import anyio.to_thread

from trouper.actors.executor.workers.launching import Exit, Peer
from trouper.actors.executor.workers.wire import (
    MAX_INLINE,
    Call,
    Frame,
    FrameReader,
    KeepMemory,
    Loaded,
    encode,
    encode_adapter,
)
from trouper.actors.messages.controls import LoadAdapter
from trouper.config.engine_config import EngineConfig


class WorkerLink:
    """Exchange frames with one worker, identified by its rank.

    `has_hung_up` is set when the connection ends, which means that the worker has ended.
    """

    def __init__(self, rank: int, peer: Peer) -> None:
        self.rank, self.where, self.pid = rank, peer.where, peer.pid
        self.has_hung_up = False
        self._peer = peer
        self._frames = FrameReader(max_inline=peer.max_inline)

    def __repr__(self) -> str:
        return f"<WorkerLink {self.rank}: {self._peer!r}>"

    def send(self, data: bytes, file: int | None) -> None:
        """Send an encoded frame.

        If the worker has ended, nothing is sent, and `receive` notices the end of the connection. `file` is the
        descriptor of a memory file with a large payload, or None.
        """
        try:
            self._peer.send(data, file)
        except OSError:
            pass

    def take(self) -> Frame | None:
        """Take the next complete frame; returns None if there is none yet.

        Frames of a dead worker can still be taken.

        Raises:
            WireError: the received bytes are not a frame.
        """
        return self._frames.take()

    async def receive(self) -> None:
        """Wait for bytes or for the end of the connection.

        Bytes are collected until `take` finds a complete frame, so a cancelled wait loses nothing.
        """
        data, files = await self._peer.receive()
        if data:
            self._frames.feed(data, files)
        else:
            self.has_hung_up = True

    async def end(self, grace_s: float) -> Exit:
        """Wait up to `grace_s` seconds for the worker to exit, then kill it.

        Returns how it ended, after the process has exited. Drops frames that were not taken.
        """
        ended = await self._peer.end(grace_s)
        self._frames.close()
        return ended


async def send_adapter(links: Sequence[WorkerLink], call: Call) -> None:
    """Send a call that carries an adapter to every worker.

    A thread first writes large weights to a memory file, which all workers then read.
    """
    if not isinstance(call.action, LoadAdapter) or len(call.action.files.weights) <= MAX_INLINE:
        send_to_all(links, call)
        return
    data, file = await anyio.to_thread.run_sync(encode_adapter, call)
    try:
        for link in links:
            link.send(data, file)
    finally:
        os.close(file)


def send_to_all(links: Sequence[WorkerLink], frame: Frame) -> None:
    """Encode a frame once and send it to every worker.

    It never waits, because the sockets' buffers have room for all plans and calls in flight; see `wire.MAX_INLINE`.
    """
    data, file = encode(frame, num_workers=len(links))
    try:
        for link in links:
            link.send(data, file)
    finally:
        if file is not None:
            os.close(file)


async def receive_from_any(links: Sequence[WorkerLink]) -> None:
    """Wait until any worker has sent bytes or hung up. Cancelling the other waits loses no bytes."""
    if len(links) == 1:
        await links[0].receive()
        return

    async def receive(link: WorkerLink) -> None:
        await link.receive()
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for link in links:
            tasks.start_soon(receive, link)


async def drain(links: Sequence[WorkerLink]) -> None:
    """Read the bytes that the workers have already sent, without waiting for more.

    After a loss, this finds the last frames of the workers.
    """
    for link in links:
        if not link.has_hung_up:
            with anyio.CancelScope() as scope:
                scope.cancel()
                await link.receive()


class KeptFiles:
    """Own the memory files of one device's workers, by rank."""

    def __init__(self, config: EngineConfig) -> None:
        has_prefixes = config.pooler is None and config.scheduler.enable_prefix_caching
        self._is_wanted = config.device == "cpu" and has_prefixes and hasattr(os, "memfd_create")
        self._files: dict[int, int] = {}
        self._layouts: tuple[str, ...] | None = None
        # Whether the files contain the keys and values of all answered steps.
        self._are_sound = False

    def __repr__(self) -> str:
        return f"<KeptFiles: {len(self._files)}, {'sound' if self._are_sound else 'empty'}>"

    @property
    def are_sound(self) -> bool:
        """Return whether the current workers can use the KV cache of the previous ones."""
        return self._are_sound

    def send(self, workers: Sequence[WorkerLink]) -> None:
        """Send each new worker its file, before the order to load.  If a worker runs on another machine, none gets a file."""
        if not self._is_wanted or any(worker.where for worker in workers):
            self.close()
            return
        for worker in workers:
            file = self._files.get(worker.rank)
            if file is None:
                name = f"trouper-kv-{worker.rank}"
                file = self._files[worker.rank] = os.memfd_create(name, os.MFD_CLOEXEC)
            worker.send(encode(KeepMemory())[0], file)

    def note_loaded(self, loaded: Sequence[Loaded]) -> bool:
        """Compare the memory layout of new workers with that of the previous ones. Returns False if they must not use the files.

        Layouts differ only if the installed code has changed since the previous workers started.
        """
        layouts = tuple(frame.layout for frame in loaded)
        known, self._layouts = self._layouts, layouts
        return known is None or known == layouts or not self._files

    def note_end(self, *, is_sound: bool) -> None:
        """Record the end of all workers, and close the files unless their contents match the workers' answers (`is_sound`)."""
        self._are_sound = is_sound and bool(self._files) and self._layouts is not None
        if not self._are_sound:
            self.close()

    def close(self) -> None:
        """Close the files.  Their pages are free once no worker maps them.  Idempotent."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()
        self._layouts = None
        self._are_sound = False
