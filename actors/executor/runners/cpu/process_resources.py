"""Threads that help a device are nicer than the event loop, and each thread computes with its own number of helpers.

A device computes on all cores while the event loop wakes now and then, and after a burst of streams the loop has had
more than its share.  So the threads that help the device's own are nicer, and so is its own where it generates: beside
them the loop has four fifths of a core.  Not where no thread helps: a small model leaves a core to the loop anyway.
Linux weighs a service or a container as a whole, and a terminal's session too, so this orders our own threads and those
of programs in the same session.

With 32 streams on two Xeon cores the loop was late by 3.5 to 4.1 ms at p99 without this; embeddings over HTTP came as
fast with it.

Memory of the host that has been freed.
"""

import contextlib
import ctypes
import os
import platform
import threading
from collections.abc import Callable

NICER = 6  # a quarter of the weight
NICEST = 19


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
    """Call `start` and lower the priority of the native threads that it starts; on Linux only, where each thread has its own."""
    if platform.system() != "Linux":
        start()
        return
    before = _threads()
    start()
    others = {thread.native_id for thread in threading.enumerate()}  # started meanwhile, by others
    for thread in _threads() - before - others:
        _make_nicer(thread)


def be_nice() -> None:
    """Lower the priority of the calling thread; on Linux only."""
    if platform.system() == "Linux":
        _make_nicer(threading.get_native_id())


def _make_nicer(thread: int) -> None:
    with contextlib.suppress(OSError):  # it has ended, or must not be: nothing changes
        nice = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(nice + NICER, NICEST))


def _threads() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}


def give_back_free_memory() -> None:
    """Return freed memory to the system: glibc keeps 900 MB of a 950 MB model; other allocators return it themselves."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
