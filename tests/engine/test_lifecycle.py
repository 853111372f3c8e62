"""Pause, resume, sleep, wake and close; spec section 10."""

from contextlib import suppress

import anyio
import pytest
import trio.testing

from tests.simulation.simulated_device import Conditions
from tests.support.engines import STEP_S, expected, simulated_engine
from trouper.actors.engine.lifecycle import TRANSITIONS, EngineState, Event, Lifecycle
from trouper.errors import (
    EngineDeadError,
    ProfilerAlreadyActiveError,
    RetryableRequestError,
    TrouperValidationError,
)
from trouper.params import RequestOutputKind, SamplingParams

pytestmark = pytest.mark.trio

PROMPT = [1, 2, 3, 4, 5, 6, 7]


def greedy(max_tokens=20):
    return SamplingParams(
        temperature=0, max_tokens=max_tokens, output_kind=RequestOutputKind.FINAL_ONLY
    )


class Client:
    """One request read to its end by a task of its own."""

    def __init__(self, engine, tg, request_id="a", max_tokens=20):
        self.output = None
        self._stream = engine.generate(PROMPT, greedy(max_tokens), request_id)
        self._stream.open()
        tg.start_soon(self._read)

    async def _read(self):
        async for output in self._stream:
            self.output = output

    @property
    def ending(self):
        return self.output and self.output.outputs[0].finish_reason

    @property
    def token_ids(self):
        return self.output.outputs[0].token_ids


async def settle():
    await anyio.sleep(100 * STEP_S)
    await trio.testing.wait_all_tasks_blocked()


@pytest.mark.parametrize("level", [0, 1, 2])
async def test_keep_freezes_and_tokens_after_it_are_those_without_it(autojump_clock, level):
    async with simulated_engine() as engine, anyio.create_task_group() as tg:
        client = Client(engine, tg)
        await anyio.sleep(5.5 * STEP_S)
        await engine.controls.sleep(level, "keep")
        steps = engine.statistics().scheduler.num_generation_tokens
        late = Client(engine, tg, "late")  # keep queues what comes meanwhile
        await settle()
        assert engine.statistics().scheduler.num_generation_tokens == steps
        assert client.output is None
        assert await engine.controls.wake()
        await settle()
        assert client.token_ids == late.token_ids == expected(PROMPT, 20)


@pytest.mark.parametrize("level", [0, 1, 2])
async def test_abort_ends_running_and_waiting_requests_once(autojump_clock, level):
    async with simulated_engine(max_num_active_seqs=1) as engine, anyio.create_task_group() as tg:
        runs, waits = Client(engine, tg, "runs"), Client(engine, tg, "waits")
        await anyio.sleep(5.5 * STEP_S)
        await engine.controls.sleep(level, "abort")
        await trio.testing.wait_all_tasks_blocked()
        assert (runs.ending, waits.ending) == ("abort", "abort")
        assert runs.token_ids == expected(PROMPT, 20)[: len(runs.token_ids)]
        assert engine.lifecycle.is_sleeping
        await engine.controls.wake()
        after = Client(engine, tg, "after")
        await settle()
        assert after.token_ids == expected(PROMPT, 20)


@pytest.mark.parametrize("level", [0, 1])
async def test_wait_lets_what_runs_finish_and_keeps_what_never_ran(autojump_clock, level):
    async with simulated_engine(max_num_active_seqs=1) as engine, anyio.create_task_group() as tg:
        runs, waits = Client(engine, tg, "runs"), Client(engine, tg, "waits")
        await anyio.sleep(5.5 * STEP_S)
        await engine.controls.sleep(level, "wait")
        await trio.testing.wait_all_tasks_blocked()
        assert (runs.ending, waits.ending) == ("length", None)
        await settle()
        assert waits.output is None
        await engine.controls.wake()
        await settle()
        assert waits.token_ids == expected(PROMPT, 20)


async def test_admission_while_paused_queues_or_refuses_as_table_says(autojump_clock):
    async with simulated_engine() as engine:
        for how, refuses in (
            (lambda: engine.controls.sleep(0, "abort"), False),
            (lambda: engine.controls.sleep(0, "wait"), False),
            (lambda: engine.controls.pause("keep"), False),
            (lambda: engine.controls.pause("abort"), True),
            (lambda: engine.controls.pause("wait"), True),
            (lambda: engine.controls.sleep(1, "keep"), False),
            (lambda: engine.controls.sleep(1, "abort"), True),
            (lambda: engine.controls.sleep(2, "wait"), True),
        ):
            await how()
            stream = engine.generate(PROMPT, greedy(), "a")
            if refuses:
                with pytest.raises(RetryableRequestError, match="paused"):
                    stream.open()
            else:
                stream.open()
            stream.close()
            assert await engine.controls.wake()


async def test_the_paused_block_restores_what_it_found(autojump_clock):
    async with simulated_engine() as engine:
        async with engine.controls.paused():
            assert engine.lifecycle.is_paused
            async with engine.controls.paused():
                assert engine.lifecycle.is_paused
            assert engine.lifecycle.is_paused
        assert not engine.lifecycle.is_paused
        with pytest.raises(KeyError):
            async with engine.controls.paused():
                raise KeyError
        assert not engine.lifecycle.is_paused
        with anyio.move_on_after(1):
            async with engine.controls.paused():
                await anyio.sleep_forever()
        assert not engine.lifecycle.is_paused


async def test_nested_and_overlapping_paused_blocks_leave_what_others_want(autojump_clock):
    async with simulated_engine() as engine:
        async with engine.controls.paused("keep"):
            async with engine.controls.paused("abort"):
                with pytest.raises(RetryableRequestError):
                    engine.generate(PROMPT, greedy(), "refused").open()
            queued = engine.generate(PROMPT, greedy(), "queued")
            queued.open()
            queued.close()
        assert not engine.lifecycle.is_paused
        first, second = engine.controls.paused(), engine.controls.paused()
        await first.__aenter__()
        await second.__aenter__()
        await first.__aexit__(None, None, None)
        assert engine.lifecycle.is_paused
        await second.__aexit__(None, None, None)
        assert not engine.lifecycle.is_paused


async def test_sleep_inside_paused_block_outlasts_it_and_hides_no_error(autojump_clock):
    async with simulated_engine() as engine:
        with pytest.raises(KeyError):
            async with engine.controls.paused():
                await engine.controls.sleep(1)
                raise KeyError
        assert engine.lifecycle.state is EngineState.ASLEEP
        assert await engine.controls.wake()


async def test_deeper_sleep_that_is_cancelled_leaves_it_asleep(autojump_clock):
    async with simulated_engine() as engine:
        await engine.controls.sleep(1)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await engine.controls.sleep(2)
        with pytest.raises(RuntimeError, match="asleep"):
            await engine.controls.resume()
        assert await engine.controls.wake()


async def test_sleeping_after_partial_wake_gives_memory_back_again(autojump_clock):
    async with simulated_engine() as engine:
        await engine.controls.sleep(1)
        await engine.controls.wake(["kv_cache"])
        assert await engine.controls.sleep(1)
        assert not engine.lifecycle.resident
        assert await engine.controls.wake()


async def test_partial_wake_stays_asleep_until_all_memory_is_there(autojump_clock):
    async with simulated_engine() as engine:
        await engine.controls.sleep(1)
        assert not await engine.controls.wake(["scheduling"])
        assert not await engine.controls.wake(["weights"])
        assert engine.lifecycle.is_sleeping
        with pytest.raises(RuntimeError, match="asleep"):
            await engine.controls.resume()
        assert await engine.controls.wake(["kv_cache"])
        assert not engine.lifecycle.is_sleeping


async def test_waking_memory_of_mere_pause_leaves_it_paused(autojump_clock):
    async with simulated_engine() as engine:
        await engine.controls.sleep(0)
        assert not await engine.controls.wake(["weights"])
        assert engine.lifecycle.is_paused
        assert await engine.controls.wake(["scheduling"])


async def test_wrong_modes_levels_and_tags_change_nothing(autojump_clock):
    async with simulated_engine() as engine:
        for call, named in (
            (lambda: engine.controls.pause("soft"), "mode"),
            (lambda: engine.controls.sleep(1, "soft"), "mode"),
            (lambda: engine.controls.sleep(3), "level"),
            (lambda: engine.controls.sleep(True), "level"),
            (lambda: engine.controls.wake(["wieghts"]), "weights, kv_cache, scheduling"),
        ):
            with pytest.raises(TrouperValidationError, match=named):
                await call()
            assert engine.lifecycle.state is EngineState.AWAKE


async def test_pausing_twice_sleeping_twice_and_waking_twice_are_no_ops(autojump_clock):
    async with simulated_engine() as engine:
        await engine.controls.pause("keep")
        await engine.controls.pause("keep")
        await engine.controls.resume()
        await engine.controls.resume()
        assert await engine.controls.sleep(1)
        assert not await engine.controls.sleep(1)
        assert await engine.controls.sleep(2)
        assert not await engine.controls.sleep(1)
        assert await engine.controls.wake()
        assert await engine.controls.wake()


async def test_sleep_and_wake_from_two_tasks_queue(autojump_clock):
    async with simulated_engine() as engine, anyio.create_task_group() as tg:
        client = Client(engine, tg)
        for _ in range(5):
            tg.start_soon(engine.controls.sleep, 1, "keep")
            tg.start_soon(engine.controls.wake)
        await settle()
        await engine.controls.wake()
        await settle()
        assert client.token_ids == expected(PROMPT, 20)


async def test_a_cancelled_wait_leaves_the_engine_paused(autojump_clock):
    async with simulated_engine() as engine, anyio.create_task_group() as tg:
        client = Client(engine, tg, max_tokens=200)
        await anyio.sleep(5 * STEP_S)
        with anyio.move_on_after(2 * STEP_S):
            await engine.controls.pause("wait")
        assert engine.lifecycle.is_paused
        await engine.controls.resume()
        await anyio.sleep(300 * STEP_S)
        assert client.token_ids == expected(PROMPT, 200)


class NoWake(Conditions):
    """The first wake finds no memory."""

    num_failures = 1

    def call_s(self, method):
        if method == "wake" and self.num_failures:
            self.num_failures -= 1
            raise MemoryError("no memory to wake up in")
        return STEP_S


async def test_wake_that_fails_is_asleep_again_and_can_be_retried(autojump_clock):
    async with (
        simulated_engine(conditions=NoWake(STEP_S)) as engine,
        anyio.create_task_group() as tg,
    ):
        client = Client(engine, tg)
        await anyio.sleep(5 * STEP_S)
        await engine.controls.sleep(2, "keep")
        with pytest.raises(MemoryError):
            await engine.controls.wake()
        assert engine.lifecycle.is_sleeping
        assert await engine.controls.wake()
        await settle()
        assert client.token_ids == expected(PROMPT, 20)


async def test_prefix_cache_is_reset_only_when_no_block_is_held(autojump_clock):
    async with simulated_engine() as engine, anyio.create_task_group() as tg:
        client = Client(engine, tg)
        await anyio.sleep(5.5 * STEP_S)
        assert not await engine.controls.reset_prefix_cache()
        assert await engine.controls.reset_prefix_cache(preempt="resample")
        await settle()
        assert client.token_ids == expected(PROMPT, 20)
        assert await engine.controls.reset_prefix_cache()


async def test_after_the_end_every_call_says_so(autojump_clock):
    async with simulated_engine() as engine:
        pass
    with pytest.raises(EngineDeadError, match="closed"):
        await engine.controls.pause()
    with pytest.raises(EngineDeadError, match="closed"):
        engine.generate(PROMPT, greedy(), "a").open()


async def test_each_step_of_stepped_engine_is_one_iteration(autojump_clock):
    async with simulated_engine(is_stepped=True) as engine:
        stream = engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=3), "a")
        await stream.submit()
        await settle()
        assert engine.statistics().scheduler.num_generation_tokens == 0
        seen = []
        for _ in range(3):
            await engine.controls.step()
            seen.append(len(stream.take_nowait().outputs[0].token_ids))
        assert seen == [1, 2, 3]
        await engine.controls.step()
        assert stream.take_nowait() is None


async def test_wait_drives_a_stepped_engine_by_itself(autojump_clock):
    async with simulated_engine(is_stepped=True) as engine:
        stream = engine.generate(PROMPT, greedy(5), "a")
        await stream.submit()
        await engine.controls.step()
        await engine.controls.pause("wait")
        output = stream.take_nowait()
        assert output.finished
        assert output.outputs[0].token_ids == expected(PROMPT, 5)


async def test_every_state_has_way_to_stop_and_to_fail():
    for state in EngineState:
        if state not in (EngineState.STOPPED, EngineState.FAILED):
            assert (state, Event.STOP) in TRANSITIONS
            assert (state, Event.FAIL) in TRANSITIONS


async def test_an_illegal_transition_is_named():
    lifecycle = Lifecycle()
    with pytest.raises(RuntimeError, match=r"woken is not possible"):
        lifecycle.move(Event.WOKEN)


async def test_profiles_given_up_leave_room_for_next_question(autojump_clock):
    async with simulated_engine(conditions=Conditions(1.0)) as engine:
        stream = engine.generate(PROMPT, greedy(3), "a")
        stream.open()
        await anyio.sleep(0.5)  # of a step
        for _ in range(9):
            with anyio.move_on_after(0.05), suppress(ProfilerAlreadyActiveError):
                await engine.controls.start_profile("folder", "x")
        await engine.controls.probe()
        await engine.controls.stop_profile()
        outputs = [output async for output in stream]
        assert outputs[0].outputs[0].token_ids == expected(PROMPT, 3)
