"""Who has a core first, when a device computes on all of them and an event loop wakes now and then; and who uses how many.

**Slices.**  Linux (from 6.12) lets who has just woken take the core from a thread that asked for longer slices, whose share of
the machine stays the same, unless it has had more than its own lately.

**Nice workers.**  An event loop has had more, after a burst of streams.  So the threads that help the device's own are nicer, and
where it generates its own is, too: beside them the loop has four fifths of a core.  Not where no thread helps: a small
model leaves a core to the loop anyway.  Linux weighs a service or a container as a whole, and a terminal's session too,
so this orders our own threads and those of programs in the same session.

With 32 streams on two Xeon cores the loop was late by 3.5 to 4.1 ms at p99 without either, by 1.2 to 4.2 with slices, and
by 1.1 to 2.0 with both; embeddings over HTTP came as fast (1.02 and 1.01 of before, in turn).  Beside bodies of 90 MB, on two
Zen 3 cores, it was late by 2.9 ms with these and helpers alone, by 2.1 with the device's own thread nicer; on two EPYC cores with AVX-512 by 2.6 and, with both, 1.3 (medians of eight runs in turn).
"""

import contextlib
import ctypes
import os
import platform
import struct
import threading
from collections.abc import Callable

SLICE_NS = 5_000_000
NICER = 6  # a quarter of the weight
NICEST = 19
# sched_getattr and sched_setattr, which the C library does not know
_CALLS = {"x86_64": (315, 314), "aarch64": (275, 274)}
_ATTRIBUTES = struct.Struct("IIQiIQQQ")  # size, policy, flags, nice, priority, runtime, …


def take_long_slices() -> None:
    """For this thread and those that it will start.  Where the kernel cannot, or must not, nothing changes."""
    if platform.system() != "Linux" or platform.machine() not in _CALLS:
        return
    read, write = _CALLS[platform.machine()]
    call, this_thread = ctypes.CDLL(None).syscall, 0
    held = ctypes.create_string_buffer(_ATTRIBUTES.size)
    if call(read, this_thread, held, _ATTRIBUTES.size, 0):
        return
    size, policy, flags, nice, priority, _, *others = _ATTRIBUTES.unpack(held.raw)
    if policy == os.SCHED_OTHER:
        asked = _ATTRIBUTES.pack(size, policy, flags, nice, priority, SLICE_NS, *others)
        call(write, this_thread, asked, 0)


def compute_with(num_threads: int, num_elsewhere: int) -> None:
    """torch computes with `num_threads` in this thread, and with `num_elsewhere` in those that begin later.

    It keeps one number for them, the last that any thread has set.  So one of them sets that again.
    """
    import torch

    torch.get_num_threads()  # else this thread takes what is kept when it first computes
    torch.set_num_threads(num_threads)
    other = threading.Thread(target=torch.set_num_threads, args=(num_elsewhere,))
    other.start()
    other.join()


def start_nice(start: Callable[[], object]) -> None:
    """What `start` starts of native threads is nicer from now on; only on Linux, where threads are nice one by one."""
    if platform.system() != "Linux":
        start()
        return
    before = _threads()
    start()
    others = {thread.native_id for thread in threading.enumerate()}  # started meanwhile, by others
    for thread in _threads() - before - others:
        _make_nicer(thread)


def be_nice() -> None:
    """As `start_nice`, for this thread."""
    if platform.system() == "Linux":
        _make_nicer(threading.get_native_id())


def _make_nicer(thread: int) -> None:
    with contextlib.suppress(OSError):  # it has ended, or must not be: nothing changes
        nice = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(nice + NICER, NICEST))


def _threads() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}
