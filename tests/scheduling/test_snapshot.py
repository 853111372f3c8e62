"""What `Engine.snapshot()` shows of each actor, and that a policy's shows each request once."""

import anyio
import pytest
import trio.testing

from tests.support.engines import STEP_S, InlineThreads, simulated_engine
from trouper.actors.engine.lifecycle import EngineState
from trouper.actors.messages.controls import Pause
from trouper.actors.messages.requests import AdmitPooling, RequestId
from trouper.actors.messages.steps import DeviceLost
from trouper.actors.scheduling.pooling_policy import PoolingPolicy
from trouper.config.engine_config import SchedulerConfig
from trouper.params import SamplingParams
from trouper.pooling import PoolingParams


class HeldThreads(InlineThreads):
    """Renders when it may."""

    def __init__(self):
        self.may_go_on = anyio.Event()

    async def run(self, function, *args):
        await self.may_go_on.wait()
        return function(*args)


def opened(engine, *names, n=1):
    """Requests that have been opened; they are to be closed before the engine ends."""
    params = SamplingParams(temperature=float(n > 1), max_tokens=50, n=n)
    streams = [engine.generate([5, 6, 7, 8, 9], params, name) for name in names]
    for stream in streams:
        stream.open()
    return streams


async def close(*streams):
    for stream in streams:
        await stream.aclose()


@pytest.mark.trio
async def test_an_idle_engine_holds_nothing(autojump_clock):
    async with simulated_engine() as engine:
        await trio.testing.wait_all_tasks_blocked()
        snapshot = engine.snapshot()
        assert snapshot.state is EngineState.AWAKE
        assert snapshot.requests == ()
        assert not any(snapshot.inboxes.values())
        assert {renderer.rendering for renderer in snapshot.renderers} == {()}
        # Two, those of large prompts and of images, and two that try grammars.
        assert len(snapshot.renderers) == 6
        policy = snapshot.scheduler.policies[0]
        nothing = (policy.running, policy.waiting, policy.other, policy.in_flight, policy.suspects)
        assert nothing == ((),) * 5
        assert (snapshot.scheduler.num_plans_due, snapshot.scheduler.num_pauses) == (0, 0)
        assert (snapshot.executors[0].last_step, snapshot.executors[0].call) == (0, None)
        assert snapshot.detokenizer.sequences == ()
        assert snapshot.pooler is None
        assert snapshot.observer.num_ended == 0


@pytest.mark.trio
async def test_snapshot_shows_running_waiting_and_plan(autojump_clock):
    async with simulated_engine(max_num_seqs=2, max_num_active_seqs=2) as engine:
        pair = opened(engine, "pair", n=2)
        await anyio.sleep(5.5 * STEP_S)
        alone = opened(engine, "alone")
        await anyio.sleep(STEP_S)
        snapshot = engine.snapshot()
        assert [(r.id, r.request_id, r.num_unread) for r in snapshot.requests] == [
            (0, "pair", 2),
            (2, "alone", 1),
        ]
        policy = snapshot.scheduler.policies[0]
        assert (policy.running, policy.waiting, policy.other) == ((0, 1), (2,), ())
        assert [ids for _, ids in policy.in_flight] == [(0, 1)] * 2
        assert snapshot.executors[0].last_step == policy.in_flight[-1][0]
        assert set(snapshot.detokenizer.sequences) == {0, 1, 2}
        engine.abort("alone")
        (_, aborted) = engine.snapshot().requests
        assert aborted.is_aborted
        assert not aborted.is_over
        await trio.testing.wait_all_tasks_blocked()
        assert engine.snapshot().requests[1].is_over
        await close(*pair, *alone)
        assert engine.snapshot().requests == ()


@pytest.mark.trio
async def test_snapshot_shows_rendering_prompts_and_inboxes(
    autojump_clock,
):
    threads = HeldThreads()
    async with simulated_engine(threads=threads) as engine:
        streams = []
        for name in "abcd":
            streams += opened(engine, name)
            if name < "c":
                await trio.testing.wait_all_tasks_blocked()  # so that they are not one batch
        snapshot = engine.snapshot()
        rendering = [renderer.rendering for renderer in snapshot.renderers]
        assert rendering == [(), (), (0,), (1,), (), ()]
        assert snapshot.inboxes["renderer"] == 2
        threads.may_go_on.set()
        await trio.testing.wait_all_tasks_blocked()
        snapshot = engine.snapshot()
        assert {renderer.rendering for renderer in snapshot.renderers} == {()}
        assert snapshot.inboxes["renderer"] == 0
        await close(*streams)


@pytest.mark.trio
async def test_it_shows_pause_that_waits_and_call_of_device(autojump_clock):
    async with simulated_engine() as engine, anyio.create_task_group() as tasks:
        (stream,) = opened(engine, "a")
        await anyio.sleep(3.5 * STEP_S)
        tasks.start_soon(engine.controls.sleep, 1, "wait")
        await anyio.sleep(STEP_S)
        snapshot = engine.snapshot()
        assert snapshot.state is EngineState.DRAINING
        assert snapshot.scheduler.policies[0].pause is Pause.NO_NEW_REQUESTS
        assert snapshot.scheduler.num_pauses == 1
        await close(stream)
        await anyio.sleep(2 * STEP_S)  # the steps in flight end, then the call begins
        assert engine.snapshot().executors[0].call == "sleep"
        await anyio.sleep(STEP_S)
        snapshot = engine.snapshot()
        assert snapshot.executors[0].call is None
        assert snapshot.state is EngineState.ASLEEP


@pytest.mark.trio
async def test_the_ends_that_the_observer_has_counted(autojump_clock):
    async with simulated_engine() as engine:
        for stream in opened(engine, "a", "b"):
            async for _ in stream:
                pass
        await engine.refresh_metrics()
        assert engine.snapshot().observer.num_ended == 2


@pytest.mark.trio
async def test_a_dead_engine_can_still_be_looked_at(autojump_clock):
    async with simulated_engine() as engine:
        (stream,) = opened(engine, "a")
        await anyio.sleep(3.5 * STEP_S)
        await close(stream)
    snapshot = engine.snapshot()
    assert snapshot.state is EngineState.STOPPED
    assert snapshot.requests == ()


def admitted(policy, *lengths):
    for id, length in enumerate(lengths):
        policy.admit(
            AdmitPooling(
                id=RequestId(id),
                prompt_token_ids=(1,) * length,
                params=PoolingParams(task="embed"),
                slot=None,  # only passed on
                arrival_time=float(id),
            )
        )
    return policy


def test_pooling_snapshot_lists_retries_first():
    policy = PoolingPolicy(SchedulerConfig(max_num_scheduled_tokens=4))
    admitted(policy, 2, 2, 2, 2)
    plan = policy.plan()
    snapshot = policy.snapshot()
    assert (snapshot.running, snapshot.waiting, snapshot.other) == ((0, 1), (2, 3), ())
    assert snapshot.in_flight == ((plan.step, (0, 1)),)
    policy.fail_step(plan.step, "no")
    policy.abort(RequestId(3))
    snapshot = policy.snapshot()
    assert (snapshot.running, snapshot.waiting, snapshot.in_flight) == ((), (0, 1, 2), ())


def test_pooling_policy_shows_suspects_of_loss():
    policy = PoolingPolicy(SchedulerConfig(max_num_scheduled_tokens=4))
    plan = admitted(policy, 2, 2, 2).plan()
    policy.lose_device(DeviceLost(plan.step, "killed"))
    snapshot = policy.snapshot()
    assert snapshot.is_device_lost
    assert snapshot.suspects == (0, 1)
    policy.return_device()
    assert not policy.snapshot().is_device_lost
