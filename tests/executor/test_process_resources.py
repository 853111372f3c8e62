"""What the device's thread asks of Linux's scheduler."""

import os
import platform
import threading

import pytest
import torch

from trouper.actors.executor.runners.cpu.process_resources import (
    NICER,
    NICEST,
    be_nice,
    compute_with,
    start_nice,
)
from trouper.actors.executor.workers.model_host import WIDE

pytestmark = pytest.mark.skipif(platform.system() != "Linux", reason="threads are nice one by one")


def in_a_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def test_thread_count_applies_to_one_thread():
    before = in_a_thread(torch.get_num_threads)

    def computed():
        compute_with(before + 1, before)
        return torch.get_num_threads()

    assert in_a_thread(computed) == before + 1
    assert in_a_thread(torch.get_num_threads) == before


def nice(thread=0):
    return os.getpriority(os.PRIO_PROCESS, thread)


@pytest.mark.parametrize("own", [0, NICEST - 1])
def test_torchs_helpers_are_nicer_than_thread_that_has_them(own):
    def computed():
        num_threads = torch.get_num_threads()
        torch.set_num_threads(3)
        try:
            os.setpriority(os.PRIO_PROCESS, 0, max(own, nice()))
            before = set(os.listdir("/proc/self/task"))
            start_nice(lambda: torch.zeros(WIDE).neg_())
            helpers = set(os.listdir("/proc/self/task")) - before
            torch.zeros(WIDE).neg_()
            assert set(os.listdir("/proc/self/task")) - before == helpers  # and they stay
            return nice(), [nice(int(helper)) for helper in helpers]
        finally:
            torch.set_num_threads(num_threads)

    mine, helpers = in_a_thread(computed)
    assert helpers == [min(mine + NICER, NICEST)] * 2


def test_threads_of_others_that_start_meanwhile_are_left_alone():
    may_end = threading.Event()
    others = [threading.Thread(target=may_end.wait) for _ in range(2)]
    before = nice()

    def start():
        for other in others:
            other.start()

    start_nice(start)
    assert [nice(other.native_id) for other in others] == [before] * 2
    may_end.set()
    for other in others:
        other.join()


@pytest.mark.parametrize("system", ["Darwin", "Windows"])
def test_threads_start_without_niceness_support(system, monkeypatch):
    started = []
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(os, "setpriority", None)
    start_nice(lambda: started.append(1))
    assert started == [1]
    be_nice()
