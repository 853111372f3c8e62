"""The workers of one device as it reaches them: a peer each, and the frames that have come from it."""

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
    encode,
    encode_adapter,
)
from trouper.actors.messages.controls import LoadAdapter


class WorkerLink:
    """One worker, by its rank."""

    def __init__(self, rank: int, peer: Peer) -> None:
        self.rank, self.where = rank, peer.where
        self.has_hung_up = False
        self._peer = peer
        self._frames = FrameReader(max_inline=peer.max_inline)

    def __repr__(self) -> str:
        return f"<WorkerLink {self.rank}: {self._peer!r}>"

    def send(self, data: bytes, file: int | None) -> None:
        """Send an encoded frame; if the worker is gone, `receive` finds its end."""
        try:
            self._peer.send(data, file)
        except OSError:
            pass

    def take(self) -> Frame | None:
        """Take the next whole frame that has come.

        Raises:
            WireError: what came is no frame.
        """
        return self._frames.take()

    async def receive(self) -> None:
        """Wait for bytes, or for the worker's end.  A wait that is cancelled loses none."""
        data, files = await self._peer.receive()
        if data:
            self._frames.feed(data, files)
        else:
            self.has_hung_up = True

    async def end(self, grace_s: float) -> Exit:
        """Let the worker exit for so long, then kill it; returns when nothing of it is left."""
        ended = await self._peer.end(grace_s)
        self._frames.close()
        return ended


async def send_adapter(links: Sequence[WorkerLink], call: Call) -> None:
    """Send a call that brings an adapter to every worker, when a thread has written it down if it is large."""
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
    """Encode a frame once and send it to every worker.  A plan and a call leave room for each other in every socket."""
    data, file = encode(frame, num_workers=len(links))
    try:
        for link in links:
            link.send(data, file)
    finally:
        if file is not None:
            os.close(file)


async def receive_from_any(links: Sequence[WorkerLink]) -> None:
    """Wait until a worker has sent something, or has hung up."""
    if len(links) == 1:
        await links[0].receive()
        return

    async def receive(link: WorkerLink) -> None:
        await link.receive()
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for link in links:
            tasks.start_soon(receive, link)


async def take_what_has_come(links: Sequence[WorkerLink]) -> None:
    """Read what the workers have sent by now, without waiting for more."""
    for link in links:
        if not link.has_hung_up:
            with anyio.CancelScope() as scope:
                scope.cancel()
                await link.receive()
