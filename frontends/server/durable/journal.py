"""Persist the records of durable answers in order, without blocking the event loop on the disk.

One task hands all new records to a writer thread at once, so that the requests of one engine step share a write.  Under the policy `group`
a second thread calls fsync, so that writes can continue meanwhile.

Tokens do not wait for the disk either: handlers build their events during the write, and `PendingRecords` releases the events to readers
when it completes.  So the journal adds no turn of the event loop to a token.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal

import anyio
import anyio.lowlevel
import anyio.to_thread
from anyio.abc import TaskStatus

from trouper.frontends.server.durable.records import (
    MAX_IN_FRAME,
    Admitted,
    Gone,
    Record,
    StreamEnded,
    StreamRecord,
)
from trouper.frontends.server.durable.segments import JournalError, Segments
from trouper.frontends.server.durable.streams import DurableStream, DurableStreams

logger = logging.getLogger(__name__)
SyncPolicy = Literal["off", "group", "step"]
# Seconds between two waits for the disk under the policy `group`.
GROUP_S = 0.1
# After this many seconds the disk counts as stalled, and answers continue before their records are written.
STALL_S = 0.25
# A request is refused if its admission cannot be written within this many seconds.
ADMIT_S = 10.0
# The longest wait, in seconds, for further records to join a write.
GATHER_S = 0.01
# Seconds between two attempts to write after a failure.
RETRY_S = 10.0
# Seconds between two checks whether a stalled disk has recovered.
POLL_S = 0.05
# The shortest time, in seconds, between two warnings about a stalled disk.
WARN_S = 60.0
# Seconds between two searches for expired streams.
EXPIRY_S = 5.0


class PendingRecords:
    """Collect the records of one write, and the readers to wake after it.

    Attributes:
        written: set when the write has succeeded or failed.
        is_released: whether readers may see the contents: after the write, or earlier if the disk stalls.
        on_release: callbacks of the release.  After an early release they run again when the write completes.
        since: the time of the first record, in seconds of the monotonic clock.
    """

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.written = anyio.Event()
        self.is_written = self.is_released = False
        self.on_release: list[Callable[[], None]] = []
        self.since = 0.0

    def release(self) -> None:
        """Let readers see the events of these records."""
        self.is_released = True
        for show in self.on_release:
            show()


class Journal:
    """Write records in the order of submission, and own the durable streams of a server.

    Args:
        segments: the files.  From now on only this journal's writer may use them.
        retain_s: how long an ended stream remains readable, in seconds.
        grace_s: how long a stream without readers keeps generating, in seconds.
        keeps_all: whether every request is durable, even without an `Idempotency-Key`.
        max_event_bytes: the memory limit for the events of ended streams.
    """

    def __init__(
        self,
        segments: Segments,
        policy: SyncPolicy,
        retain_s: float,
        *,
        grace_s: float = 60.0,
        keeps_all: bool = False,
        max_event_bytes: int = 2**26,
    ) -> None:
        self._segments, self._policy, self._retain_s = segments, policy, retain_s
        self.grace_s, self.keeps_all = grace_s, keeps_all
        self.streams = DurableStreams(max_event_bytes, retain_s)
        # Bounded by the tokens that open requests sample during one write, or until they end if the disk stalls.
        self._pending = PendingRecords()
        self._news = anyio.Event()
        # The batch in the writer thread, and the event that starts the stall watch.
        self._writing: PendingRecords | None = None
        self._begun = anyio.Event()
        self._one_thread, self._sync_thread = anyio.CapacityLimiter(1), anyio.CapacityLimiter(1)
        self._synced_s = self._expired_s = 0.0
        # Whether a power failure could lose written bytes.
        self._is_unsynced = False
        # The file for the sync thread, until the writer thread has handled the outcome.
        self._to_sync: int | None = None
        self._sync_news = anyio.Event()
        self._is_syncing = False
        self._outcome: tuple[int, OSError | None] | None = None
        # Whether the last write failed, and whether the current one takes longer than `STALL_S`.
        self._has_failed = self._is_behind = False
        self._failed_s, self._warned_s = 0.0, -WARN_S
        # Whether a successor process holds the folder for now, and whether it keeps the folder for good.
        self._is_lent = self._is_given = False
        # Set by the writer when it has released the folder, or has found that it cannot.
        self._loan: anyio.Event | None = None
        # The streams of earlier processes, until `take_recovered`.
        self.recovered: dict[str, StreamRecord] = dict(segments.streams)

    def __repr__(self) -> str:
        return f"<Journal {'working' if self.is_working else 'failed'}: {self._segments!r}>"

    def take_recovered(self) -> tuple[dict[str, StreamRecord], dict[str, StreamRecord]]:
        """Return the background responses and the other streams of earlier processes, each by id.

        A second call returns nothing, so that no answer is resumed twice.
        """
        found, self.recovered = self.recovered, {}
        if found:
            logger.info("found %d answers of an earlier server in the journal", len(found))
        responses = {id: each for id, each in found.items() if not each.admitted.route}
        return responses, {id: each for id, each in found.items() if id not in responses}

    @property
    def is_working(self) -> bool:
        """Whether the disk currently accepts records without failure or stall."""
        return not (self._has_failed or self._is_behind)

    @property
    def has_failed(self) -> bool:
        """Whether the last write failed."""
        return self._has_failed

    @property
    def fingerprint(self) -> bytes:
        """The digest of the model's files and options that determine tokens and texts."""
        return self._segments.fingerprint

    @property
    def num_bytes(self) -> int:
        """Return the size of the current segment in bytes."""
        return self._segments.num_bytes

    @property
    def kept_bytes(self) -> int:
        """Return the size in bytes of all records that a new segment would repeat."""
        return self._segments.kept_bytes

    @property
    def errors(self) -> Mapping[tuple[str, str], int]:
        """Return the number of disk errors by operation and by name of the error, such as `("write", "ENOSPC")`."""
        return self._segments.errors

    def behind_s(self) -> float:
        """Return how long the oldest pending record has waited for the disk, in seconds."""
        batch = self._pending
        return time.monotonic() - batch.since if batch.records else 0.0

    def has_room(self, num_bytes: int) -> bool:
        """Return whether disk and memory have room for a new stream with a request of this size."""
        has_room = self._segments.has_room(num_bytes) and self.streams.has_room()
        return has_room and not self._has_failed

    def record(self, id: str) -> StreamRecord | None:
        """Return the records of a stream, or None if it has expired."""
        return self._segments.streams.get(id)

    def put(self, record: Record, stream: DurableStream) -> None:
        """Submit a record of a stream.  Readers see the stream's next events only after it is written.

        They wait a quarter of a second at most: a stalled disk delays durability, not tokens.
        """
        batch = self._add((record,))
        if self._holds(batch) and stream.hold(batch):
            batch.on_release.append(stream.wake)

    async def write(self, *records: Record) -> None:
        """Write records before the caller shows their contents.  Waits no longer than events do after `put`."""
        batch = self._add(records)
        if self._holds(batch):
            shown = anyio.Event()
            batch.on_release.append(shown.set)
            await shown.wait()

    def _holds(self, batch: PendingRecords) -> bool:
        return not (self._is_behind or self._is_lent or batch.is_released)

    async def admit(self, record: Admitted) -> bool:
        """Write a request before its client gets an answer.  Returns False if the disk takes more than `ADMIT_S` seconds.

        Lost tokens can be sampled again, but a lost request is gone, so here the client waits even for a stalled disk.
        """
        batch = self._add((record,))
        with anyio.move_on_after(ADMIT_S):
            await batch.written.wait()
        return batch.is_written

    async def note_end(self, id: str, failure: bytes = b"") -> None:
        """Record the end of a stream, which starts its retention time.

        Args:
            failure: the error in its API's format; empty if the tokens contain the end.
        """
        await self.write(StreamEnded(id, time.time(), failure))

    async def delete(self, id: str) -> None:
        """Record that a stream was deleted or failed before its answer began, so that no later process resumes it."""
        await self.write(Gone(id))

    async def lend(self) -> bool:
        """Write all pending records and release the folder to another server.  Later records stay in memory.

        Call `take_back` or `give` next.  Returns False, and keeps the folder, if the disk is too slow or fails: the other server would
        miss records.
        """
        loan = self._loan = anyio.Event()
        self._news.set()
        try:
            with anyio.move_on_after(ADMIT_S):
                await loan.wait()
        finally:
            self._loan = None
            if not loan.is_set():
                self.take_back()
        return self._is_lent

    def take_back(self) -> None:
        """Resume writing, in a new segment, after the other server has given up.  Does nothing if the folder is not lent."""
        if self._is_lent and not self._is_given:
            self._is_lent = self._pending.is_released = False
            self._pending.since = time.monotonic()
            self._news.set()
            self._begun.set()

    def give(self) -> list[str]:
        """Leave the folder to the other server for good.  Returns the ids of running streams without a reader in this process."""
        self._is_given = self._is_lent = self._has_failed = True
        batch, self._pending = self._pending, PendingRecords()
        for each in (batch, self._pending):
            each.written.set()
            each.release()
        return self.streams.unread()

    async def run_writer(
        self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Write records until cancelled.  Records submitted before the cancellation are still written."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._sync_files, name="journal sync")
                tasks.start_soon(self._watch_stalls, name="journal stalls")
                task_status.started()
                while True:
                    await self._wait()
                    await self._gather()
                    await self._write_pending()
                    if self._loan is not None:
                        await self._lend(self._loan)
        finally:
            # Bounded although shielded: if the disk hangs, the watchdog ends the process.
            with anyio.CancelScope(shield=True):
                await self._write_pending()
                await anyio.to_thread.run_sync(self._close, limiter=self._one_thread)
            # Nothing writes later records, so their callers must not wait.
            self._is_behind = True
            self._pending.release()

    def _add(self, records: Sequence[Record]) -> PendingRecords:
        batch = self._pending
        if self._is_given:
            return batch
        if not batch.records:
            batch.since = time.monotonic()
            self._begun.set()
            self._news.set()
        batch.records += records
        return batch

    async def _wait(self) -> None:
        """Wait for records, or until a retry, an fsync or a search for expired streams is due."""
        seconds = RETRY_S if self._has_failed else EXPIRY_S
        if self._is_unsynced and self._to_sync is None:
            seconds = GROUP_S
        with anyio.move_on_after(seconds):
            await self._news.wait()
        self._news = anyio.Event()

    async def _gather(self) -> None:
        """Wait while each turn of the event loop adds records, so that the tokens of one step share a write.

        The engine delivers the tokens of a step over several turns.  With a write per turn, the last ones would wait for several writes.
        """
        num_before, end_s = 0, time.monotonic() + GATHER_S
        # Bounded in time, because a busy event loop may add records in every turn.
        while time.monotonic() < end_s and num_before < len(self._pending.records) < MAX_IN_FRAME:
            num_before = len(self._pending.records)
            # Tasks of a turn run in any order: only two checkpoints let every other task run once.
            for _ in range(2):
                await anyio.lowlevel.checkpoint()

    async def _write_pending(self) -> None:
        if self._is_lent:
            return
        batch, self._pending = self._pending, PendingRecords()
        outcome, self._outcome = self._outcome, None
        self._writing = batch
        # The batch has left the queue, so a cancellation before the thread starts would lose its records.
        with anyio.CancelScope(shield=True):
            act = partial(self._act, batch.records, outcome)
            error = await anyio.to_thread.run_sync(act, limiter=self._one_thread)
            self._writing = None
            self._note_written(batch, error)

    async def _lend(self, loan: anyio.Event) -> None:
        """Release the folder after all writes.  If `lend` has timed out meanwhile, the next write locks it again."""
        if not (self._has_failed or self._is_lent):
            self._is_lent = True
            # Answers continue during the loan, with their records in memory.
            self._pending.release()
            await anyio.to_thread.run_sync(self._release, limiter=self._one_thread)
        loan.set()

    async def _watch_stalls(self) -> None:
        """Release the events of all pending records when the disk takes longer than `STALL_S`."""
        while True:
            await self._begun.wait()
            self._begun = anyio.Event()
            while (oldest := self._oldest()) is not None:
                rest_s = oldest.since + STALL_S - time.monotonic()
                if rest_s <= 0 and not self._is_behind:
                    self._release_late(oldest)
                await anyio.sleep(rest_s if rest_s > 0 else POLL_S)

    def _oldest(self) -> PendingRecords | None:
        """Return the batch that has waited longest for the disk, or None if none waits."""
        batches = (self._writing, None if self._is_lent else self._pending)
        return next((each for each in batches if each is not None and each.records), None)

    def _release_late(self, batch: PendingRecords) -> None:
        self._is_behind = True
        if time.monotonic() > self._warned_s + WARN_S:
            self._warned_s = time.monotonic()
            logger.warning(
                "the journal is behind: a write takes more than %g s. Answers continue, but a crash now may lose their last tokens",
                STALL_S,
            )
        batch.release()
        self._pending.release()

    def _note_written(self, batch: PendingRecords, error: JournalError | None) -> None:
        batch.is_written = error is None
        if error is not None and not self._has_failed:
            words = "cannot write the journal, so answers would not survive a restart; trying again every %g s: %s"
            logger.warning(words, RETRY_S, error)
        if error is None and self._has_failed:
            logger.warning("the journal is written again, with all records since the failure")
        if self._is_behind:
            # The stall is over, so events wait for their records again.
            self._is_behind = self._pending.is_released = False
        self._has_failed = error is not None
        batch.written.set()
        batch.release()
        # An ended stream still refers to its last batch, so free the records here.
        batch.records, batch.on_release = [], []
        if self._to_sync is not None and not self._is_syncing:
            self._is_syncing = True
            self._sync_news.set()

    def _act(
        self, records: Sequence[Record], outcome: tuple[int, OSError | None] | None
    ) -> JournalError | None:
        """Write, expire and handle a sync's outcome, in the writer thread.  Returns the error if the records were not written."""
        now = time.monotonic()
        gone: list[Record] = []
        if now - self._expired_s > EXPIRY_S:
            self._expired_s = now
            gone += [Gone(id) for id in self._segments.ended_before(time.time() - self._retain_s)]
        try:
            if outcome is not None:
                self._to_sync, self._is_syncing = None, False
                self._segments.end_sync(*outcome)
            if self._has_failed and now - self._failed_s < RETRY_S:
                self._segments.note([*records, *gone])
                return JournalError("the next attempt is not due yet")
            self._failed_s = now
            self._segments.write([*records, *gone])
        except JournalError as error:
            return error
        self._is_unsynced |= bool(records) and self._policy == "group"
        if self._is_unsynced and self._to_sync is None and now - self._synced_s >= GROUP_S:
            self._synced_s, self._is_unsynced = now, False
            self._to_sync = self._segments.begin_sync()
        return None

    async def _sync_files(self) -> None:
        """Sync one file after the other in a second thread, while the writer continues."""
        while True:
            await self._sync_news.wait()
            self._sync_news, file = anyio.Event(), self._to_sync
            assert file is not None
            error: OSError | None = None
            try:
                act = partial(self._segments.sync, file)
                await anyio.to_thread.run_sync(act, limiter=self._sync_thread)
            except OSError as raised:
                error = raised
            self._outcome = file, error
            self._news.set()

    def _release(self) -> None:
        self._close()
        self._segments.release()

    def _close(self) -> None:
        self._segments.close(syncs=self._policy == "group")
