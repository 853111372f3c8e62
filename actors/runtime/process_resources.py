"""Prepare a process for torch, share its cores between computing threads and the event loop, and give back freed memory.

Starting takes seconds, most of them spent importing torch. An import holds the interpreter lock while the
system loads and relocates a library, but a foreign call does not, so a thread that opens the same library
ahead saves 0.14 s of 1.0 s. Importing torch also creates half a million objects; garbage collections during
the import take a sixth of its time, and the first one afterwards 0.1 s. This module imports nothing heavy
itself.

A model computes on all cores while the event loop wakes now and then. After a burst of streams the scheduler considers the
loop to have had its share, and lets it wait. Computing threads therefore have a lower priority (a higher nice value), which
leaves the loop four fifths of a core. If a small model computes in one thread only, the loop has a core anyway and
priorities stay. Linux weighs a service, a container or a terminal session as a whole, so this orders only our own threads
and programs of the same session.

With 32 streams on two Xeon cores the loop was late by 3.5 to 4.1 ms at p99 without this. Embeddings over HTTP were as fast.
"""

import contextlib
import ctypes
import gc
import os
import platform
import threading
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

# Environment variables that torch's libraries read at their first use, so they must be set before torch is
# imported.
TORCH_ENVIRONMENT = {
    # A thread that spins at a barrier keeps its partner off a busy core: 64 tokens of the demo model took
    # 5-17 s next to other work, and 0.6 s with this setting.
    "OMP_WAIT_POLICY": "passive",
    # Spinning for 30 µs is allowed because waking takes longer. Encoding MiniLM in bfloat16 with 256 tokens
    # per batch ran at 267 GFLOP/s instead of 215, with 4,096 tokens at 339 instead of 315.
    "GOMP_SPINCOUNT": "2000",
    # Torch, and oneDNN below it, cache generated GEMM code for each matrix and batch size. The defaults of
    # 1024 entries grew by 620 MB over 500 mixed batches of the demo model.
    "LRU_CACHE_CAPACITY": "128",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
}
# The libraries in the order in which torch opens them.
LIBRARIES = ("libtorch_global_deps.so", "libtorch_cpu.so")


def set_torch_environment() -> None:
    """Set the environment variables of `TORCH_ENVIRONMENT` that the caller of this process has not set.

    It must run before torch is imported, because torch reads them only then.
    """
    for name, value in TORCH_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def load_ahead() -> Thread | None:
    """Start a thread that opens torch's libraries, so that a later import finds them loaded. Returns None on
    systems without these files.
    """
    spec = find_spec("torch")
    folder = Path(spec.origin).parent / "lib" if spec is not None and spec.origin else None
    if folder is None or not all((folder / name).is_file() for name in LIBRARIES):
        return None
    set_torch_environment()
    # This is not a daemon thread: a process that ends immediately, for a mistake on its command line, must
    # wait until the libraries have created the globals that they destroy at exit.
    thread = Thread(target=_open, args=(folder,), name="trouper-libraries")
    thread.start()
    return thread


def _open(folder: Path) -> None:
    """Open the libraries and never close them. A library that cannot be loaded is left to the import, whose
    error is more informative.
    """
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.restype, dlopen.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int)
    for name in LIBRARIES:
        dlopen(os.fsencode(folder / name), os.RTLD_LAZY)


SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def num_physical_cores(cpus: Collection[int] | None = None) -> int:
    """Count the cores of these processors, by default of those that this process may use.

    Two hyper-threads of a core count once, since matrix products gain nothing from the second.
    """
    if cpus is None and hasattr(os, "sched_getaffinity"):
        cpus = os.sched_getaffinity(0)
    elif cpus is None:
        cpus = range(os.cpu_count() or 1)
    try:
        return len({Path(SIBLINGS.format(cpu)).read_text() for cpu in cpus})
    except OSError:
        return len(cpus)


@contextmanager
def collections_paused(*, is_frozen: bool = False) -> Generator[None]:
    """Disable garbage collection in this block, except collections that the block itself requests.

    Args:
        is_frozen: exempt all objects that exist at the end of the block from later collections. Use it only
            in our own processes, since garbage of that moment is kept as well.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_frozen:
            gc.freeze()
        if was_enabled:
            gc.enable()


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
