"""What the device's thread asks of Linux's scheduler."""

import ctypes
import os
import platform
import threading

import pytest

from trouper.actors.executor import slices
from trouper.actors.executor.slices import _ATTRIBUTES, _CALLS, SLICE_NS, take_long_slices

can_ask = platform.system() == "Linux" and platform.machine() in _CALLS
pytestmark = pytest.mark.skipif(not can_ask, reason="Linux's system calls")


def attributes():
    held = ctypes.create_string_buffer(_ATTRIBUTES.size)
    number = _CALLS[platform.machine()][0]
    assert not ctypes.CDLL(None).syscall(number, 0, held, _ATTRIBUTES.size, 0)
    _, policy, _, nice, _, runtime, *_ = _ATTRIBUTES.unpack(held.raw)
    return policy, nice, runtime


def in_a_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.skipif(
    can_ask and not attributes()[2], reason="a kernel in which threads have no slices of their own"
)
def test_slices_are_long_in_this_thread_and_in_those_it_starts():
    before = attributes()

    def taken():
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 3)
        take_long_slices()
        return attributes(), in_a_thread(attributes)

    assert in_a_thread(taken) == ((os.SCHED_OTHER, 3, SLICE_NS),) * 2
    assert attributes() == before


@pytest.mark.parametrize("part", ["system", "machine", "call"])
def test_nothing_changes_where_the_kernel_does_not_know_how(part, monkeypatch):
    before = attributes()
    with monkeypatch.context() as patched:
        if part == "call":
            patched.setattr(slices, "_CALLS", {platform.machine(): (2**20, 2**20)})
        else:
            patched.setattr(platform, part, lambda: "other")
        in_a_thread(take_long_slices)
    assert attributes() == before


def test_other_policies_are_left_alone():
    def batch():
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        before = attributes()
        take_long_slices()
        return before == attributes()

    assert in_a_thread(batch)
