"""Step timers: each step has the time that it takes by itself."""

from types import SimpleNamespace

import pytest

from trouper.actors.executor.device import PendingResult
from trouper.actors.executor.workers import model_host
from trouper.actors.executor.workers.model_host import ModelHost
from trouper.actors.messages.steps import StepDone, StepFailed


@pytest.fixture
def now(monkeypatch):
    clock = SimpleNamespace(s=100.0)
    monkeypatch.setattr(model_host, "perf_counter", lambda: clock.s)
    return clock


def host_of(execute):
    host = ModelHost(SimpleNamespace(workers_per_replica=1))
    host._runner = SimpleNamespace(execute=execute)
    return host


def plan(step):
    return SimpleNamespace(step=step, epoch=0)


def test_step_is_timed_where_it_is_computed(now):
    def execute(plan):
        now.s += 0.0004
        return StepDone(plan.step, ())

    host = host_of(execute)
    for step in range(2):
        now.s += 5.0
        assert host.execute(plan(step)).seconds == pytest.approx(0.0004)


def test_launched_step_begins_behind_the_one_before(now):
    host = host_of(lambda plan: PendingResult(lambda: True, lambda: StepDone(plan.step, ())))
    first, second = host.execute(plan(1)), host.execute(plan(2))
    now.s += 3.0
    assert first.finish().seconds == pytest.approx(3.0)
    now.s += 0.5
    assert second.finish().seconds == pytest.approx(0.5)


def test_step_that_another_worker_answers_is_counted(now):
    results = [None, StepFailed(2, "no"), StepDone(3, ())]
    host = host_of(lambda plan: PendingResult(lambda: True, lambda: results[plan.step - 1]))
    steps = [host.execute(plan(step)) for step in (1, 2, 3)]
    now.s += 1.0
    assert [steps[0].finish(), steps[1].finish()] == results[:2]
    now.s += 0.25
    assert steps[2].finish().seconds == pytest.approx(0.25)
