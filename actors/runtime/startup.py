"""Prepare a process for torch: environment settings, faster loading of its libraries, and the number of cores.

Starting takes seconds, most of them spent importing torch. An import holds the interpreter lock while the
system loads and relocates a library, but a foreign call does not, so a thread that opens the same library
ahead saves 0.14 s of 1.0 s. Importing torch also creates half a million objects; garbage collections during
the import take a sixth of its time, and the first one afterwards 0.1 s. This module imports nothing heavy
itself.
"""

import ctypes
import gc
import os
from collections.abc import Collection, Generator
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
