"""The journal of a server: what handlers write, and when they may go on.

One task writes, in a thread, all new records together.  So the requests of one step share a write, and the event loop never waits for the
disk.  Under the policy `group` another thread waits for the disk, so that the writes between need not.

Tokens do not wait either: their events are made while they are written, and `PendingRecords` shows them to readers afterwards.  So a token costs
its answer no turn of the event loop more than without a journal.
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
# A record that takes longer does not hold up its answer: the disk stalls.
STALL_S = 0.25
# If the record of a request takes longer, the request is refused.
ADMIT_S = 10.0
# Seconds for which a write waits for more records at most.
GATHER_S = 0.01
# Seconds between two attempts to write after a failure.
RETRY_S = 10.0
# Seconds between two looks whether a slow disk has caught up.
LOOK_S = 0.05
# Seconds between two log lines about a slow disk.
TELL_S = 60.0
# Seconds between two searches for streams to remove.
EXPIRY_S = 5.0


class PendingRecords:
    """Records to write together.

    Attributes:
        written: set when they are written, or when this has failed.
        is_released: whether their contents may be shown: then, or earlier if the disk stalls.
        on_release: called then, and again at the end of a stall during which they were released.
        since: seconds of the monotonic clock at which the first record came.
    """

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.written = anyio.Event()
        self.is_written = self.is_released = False
        self.on_release: list[Callable[[], None]] = []
        self.since = 0.0

    def release(self) -> None:
        """Show the contents."""
        self.is_released = True
        for show in self.on_release:
            show()


class Journal:
    """Writes records in the order in which they are handed in.

    Args:
        segments: the files, which this object's writer uses from now on.
        retain_s: seconds for which a stream is kept after its end.
        grace_s: seconds for which a stream without a reader goes on.
        keeps_all: whether requests are durable without asking for it.
        max_event_bytes: of the events of ended streams that stay in memory.
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
        # The tokens of open requests that are sampled during one write.  While the disk stalls, at most all their tokens.
        self._pending = PendingRecords()
        self._news = anyio.Event()
        # What the thread writes at present, and whether the watch for a stalled disk has to begin.
        self._writing: PendingRecords | None = None
        self._begun = anyio.Event()
        self._one_thread, self._sync_thread = anyio.CapacityLimiter(1), anyio.CapacityLimiter(1)
        self._synced_s = self._expired_s = 0.0
        # Whether a loss of power would take written bytes.
        self._is_unsynced = False
        # The file that another thread is to sync, until the writer has taken the outcome.
        self._to_sync: int | None = None
        self._sync_news = anyio.Event()
        self._is_syncing = False
        self._outcome: tuple[int, OSError | None] | None = None
        # Whether the last write failed, and whether one takes too long at present.
        self._has_failed = self._is_behind = False
        self._failed_s, self._told_s = 0.0, -TELL_S
        # Whether the folder is lent to a successor, and whether the successor keeps it.
        self._is_lent = self._is_given = False
        # Set by the writer once it has lent the folder, or cannot.
        self._loan: anyio.Event | None = None
        # The streams of earlier processes, until they are taken.
        self.recovered: dict[str, StreamRecord] = dict(segments.streams)

    def __repr__(self) -> str:
        return f"<Journal {'working' if self.is_working else 'failed'}: {self._segments!r}>"

    def take_recovered(self) -> tuple[dict[str, StreamRecord], dict[str, StreamRecord]]:
        """Return the background responses and the streams of earlier processes, once."""
        found, self.recovered = self.recovered, {}
        if found:
            logger.info("%d answers of an earlier server were found in the journal", len(found))
        responses = {id: each for id, each in found.items() if not each.admitted.route}
        return responses, {id: each for id, each in found.items() if id not in responses}

    @property
    def is_working(self) -> bool:
        """Whether records reach the folder at present."""
        return not (self._has_failed or self._is_behind)

    @property
    def has_failed(self) -> bool:
        """Whether the last write failed."""
        return self._has_failed

    @property
    def fingerprint(self) -> bytes:
        """The digest of everything that decides about tokens and texts."""
        return self._segments.fingerprint

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the current file."""
        return self._segments.num_bytes

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of all kept records."""
        return self._segments.kept_bytes

    @property
    def errors(self) -> Mapping[tuple[str, str], int]:
        """Count the errors of the disk, by what was done and by the error's name."""
        return self._segments.errors

    def behind_s(self) -> float:
        """Return for how long the oldest record has waited for the disk."""
        batch = self._pending
        return time.monotonic() - batch.since if batch.records else 0.0

    def has_room(self, num_bytes: int) -> bool:
        """Return whether a stream of this size may be added."""
        has_room = self._segments.has_room(num_bytes) and self.streams.has_room()
        return has_room and not self._has_failed

    def record(self, id: str) -> StreamRecord | None:
        """Return what is kept of an ended stream."""
        return self._segments.streams.get(id)

    def put(self, record: Record, stream: DurableStream) -> None:
        """Hand in a record of a stream.  The next events of the stream are shown once it is written.

        They are shown after a quarter of a second at the latest: a stalled disk delays durability, not tokens.
        """
        batch = self._add((record,))
        if self._holds(batch) and stream.hold(batch):
            batch.on_release.append(stream.wake)

    async def write(self, *records: Record) -> None:
        """Write records; call it before their contents are shown.  It waits as long as events do after `put`."""
        batch = self._add(records)
        if self._holds(batch):
            shown = anyio.Event()
            batch.on_release.append(shown.set)
            await shown.wait()

    def _holds(self, batch: PendingRecords) -> bool:
        return not (self._is_behind or self._is_lent or batch.is_released)

    async def admit(self, record: Admitted) -> bool:
        """Write a request before its client gets an answer.

        Unlike tokens it cannot be made again, so a slow disk delays it.  Returns whether it was written in time.
        """
        batch = self._add((record,))
        with anyio.move_on_after(ADMIT_S):
            await batch.written.wait()
        return batch.is_written

    async def note_end(self, id: str, failure: bytes = b"") -> None:
        """Write that a stream has ended, with its tokens or as given.  The time for which it is kept begins."""
        await self.write(StreamEnded(id, time.time(), failure))

    async def delete(self, id: str) -> None:
        """Write that a stream was deleted or has failed before its answer began, so that no later process finds it."""
        await self.write(Gone(id))

    async def lend(self) -> bool:
        """Write what was handed in, and give the folder to another server.  Records wait in memory until the next call.

        Returns False, and keeps the folder, if the disk does not take them in time: the other server would not find them.
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
        """Write again, in a new segment: the other server has not gone on.  Does nothing if the folder is not lent."""
        if self._is_lent and not self._is_given:
            self._is_lent = self._pending.is_released = False
            self._pending.since = time.monotonic()
            self._news.set()
            self._begun.set()

    def give(self) -> list[str]:
        """Leave the folder to the other server, and write nothing more.  Returns the running streams without a reader here."""
        self._is_given = self._is_lent = self._has_failed = True
        batch, self._pending = self._pending, PendingRecords()
        for each in (batch, self._pending):
            each.written.set()
            each.release()
        return self.streams.unread()

    async def run_writer(
        self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Write until this is cancelled.  What was handed in until then is still written."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._sync_files, name="sync of the journal")
                tasks.start_soon(self._watch_stalls, name="stalls of the journal")
                task_status.started()
                while True:
                    await self._wait()
                    await self._gather()
                    await self._write_pending()
                    if self._loan is not None:
                        await self._lend(self._loan)
        finally:
            # Bounded: the disk that does not answer keeps a thread, and the watchdog ends the process.
            with anyio.CancelScope(shield=True):
                await self._write_pending()
                await anyio.to_thread.run_sync(self._close, limiter=self._one_thread)
            # No task writes what comes now, so no caller may wait for it.
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
        """Wait for records, or until something else is due."""
        seconds = RETRY_S if self._has_failed else EXPIRY_S
        if self._is_unsynced and self._to_sync is None:
            seconds = GROUP_S
        with anyio.move_on_after(seconds):
            await self._news.wait()
        self._news = anyio.Event()

    async def _gather(self) -> None:
        """Wait while the turns of the event loop bring records, so that the tokens of one step are one write.

        The engine hands out the tokens of a step over several turns.  Written turn by turn, they would wait for one thread after the other.
        """
        num_before, end_s = 0, time.monotonic() + GATHER_S
        # A busy event loop may bring records in every turn.
        while time.monotonic() < end_s and num_before < len(self._pending.records) < MAX_IN_FRAME:
            num_before = len(self._pending.records)
            # Tasks of the same turn run in any order, so two looks are a whole turn apart.
            for _ in range(2):
                await anyio.lowlevel.checkpoint()

    async def _write_pending(self) -> None:
        if self._is_lent:
            return
        batch, self._pending = self._pending, PendingRecords()
        outcome, self._outcome = self._outcome, None
        self._writing = batch
        # The records are in no queue any more, so a cancellation before the thread begins would lose them.
        with anyio.CancelScope(shield=True):
            act = partial(self._act, batch.records, outcome)
            error = await anyio.to_thread.run_sync(act, limiter=self._one_thread)
            self._writing = None
            self._note_written(batch, error)

    async def _lend(self, loan: anyio.Event) -> None:
        """Close the folder behind all writes.  If the lender has given up meanwhile, the next write takes the folder again."""
        if not (self._has_failed or self._is_lent):
            self._is_lent = True
            # Tokens go on meanwhile.
            self._pending.release()
            await anyio.to_thread.run_sync(self._release, limiter=self._one_thread)
        loan.set()

    async def _watch_stalls(self) -> None:
        """Let tokens go on if the disk takes too long, and those that wait behind them."""
        while True:
            await self._begun.wait()
            self._begun = anyio.Event()
            while (oldest := self._oldest()) is not None:
                rest_s = oldest.since + STALL_S - time.monotonic()
                if rest_s <= 0 and not self._is_behind:
                    self._release_late(oldest)
                await anyio.sleep(rest_s if rest_s > 0 else LOOK_S)

    def _oldest(self) -> PendingRecords | None:
        """Return the records with the longest wait for the disk."""
        batches = (self._writing, None if self._is_lent else self._pending)
        return next((each for each in batches if each is not None and each.records), None)

    def _release_late(self, batch: PendingRecords) -> None:
        self._is_behind = True
        if time.monotonic() > self._told_s + TELL_S:
            self._told_s = time.monotonic()
            logger.warning("the journal is behind: the disk takes more than %g s", STALL_S)
        batch.release()
        self._pending.release()

    def _note_written(self, batch: PendingRecords, error: JournalError | None) -> None:
        batch.is_written = error is None
        if error is not None and not self._has_failed:
            words = "the journal cannot be written, answers do not outlive the server: %s"
            logger.warning(words, error)
        if error is None and self._has_failed:
            logger.warning("the journal is written again")
        if self._is_behind:
            # Later records of the next batch wait for it again.
            self._is_behind = self._pending.is_released = False
        self._has_failed = error is not None
        batch.written.set()
        batch.release()
        # The streams of ended answers keep their last batch.
        batch.records, batch.on_release = [], []
        if self._to_sync is not None and not self._is_syncing:
            self._is_syncing = True
            self._sync_news.set()

    def _act(
        self, records: Sequence[Record], outcome: tuple[int, OSError | None] | None
    ) -> JournalError | None:
        """Do in the thread what is due.  Returns why the records were not written."""
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
                return JournalError("it is tried again later")
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
        """Wait for the disk, one file after the other, while the writer goes on."""
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
