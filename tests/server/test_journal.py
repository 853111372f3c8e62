"""The journal against a disk that fails in every way that is drawn, and planted bugs that this must find.

A schedule plays several lives of a server.  In each, requests arrive, tokens are written and seen by clients, streams are deleted, and
at the end the process is killed or the power fails.  One seed plays one schedule.
"""

import errno
import os
import random
import threading
import time
from functools import wraps
from types import SimpleNamespace

import pytest
import trio
import trio.lowlevel
import trio.testing

from trouper.errors import TrouperValidationError
from trouper.frontends.server.durable import journal as journal_module
from trouper.frontends.server.durable import records, segments
from trouper.frontends.server.durable.journal import Journal, PendingRecords
from trouper.frontends.server.durable.records import (
    Admitted,
    Gone,
    StreamEnded,
    StreamRecord,
    Tokens,
)
from trouper.frontends.server.durable.segments import FolderDisk, JournalError, Segments
from trouper.frontends.server.durable.streams import DurableStream

MODEL = bytes(32)
NUM_SCHEDULES, LIMIT = 300, 1500


def token(stream, position):
    """Return what the model samples: a function of the stream and the position."""
    return (stream * 7919 + position * 104729 + 13) % 50000


class SimulatedFile:
    """What a program sees of a file, what is on the platter, and the writes between."""

    def __init__(self):
        self.data, self.kept, self.since = bytearray(), b"", []
        self.has_failed = False

    def copied(self):
        found = SimulatedFile()
        found.data, found.kept, found.since = self.data[:], self.kept, self.since[:]
        found.has_failed = self.has_failed
        return found

    def reach_platter(self):
        kept = bytearray(self.kept)
        for place, piece in self.since:
            kept[len(kept) :] = bytes(max(0, place - len(kept)))
            kept[place : place + len(piece)] = piece
        self.kept, self.since = bytes(kept), []

    def lose_power(self, dice, graves):
        """Keep what was synchronised.  Of later writes some are lost, torn, empty, or show what another file had there."""
        for i, (place, piece) in enumerate(self.since):
            how = dice.random()
            if how < 0.35:
                piece = b""
            elif how < 0.6:
                piece = piece[: dice.randrange(len(piece) + 1)]
            elif how < 0.7:
                piece = piece[: len(piece) // 2] + bytes(len(piece) - len(piece) // 2)
            elif how < 0.85 and graves:
                old = dice.choice(graves)[place : place + len(piece)]
                piece = old + bytes(len(piece) - len(old))
            self.since[i] = place, piece
        self.reach_platter()
        self.data = bytearray(self.kept)


class PowerCut(BaseException):
    """The power fails in the middle of what the journal does."""


def may_be_cut(method):
    """Let the power fail before a call."""

    @wraps(method)
    def called(self, *args):
        if self.num_calls_left is not None:
            self.num_calls_left -= 1
            if self.num_calls_left < 0:
                raise PowerCut
        return method(self, *args)

    return called


class SimulatedDisk:
    """A folder on a disk with faults.  Descriptors are names."""

    num_calls_left = None

    def __init__(self, dice, *, full_rate, error_rate):
        self._dice = dice
        self.full_rate, self.error_rate = full_rate, error_rate
        self.files, self.graves, self.open = {}, [], set()
        # Names that a loss of power brings back.
        self.unlinked = {}

    def names(self):
        return sorted(self.files)

    def read(self, name):
        return bytes(self.files[name].data)

    @may_be_cut
    def create(self, name):
        assert name not in self.files
        if self._dice.random() < self.full_rate:
            raise OSError("no space")
        self.files[name] = SimulatedFile()
        self.open.add(name)
        return name

    @may_be_cut
    def write(self, name, data):
        file = self.files[name]
        assert not file.has_failed, "a segment was touched after a failure"
        if self._dice.random() < self.full_rate:
            data = data[: self._dice.randrange(len(data))]
            file.has_failed = True
        file.since.append((len(file.data), bytes(data)))
        file.data += data
        return len(data)

    @may_be_cut
    def sync(self, name):
        file = self.files[name]
        if self._dice.random() < self.error_rate:
            # The dirty pages are marked clean, and gone.  A later call succeeds.
            file.since = []
            raise OSError("input or output error")
        file.reach_platter()

    def close(self, name):
        self.open.remove(name)

    @may_be_cut
    def unlink(self, name):
        self.unlinked[name] = self.files.pop(name)
        self.graves.append(bytes(self.unlinked[name].data))

    @may_be_cut
    def sync_folder(self):
        self.unlinked.clear()

    def release(self):
        pass

    def end_life(self, *, power):
        if power:
            if self._dice.random() < 0.5:
                self.files = {**self.unlinked, **self.files}
            for file in self.files.values():
                file.lose_power(self._dice, self.graves)
        for file in self.files.values():
            file.kept, file.since, file.has_failed = bytes(file.data), [], False
        self.unlinked.clear()
        self.open.clear()

    def rot(self):
        """Flip one bit at rest."""
        data = self._dice.choice(list(self.files.values())).data
        if len(data) > records.HEAD_BYTES:
            place = self._dice.randrange(records.HEAD_BYTES, len(data))
            data[place] ^= 1 << self._dice.randrange(8)


class Life:
    """One process: its journal, and what clients may rely on."""

    def __init__(self, disk, dice, *, syncs):
        self.journal = Segments(
            disk, MODEL, lambda: dice.randbytes(16), max_bytes=2**30, syncs=syncs
        )
        self.is_durable = True
        self.attempt(self.journal.begin)

    def attempt(self, act, *args):
        try:
            act(*args)
        except JournalError:
            self.is_durable = False
        else:
            self.is_durable = True


class Play:
    """One schedule.  `run` raises AssertionError if a promise is broken."""

    def __init__(self, seed, *, sent_first=False):
        self.dice = dice = random.Random(seed)
        self.sent_first = sent_first
        self.syncs = dice.random() < 0.5
        rates = {"full_rate": dice.choice((0, 0, 0.05)), "error_rate": dice.choice((0, 0, 0.05))}
        self.disk = SimulatedDisk(dice, **rates)
        self.has_rotted = False
        # By stream, what clients may rely on.  Deleted streams must not come back.
        self.seen, self.deleted = {}, set()

    def run(self):
        for number in range(self.dice.randrange(2, 5)):
            power = self.dice.random() < 0.5
            if power and self.dice.random() < 0.4:
                self.disk.num_calls_left = self.dice.randrange(1, 30)
            try:
                life = Life(self.disk, self.dice, syncs=self.syncs)
                self.live(life, self.check(life), 100 * number)
            except PowerCut:
                self.disk.num_calls_left = None
            else:
                self.disk.num_calls_left = None
                life.journal.close()
                assert not self.disk.open, "a descriptor is left"
            if power and not self.syncs:
                # Nothing of the last moments was promised.
                self.seen = {}
            self.disk.end_life(power=power)
            if self.dice.random() < 0.2 and self.disk.files:
                self.has_rotted = True
                self.disk.rot()
                self.deleted = set()

    def check(self, life):
        """Compare what a new process finds with what was promised.  Returns the number of tokens of each stream."""
        found = {int(id): stream for id, stream in life.journal.streams.items()}
        for stream, record in found.items():
            known = [t for tokens in record.tokens for t in tokens.token_ids]
            assert known == [token(stream, i) for i in range(len(known))], "a wrong token"
            is_whole = record.num_tokens >= self.seen.get(stream, 0)
            assert is_whole or self.has_rotted, "tokens that a client has seen are lost"
        assert len(set(self.seen) - set(found)) <= 2 * self.has_rotted, "a stream is lost"
        assert not self.deleted & set(found), "a deleted stream is back"
        true = {stream: record.num_tokens for stream, record in found.items()}
        self.seen = {stream: min(self.seen.get(stream, 0), num) for stream, num in true.items()}
        self.deleted, self.has_rotted = set(), False
        if not life.is_durable:
            self.seen = {}
        return true

    def live(self, life, true, first):
        gone = {stream for stream in true if self.dice.random() < 0.3}
        for stream in gone:
            true.pop(stream)
            self.seen.pop(stream, None)
        life.attempt(life.journal.write, [Gone(str(stream)) for stream in gone])
        if life.is_durable:
            life.attempt(life.journal.rotate)
        if life.is_durable:
            self.deleted |= gone
        for step in range(self.dice.randrange(1, 12)):
            if life.is_durable is False:
                # Clients are told that nothing is durable, and what is in the folder may be old.
                self.seen, self.deleted = {}, set()
            written = list(self.news(true, first + step))
            if self.sent_first:
                self.seen.update(true)
                if self.dice.random() < 0.1:
                    return
            life.attempt(life.journal.write, written)
            if life.is_durable:
                self.seen.update(true)

    def news(self, true, number):
        if self.dice.random() < 0.5 and len(true) < 6:
            true[number] = 0
            yield Admitted(str(number), b"", b"{}")
        for stream in [each for each in true if self.dice.random() < 0.7]:
            start, count = true[stream], self.dice.randrange(1, 4)
            ids = [token(stream, start + i) for i in range(count)]
            is_first = {"prompt_token_ids": [1]} if start == 0 else {}
            yield Tokens(str(stream), start, ids, **is_first)
            true[stream] += count


def play(seed, **options):
    Play(seed, **options).run()


def test_journal_keeps_its_promises_on_bad_disks():
    for seed in range(NUM_SCHEDULES):
        play(seed)


@pytest.mark.slow
def test_journal_keeps_its_promises_in_many_schedules():
    for seed in range(NUM_SCHEDULES, 10_000):
        play(seed)


# Planted bugs


def no_sum(patch):
    patch.setattr(records, "_sum", lambda segment, number, frame: bytes(8))


def sum_without_segment(patch):
    right = records._sum
    patch.setattr(records, "_sum", lambda segment, number, frame: right(b"", number, frame))


def tokens_without_position(patch):
    patch.setattr(StreamRecord, "add", lambda self, tokens: self.tokens.append(tokens))


def short_write_is_ignored(patch):
    def write_all(self, file, data):
        self._num_bytes += self._disk.write(file, data)

    patch.setattr(Segments, "_write_all", write_all)


def writes_behind_a_failed_sync(patch):
    right = SimulatedDisk.sync

    def sync(self, name):
        try:
            right(self, name)
        except OSError:
            right(self, name)

    patch.setattr(SimulatedDisk, "sync", sync)


def earlier_segments_count_again(patch):
    right = records.recover

    def recover(found):
        return right([f for f in each if f.kind != 4] for each in found)

    patch.setattr(segments, "recover", recover)


def unlinks_before_it_syncs(patch):
    right = Segments.rotate

    def rotate(self):
        for name in self._disk.names():
            self._disk.unlink(name)
        right(self)

    patch.setattr(Segments, "rotate", rotate)


BUGS = [
    no_sum, sum_without_segment, tokens_without_position, short_write_is_ignored,
    writes_behind_a_failed_sync, earlier_segments_count_again, unlinks_before_it_syncs,
]  # fmt: skip


def num_schedules_until_found(**options):
    for seed in range(LIMIT):
        try:
            play(seed, **options)
        except Exception:
            return seed
    raise AssertionError("not found")


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_planted_bug_of_the_journal_is_found(bug, monkeypatch):
    bug(monkeypatch)
    num_schedules_until_found()


def test_sending_before_writing_is_found():
    assert num_schedules_until_found(sent_first=True) < 100


# Without faults


def segments_on(disk, model=MODEL):
    made = Segments(disk, model, lambda: bytes(16), max_bytes=10_000)
    made.begin()
    return made


@pytest.fixture
def disk():
    return SimulatedDisk(random.Random(0), full_rate=0, error_rate=0)


def test_stream_keeps_its_model_in_every_life(disk):
    first = segments_on(disk)
    first.write([Admitted("a", b"key", b"{}", model=MODEL)])
    first.write([Tokens("a", 0, [1, 2], prompt_token_ids=[3])])
    for life in range(3):
        again = segments_on(disk, bytes([life]) * 32)
        assert again.streams["a"].admitted.model == MODEL
        assert again.streams["a"].num_tokens == 2


def test_end_of_a_stream_is_found_again(disk):
    first = segments_on(disk)
    first.write([Admitted("a", b"", b"{}"), StreamEnded("a", 5.0, b"failed")])
    assert segments_on(disk).streams["a"].ended == StreamEnded("a", 5.0, b"failed")
    assert len(disk.files) == 1


def test_room_is_half_of_what_the_folder_may_take(disk):
    journal = segments_on(disk)
    journal.write([Admitted("a", b"", bytes(3000))])
    assert journal.has_room(1000)
    assert not journal.has_room(2500)
    journal.write([Gone("a")])
    assert journal.has_room(4500)


def test_long_segment_is_replaced_by_what_is_kept(disk, monkeypatch):
    monkeypatch.setattr(segments, "ROTATE_BYTES", 2000)
    journal = segments_on(disk)
    for number in range(100):
        journal.write([Admitted(str(number), b"", bytes(500))])
        journal.write([Gone(str(number))])
        assert sum(len(file.data) for file in disk.files.values()) < 4000


# The actor


class CancelledStep(trio.abc.Instrument):
    """Cancels a scope in one step of a task, so that the task's next await is interrupted."""

    def __init__(self, task, scope, number):
        self.task, self.scope, self.num_left = task, scope, number

    def before_task_step(self, task):
        if task is self.task:
            self.num_left -= 1
            if self.num_left < 0:
                self.scope.cancel()


async def until(holds):
    """Wait for what gives no sign when it happens."""
    with trio.fail_after(30):
        while not holds():  # noqa: ASYNC110
            await trio.sleep(0.001)


@pytest.mark.trio
@pytest.mark.parametrize("number", range(7))
async def test_cancelled_writer_writes_what_it_has_taken(disk, number):
    journal, handed = Journal(segments_on(disk), "step", retain_s=600), []
    async with trio.open_nursery() as tasks, trio.open_nursery() as writers:

        def hand_in(stream):
            tasks.start_soon(journal.write, Admitted(stream, b"", b"{}"))
            handed.append(stream)

        async def write():
            cancelled = CancelledStep(trio.lowlevel.current_task(), writers.cancel_scope, number)
            trio.lowlevel.add_instrument(cancelled)
            try:
                await journal.run_writer()
            finally:
                trio.lowlevel.remove_instrument(cancelled)

        hand_in("a")
        writers.start_soon(write)
        while not writers.cancel_scope.cancel_called:
            hand_in(f"{len(handed)}")
            await trio.testing.wait_all_tasks_blocked()
    assert set(segments_on(disk).streams) >= set(handed[:-1])


@pytest.mark.trio
async def test_unwritten_request_is_not_admitted(disk):
    disk.full_rate = 1.0
    journal = Journal(Segments(disk, MODEL, lambda: bytes(16), max_bytes=10_000), "off", 600)
    async with trio.open_nursery() as writers:
        await writers.start(journal.run_writer)
        assert not await journal.admit(Admitted("a", b"", b"{}"))
        writers.cancel_scope.cancel()


@pytest.fixture
def stalled(disk, monkeypatch):
    """The disk, and a function that lets a call of it go on."""
    monkeypatch.setattr(journal_module, "STALL_S", 0.01)
    turns, right = threading.Semaphore(0), disk.write

    def write(file, data):
        assert turns.acquire(timeout=10)
        return right(file, data)

    journal = Journal(segments_on(disk), "group", retain_s=600)
    monkeypatch.setattr(disk, "write", write)
    return journal, turns.release


@pytest.mark.trio
async def test_stalled_disk_delays_no_token(stalled):
    journal, go_on = stalled
    admitted = []

    async def admit():
        admitted.append(await journal.admit(Admitted("b", b"", b"{}")))

    async with trio.open_nursery() as tasks, trio.open_nursery() as writers:
        await writers.start(journal.run_writer)
        await journal.write(Admitted("a", b"", b"{}"))
        assert not journal.is_working
        # Behind a write that takes long, too, but a request waits until it is kept.
        tasks.start_soon(admit)
        await journal.write(Tokens("a", 0, [1], prompt_token_ids=[1]))
        assert not admitted
        go_on(10)
        await until(lambda: admitted)
        assert admitted == [True]
        assert journal.is_working
        writers.cancel_scope.cancel()


@pytest.mark.trio
async def test_tokens_wait_again_after_a_stall(stalled, disk, monkeypatch):
    journal, go_on = stalled
    async with trio.open_nursery() as writers:
        await writers.start(journal.run_writer)
        await journal.write(Admitted("a", b"", b"{}"))
        go_on(10)
        await until(lambda: journal.is_working)
        await journal.write(Tokens("a", 0, [1], prompt_token_ids=[1]))
        found = records.recover(map(records.scan, (file.data for file in disk.files.values())))
        assert found["a"].num_tokens == 1
        writers.cancel_scope.cancel()


@pytest.mark.trio
async def test_reader_wakes_after_a_short_stall(stalled):
    journal, go_on = stalled
    stream, found = DurableStream("a", b"", "/", b"", b"", 0.0), []

    async def read():
        found.append(await stream.wait(0))

    async with trio.open_nursery() as tasks:
        journal.put(Admitted("a", b"", b"{}"), stream)
        stream.add(b"1")
        journal._release_late(journal._pending)
        # The disk has caught up before any reader looks.
        journal._note_written(PendingRecords(), None)
        stream.add(b"2")
        tasks.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        assert not found
        go_on(10)
        await tasks.start(journal.run_writer)
        await until(lambda: found)
        tasks.cancel_scope.cancel()
    assert found == [2]


@pytest.mark.trio
async def test_answer_without_reader_keeps_no_batches(disk):
    journal = Journal(segments_on(disk), "off", 600)
    stream = DurableStream("a", b"", "/", b"", b"", 0.0)
    async with trio.open_nursery() as tasks:
        await tasks.start(journal.run_writer)
        for i in range(20):
            journal.put(Tokens("a", i, [i], prompt_token_ids=[1]), stream)
            stream.add(b"1")
            await journal.write(Tokens("b", i, [i], prompt_token_ids=[1]))
            assert len(stream._held) <= 2
        assert not any(batch.records for batch, _ in stream._held)
        tasks.cancel_scope.cancel()


@pytest.mark.trio
async def test_records_of_several_turns_are_one_write(disk, monkeypatch):
    sizes, right = [], disk.write

    def write(file, data):
        sizes.append(len(data))
        return right(file, data)

    # A slow machine may take longer than usual.
    monkeypatch.setattr(journal_module, "GATHER_S", 60.0)
    journal, streams = Journal(segments_on(disk), "off", 600), "abcdefgh"
    async with trio.open_nursery() as tasks:
        await tasks.start(journal.run_writer)
        for each in streams:
            await journal.write(Admitted(each, b"", b"{}"))
        monkeypatch.setattr(disk, "write", write)
        for each in streams:
            # The engine hands out the tokens of a step over several turns.
            tasks.start_soon(journal.write, Tokens(each, 0, [1], prompt_token_ids=[1]))
            await trio.lowlevel.checkpoint()
        await journal.write(Tokens("a", 1, [1]))
        tasks.cancel_scope.cancel()
    assert len(sizes) == 1
    assert all(each.num_tokens for each in segments_on(disk).streams.values())


@pytest.mark.trio
async def test_records_without_an_end_are_written(disk, monkeypatch):
    journal, now_s, num_turns = Journal(segments_on(disk), "off", 600), 0.0, 0
    async with trio.open_nursery() as tasks:
        await tasks.start(journal.run_writer)
        await journal.write(Admitted("a", b"", b"{}"))
        clock = SimpleNamespace(monotonic=lambda: now_s, time=time.time)
        monkeypatch.setattr(journal_module, "time", clock)
        # A busy event loop brings a record in every turn.
        while journal._writing is None and num_turns < journal_module.MAX_IN_FRAME - 1:
            tasks.start_soon(journal.write, Tokens("a", num_turns, [1]))
            await trio.lowlevel.checkpoint()
            now_s += journal_module.GATHER_S / 4
            num_turns += 1
        tasks.cancel_scope.cancel()
    assert num_turns < 20


@pytest.mark.trio
async def test_writes_go_on_while_the_disk_syncs(disk, monkeypatch):
    monkeypatch.setattr(journal_module, "GROUP_S", 0.0)
    journal, syncs, right = Journal(segments_on(disk), "group", 600), threading.Event(), disk.sync
    begun = threading.Event()

    def sync(file):
        begun.set()
        assert syncs.wait(10)
        raise OSError("input or output error")

    monkeypatch.setattr(disk, "sync", sync)
    async with trio.open_nursery() as writers:
        await writers.start(journal.run_writer)
        await journal.write(Admitted("a", b"", b"{}"))
        await until(lambda: begun.is_set())
        await journal.write(Admitted("b", b"", b"{}"))
        assert journal.is_working
        monkeypatch.setattr(disk, "sync", right)
        syncs.set()
        await until(lambda: journal.errors)
        # What a failed sync may have lost is in a new file.
        await journal.write(Admitted("c", b"", b"{}"))
        writers.cancel_scope.cancel()
    assert len(disk.files) == 1
    assert min(disk.files) > "000000000001"
    assert not disk.open
    assert set(segments_on(disk).streams) == set("abc")


def folder_journal(path):
    segments = Segments(FolderDisk(str(path)), MODEL, lambda: os.urandom(16), max_bytes=10**6)
    segments.begin()
    return Journal(segments, "off", retain_s=600)


@pytest.mark.trio
async def test_lent_journal_comes_back_with_everything(tmp_path):
    journal = folder_journal(tmp_path)
    async with trio.open_nursery() as writers:
        await writers.start(journal.run_writer)
        await journal.admit(Admitted("a", b"", b"{}"))
        with pytest.raises(TrouperValidationError, match="--take-over"):
            FolderDisk(str(tmp_path))
        assert await journal.lend()
        other = folder_journal(tmp_path)
        assert set(other.recovered) == {"a"}
        writers.start_soon(journal.admit, Admitted("b", b"", b"{}"))
        await trio.testing.wait_all_tasks_blocked()
        other._segments.release()
        journal.take_back()
        await journal.admit(Admitted("c", b"", b"{}"))
        assert journal.is_working
        writers.cancel_scope.cancel()
    journal._segments.release()
    assert set(folder_journal(tmp_path).recovered) == {"a", "b", "c"}


@pytest.mark.trio
@pytest.mark.parametrize("has_failed", [False, True])
async def test_journal_that_cannot_be_written_is_not_lent(tmp_path, monkeypatch, has_failed):
    def fail(*_):
        raise OSError(errno.ENOSPC, "no space left")

    journal = folder_journal(tmp_path)
    async with trio.open_nursery() as writers:
        await writers.start(journal.run_writer)
        await journal.admit(Admitted("a", b"", b"{}"))
        monkeypatch.setattr(FolderDisk, "write", fail)
        if has_failed:
            assert not await journal.admit(Admitted("b", b"", b"{}"))
        else:
            journal._add((Gone("a"),))
        assert not await journal.lend()
        with pytest.raises(TrouperValidationError, match="in use"):
            FolderDisk(str(tmp_path))
        monkeypatch.undo()
        writers.cancel_scope.cancel()
    journal._segments.release()


@pytest.mark.trio
@pytest.mark.parametrize("method", ["write", "sync"])
async def test_hanging_disk_does_not_hang_the_lender(disk, monkeypatch, method):
    journal, right = Journal(segments_on(disk), "group", 600), getattr(disk, method)
    goes_on = threading.Event()

    def hang(*args):
        assert goes_on.wait(10)
        return right(*args)

    async with trio.open_nursery() as writers:
        await writers.start(journal.run_writer)
        monkeypatch.setattr(journal_module, "GROUP_S", 1e9)
        await journal.admit(Admitted("a", b"", b"{}"))
        monkeypatch.setattr(disk, method, hang)
        with monkeypatch.context() as patch, trio.fail_after(5):
            patch.setattr(journal_module, "ADMIT_S", 0.01)
            journal._add((Admitted("b", b"", b"{}"),))
            assert not await journal.lend()
        goes_on.set()
        # The folder was not given away.
        assert await journal.admit(Admitted("c", b"", b"{}"))
        assert await journal.lend()
        writers.cancel_scope.cancel()
    assert set(segments_on(disk).streams) == set("abc")


@pytest.mark.trio
async def test_refused_take_over_leaves_no_record_waiting(tmp_path):
    journal, is_written = folder_journal(tmp_path), trio.Event()

    async def delete():
        await journal.delete("a")
        is_written.set()

    async with trio.open_nursery() as writers:
        writers.start_soon(delete)
        await trio.testing.wait_all_tasks_blocked()
        journal.take_back()
        await writers.start(journal.run_writer)
        with trio.fail_after(5):
            await is_written.wait()
        writers.cancel_scope.cancel()
    journal._segments.release()


@pytest.mark.trio
async def test_given_journal_gets_no_further_record(tmp_path):
    journal = folder_journal(tmp_path)
    async with trio.open_nursery() as writers:
        await writers.start(journal.run_writer)
        await journal.admit(Admitted("a", b"", b"{}"))
        await journal.lend()
        other = folder_journal(tmp_path)
        assert journal.give() == []
        assert not await journal.admit(Admitted("b", b"", b"{}"))
        await journal.write(Tokens("a", 0, [1]))
        assert not journal.has_room(1)
        journal.take_back()
        writers.cancel_scope.cancel()
    other._segments.release()
    assert set(folder_journal(tmp_path).recovered) == {"a"}


@pytest.mark.trio
async def test_journal_of_another_holder_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr("trouper.frontends.server.durable.journal.RETRY_S", 0.0)
    journal = folder_journal(tmp_path)
    async with trio.open_nursery() as writers:
        await writers.start(journal.run_writer)
        await journal.lend()
        other = folder_journal(tmp_path)
        journal.take_back()
        assert not await journal.admit(Admitted("a", b"", b"{}"))
        other._segments.release()
        assert await journal.admit(Admitted("b", b"", b"{}"))
        writers.cancel_scope.cancel()
