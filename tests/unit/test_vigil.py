"""The device's thread between two steps: awake for a moment if that has paid, asleep otherwise."""

import threading

import pytest

from trouper.actors.executor import vigil as vigil_module
from trouper.actors.executor.vigil import AWAKE_S, Vigil
from trouper.kernels.codegen import units


def prepared(*args):
    vigil = Vigil(*args)
    vigil.prepare()
    return vigil


class Clock:
    def __init__(self):
        self.s = 0.0

    def __call__(self):
        return self.s


@pytest.fixture
def watched(monkeypatch):
    """How often a thread stayed awake."""
    calls = []
    monkeypatch.setattr(vigil_module.units, "is_available", lambda: True)
    monkeypatch.setattr(
        vigil_module.units, "compiled", lambda kernel: lambda *args: calls.append(args)
    )
    return calls


def waited(vigil, clock, seconds):
    vigil.keep()
    clock.s += seconds
    vigil.end()


def test_it_is_awake_after_a_short_wait_and_asleep_after_a_long_one(watched):
    clock = Clock()
    vigil = prepared(clock)
    found = []
    for seconds in (0.9 * AWAKE_S, 2 * AWAKE_S, 0.9 * AWAKE_S, 0.9 * AWAKE_S, 60.0, 1.0):
        waited(vigil, clock, seconds)
        found.append(len(watched))
    assert found == [0, 1, 1, 2, 3, 3]


def test_without_native_code_it_sleeps(watched, monkeypatch):
    monkeypatch.setattr(vigil_module.units, "is_available", lambda: False)
    vigil = prepared(Clock())
    for _ in range(3):
        waited(vigil, vigil._now, 0.0)
    assert watched == []


@pytest.mark.skipif(not units.is_available(), reason="it is native")
def test_a_call_ends_it_whenever_it_comes(monkeypatch):
    """With patience for an hour: only the calls can end these waits."""
    monkeypatch.setattr(vigil_module, "AWAKE_S", 3600.0)
    vigil, is_kept = prepared(), threading.Event()
    waited(vigil, Clock(), 0.0)

    def wait():
        for _ in range(3):
            vigil.keep()
            vigil.end()
            is_kept.set()

    thread = threading.Thread(target=wait)
    vigil.call()  # before it begins
    thread.start()
    for _ in range(2):
        assert is_kept.wait(30)
        is_kept.clear()
        vigil.call()
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.skipif(not units.is_available(), reason="it is native")
def test_without_a_call_it_gives_up():
    vigil = prepared()
    waited(vigil, Clock(), 0.0)
    vigil.keep()
