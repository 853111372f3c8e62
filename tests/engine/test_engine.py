"""The engine's promises, one at a time: streams, ends, cancellation in every stage, failures."""

import gc
import warnings

import anyio
import msgspec
import pytest
import trio
import trio.testing

from tests.simulation.simulated_device import Conditions, StepError
from tests.support.engines import STEP_S, engine_config, expected, simulated_engine
from trouper.actors.messages.requests import RequestOptions
from trouper.actors.rendering import renderer
from trouper.errors import EngineDeadError, ExecutionError, TrouperValidationError
from trouper.params import RequestOutputKind, SamplingParams

pytestmark = pytest.mark.trio

PROMPT = [1, 2, 3, 4, 5, 6, 7]
DELTA = RequestOutputKind.DELTA


def greedy(max_tokens=8, **options):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **options)


async def assert_idle(engine, before):
    """Nothing is left of any request: the statistics are those of the idle engine."""
    await trio.testing.wait_all_tasks_blocked()
    await anyio.sleep(10 * STEP_S)
    after = engine.statistics()
    assert after.num_open_requests == after.num_rendering == after.num_tracked == 0
    for name in (
        "num_running",
        "num_waiting",
        "num_deferred",
        "num_steps_in_flight",
        "num_blocks_free",
    ):
        assert getattr(after.scheduler, name) == getattr(before.scheduler, name), name


async def finish(engine, request_id, max_tokens=8, prompt=PROMPT):
    outputs = [o async for o in engine.generate(prompt, greedy(max_tokens), request_id)]
    assert outputs[-1].outputs[0].token_ids == expected(prompt, max_tokens)
    return outputs


async def test_a_bare_loop_streams_to_the_end(autojump_clock):
    async with simulated_engine() as engine:
        idle = engine.statistics()
        outputs = await finish(engine, "a")
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
        await assert_idle(engine, idle)


async def test_counters_agree_with_the_statistics(autojump_clock):
    async with simulated_engine() as engine:
        await finish(engine, "a")
        stats = engine.statistics()
        tokens = stats.scheduler.num_prompt_tokens + stats.scheduler.num_generation_tokens
        assert engine.num_tokens == tokens == len(PROMPT) + 8
        async with engine.generate(PROMPT, greedy(), "b"):
            waiting = engine.num_prefill_tokens
            assert waiting == engine.statistics().num_prefill_tokens == len(PROMPT)


async def test_deltas_add_up_to_the_whole(autojump_clock):
    async with simulated_engine() as engine:
        params = greedy(output_kind=DELTA)
        parts = [o async for o in engine.generate(PROMPT, params, "a")]
    assert [id for o in parts for id in o.outputs[0].token_ids] == expected(PROMPT, 8)


async def test_outputs_are_independent_of_schedule_and_cache(autojump_clock):
    seen = []
    for options in (
        {"max_steps_in_flight": 1},
        {"max_steps_in_flight": 2},
        {"max_num_scheduled_tokens": 8},
        {"enable_prefix_caching": False},
    ):
        async with simulated_engine(**options) as engine:
            outputs = {}
            async with anyio.create_task_group() as tg:

                async def client(n, engine=engine, outputs=outputs):
                    outputs[n] = (await finish(engine, f"r{n}", prompt=PROMPT * (n + 1)))[-1]

                for n in range(6):
                    tg.start_soon(client, n)
            seen.append([outputs[n].outputs[0].token_ids for n in range(6)])
    assert seen.count(seen[0]) == len(seen)


async def test_n_completions_come_back_by_index(autojump_clock):
    async with simulated_engine() as engine:
        idle = engine.statistics()
        params = SamplingParams(n=3, seed=7, max_tokens=5, output_kind=RequestOutputKind.FINAL_ONLY)
        outputs = [o async for o in engine.generate(PROMPT, params, "a")]
        assert len(outputs) == 1
        assert [c.index for c in outputs[0].outputs] == [0, 1, 2]
        assert all(len(c.token_ids) == 5 for c in outputs[0].outputs)
        await assert_idle(engine, idle)


async def test_request_id_is_unique_while_open(autojump_clock):
    async with simulated_engine() as engine:
        async with engine.generate(PROMPT, greedy(), "same"):
            with pytest.raises(ValueError, match="in flight"):
                await anext(engine.generate(PROMPT, greedy(), "same"))
        await finish(engine, "same")


async def test_ids_and_params_of_wrong_type_are_refused_at_once(autojump_clock):
    async with simulated_engine() as engine:
        with pytest.raises(TypeError, match="request_id must be a string"):
            engine.generate(PROMPT, greedy(), 7)
        with pytest.raises(TypeError, match="SamplingParams"):
            engine.generate(PROMPT, {"max_tokens": 3}, "a")


async def test_a_bad_prompt_fails_its_request_alone(autojump_clock):
    async with simulated_engine() as engine:
        idle = engine.statistics()
        async with engine.generate(PROMPT, greedy(), "good") as good:
            with pytest.raises(TrouperValidationError, match="prompt"):
                await anext(engine.generate([], greedy(), "bad"))
            outputs = [o async for o in good]
        assert outputs[-1].outputs[0].token_ids == expected(PROMPT, 8)
        await assert_idle(engine, idle)


# One test per stage: leaving there leaves nothing behind.


class StuckThreads:
    """Rendering takes one virtual second, and like a real thread it is not interrupted."""

    async def run(self, function, *args):
        with anyio.CancelScope(shield=True):
            await anyio.sleep(1)
        return function(*args)


async def test_cancelling_before_the_renderer_takes_it_leaves_nothing(autojump_clock, monkeypatch):
    monkeypatch.setattr(renderer, "BATCH_CHARS", 0)  # so that none shares a hop
    async with simulated_engine(threads=StuckThreads()) as engine:
        idle = engine.statistics()
        async with engine.generate(PROMPT, greedy(), "0"), engine.generate(PROMPT, greedy(), "1"):
            async with engine.generate(PROMPT, greedy(), "queued behind both workers"):
                await trio.testing.wait_all_tasks_blocked()
                assert engine.statistics().num_rendering == 1
        await anyio.sleep(3)
        await assert_idle(engine, idle)


async def test_cancelling_while_rendering_leaves_nothing(autojump_clock):
    async with simulated_engine(threads=StuckThreads()) as engine:
        idle = engine.statistics()
        with anyio.move_on_after(0.5) as scope:
            await finish(engine, "a")
        assert scope.cancelled_caught
        await anyio.sleep(2)
        await assert_idle(engine, idle)


async def test_cancelling_while_waiting_leaves_nothing(autojump_clock):
    async with simulated_engine(max_num_active_seqs=1) as engine:
        idle = engine.statistics()
        async with engine.generate(PROMPT, greedy(200), "runs") as stream:
            await anext(stream)
            async with engine.generate(PROMPT, greedy(), "waits"):
                await anyio.sleep(3 * STEP_S)
                assert engine.statistics().scheduler.num_waiting == 1
        await assert_idle(engine, idle)


async def test_cancelling_while_prefilling_leaves_nothing(autojump_clock):
    async with simulated_engine(max_num_scheduled_tokens=8) as engine:
        idle = engine.statistics()
        with anyio.move_on_after(2.5 * STEP_S):
            await finish(engine, "a", prompt=PROMPT * 20)
        await assert_idle(engine, idle)


async def test_cancelling_while_decoding_leaves_nothing(autojump_clock):
    async with simulated_engine() as engine:
        idle = engine.statistics()
        with anyio.move_on_after(5.5 * STEP_S):
            await finish(engine, "a", max_tokens=100)
        await assert_idle(engine, idle)


async def test_leaving_a_stream_with_unread_output_leaves_nothing(autojump_clock):
    async with simulated_engine() as engine:
        idle = engine.statistics()
        async with engine.generate(PROMPT, greedy(100), "a") as stream:
            await anext(stream)
            await anyio.sleep(20 * STEP_S)
        await assert_idle(engine, idle)


async def test_cancelling_some_of_n_completions_leaves_nothing(autojump_clock):
    async with simulated_engine() as engine:
        idle = engine.statistics()
        params = SamplingParams(n=4, seed=1, max_tokens=100)
        async with engine.generate(PROMPT, params, "a") as stream:
            await anext(stream)
        await assert_idle(engine, idle)


async def test_cancelling_while_preempted_leaves_nothing(autojump_clock):
    async with simulated_engine(num_blocks=9, max_model_len=32) as engine:
        idle = engine.statistics()
        async with (
            engine.generate(PROMPT, greedy(20), "a"),
            engine.generate(PROMPT, greedy(20), "b"),
        ):
            while not engine.statistics().scheduler.num_preemptions:  # noqa: ASYNC110  # virtual
                await anyio.sleep(STEP_S / 4)
            assert engine.statistics().scheduler.num_waiting == 1
        await assert_idle(engine, idle)


async def test_an_iterator_dropped_while_open_warns_and_aborts(autojump_clock):
    async with simulated_engine() as engine:
        idle = engine.statistics()
        stream = engine.generate(PROMPT, greedy(100), "a")
        await anext(stream)
        with pytest.warns(ResourceWarning, match="dropped while open"):
            del stream
            gc.collect()
        await assert_idle(engine, idle)


async def test_iterator_collected_in_another_thread_aborts_and_engine_goes_on():
    async with simulated_engine() as engine:
        idle = engine.statistics()
        stream = engine.generate(PROMPT, greedy(100), "a")
        await anext(stream)
        cycle = [stream]
        cycle.append(cycle)
        with pytest.warns(ResourceWarning, match="dropped while open"):
            del stream, cycle
            await trio.to_thread.run_sync(gc.collect)
        await finish(engine, "b")
        await assert_idle(engine, idle)


async def test_a_stream_closed_by_another_task_just_ends(autojump_clock):
    async with simulated_engine() as engine, anyio.create_task_group() as tg:
        stream = engine.generate(PROMPT, greedy(100), "a")
        seen = []

        async def read():
            seen.extend([output async for output in stream])
            seen.append("ended")

        tg.start_soon(read)
        await anyio.sleep(3 * STEP_S)
        await stream.aclose()
        await anyio.sleep(3 * STEP_S)
        assert seen[-1] == "ended"
        assert not any(output.finished for output in seen[:-1])
        with pytest.raises(RuntimeError, match="opened again"):
            stream.open()


@pytest.mark.parametrize(
    "order",
    [{"priority": "high"}, {"priority": None}, {"priority": True}, {"priority": 2**70},
     {"arrival_time": float("nan")}, {"arrival_time": -1.0}, {"arrival_time": "now"}],
    ids=str,
)  # fmt: skip
async def test_what_cannot_be_ordered_is_refused_and_hurts_nobody(autojump_clock, order):
    async with simulated_engine() as engine:
        with pytest.raises(TrouperValidationError, match=next(iter(order))):
            engine.generate(PROMPT, greedy(), "bad", RequestOptions(**order))
        await finish(engine, "good")


async def test_abort_by_another_gives_reader_one_final_output(autojump_clock):
    async with simulated_engine() as engine:
        idle = engine.statistics()
        stream = engine.generate(PROMPT, greedy(100), "a")
        await anext(stream)
        engine.abort(["a", "unknown", "a"])
        rest = [o async for o in stream]
        assert [o.finished for o in rest].count(True) == 1
        assert rest[-1].outputs[0].finish_reason == "abort"
        engine.abort("a")
        await assert_idle(engine, idle)


async def test_abort_while_rendering_gives_reader_one_final_output(autojump_clock):
    async with simulated_engine(threads=StuckThreads()) as engine:
        stream = engine.generate(PROMPT, greedy(), "a")
        stream.open()
        engine.abort("a")
        outputs = [o async for o in stream]
        assert [o.outputs[0].finish_reason for o in outputs] == ["abort"]
        assert outputs[0].prompt_token_ids == []


# Failures


class Poison(Conditions):
    """Every step with this sequence raises."""

    def __init__(self, sequence):
        super().__init__(STEP_S)
        self.sequence = sequence

    def error(self, plan, sequences):
        return StepError("boom") if self.sequence in sequences else None


async def test_poison_request_fails_alone_and_others_do_not_notice(autojump_clock):
    async with simulated_engine(conditions=Poison(2)) as engine:
        idle = engine.statistics()
        ends = {}

        async def client(n):
            try:
                await finish(engine, f"r{n}", prompt=[n, *PROMPT])
                ends[n] = "finished"
            except ExecutionError as error:
                ends[n] = str(error)

        async with anyio.create_task_group() as tg:
            for n in range(5):
                tg.start_soon(client, n)
        assert sorted(ends.values()) == ["boom", *["finished"] * 4]
        await assert_idle(engine, idle)


class Broken(Conditions):
    def error(self, plan, sequences):
        raise RuntimeError("device lost")


async def test_broken_device_reaches_every_waiter_and_every_later_call(autojump_clock):
    with pytest.raises(EngineDeadError) as outcome:
        async with simulated_engine(conditions=Broken(STEP_S)) as engine:
            errors = []

            async def client(n):
                with pytest.raises(EngineDeadError) as caught:
                    await finish(engine, f"r{n}")
                errors.append(caught.value)

            async with anyio.create_task_group() as tg:
                for n in range(3):
                    tg.start_soon(client, n)
            assert [str(error.__cause__) for error in errors] == ["device lost"] * 3
            with pytest.raises(EngineDeadError):
                await anext(engine.generate(PROMPT, greedy(), "late"))
            with pytest.raises(EngineDeadError):
                await engine.controls.pause("keep")
    assert str(outcome.value.__cause__) == "device lost"


async def test_error_in_block_leaves_it_as_it_is(autojump_clock):
    with pytest.raises(KeyError, match="mine"):
        async with simulated_engine() as engine:
            await finish(engine, "a")
            raise KeyError("mine")


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=repr)
async def test_exit_out_of_block_is_not_wrapped(autojump_clock, error):
    with pytest.raises(type(error)) as caught:
        async with simulated_engine():
            raise error
    assert caught.value is error


async def test_leaving_the_block_ends_open_requests_with_abort(autojump_clock):
    reasons = []
    async with anyio.create_task_group() as tg:
        async with simulated_engine() as engine:

            async def client():
                stream = engine.generate(PROMPT, greedy(200), "a")
                reasons.extend([o.outputs[0].finish_reason async for o in stream])

            tg.start_soon(client)
            await anyio.sleep(10 * STEP_S)
    assert reasons[-1] == "abort"
    assert set(reasons[:-1]) == {None}


async def test_a_drain_lets_open_requests_finish(autojump_clock):
    config = msgspec.structs.replace(engine_config(), shutdown_timeout_s=5.0)
    reasons = []
    async with anyio.create_task_group() as tg:
        async with simulated_engine(config=config) as engine:

            async def client():
                outputs = await finish(engine, "a", 20)
                reasons.append(outputs[-1].outputs[0].finish_reason)

            tg.start_soon(client)
            await anyio.sleep(3 * STEP_S)
    assert reasons == ["length"]


async def test_no_resource_is_left_to_the_garbage_collector(autojump_clock):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with simulated_engine() as engine:
            await finish(engine, "a")
        del engine
        gc.collect()
