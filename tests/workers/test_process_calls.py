"""Calls to workers that have no step: one that does not answer is killed after the patience that a step has.

Calls to several workers: all of them do what is asked, or none does, or they differ.

The exchange of ranks over all interleavings; `tests/simulation/stages/rank_protocol.py` has the moves.
"""

import pytest
import trio
import trio.testing

from tests.simulation.stages import rank_protocol
from trouper.actors.executor.devices.outstanding import OpenCalls
from trouper.actors.executor.devices.process import CLOSE_S, ProcessDevice
from trouper.actors.executor.devices.supervision import (
    CALL_FACTOR,
    FIRST_STEP_S,
    MIN_STEP_S,
    call_deadline_s,
)
from trouper.actors.executor.workers.wire import Call, ErrorText, Returned
from trouper.actors.messages.controls import ProbeDevice, Sleep, StopProfile, Wake
from trouper.actors.messages.steps import DeviceBack, DeviceLost, StepDone
from trouper.config.args import EngineArgs
from trouper.config.resolve import resolve
from trouper.errors import DeviceStartError, RetryableRequestError, TrouperValidationError
from trouper.frontends.server.program.server import GRACE_S, GUARD_S

from .test_process_ranks import FakeLauncher, FakePeer, make_device, plan, run


class AwayWorkers:
    """A worker on a machine that is away for an hour before each start."""

    def __init__(self):
        self.peers, self.num_releases = [], 0

    async def __call__(self):
        await trio.sleep(3600.0)
        self.peers.append(FakePeer(0, ()))
        return self.peers[-1:]

    async def release(self):
        self.num_releases += 1


def number_of(peer, method):
    return next(f.number for f in peer.taken if isinstance(f, Call) and f.action.name == method)


@pytest.mark.parametrize(
    "action",
    [Sleep(1), Wake(frozenset({"weights"})), ProbeDevice()],
    ids=lambda action: action.name,
)
@pytest.mark.parametrize("num_answers", [0, 1])
def test_workers_that_hang_in_call_are_killed_and_call_fails(action, num_answers):
    async def act():
        device = make_device(launcher := FakeLauncher(), num_stages=2)
        await device.load()
        await trio.sleep(1000.0)  # idle, which is no fault
        failed = []

        async def ask():
            with pytest.raises(RetryableRequestError, match="the device"):
                await device.call(action)
            failed.append(trio.current_time())

        async def answer():
            for peer in launcher.peers[:num_answers]:
                await trio.sleep(2.0)
                peer.write(Returned(number_of(peer, action.name)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            nursery.start_soon(answer)
            lost = await device.receive()
        assert isinstance(lost, DeviceLost)
        assert (lost.cause, lost.step) == ("hang", None)
        assert "without an answer" in lost.message
        assert failed == [1000.0 + num_answers * 2.0 + FIRST_STEP_S]
        assert [peer.ended_after for peer in launcher.peers] == [0.0, 0.0]
        assert isinstance(await device.receive(), DeviceBack)

    run(act)


def test_call_answered_or_left_or_writes_trace_costs_no_worker():
    async def act():
        device = make_device(launcher := FakeLauncher(), num_stages=2)
        await device.load()
        events = []

        async def receive():
            events.append(await device.receive())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            with trio.move_on_after(FIRST_STEP_S / 2):
                await device.call(ProbeDevice())
            nursery.start_soon(device.call, StopProfile())
            await trio.sleep(3 * FIRST_STEP_S)
            for peer in launcher.peers:
                peer.write(Returned(number_of(peer, "stop_profile")))
            nursery.start_soon(device.call, Sleep(1))
            await trio.sleep(FIRST_STEP_S - 1)
            for peer in launcher.peers:
                peer.write(Returned(number_of(peer, "sleep")))
            await trio.sleep(3 * FIRST_STEP_S)
            assert events == []
            nursery.cancel_scope.cancel()
        assert [peer.ended_after for peer in launcher.peers] == [None, None]

    run(act)


def test_plan_behind_call_has_its_whole_time_from_answer_on():
    async def act():
        device = make_device(launcher := FakeLauncher(), num_stages=2, step_timeout=MIN_STEP_S)
        await device.load()

        async def finish():
            await trio.sleep(MIN_STEP_S - 1)
            for peer in launcher.peers:
                peer.write(Returned(number_of(peer, "probe")))
            await trio.sleep(MIN_STEP_S - 1)
            launcher.peers[-1].write(StepDone(1, ((5,),)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(device.call, ProbeDevice())
            await trio.testing.wait_all_tasks_blocked()
            device.submit(plan(1))
            nursery.start_soon(finish)
            assert isinstance(await device.receive(), StepDone)

    run(act)


def test_wait_for_machine_is_no_part_of_load():
    async def act():
        device = ProcessDevice(resolve(EngineArgs()), launch_workers=AwayWorkers())
        await device.load()
        asked_s = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail_in_a_call, device)
            assert (await device.receive()).cause == "hang"
        assert trio.current_time() == asked_s + FIRST_STEP_S

    run(act)


class StandingPeer(FakePeer):
    """A worker that has to be killed."""

    async def end(self, grace_s):
        await trio.sleep(grace_s)
        return await super().end(grace_s)


def test_workers_that_stand_still_have_one_time_to_close_together():
    async def act():
        device = make_device(launcher := FakeLauncher(StandingPeer), num_stages=3)
        await device.load()
        await device.aclose()
        assert trio.current_time() == CLOSE_S
        assert [peer.ended_after for peer in launcher.peers] == [CLOSE_S, 0.0, 0.0]

    run(act)


def test_guard_of_server_leaves_its_workers_their_time():
    assert GUARD_S > GRACE_S + CLOSE_S


async def fail_in_a_call(device):
    with pytest.raises(RetryableRequestError, match="the device"):
        await device.call(ProbeDevice())


def test_final_worker_group_releases_resources():
    async def act():
        worker_group = AwayWorkers()
        device = ProcessDevice(
            resolve(EngineArgs(max_worker_restarts=0)), launch_workers=worker_group
        )
        await device.load()
        worker_group.peers[0].hang_up()
        assert isinstance(await device.receive(), DeviceLost)
        assert worker_group.num_releases == 0
        with pytest.raises(DeviceStartError, match="all restarts are used"):
            await device.receive()
        assert worker_group.num_releases == 1

    run(act)


def test_patience_grows_with_what_load_has_taken():
    assert call_deadline_s(0.0) == FIRST_STEP_S
    assert call_deadline_s(FIRST_STEP_S) == CALL_FACTOR * FIRST_STEP_S


BAD = ErrorText("TrouperValidationError", "too wide", "lora_path")


def answered(*errors):
    """The calls, an open one and what its last answer gave, once workers have answered so."""
    calls = OpenCalls()
    opened = calls.open(Sleep(1), 0.0)
    found = [calls.note(Returned(opened.call.number, error), len(errors)) for error in errors]
    assert found[:-1] == [None] * (len(errors) - 1)
    return calls, opened, found[-1]


def test_call_that_all_workers_have_done_is_done():
    calls, opened, done = answered(None, None, None)
    assert (done, opened.future.result(), calls.differ) == (opened.call, None, None)


def test_error_of_all_workers_is_askers_alone():
    calls, opened, done = answered(BAD, BAD)
    with pytest.raises(TrouperValidationError, match="too wide"):
        opened.future.result()
    assert (done, calls.differ) == (None, None)


def test_error_of_some_workers_leaves_them_in_different_states():
    calls, opened, done = answered(None, BAD, None)
    with pytest.raises(TrouperValidationError, match="too wide"):
        opened.future.result()
    assert done is None
    assert calls.differ == "1 of 3 workers failed to sleep: TrouperValidationError: too wide"
    calls.fail_all(RuntimeError())
    assert calls.differ is None


def test_in_no_interleaving_of_three_ranks_is_part_read_written():
    """And ranks that do different things find out, whichever of them leaves something out or does more."""
    num_runs, num_states = rank_protocol.check_all(max_ranks=3, num_exchanges=4)
    assert num_runs > 40
    assert num_states > 10_000


@pytest.mark.parametrize("name", rank_protocol.FAULTS)
def test_the_model_check_of_ranks_finds_known_mistakes(name):
    assert rank_protocol.find(name)
