"""Replicas of a model that pools: one coordinator, and texts that go elsewhere when a device is lost."""

from contextlib import asynccontextmanager

import msgspec
import numpy as np
import pytest
import trio

from tests.scheduling.test_pooling_policy import admit, done, ids
from tests.simulation.simulated_device import Conditions
from tests.simulation.simulated_encoder import SimulatedEncoder, simulated_result
from tests.support.engines import STEP_S, InlineThreads, Losable, engine_config
from trouper.actors.engine.wiring import open_engine
from trouper.actors.messages.controls import Pause
from trouper.actors.messages.requests import RequestId, RequestOptions
from trouper.actors.messages.steps import DeviceBack, DeviceLost, PoolEntry
from trouper.actors.scheduling.pooling_policy import PoolingPolicy, SharedPooling
from trouper.actors.scheduling.replicas import Replicas
from trouper.config.checkpoint.pooler import PoolerSpec
from trouper.config.engine_config import SchedulerConfig
from trouper.errors import (
    DeviceStartError,
    GenerationError,
    RetryableRequestError,
    TrouperValidationError,
)
from trouper.pooling import PoolingParams

SIZE = 4
POOLER = PoolerSpec(
    tasks=("embed",), task="embed", engine_task="embed", seq_pooling_type="MEAN",
    tok_pooling_type="ALL", embedding_size=SIZE, normalizes=False, use_activation=False,
    activation="identity", is_matryoshka=False,
)  # fmt: skip
OUTSIDE = DeviceLost("killed", None, is_from_outside=True)


# The choice, and what is given up


def two_policies(**options):
    config = SchedulerConfig(
        **{"max_num_scheduled_tokens": 10, "max_steps_in_flight": 1, **options}
    )
    shared = SharedPooling()
    policies = [PoolingPolicy(config, shared) for _ in range(2)]
    return Replicas(policies, config.max_num_scheduled_tokens), *policies


def told(replicas):
    news = replicas.take_outputs()
    return (
        {}
        if news is None
        else {r.admit.id: str(r.error) if r.error else r.array for r in news.requests}
    )


def test_a_text_goes_where_least_tokens_are_ahead():
    replicas, first, second = two_policies()
    for id, length in ((1, 9), (2, 1), (3, 1), (4, 1)):
        replicas.admit(admit(id, length))
    assert set(first.unfinished) == {1}
    assert set(second.unfinished) == {2, 3, 4} - set(first.unfinished)


def test_texts_of_lost_device_are_computed_again_by_other():
    replicas, first, second = two_policies()
    for id in range(1, 7):
        replicas.admit(admit(id, 3))
    first.plan()
    first.lose_device(OUTSIDE)
    replicas.note_loss(0)
    assert not first.unfinished
    assert set(second.unfinished) == set(range(1, 7))
    while (plan := second.plan()) is not None:
        second.apply(done(plan))
    assert told(replicas) == {id: id for id in range(1, 7)}


def test_texts_in_question_stay_and_are_tried_where_they_were():
    replicas, first, second = two_policies()
    for id in range(1, 9):
        replicas.admit(admit(id, 3))
    plan = first.plan()
    suspects = set(ids(plan))
    first.lose_device(DeviceLost("died", plan.step))
    replicas.note_loss(0)
    assert set(first.unfinished) == suspects
    first.return_device()
    assert not first.is_available
    replicas.admit(admit(9, 3))
    assert 9 in second.unfinished
    while (plan := first.plan()) is not None:
        first.apply(done(plan))
    assert first.is_available
    assert replicas.rebalance()
    assert first.unfinished


def test_work_told_is_that_of_texts_open():
    replicas, first, second = two_policies(max_num_scheduled_tokens=100)

    def check():
        for policy in (first, second):
            lengths = [len(text.admit.prompt_token_ids) for text in policy.unfinished.values()]
            assert policy.work() == (sum(lengths), len(lengths))

    def apply(policy):
        plan = policy.plan()
        policy.apply(done(plan))
        check()

    for id in range(1, 13):
        replicas.admit(admit(id, id))
    check()
    assert all(policy.work()[0] for policy in (first, second))
    for id in (next(iter(first.unfinished)), 99):
        replicas.abort(RequestId(id))
        check()
    apply(second)
    plan = first.plan()
    replicas.abort(RequestId(ids(plan)[0]))  # in flight
    check()
    first.fail_step(plan.step, "raised")
    for id in range(13, 19):
        replicas.admit(admit(id, id))
    plan = first.plan()
    first.lose_device(DeviceLost("died", plan.step))
    replicas.note_loss(0)
    check()
    assert first.work()[1]
    first.fail_device("it is not started again")
    replicas.note_failure(0)
    check()
    assert first.work() == (0, 0)
    while second.unfinished:
        apply(second)
    assert second.work() == (0, 0)


def test_started_texts_move_first_even_in_pause():
    replicas, first, second = two_policies()
    for id in range(1, 7):
        replicas.admit(admit(id, 3))
    begun = set(ids(first.plan()))
    first.lose_device(OUTSIDE)
    replicas.note_loss(0)
    replicas.set_pause(Pause.NO_NEW_REQUESTS)
    assert replicas.num_started == len(begun)
    assert set(second.snapshot().waiting[: len(begun)]) == begun
    plan = second.plan()
    assert set(ids(plan)) == begun
    second.apply(done(plan))
    assert second.plan() is None
    assert replicas.num_started == 0


def test_a_text_that_was_aborted_moves_nowhere():
    replicas, first, second = two_policies()
    for id in range(1, 5):
        replicas.admit(admit(id, 3))
    first.plan()
    gone = next(iter(first.unfinished))
    replicas.abort(RequestId(gone))
    first.lose_device(OUTSIDE)
    replicas.note_loss(0)
    assert gone not in second.unfinished
    assert told(replicas) == {gone: "aborted: the request was aborted"}


# A whole engine


class Replica(Losable, SimulatedEncoder):
    pass


@asynccontextmanager
async def replicated_engine(num=2, **scheduler):
    config = msgspec.structs.replace(
        engine_config(**scheduler), data_parallel_size=num, device_worker="process", pooler=POOLER
    )
    devices = [Replica(SIZE, 2, Conditions(STEP_S)) for _ in range(num)]
    async with open_engine(config, devices, InlineThreads()) as engine:
        yield engine, devices


def expected(prompt):
    return simulated_result(PoolEntry(tuple(prompt), None, "embed"), SIZE)


PROMPTS = {f"t{i}": [i + 1, *range(2, 3 + i)] for i in range(24)}


async def pool(engine, prompt, name, found=None, **more):
    async for output in engine.encode(
        {"prompt_token_ids": prompt}, PoolingParams(), name, RequestOptions(**more)
    ):
        if output.error is not None:
            raise output.error.to_exception(name)
        if found is not None:
            found[name] = np.array(output.outputs.array)
    return output


async def pool_all(engine, do=None):
    found = {}
    async with trio.open_nursery() as nursery:
        for name, prompt in PROMPTS.items():
            nursery.start_soon(pool, engine, prompt, name, found)
        if do is not None:
            await trio.sleep(0.5 * STEP_S)
            do()
    for name, prompt in PROMPTS.items():
        assert np.array_equal(found[name], expected(prompt))


@pytest.mark.trio
async def test_texts_are_distributed_with_separate_statistics(autojump_clock):
    async with replicated_engine() as (engine, devices):
        await pool_all(engine)
        parts = engine.statistics().replicas
        assert sum(part.num_prompt_tokens for part in parts) == sum(map(len, PROMPTS.values()))
        assert all(part.num_prompt_tokens > 50 for part in parts)
        metrics = await engine.get_metrics()
    assert all(device.num_steps for device in devices)
    counted = {m.labels["engine"]: m.value for m in metrics if m.name == "trouper:prompt_tokens"}
    assert counted == {str(i): part.num_prompt_tokens for i, part in enumerate(parts)}


@pytest.mark.trio
async def test_texts_move_from_lost_replica_which_returns(autojump_clock):
    async with replicated_engine() as (engine, devices):
        await pool_all(engine, lambda: devices[0].tell(DeviceLost("killed", None, True)))
        assert [p.is_device_lost for p in engine.statistics().replicas] == [True, False]
        assert devices[0].num_steps == 0
        devices[0].tell(DeviceBack(1.0))
        await pool_all(engine)
        assert devices[0].num_steps


@pytest.mark.trio
async def test_replicas_sleep_despite_one_hanging(
    autojump_clock,
):
    async with replicated_engine() as (engine, devices):
        await engine.controls.sleep(1)
        assert await engine.controls.wake()
        assert [device.calls for device in devices] == [["sleep", "wake"]] * 2
        await pool_all(engine)
        devices[1].refused.add("sleep")
        with pytest.raises(RetryableRequestError, match="the device"):
            await engine.controls.sleep(1)
        await engine.controls.resume()
        await pool_all(engine)
        devices[0].hangs.add("probe")
        with trio.fail_after(1):
            for _ in range(5):
                await engine.controls.probe()


@pytest.mark.trio
async def test_failed_replica_and_its_suspects_end(autojump_clock):
    async with replicated_engine() as (engine, devices):
        failed = []

        async def pool_one(name, prompt):
            try:
                output = await pool(engine, prompt, name)
                assert np.array_equal(output.outputs.array, expected(prompt))
            except GenerationError as error:
                failed.append(error.code)

        async with trio.open_nursery() as nursery:
            for name, prompt in PROMPTS.items():
                nursery.start_soon(pool_one, name, prompt)
            await trio.sleep(0.5 * STEP_S)
            devices[0].tell(DeviceLost("died", 1))
            devices[0].tell(DeviceStartError("worker 0 died; max_worker_restarts=3 are spent"))
        assert failed
        assert set(failed) == {"device_failed"}
        assert [p.is_device_failed for p in engine.statistics().replicas] == [True, False]
        await pool_all(engine)
        assert devices[0].num_steps == 0


@pytest.mark.trio
async def test_a_text_gets_the_replica_that_it_names(autojump_clock):
    async with replicated_engine(3) as (engine, devices):
        for i in range(3):
            await pool(engine, [1, 2], f"n{i}", data_parallel_rank=2)
        assert [device.num_steps for device in devices] == [0, 0, 3]
        with pytest.raises(TrouperValidationError, match=r"\[0, 2\]") as caught:
            engine.encode("x", PoolingParams(), "n", RequestOptions(data_parallel_rank=3))
        assert caught.value.parameter == "data_parallel_rank"
