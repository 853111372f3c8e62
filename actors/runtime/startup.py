"""Torch's libraries before torch is imported: the environment that they read, and the largest of them loaded ahead.

An import holds the interpreter's lock while the system loads and relocates a library; a foreign call does not.  So a
thread that opens the same file takes 0.14 s of 1.0 off the import, beside imports of other modules.

The processors of this process.

A pause of the garbage collector while modules are imported: they are kept, so scans of them find nothing.

Importing torch makes half a million objects, and collections on the way take a sixth of its time; the first one after it
takes 0.1 s.
"""

import ctypes
import gc
import os
from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

# What torch's libraries read when they are first used, so before torch is.
TORCH_ENVIRONMENT = {
    # A thread that spins at a barrier keeps its partner off a busy core: 64 tokens of the demo model took
    # 5-17 s beside other work, 0.6 s with this.
    "OMP_WAIT_POLICY": "passive",
    # But for 30 µs it may: to wake it takes longer.  Encoding 256 tokens at a time of MiniLM in bfloat16 ran at 267
    # GFLOP/s instead of 215, 4,096 at 339 instead of 315.
    "GOMP_SPINCOUNT": "2000",
    # GEMM code kept, by torch and by oneDNN below it: one piece for each matrix and batch size.  The
    # defaults of 1024 grow with every new batch: by 620 MB over 500 mixed batches of the demo model.
    "LRU_CACHE_CAPACITY": "128",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
}
LIBRARIES = ("libtorch_global_deps.so", "libtorch_cpu.so")  # in the order in which torch opens them


def set_torch_environment() -> None:
    """Set what the libraries read, where the caller of this process has not."""
    for name, value in TORCH_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def load_ahead() -> Thread | None:
    """Start a thread that loads the libraries which importing torch will find loaded; None on systems without them."""
    spec = find_spec("torch")
    folder = Path(spec.origin).parent / "lib" if spec is not None and spec.origin else None
    if folder is None or not all((folder / name).is_file() for name in LIBRARIES):
        return None
    set_torch_environment()
    # no daemon: a process that ends at once, for a mistake on its command line, waits until the libraries have made their
    # globals, which it destroys at its end
    thread = Thread(target=_open, args=(folder,), name="trouper-libraries")
    thread.start()
    return thread


def _open(folder: Path) -> None:
    """Open them for good; one that fails to load is an error of the import, which says more."""
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.restype, dlopen.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int)
    for name in LIBRARIES:
        dlopen(os.fsencode(folder / name), os.RTLD_LAZY)


SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def num_physical_cores() -> int:
    """Count the cores that this process may use; two hyper-threads of a core count once."""
    cpus = (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    try:
        return len({Path(SIBLINGS.format(cpu)).read_text() for cpu in cpus})
    except OSError:
        return len(cpus)


@contextmanager
def collections_paused(*, is_frozen: bool = False) -> Generator[None]:
    """Let no collection run in this block, unless something in it asks for one.

    `is_frozen` exempts what is there at its end from later collections: for processes of this program alone, since what
    is garbage by then is kept, too.
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
