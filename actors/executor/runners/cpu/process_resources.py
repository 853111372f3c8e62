"""Set the thread priorities of a computing process and the number of its torch threads, and give back freed memory.

A model computes on all cores while the event loop wakes now and then. After a burst of streams the scheduler considers the
loop to have had its share, and lets it wait. Computing threads therefore have a lower priority (a higher nice value), which
leaves the loop four fifths of a core. If a small model computes in one thread only, the loop has a core anyway and
priorities stay. Linux weighs a service, a container or a terminal session as a whole, so this orders only our own threads
and programs of the same session.

With 32 streams on two Xeon cores the loop was late by 3.5 to 4.1 ms at p99 without this. Embeddings over HTTP were as fast.
"""

import contextlib
import ctypes
import os
import platform
import threading
from collections.abc import Callable

# The scheduler gives a thread with this nice value a quarter of the weight.
NICER = 6
NICEST = 19


def compute_with(num_threads: int, num_elsewhere: int) -> None:
    """Let torch compute with `num_threads` in this thread, and with `num_elsewhere` in threads that start later.

    Later threads inherit the last number that any thread has set, so a short-lived thread sets it again.
    """
    import torch

    # Without this call, this thread would take the inherited number when it first computes.
    torch.get_num_threads()
    torch.set_num_threads(num_threads)
    other = threading.Thread(target=torch.set_num_threads, args=(num_elsewhere,))
    other.start()
    other.join()


def start_nice(start: Callable[[], object]) -> None:
    """Call `start`, and lower the priority of the native threads that it starts.

    Does so only on Linux, where threads have one. The threads of the event loop then run first.
    """
    if platform.system() != "Linux":
        start()
        return
    before = _threads()
    start()
    # Threads of Python that other code started in the meantime keep their priority.
    others = {thread.native_id for thread in threading.enumerate()}
    for thread in _threads() - before - others:
        _make_nicer(thread)


def be_nice() -> None:
    """Lower the priority of the calling thread, so that threads of the event loop run first.

    Does nothing outside Linux, where priorities belong to processes.
    """
    if platform.system() == "Linux":
        _make_nicer(threading.get_native_id())


def _make_nicer(thread: int) -> None:
    # The thread may have ended, or the system may not permit this. Priorities then stay as they are.
    with contextlib.suppress(OSError):
        nice = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(nice + NICER, NICEST))


def _threads() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}


def give_back_free_memory() -> None:
    """Return freed memory to the system. glibc would keep 900 MB of a 950 MB model; other allocators return it
    themselves.

    It is called after weights are dropped.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
