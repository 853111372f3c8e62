"""An engine of several replicas: one coordinator, one answer of all, and numbers for each."""

import logging
from contextlib import asynccontextmanager

import anyio
import msgspec
import pytest
import trio

from tests.simulation.simulated_device import Conditions, SimulatedDevice
from tests.support.engines import (
    STEP_S,
    VOCAB_SIZE,
    InlineThreads,
    Losable,
    engine_config,
    expected,
)
from trouper.actors.engine.wiring import open_engine
from trouper.actors.messages.outputs import AdapterStats, total
from trouper.actors.messages.requests import RequestOptions
from trouper.actors.messages.steps import DeviceBack, DeviceLost
from trouper.config.args import EngineArgs
from trouper.config.resolve import resolve
from trouper.errors import (
    DeviceStartError,
    EngineDeadError,
    GenerationError,
    RetryableRequestError,
    TrouperValidationError,
    UnsupportedFeatureError,
)
from trouper.params import SamplingParams

pytestmark = pytest.mark.trio


class Replica(Losable, SimulatedDevice):
    def __init__(self, config, conditions=None):
        credits = config.scheduler.max_steps_in_flight
        super().__init__(65, 4, VOCAB_SIZE, credits, conditions or Conditions(STEP_S))


@asynccontextmanager
async def replicated_engine(num=2, *, is_stepped=False, **scheduler):
    config = msgspec.structs.replace(
        engine_config(**scheduler), data_parallel_size=num, device_worker="process"
    )
    shown = config
    if is_stepped:
        single = msgspec.structs.replace(config.scheduler, max_steps_in_flight=1)
        shown = msgspec.structs.replace(config, scheduler=single)
    devices = [Replica(shown) for _ in range(num)]
    async with open_engine(config, devices, InlineThreads(), is_stepped=is_stepped) as engine:
        yield engine, devices


def greedy(max_tokens=8):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


async def finish(engine, prompt, name, *, max_tokens=8, outputs=None, **more):
    final = None
    async for output in engine.generate(
        {"prompt_token_ids": prompt}, greedy(max_tokens), name, RequestOptions(**more)
    ):
        final = output
    if outputs is not None:
        outputs[name] = final.outputs[0].token_ids
    return final


PROMPTS = {f"r{i}": [i + 1, 2, 3] for i in range(6)}


async def run_all(engine, max_tokens=8, do=None):
    outputs = {}
    async with trio.open_nursery() as nursery:
        for name, prompt in PROMPTS.items():
            nursery.start_soon(
                lambda n=name, p=prompt: finish(
                    engine, p, n, max_tokens=max_tokens, outputs=outputs
                )
            )
        if do is not None:
            await trio.sleep(3.5 * STEP_S)
            await do()
    for name, prompt in PROMPTS.items():
        assert list(outputs[name]) == expected(prompt, max_tokens)


async def test_requests_are_distributed_with_separate_statistics(autojump_clock):
    async with replicated_engine() as (engine, devices):
        await run_all(engine)
        statistics = engine.statistics()
        metrics = await engine.get_metrics()
    assert [s.num_generation_tokens for s in statistics.replicas] == [24, 24]
    assert statistics.scheduler.num_generation_tokens == 48
    assert all(device.num_steps for device in devices)
    found = {(m.name, m.labels.get("engine")): m for m in metrics if len(m.labels) == 2}
    for engine_name in "01":
        assert found["trouper:generation_tokens", engine_name].value == 24
        assert found["trouper:e2e_request_latency_seconds", engine_name].count == 3
        assert found["trouper:iteration_tokens_total", engine_name].count > 0
    assert b'engine="1"' in engine.metrics.expose()


async def test_streams_of_lost_replica_go_on_at_once_with_others(autojump_clock):
    async with replicated_engine() as (engine, devices):

        async def lose():
            devices[0].tell(DeviceLost("killed", 3, is_from_outside=True, cause="signal"))

        start = trio.current_time()
        await run_all(engine, max_tokens=20, do=lose)
        assert trio.current_time() - start < 30 * STEP_S  # it has not come back
        statistics = engine.statistics()
        assert [s.is_device_lost for s in statistics.replicas] == [True, False]
        assert not statistics.scheduler.is_device_lost
        devices[0].tell(DeviceBack(1.0))
        await run_all(engine)
        assert not engine.statistics().replicas[0].is_device_lost
        values = {
            (m.name, m.labels["engine"]): m.value
            for m in await engine.get_metrics()
            if m.labels.get("cause") == "signal"
        }
    assert values == {
        ("trouper:worker_restarts", "0"): 1,
        ("trouper:worker_restarts", "1"): 0,
    }


async def test_only_suspect_requests_wait_for_replica(autojump_clock):
    async with replicated_engine(max_num_seqs=2, max_num_active_seqs=2) as (engine, devices):

        async def lose():
            devices[0].tell(DeviceLost("SIGSEGV", 3, cause="signal"))
            await trio.sleep(60 * STEP_S)
            numbers = engine.statistics()
            assert numbers.num_open_requests == 2
            assert [s.num_waiting for s in numbers.replicas] == [2, 0]
            devices[0].tell(DeviceBack(1.0))

        await run_all(engine, max_tokens=12, do=lose)


async def test_a_request_gets_the_replica_that_it_names(autojump_clock):
    async with replicated_engine(3) as (engine, devices):
        for number in (2, 2, 0):
            await finish(
                engine, [5, 6], f"r{number}{devices[2].num_steps}", data_parallel_rank=number
            )
        assert [bool(device.num_steps) for device in devices] == [True, False, True]


async def test_a_session_stays_where_its_prefix_is(autojump_clock):
    async with replicated_engine(4) as (engine, devices):
        prompt = [7] * 40
        await finish(engine, prompt, "first", session_id="me")
        last = await finish(engine, [*prompt, 8], "second", session_id="me")
        assert last.num_cached_tokens == 40
        assert sum(device.num_steps > 0 for device in devices) == 1


async def test_a_prompt_goes_where_its_prefix_is_cached(autojump_clock):
    async with replicated_engine(2) as (engine, _):
        await finish(engine, [7] * 40, "a")
        await finish(engine, [9] * 40, "b")
        cached = [
            (await finish(engine, [token] * 40 + [1], f"{token} {i}")).num_cached_tokens
            for i in range(3)
            for token in (7, 9)
        ]
    assert cached == [40] * 6


@pytest.mark.parametrize(
    ("parameter", "value", "words"),
    [
        ("data_parallel_rank", 2, r"in \[0, 1\].*data_parallel_size is 2"),
        ("data_parallel_rank", -1, r"in \[0, 1\]"),
        ("data_parallel_rank", True, "integer"),
        ("data_parallel_rank", "0", "integer"),
        ("session_id", "", "1 to 256"),
        ("session_id", "x" * 257, "1 to 256"),
        ("session_id", 7, "string"),
    ],
)
async def test_a_place_that_does_not_exist_is_refused(autojump_clock, parameter, value, words):
    async with replicated_engine() as (engine, _):
        with pytest.raises(TrouperValidationError, match=words) as caught:
            engine.generate(
                {"prompt_token_ids": [1]}, greedy(), "r", RequestOptions(**{parameter: value})
            )
    assert caught.value.parameter == parameter


async def test_all_replicas_sleep_wake_and_are_probed(autojump_clock):
    async with replicated_engine() as (engine, devices):
        await engine.controls.sleep(1)
        assert [device._absent for device in devices] == [{"weights", "kv_cache"}] * 2
        assert await engine.controls.wake()
        await engine.controls.probe()
        assert [device.calls for device in devices] == [["sleep", "wake", "probe"]] * 2
        await run_all(engine)


async def test_sleep_that_one_replica_refuses_is_taken_back_by_others(autojump_clock):
    async with replicated_engine() as (engine, devices):
        devices[1].refused.add("sleep")
        with pytest.raises(RetryableRequestError, match="the device"):
            await engine.controls.sleep(1)
        assert [device._absent for device in devices] == [set(), set()]
        assert not engine.lifecycle.is_sleeping
        await run_all(engine)


@pytest.mark.parametrize("num_replicas", [1, 2])
async def test_paused_engine_that_could_not_sleep_stays_paused(autojump_clock, num_replicas):
    async with replicated_engine(num_replicas) as (engine, devices):
        await engine.controls.pause("keep")
        devices[-1].refused.add("sleep")
        with pytest.raises(RetryableRequestError, match="the device"):
            await engine.controls.sleep(1)
        assert engine.lifecycle.is_sleeping
        await engine.controls.resume()
        await run_all(engine)


async def test_failed_sleep_keeps_requests(autojump_clock):
    async with replicated_engine(1) as (engine, (device,)), anyio.create_task_group() as tasks:
        device.refused.add("sleep")
        tasks.start_soon(run_all, engine)
        await anyio.sleep(0.001)
        with pytest.raises(RetryableRequestError, match="the device"):
            await engine.controls.sleep(1, "keep")


async def test_failed_wake_after_refused_sleep_leaves_asleep(
    autojump_clock,
):
    async with replicated_engine() as (engine, devices):
        devices[0].refused.add("wake")
        devices[1].refused.add("sleep")
        with pytest.raises(RetryableRequestError, match="the device"):
            await engine.controls.sleep(1)
        assert engine.lifecycle.is_sleeping
        with pytest.raises(RuntimeError, match="asleep"):  # no plan for a device without memory
            await engine.controls.resume()
        devices[0].refused.clear()
        devices[1].refused.clear()
        assert await engine.controls.sleep(1)  # of the one that is awake
        assert [device._absent for device in devices] == [{"weights", "kv_cache"}] * 2
        assert await engine.controls.wake()
        await run_all(engine)


async def test_replica_that_woke_alone_is_put_to_sleep_again(autojump_clock):
    async with replicated_engine() as (engine, devices):
        await engine.controls.sleep(1)
        devices[1].refused.add("wake")
        with pytest.raises(RetryableRequestError, match="the device"):
            await engine.controls.wake()
        assert await engine.controls.sleep(1)
        assert [device._absent for device in devices] == [{"weights", "kv_cache"}] * 2
        assert not await engine.controls.sleep(1)
        devices[1].refused.clear()
        assert await engine.controls.wake()
        await run_all(engine)


async def test_next_stop_ends_orphaned_trace(autojump_clock):
    async with replicated_engine() as (engine, devices):
        devices[0].refused.add("stop_profile")
        devices[1].refused.add("start_profile")
        with pytest.raises(RetryableRequestError, match="the device"):
            await engine.controls.start_profile("/tmp", "t")
        devices[0].refused.clear()
        await engine.controls.stop_profile()
        assert devices[0].calls == ["start_profile", "stop_profile", "stop_profile"]


async def test_replica_that_is_lost_leaves_engine_ready(autojump_clock):
    async with replicated_engine() as (engine, devices):
        devices[1].refused.add("probe")
        devices[1].tell(DeviceLost("killed", None, is_from_outside=True))
        await trio.testing.wait_all_tasks_blocked()
        await engine.controls.probe()
        devices[0].refused.add("probe")
        devices[0].tell(DeviceLost("killed", None, is_from_outside=True))
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(RetryableRequestError, match="the device"):
            await engine.controls.probe()
        assert engine.statistics().scheduler.is_device_lost


async def test_a_replica_that_hangs_leaves_the_engine_ready(autojump_clock):
    async with replicated_engine() as (engine, devices):
        devices[0].hangs.add("probe")
        with trio.fail_after(1):
            for _ in range(20):
                await engine.controls.probe()
        assert devices[0].calls == ["probe"]  # one alone waits in its inbox
        assert devices[1].calls == ["probe"] * 20


async def test_engine_continues_without_failed_replica(autojump_clock, caplog):
    async with replicated_engine() as (engine, devices):

        async def fail():
            devices[0].tell(DeviceLost("killed", 3, is_from_outside=True))
            devices[0].tell(DeviceStartError("worker 0 died; max_worker_restarts=3 are spent"))

        await run_all(engine, max_tokens=20, do=fail)
        num_steps = devices[0].num_steps
        await run_all(engine)
        await finish(engine, [5, 6], "named", data_parallel_rank=0)
        assert devices[0].num_steps == num_steps
        await engine.controls.probe()
        await engine.controls.sleep(1)
        assert await engine.controls.wake()
        assert devices[0].calls == []
        assert devices[1].calls == ["probe", "sleep", "wake"]
        statistics = engine.statistics()
        assert [s.is_device_failed for s in statistics.replicas] == [True, False]
        assert not statistics.scheduler.is_device_failed
        failed = [m for m in await engine.get_metrics() if m.name == "trouper:replica_failed"]
        assert [m.value for m in failed] == [1, 0]
    assert "engine 0 stays out: worker 0 died" in caplog.text


async def test_requests_in_question_end_when_their_replica_fails(autojump_clock):
    async with replicated_engine(max_num_seqs=2, max_num_active_seqs=2) as (engine, devices):
        ends = {}

        async def ask(name, prompt):
            try:
                ends[name] = (await finish(engine, prompt, name, max_tokens=12)).outputs[0]
            except GenerationError as error:
                ends[name] = error.code

        async with trio.open_nursery() as nursery:
            for name, prompt in PROMPTS.items():
                nursery.start_soon(ask, name, prompt)
            await trio.sleep(3.5 * STEP_S)
            devices[0].tell(DeviceLost("SIGSEGV", 3, cause="signal"))
            devices[0].tell(DeviceStartError("spent"))
        assert (
            sorted(str(end) for end in ends.values() if isinstance(end, str))
            == ["device_failed"] * 2
        )
        assert sum(not isinstance(end, str) for end in ends.values()) == 4


async def test_the_engine_ends_with_its_last_replica(autojump_clock):
    with pytest.raises(EngineDeadError) as caught:
        async with replicated_engine() as (_, devices):
            for device in devices:
                device.tell(DeviceLost("killed", None, is_from_outside=True))
                device.tell(DeviceStartError("spent"))
            await trio.sleep(1)
    assert isinstance(caught.value.__cause__, DeviceStartError)


async def test_replica_takes_its_share_when_its_search_ends(autojump_clock):
    """One replica is searched, all that has not begun is with the other; then the search ends."""
    async with replicated_engine(max_num_seqs=1, max_num_active_seqs=1) as (engine, devices):

        async def search():
            devices[0].tell(DeviceLost("SIGSEGV", 3, cause="signal"))
            await trio.sleep(STEP_S)
            assert [s.num_waiting for s in engine.statistics().replicas] == [1, 4]
            devices[0].tell(DeviceBack(1.0))
            await trio.sleep(STEP_S / 2)
            assert engine.statistics().replicas[1].num_waiting == 4
            await trio.sleep(10 * STEP_S)
            assert [s.num_waiting for s in engine.statistics().replicas] == [2, 2]

        await run_all(engine, max_tokens=40, do=search)


async def test_the_cache_is_reset_everywhere_or_nowhere(autojump_clock):
    async with replicated_engine() as (engine, _):
        await run_all(engine)
        async with engine.generate({"prompt_token_ids": [1] * 9}, greedy(200), "long") as stream:
            await anext(stream)
            assert not await engine.controls.reset_prefix_cache()
        await trio.testing.wait_all_tasks_blocked()
        assert await engine.controls.reset_prefix_cache()


async def test_a_stepped_engine_steps_all_replicas_at_once(autojump_clock):
    async with replicated_engine(is_stepped=True) as (engine, devices):
        streams = [
            engine.generate({"prompt_token_ids": prompt}, greedy(2), name)
            for name, prompt in PROMPTS.items()
        ]
        for stream in streams:
            await stream.submit()
        for count in (1, 2):
            await engine.controls.step()
            assert [device.num_steps for device in devices] == [count, count]
        assert all(stream.take_nowait().finished for stream in streams)


async def test_each_replica_has_a_log_line(autojump_clock, caplog):
    caplog.set_level(logging.INFO, "trouper")
    async with replicated_engine() as (engine, _):
        await run_all(engine)
        await engine.log_stats()
    lines = [message for message in caplog.messages if "throughput" in message]
    assert [line.split(": ")[0] for line in lines[:2]] == ["engine 0", "engine 1"]


async def test_the_sum_of_replicas_counts_adapters_once(autojump_clock):
    async with replicated_engine() as (engine, _):
        one = engine.statistics().replicas[0]
    parts = [
        msgspec.structs.replace(one, adapters=AdapterStats(("a",), waiting, 2))
        for waiting in (("b",), ("a", "b"))
    ]
    assert total(parts).adapters == AdapterStats(("a",), ("a", "b"), 2)
    assert total(parts).num_blocks_total == 2 * one.num_blocks_total


# The wish


async def test_replicas_are_resolved_into_processes():
    assert resolve(EngineArgs()).data_parallel_size == 1
    pooling = resolve(EngineArgs(data_parallel_size=2, runner="pooling"))
    assert (pooling.device_worker, pooling.num_workers) == ("process", 2)
    config = resolve(EngineArgs(data_parallel_size=3, pipeline_parallel_size=2))
    assert (config.data_parallel_size, config.device_worker, config.num_workers) == (
        3,
        "process",
        6,
    )


@pytest.mark.parametrize(
    ("options", "error", "parameter", "words"),
    [
        ({"data_parallel_size": 0}, TrouperValidationError, "data_parallel_size", "at least 1"),
        ({"data_parallel_size": 65}, TrouperValidationError, "data_parallel_size", "at most 64"),
        ({"data_parallel_size": 1.5}, TrouperValidationError, "data_parallel_size", "integer"),
        ({"data_parallel_size": 2, "device_worker": "inline"}, TrouperValidationError, "device_worker", "inline"),
        ({"pipeline_parallel_size": 2, "runner": "pooling"}, UnsupportedFeatureError, "pipeline_parallel_size", "pooling models"),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2, "runner": "pooling"}, UnsupportedFeatureError, "tensor_parallel_size", "pooling models"),
    ],
)  # fmt: skip
async def test_a_wish_that_cannot_be_met_is_refused(options, error, parameter, words):
    with pytest.raises(error, match=words) as caught:
        resolve(EngineArgs(**options))
    assert caught.value.parameter == parameter
