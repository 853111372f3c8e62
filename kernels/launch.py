"""Compiled kernels on the threads that torch computes with: its own OpenMP team, and no second pool.

A kernel is a C function of one pointer, to int64 arguments; every thread of the team calls it:

    args[0]  next piece of work, taken by `fetch_add`          args[1]  threads so far, likewise
    args[2]  pieces in all                                     args[3 …]  the kernel's own

`GOMP_parallel` is looked up through libtorch_cpu, so that it is the runtime torch itself calls: the
same threads, the same waiting, one phase after the other.  Where it has no such name (macOS, Windows)
a kernel runs on one thread.

Law: a piece's result does not depend on who computes it, nor on the number of threads.

Measured on one EPYC core: 2.5 µs a launch with ten arguments, most of it ctypes.
"""

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import logging
import os
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

COMPILE_TIMEOUT_S = 60.0

logger = logging.getLogger(__name__)
_local = threading.local()
_compiling = threading.Lock()
_kept: list[object] = []  # machine code lives as long as its function


class Kernel:
    """A C function, and the way to call it."""

    __slots__ = ("_address", "_call", "name")

    def __init__(self, name: str, address: int) -> None:
        self.name = name
        self._address = address
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)

    def __repr__(self) -> str:
        return f"<Kernel {self.name}>"

    def __call__(self, num_pieces: int, *arguments: int, num_threads: int = 1) -> None:
        """Run all pieces.  `arguments` are addresses and numbers."""
        args = (ctypes.c_int64 * (3 + len(arguments)))(0, 0, num_pieces, *arguments)
        # always torch's own number: a team of another size would be ended and made anew
        if num_threads > 1 and num_pieces > 1 and (fork := _gomp_parallel()) is not None:
            fork(self._address, args, num_threads, 0)
        elif num_pieces:
            self._call(args)


def float_bits(x: float) -> int:
    """A float64 as an argument."""
    return struct.unpack("q", struct.pack("d", x))[0]


def scratch(num_bytes: int) -> int:
    """Address of memory of this thread, valid until its next call; aligned to cache lines."""
    held: ctypes.Array[Any] | None = getattr(_local, "scratch", None)
    if held is None or len(held) < num_bytes + 64:
        held = _local.scratch = (ctypes.c_char * (2 * num_bytes + 64))()
    return -(-ctypes.addressof(held) // 64) * 64


@functools.cache
def is_available() -> bool:
    """Numba can be imported; it takes a fifth of a second, hence not before somebody asks."""
    if importlib.util.find_spec("numba") is None:
        return False
    try:
        import numba  # noqa: F401
    except ImportError as error:  # built for another numpy, say
        logger.warning("numba cannot be imported, the CPU runs on torch alone: %s", error)
        return False
    return True


def compiled(function: Callable[..., None]) -> Kernel:
    """Compile `function(args)`, or load it from the cache."""
    from numba import cfunc, types
    from numba.core import config as numba_config

    config: Any = numba_config

    signature = types.void(types.CPointer(types.int64))
    with _compiling:
        # Numba's own key is the file of the function alone; ours is every file of this folder.
        before = config.CACHE_DIR, config.OPT
        config.CACHE_DIR = str(_cache_folder())
        config.OPT = type(config.OPT)(1)  # vectors are explicit here: as fast as 3, compiled in 3/4
        try:
            made: Any = cfunc(signature, cache=True, error_model="numpy")(function)
        finally:
            config.CACHE_DIR, config.OPT = before
    _kept.append(made)
    return Kernel(function.__name__, made.address)


@contextlib.contextmanager
def compiling_beside(function: str, code: str) -> Iterator[None]:
    """Let a second process fill the cache with `function`, while the body compiles others.

    Numba compiles under one lock, so that threads do not help.  Nothing happens where the function is
    in the cache, there is one core only, or no interpreter to start; a failure costs time alone.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    is_cached = any(_cache_folder().rglob(f"*.{function}-*.nbi"))
    if is_cached or (cores or 1) < 2 or not sys.executable:
        yield
        return
    try:
        child = subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        yield
        return
    try:
        yield
        child.wait(COMPILE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        pass  # then it is compiled here
    finally:
        child.kill()
        child.wait()


@functools.cache
def _cache_folder() -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    folder = home / "trouper" / f"kernels-{digest.hexdigest()[:16]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # nowhere to keep them: compile each time
        folder = Path(tempfile.mkdtemp(prefix="trouper-kernels-"))
    return folder


@functools.cache
def _gomp_parallel() -> Callable[..., None] | None:
    import torch  # not above: a process that only compiles does without

    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        function = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    function.restype = None
    return function
