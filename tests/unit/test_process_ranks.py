"""A device of several workers: what they answer is joined, and the end of one is the end of all."""

import math
from collections import deque
from functools import partial

import anyio
import msgspec
import pytest
import trio.testing

from trouper.actors.executor.device import DeviceInfo
from trouper.actors.executor.devices.launch_local import CLOSED, Exit
from trouper.actors.executor.devices.process import ProcessDevice
from trouper.actors.executor.devices.wire import (
    Broken,
    Call,
    ErrorText,
    FrameReader,
    Load,
    Loaded,
    Returned,
    encode,
)
from trouper.actors.messages.plans import StepPlan
from trouper.actors.messages.results import DeviceBack, DeviceLost, StepDone
from trouper.config.args import EngineArgs
from trouper.config.resolve import resolve
from trouper.errors import DeviceStartError, ProfilerAlreadyActiveError, TrouperValidationError

INFO = DeviceInfo(100, 16, "float32", "cpu")


class FakePeer:
    """A worker that writes what a test tells it to."""

    def __init__(self, rank, files):
        self.rank, self.files = rank, files
        self.frames, self.taken = FrameReader(), []
        self.ended_after = None
        self._bytes = deque()
        self._changed = anyio.Event()

    def write(self, *frames):
        for frame in frames:
            self._bytes.append(encode(frame)[0])
        self._changed.set()

    def hang_up(self):
        self._bytes.append(b"")
        self._changed.set()

    def send(self, data, file):
        self.frames.feed(data, [])
        while (frame := self.frames.take()) is not None:
            self.taken.append(frame)
            if isinstance(frame, Load):
                self.write(Loaded(msgspec.structs.replace(INFO, num_blocks=100 - 10 * self.rank)))

    async def receive(self):
        while not self._bytes:
            self._changed = anyio.Event()
            await self._changed.wait()
        data = self._bytes.popleft()
        return (data, []) if data else CLOSED

    async def end(self, grace_s):
        if self.ended_after is None:
            self.ended_after = grace_s
        return Exit(-9)


class FakeLauncher:
    def __init__(self, peer=FakePeer, refused=None):
        self.peers, self._peer, self._refused = [], peer, refused

    def __call__(self, rank, *, files=()):
        if rank == self._refused:
            raise DeviceStartError("cannot start a worker process")
        self.peers.append(self._peer(rank, files))
        return self.peers[-1]


def make_device(launcher, num_stages=3, **options):
    config = resolve(EngineArgs(pipeline_parallel_size=num_stages, **options))
    return ProcessDevice(config, launcher)


def plan(step):
    return StepPlan(step, 0, (0,), (0,), (1,), (1,))


def run(function):
    trio.run(function, clock=trio.testing.MockClock(autojump_threshold=0))


def test_all_are_given_every_plan_and_the_last_one_answers():
    async def act():
        device = make_device(launcher := FakeLauncher())
        info = await device.load()
        assert info.num_blocks == 80  # of the stage that has fewest
        device.submit(plan(1))
        device.submit(plan(2))
        assert [[p.step for p in peer.taken[1:]] for peer in launcher.peers] == [[1, 2]] * 3
        assert [peer.taken[0].rank for peer in launcher.peers] == [0, 1, 2]
        assert [len(peer.files) for peer in launcher.peers] == [6, 6, 6]
        launcher.peers[2].write(StepDone(1, ((5,),)), StepDone(2, ((6,),)))
        assert [(await device.receive()).token_ids for _ in range(2)] == [((5,),), ((6,),)]

    run(act)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_what_was_answered_comes_before_the_end_of_any_worker(rank):
    async def act():
        device = make_device(launcher := FakeLauncher())
        await device.load()
        for step in (1, 2, 3):
            device.submit(plan(step))
        launcher.peers[2].write(StepDone(1, ((5,),)), StepDone(2, ((6,),)))
        launcher.peers[rank].hang_up()
        assert [(await device.receive()).step for _ in range(2)] == [1, 2]
        lost = await device.receive()
        assert isinstance(lost, DeviceLost)
        assert (lost.step, lost.message) == (3, f"worker {rank} died of SIGKILL in step 3")
        assert [peer.ended_after for peer in launcher.peers] == [float(r == rank) for r in range(3)]
        back = await device.receive()
        assert isinstance(back, DeviceBack)
        assert [peer.rank for peer in launcher.peers] == [0, 1, 2] * 2
        assert {peer.taken[0].config.num_blocks for peer in launcher.peers[3:]} == {79}

    run(act)


def test_a_call_is_done_when_all_have_done_it_and_fails_with_the_first_error():
    async def act():
        device = make_device(launcher := FakeLauncher())
        await device.load()
        errors = []

        async def ask(method, *args):
            try:
                await device.call(method, *args)
            except ProfilerAlreadyActiveError as error:
                errors.append(str(error))
            done.append(method)

        done = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(device.receive)
            nursery.start_soon(ask, "sleep", 1)
            nursery.start_soon(partial(ask, "start_profile", "f", "p"))
            await trio.testing.wait_all_tasks_blocked()
            numbers = {c.method: c.number for c in launcher.peers[0].taken if isinstance(c, Call)}
            for peer in launcher.peers:
                assert done == []
                text = ErrorText("ProfilerAlreadyActiveError", f"in {peer.rank}")
                peer.write(Returned(numbers["sleep"]))
                peer.write(Returned(numbers["start_profile"], text if peer.rank else None))
                await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert sorted(done) == ["sleep", "start_profile"]
        assert errors == ["in 1"]

    run(act)


def test_a_launch_that_is_refused_ends_those_before():
    async def act():
        device = make_device(launcher := FakeLauncher(refused=2))
        with pytest.raises(DeviceStartError, match="cannot start"):
            await device.load()
        assert [peer.ended_after for peer in launcher.peers] == [0.0, 0.0]

    run(act)


def test_an_error_of_any_worker_at_load_is_raised_as_it_was():
    class Failing(FakePeer):
        def send(self, data, file):
            if self.rank == 1:
                self.write(Broken(ErrorText("TrouperValidationError", "no", "max_model_len", 7)))
            else:
                super().send(data, file)

    async def act():
        device = make_device(launcher := FakeLauncher(Failing))
        with pytest.raises(TrouperValidationError) as caught:
            await device.load()
        assert caught.value.parameter == "max_model_len"
        assert all(peer.ended_after is not None for peer in launcher.peers)

    run(act)


def test_stages_that_do_not_answer_are_ended_at_the_deadline():
    async def act():
        device = make_device(FakeLauncher(), step_timeout=5.0)
        await device.load()
        device.submit(plan(1))
        begun_s = trio.current_time()
        lost = await device.receive()
        assert math.isclose(trio.current_time() - begun_s, 5.0)
        assert (
            lost.message == "one of workers 0 to 2 was killed after 5 s without an answer in step 1"
        )

    run(act)
