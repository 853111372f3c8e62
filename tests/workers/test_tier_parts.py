"""The tier on disk of a device of several workers: a block is there when all of them have their part of it.

The worlds of `tests/scheduling/test_tier.py` play on: each worker keeps one token of each block, in files of its own, and its thread
works, hangs and finds damaged files independently of the others.
"""

import random
from collections import deque

import msgspec
import pytest

from tests.scheduling.test_policy_model import POISON
from tests.scheduling.test_tier import PROMPT, SIZE, World, settle
from trouper.actors.executor.devices.outstanding import TierParts
from trouper.actors.executor.workers.wire import Loaded
from trouper.actors.messages.steps import DeviceBack, DeviceLost, TierAnswer, TierOrder
from trouper.config.kv_layout import KVLayout
from trouper.errors import TrouperValidationError

from .test_process_ranks import INFO, FakeLauncher, FakePeer, make_device, run

A, B, C = (bytes([number]) * 32 for number in range(3))


def opened(*names_of_workers):
    """Join the workers of a device with these files, and take the first answer."""
    parts = TierParts(len(names_of_workers))
    for worker, names in enumerate(names_of_workers):
        assert parts.take() is None
        parts.note(worker, TierAnswer(0, is_anew=True, added=names, num_bytes=9, num_files=3))
    return parts, parts.take()


def test_only_blocks_of_all_workers_are_there():
    parts, first = opened((A, B), (B, C), (C, B))
    assert (first.number, first.is_anew, first.added) == (0, True, (B,))
    assert (first.num_bytes, first.num_files) == (9, 3)
    assert parts.take() is None


def test_least_done_and_slowest_worker_count():
    parts, _ = opened((A, B), (A, B))
    parts.note(1, TierAnswer(7, 2, 0.5, refused=(("sum", 1),)))
    assert parts.take() is None
    parts.note(0, TierAnswer(7, 1, 0.1, removed=(B,), refused=(("sum", 2), ("io", 1))))
    found = parts.take()
    assert (found.number, found.num_done, found.seconds) == (7, 1, 0.5)
    assert (found.removed, dict(found.refused)) == ((B,), {"sum": 3, "io": 1})
    assert parts.take() is None


def test_answers_of_several_orders_may_cross():
    parts, _ = opened((), ())
    for number in (4, 5):
        parts.note(0, TierAnswer(number, 1))
    parts.note(1, TierAnswer(5, 1))
    parts.note(1, TierAnswer(4))
    assert [(each.number, each.num_done) for each in (parts.take(), parts.take())] == [
        (5, 1),
        (4, 0),
    ]


def test_news_count_when_last_worker_has_them():
    parts, _ = opened((), (A,))
    parts.note(1, TierAnswer(0, added=(B,)))
    assert parts.take().added == ()
    parts.note(0, TierAnswer(0, added=(B, A, C)))
    assert set(parts.take().added) == {A, B}
    parts.note(0, TierAnswer(0, removed=(A,)))
    parts.note(0, TierAnswer(0, added=(A,)))
    found = parts.take()
    assert (found.added, found.removed) == ((A,), ())


def test_cleared_part_empties_whole():
    parts, _ = opened((A, B), (A, B))
    parts.note(0, TierAnswer(3, is_anew=True))
    parts.note(1, TierAnswer(3, is_anew=True, added=(B,)))
    found = parts.take()
    assert (found.number, found.is_anew, found.added) == (3, True, ())


class PartsWorld(World):
    """A world of two workers.  `files` has their files, one after the other."""

    def __init__(self, seed, files=None, **options):
        files = ({}, {}) if files is None else files
        super().__init__(seed, files, **options)
        self.begin()

    def begin(self):
        self.parts, self.news = TierParts(SIZE), []
        self.threads = tuple(deque() for _ in range(SIZE))
        # The workers whose disk hangs, while one does.
        self.hanging = self.random.choice(((0,), (1,), (0, 1)))
        for worker, files in enumerate(self.files):
            self.answers.append((worker, TierAnswer(0, is_anew=True, added=tuple(files))))

    @property
    def ready(self):
        """The workers whose thread can go on."""
        return [
            worker
            for worker, thread in enumerate(getattr(self, "threads", ()))
            if thread and not (self.is_hanging and worker in self.hanging)
        ]

    # What the moves of a world look at.
    @property
    def thread(self):
        return self.ready

    @thread.setter
    def thread(self, orders):
        pass

    def compute(self):
        frame = self.frames[0]
        if not isinstance(frame, TierOrder):
            return super().compute()
        self.frames.popleft()
        for worker, thread in enumerate(self.threads):
            if frame.kind in ("cancel", "clear"):
                self.answers.extend((worker, TierAnswer(order.number)) for order in thread)
                thread.clear()
            if frame.kind == "cancel":
                self.answers.append((worker, TierAnswer(frame.number)))
            else:
                thread.append(frame)
        return None

    def perform(self):
        if self.ready:
            self.perform_of(self.random.choice(self.ready))

    def perform_of(self, worker):
        order, files = self.threads[worker].popleft(), self.files[worker]
        num_done, added, removed = 0, [], []
        if order.kind == "store":
            (block,), (name,) = order.blocks, order.names
            if not order.parent or order.parent in files:
                files[name] = self.device.memory[block][worker]
                num_done, added = 1, [name]
        elif order.kind == "fetch":
            for block, name in zip(order.blocks, order.names, strict=True):
                if (content := files.get(name, POISON)) == POISON:
                    files.pop(name, None)
                    removed.append(name)
                    break
                self.device.memory[block][worker] = content
                num_done += 1
        elif order.kind == "clear":
            files.clear()
        is_anew, news = order.kind == "clear", (tuple(added), tuple(removed))
        self.answers.append((worker, TierAnswer(order.number, num_done, 0.001, is_anew, *news)))

    def answer(self):
        found = self.answers.popleft()
        if not isinstance(found, tuple):
            return self.policy.apply(found)
        self.parts.note(*found)
        while (joined := self.parts.take()) is not None:
            self.num_unanswered -= joined.number > 0
            self.policy.note_tier(joined)
        return None

    def lose(self, *, keeps_memory):
        super().lose(keeps_memory=keeps_memory)
        self.begin()

    def damage(self):
        files = self.random.choice(self.files)
        if files:
            name = self.random.choice(list(files))
            if self.random.random() < 0.5:
                del files[name]
            else:
                files[name] = POISON


def play_lives(seed):
    """Let three engines follow each other with one disk.  Returns how many blocks they fetched."""
    draw, files, count = random.Random(-seed - 1), ({}, {}), 0
    heads = [[draw.randrange(2, 40) for _ in range(16)] for _ in range(2)]
    for life in range(3):
        world = PartsWorld(3 * seed + life, files, num_blocks=draw.choice((13, 20)))
        count += world.play(heads).tier.counts["hit"]
    return count


def run_one(files=None):
    world = PartsWorld(1, files)
    settle(world)
    world.admit(PROMPT)
    world.finish()
    world.check()
    settle(world)
    return world


def test_any_schedule_of_workers_gives_right_tokens():
    assert sum(map(play_lives, range(40))) > 60


def test_missing_part_of_one_worker_is_a_miss():
    files = run_one().files
    assert [len(each) for each in files] == [7, 7]
    names = list(files[0])
    files[1][names[3]] = POISON
    world = run_one(files)
    assert world.tier.counts["hit"] == 3
    # The part was written again.
    assert files[1][names[3]] == PROMPT[7]
    del files[0][names[5]]
    assert run_one(files).tier.counts["hit"] == 5


def test_hanging_worker_delays_until_the_deadline():
    files = run_one().files
    world = PartsWorld(1, files)
    settle(world)
    world.is_hanging, world.hanging = True, (1,)
    world.admit(PROMPT)
    settle(world)
    assert world.policy.table.waiting.num_fresh == 1
    assert not world.threads[0]
    world.now = world.policy.tier_deadline_s
    world.finish()
    world.check()
    world.is_hanging = False
    settle(world)
    assert world.blocks.num_free == world.blocks.num_usable


def ignore_misses(right):
    """Let the worker that has done most decide."""

    def note(self, worker, answer):
        if (order := self._orders.get(answer.number)) is not None:
            order.num_done = max(order.num_done, answer.num_done)
            answer = msgspec.structs.replace(answer, num_done=order.num_done)
        right(self, worker, answer)

    return note


def wait_for_nobody(right):
    """Take the first answer to an order for the answers of all workers."""
    seen = set()

    def note(self, worker, answer):
        if not answer.number:
            right(self, worker, answer)
        elif (id(self), answer.number) not in seen:
            seen.add((id(self), answer.number))
            for each in range(len(self._names)):
                right(self, each, answer)

    return note


@pytest.mark.parametrize("plant", [ignore_misses, wait_for_nobody])
def test_planted_bug_of_the_join_is_found(plant, monkeypatch):
    monkeypatch.setattr(TierParts, "note", plant(TierParts.note))
    for seed in range(500):
        try:
            play_lives(seed)
        except (AssertionError, pytest.fail.Exception):
            return
    pytest.fail("not found within 500 schedules")


class OpenedPeer(FakePeer):
    """A worker that reports its files before it is loaded, as a worker with a tier does."""

    def write(self, *frames):
        if self.ended_after is None and any(isinstance(frame, Loaded) for frame in frames):
            super().write(TierAnswer(0, is_anew=True, added=(A, bytes([9 + self.rank]))))
        super().write(*frames)


def test_device_joins_answers_and_forgets_them_with_its_workers():
    async def act():
        device = make_device(launcher := FakeLauncher(OpenedPeer), num_stages=2)
        await device.load()
        assert (await device.receive()).added == (A,)
        device.order_tier(order := TierOrder(5, "fetch", (1,), (A,)))
        peers = launcher.peers
        peers[1].write(TierAnswer(5, 1))
        peers[0].write(TierAnswer(5, 0))
        found = await device.receive()
        assert (found.number, found.num_done) == (5, 0)
        assert [peer.taken[-1] for peer in peers] == [order, order]
        device.order_tier(TierOrder(6, "fetch", (1,), (A,)))
        peers[0].write(TierAnswer(6, 1))
        peers[1].hang_up()
        assert isinstance(await device.receive(), DeviceLost)
        assert isinstance(await device.receive(), DeviceBack)
        assert (await device.receive()).is_anew
        # Held up by a slow call, it comes too late.
        device.order_tier(TierOrder(7, "store", (1,), (A,)))
        device.order_tier(later := TierOrder(8, "fetch", (1,), (A,), epoch=1))
        assert [f for f in launcher.peers[-1].taken if isinstance(f, TierOrder)] == [later]
        launcher.peers[-1].write(TierAnswer(6, 1), TierAnswer(0, added=(B,)))
        found = await device.receive()
        assert (found.number, found.added) == (0, ())
        await device.aclose()

    run(act)


class LargePeer(FakePeer):
    """A worker whose part of a block has 4,000 bytes, and of a state 4,500."""

    def write(self, *frames):
        layout = KVLayout(16, block_bytes=4000)
        info = msgspec.structs.replace(INFO, layout=layout, state_bytes=4500)
        super().write(*(Loaded(info) if isinstance(frame, Loaded) else frame for frame in frames))


@pytest.mark.parametrize("size", [7999, 8999])
def test_folder_without_room_for_all_parts_is_refused(tmp_path, size):
    async def act():
        options = {"kv_tier_dir": str(tmp_path / "t"), "kv_tier_size": size}
        with pytest.raises(TrouperValidationError, match="too small") as caught:
            await make_device(FakeLauncher(LargePeer), 2, **options).load()
        assert caught.value.parameter == "kv_tier_size"
        device = make_device(FakeLauncher(LargePeer), 2, **options | {"kv_tier_size": 9000})
        assert (await device.load()).kv_layout.block_bytes == 8000
        await device.aclose()

    run(act)
