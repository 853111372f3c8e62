"""The observer actor: its log line, its indifference to trouble, and that nobody ever waits for it."""

import logging

import anyio
import msgspec
import pytest
import trio.testing

from tests.support.engines import STEP_S, simulated_engine
from trouper.actors.messages.controls import Flush, ObserverInbox
from trouper.actors.messages.outputs import OutputStats, RequestEnded, SchedulerStats, StepStats
from trouper.actors.messages.steps import DeviceBack, DeviceLost
from trouper.actors.observability.metrics import Metrics
from trouper.actors.observability.observer import (
    INTAKE_PAUSE_S,
    Observer,
    RecentEvents,
    interval_line,
)
from trouper.actors.runtime.event_loop import Future, Reporter
from trouper.metrics import Counter
from trouper.outputs import RequestStateStats
from trouper.params import SamplingParams

pytestmark = pytest.mark.trio
PROMPT = [1, 2, 3, 4, 5, 6, 7]


def stats(**numbers):
    fields = msgspec.structs.fields(SchedulerStats)
    required = [field.name for field in fields if field.required]
    return SchedulerStats(**dict.fromkeys(required, 0) | numbers)


def ended(**facts):
    times = RequestStateStats(0, 0, 1.0, 2.0, 3.0, 5.0, 5.0, 3, 3)
    defaults = {
        "request_id": "a", "stats": times, "finish_reason": "stop", "num_prompt_tokens": 10,
        "num_cached_tokens": 4, "params": SamplingParams(), "trace_headers": None,
    }  # fmt: skip
    return RequestEnded(**defaults | facts)


def value(metrics, name):
    (found,) = (m for m in metrics.values() if m.name == f"trouper:{name}")
    return found.value if isinstance(found, Counter) else found.count


class Stage:
    """An observer that this test reports to."""

    def __init__(self, nursery, interval_s=10.0, capacity=100, note_ended=None, is_on=True):
        self.metrics = Metrics("m", 64) if is_on else None
        self.observer, inbox = anyio.create_memory_object_stream[ObserverInbox](capacity)
        self.stats = stats()  # the scheduler's
        self.events = RecentEvents()
        self.actor = Observer(
            inbox, self.metrics, lambda: (self.stats,), interval_s, note_ended, self.events
        )
        self.reporter = Reporter(self.observer)
        nursery.start_soon(self.actor.run)

    async def settle(self):
        await trio.testing.wait_all_tasks_blocked()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.observer.close()


async def flushed(stage):
    answer = Future()
    stage.observer.send_nowait(Flush(answer))
    stage.actor.hurry()
    await answer.wait()


def levels(caplog):
    return [record.levelname for record in caplog.records if record.name == "trouper"]


async def test_line_interval_is_info_while_busy_and_debug_while_idle(autojump_clock, caplog):
    caplog.set_level(logging.DEBUG, "trouper")
    async with trio.open_nursery() as nursery:
        with Stage(nursery) as stage:
            await trio.sleep(11)
            assert levels(caplog) == []  # nothing has ever happened
            stage.stats = stats(num_steps=20, num_running=1, num_generation_tokens=20)
            await trio.sleep(10)
            assert levels(caplog) == ["INFO"]
            await trio.sleep(10)
            assert levels(caplog) == ["INFO", "INFO"]  # stalled is not idle
            stage.stats = stats(num_steps=50, num_generation_tokens=50)
            await trio.sleep(10)
            assert levels(caplog) == ["INFO"] * 3
            await trio.sleep(30)
            assert levels(caplog) == ["INFO"] * 3 + ["DEBUG"] * 3
    assert "generation throughput: 2.0 tokens/s, running: 1" in caplog.messages[0]
    assert "generation throughput: 3.0 tokens/s, running: 0" in caplog.messages[2]


async def test_line_comes_in_time_however_many_facts_there_are(autojump_clock, caplog):
    caplog.set_level(logging.INFO, "trouper")
    async with trio.open_nursery() as nursery:
        with Stage(nursery) as stage:
            stage.stats = stats(num_steps=1, num_running=1)
            for _ in range(300):
                stage.reporter.report(StepStats(1))
                await trio.sleep(0.1)
    assert len(levels(caplog)) in (2, 3)


async def test_loss_and_return_are_events_with_their_costs(autojump_clock):
    async with trio.open_nursery() as nursery:
        with Stage(nursery) as stage:
            stage.stats = stats(num_running=2, num_deferred=1)
            stage.reporter.report(DeviceLost("died of /root/secret", 7, cause="signal"))
            stage.reporter.report(DeviceBack(1.5))
            stage.reporter.report(StepStats(8, num_lost_tokens=40))
            stage.reporter.report(StepStats(8, num_lost_tokens=2))
            await flushed(stage)
            loss, back, recompute = stage.events.since(0)
            assert (loss.step, loss.detail, loss.sequences) == (7, "signal", 3)
            assert (back.kind, back.seconds) == ("return", 1.5)
            assert (recompute.kind, recompute.count) == ("recompute", 42)


async def test_preemptions_of_a_step_are_one_event(autojump_clock):
    async with trio.open_nursery() as nursery:
        with Stage(nursery, is_on=False) as stage:
            stage.reporter.report(StepStats(8, num_preemptions=3))
            stage.reporter.report(StepStats(8))
            await stage.settle()
            (event,) = stage.events.since(0)
            assert (event.kind, event.count) == ("preemption", 3)


async def test_line_says_what_happened_since_one_before():
    before = stats(num_prompt_tokens=100, num_generation_tokens=10)
    now = stats(
        num_prompt_tokens=300, num_generation_tokens=60, num_running=3, num_waiting=2,
        num_deferred=1, kv_cache_usage=0.125, num_preemptions=4,
    )  # fmt: skip
    assert interval_line(before, now, 10.0, [(30, 0), (10, 20)]) == (
        "prompt throughput: 20.0 tokens/s, generation throughput: 5.0 tokens/s, running: 3, waiting: 3, "
        "preemptions: 4, KV cache usage: 12.5 %, prefix cache hit rate: 50.0 %"
    )
    assert "preemptions" not in interval_line(now, now, 10.0)
    assert "hit rate" not in interval_line(now, now, 10.0)


async def test_facts_without_room_are_dropped_and_counted_and_nobody_waits():
    to_observer, inbox = anyio.create_memory_object_stream[ObserverInbox](2)
    with inbox, Reporter(to_observer) as reporter:
        for _ in range(5):
            reporter.report(StepStats(1))
        assert reporter.num_dropped == 3


async def test_reporting_to_observer_that_is_gone_is_harmless():
    to_observer, inbox = anyio.create_memory_object_stream[ObserverInbox](2)
    inbox.close()
    with Reporter(to_observer) as reporter:
        reporter.report(StepStats(1))
    reporter.report(StepStats(1))
    assert reporter.num_dropped == 2


async def test_counters_are_the_schedulers_own_whatever_was_dropped():
    async with trio.open_nursery() as nursery:
        with Stage(nursery) as stage:
            stage.stats = stats(num_generation_tokens=9)
            for num_tokens in (5, 3):  # what came in between was dropped
                stage.reporter.report(StepStats(num_tokens))
            await flushed(stage)
            assert value(stage.metrics, "generation_tokens") == 9
            assert value(stage.metrics, "iteration_tokens_total") == 2


async def test_failure_inside_is_logged_and_next_fact_is_taken(caplog):
    def note_ended(ended):
        raise RuntimeError("no span today")

    async with trio.open_nursery() as nursery:
        with Stage(nursery, note_ended=note_ended) as stage:
            stage.reporter.report(OutputStats((), (), (ended(),)))
            stage.reporter.report(OutputStats((0.5,), (), ()))
            await stage.settle()
            assert value(stage.metrics, "time_to_first_token_seconds") == 1
            assert value(stage.metrics, "request_params_n") == 1  # counted before it failed
    assert caplog.messages == ["statistics could not be recorded"]
    assert "no span today" in caplog.text


async def test_a_broken_observer_is_not_noticed_by_requests(autojump_clock, monkeypatch, caplog):
    def note_output_stats(self, told):
        raise RuntimeError("broken")

    monkeypatch.setattr(Metrics, "note_output_stats", note_output_stats)
    monkeypatch.setattr(Metrics, "note_step", note_output_stats)
    async with simulated_engine() as engine:
        params = SamplingParams(temperature=0, max_tokens=4)
        outputs = [o async for o in engine.generate(PROMPT, params, "a")]
    assert len(outputs[-1].outputs[0].token_ids) == 4
    assert set(caplog.messages) == {"statistics could not be recorded"}


async def test_it_pauses_its_intake_unless_a_flush_waits(mock_clock):
    async with trio.open_nursery() as nursery:
        with Stage(nursery) as stage:

            async def count():
                stage.reporter.report(StepStats(1))
                await stage.settle()
                return value(stage.metrics, "iteration_tokens_total")

            assert await count() == 1
            assert await count() == 1
            mock_clock.jump(INTAKE_PAUSE_S)
            await stage.settle()
            assert await count() == 2
            stage.actor.hurry()
            await stage.settle()
            assert value(stage.metrics, "iteration_tokens_total") == 3
            mock_clock.jump(INTAKE_PAUSE_S)
            await stage.settle()


async def test_flush_is_answered_behind_facts_before_it():
    async with trio.open_nursery() as nursery:
        with Stage(nursery) as stage:
            for _ in range(50):
                stage.reporter.report(StepStats(1))
            await flushed(stage)
            assert value(stage.metrics, "iteration_tokens_total") == 50


async def test_what_is_in_inbox_at_end_is_still_counted():
    async with trio.open_nursery() as nursery:
        with Stage(nursery) as stage:
            await stage.settle()
            for _ in range(5):
                stage.reporter.report(StepStats(1))
            stage.stats = stats(num_generation_tokens=4)
            nursery.cancel_scope.cancel()
    assert value(stage.metrics, "iteration_tokens_total") == 5
    assert value(stage.metrics, "generation_tokens") == 4


async def test_for_tracing_alone_it_writes_no_lines(autojump_clock, caplog):
    caplog.set_level(logging.DEBUG, "trouper")
    seen = []
    async with trio.open_nursery() as nursery:
        with Stage(nursery, is_on=False, note_ended=seen.append) as stage:
            stage.stats = stats(num_steps=1, num_running=1)
            stage.reporter.report(StepStats(1))
            stage.reporter.report(OutputStats((), (), (ended(),)))
            await trio.sleep(60)
    assert [fact.request_id for fact in seen] == ["a"]
    assert levels(caplog) == []


async def test_the_line_can_be_had_at_once(autojump_clock, caplog):
    caplog.set_level(logging.DEBUG, "trouper")
    async with simulated_engine() as engine:
        params = SamplingParams(temperature=0, max_tokens=10)
        [o async for o in engine.generate(PROMPT, params, "a")]
        await engine.log_stats()
    assert levels(caplog) == ["INFO"]
    rate = 10 / (10 * STEP_S)
    assert f"generation throughput: {rate:.1f} tokens/s" in caplog.text
