"""Compiled kernels on the threads that torch computes with: its own OpenMP team, and no second pool.

A kernel is a C function of one pointer, to int64 arguments; every thread of the team calls it:

    args[0]  next piece of work, taken by `KernelBuilder.pieces`        args[1]  threads so far, likewise
    args[2]  pieces in all                                     args[3 …]  the kernel's own

`GOMP_parallel` is looked up through libtorch_cpu, so that it is the runtime torch itself calls: the
same threads, the same waiting, one phase after the other.  Where it has no such name (macOS, Windows)
a kernel runs on one thread.

Law: a piece's result does not depend on which thread computes it, nor on the number of threads.

Measured on one EPYC core: 2.5 µs a launch with ten arguments, most of it ctypes.
"""

import contextlib
import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Protocol

_local = threading.local()
_making = threading.Lock()
_made: "dict[tuple[object, ...], Kernel]" = {}


class Recorder(Protocol):
    """Takes launches down in place of running them; `recording.Recording` is one."""

    def add(self, address: int, num_threads: int, arguments: tuple[int, ...]) -> None:
        """Take one launch of a kernel down."""
        ...

    def keep(self, memory: object) -> None:
        """Hold memory whose address a launch was given."""
        ...


class Kernel:
    """A compiled kernel: a C function, and the way to call it."""

    __slots__ = ("_address", "_call", "_code", "name")

    def __init__(self, name: str, address: int, code: object) -> None:
        self.name = name
        self._address, self._code = address, code  # machine code lives as long as its function
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)

    def __repr__(self) -> str:
        return f"<Kernel {self.name}>"

    def __call__(self, num_pieces: int, *arguments: int, num_threads: int = 1) -> None:
        """Run all pieces.  `arguments` are addresses and numbers."""
        recorder: Recorder | None = getattr(_local, "recorder", None)
        if recorder is not None:
            recorder.add(self._address, num_threads, (0, 0, num_pieces, *arguments))
            return
        args = (ctypes.c_int64 * (3 + len(arguments)))(0, 0, num_pieces, *arguments)
        # always torch's own number: a team of another size would be ended and made anew
        if num_threads > 1 and num_pieces > 1 and (fork := _gomp_parallel()) is not None:
            fork(self._address, args, num_threads, 0)
        elif num_pieces:
            self._call(args)


@functools.cache
def compiled(write: Callable[..., None], *options: object) -> Kernel:
    """Return the kernel that `write(code, *options)` writes, from the disk if it was compiled before."""
    from trouper.kernels.codegen.compiler import address_of

    name = "_".join((write.__name__, *map(str, options)))
    # The cache alone would let two threads make one each, and drop the one whose address is recorded.
    with _making:
        key = write, options
        if key not in _made:
            _made[key] = Kernel(name, *address_of(name, write, *options))
        return _made[key]


def float_bits(x: float) -> int:
    """Return the bits of a float64, as a kernel takes it for an argument."""
    return struct.unpack("q", struct.pack("d", x))[0]


def scratch(num_bytes: int) -> int:
    """Return the address of this thread's scratch memory, valid until its next call; aligned to cache lines."""
    held: ctypes.Array[Any] | None = getattr(_local, "scratch", None)
    if held is None or len(held) < num_bytes + 64:
        held = _local.scratch = (ctypes.c_char * (2 * num_bytes + 64))()
    recorder: Recorder | None = getattr(_local, "recorder", None)
    if recorder is not None:
        recorder.keep(held)
    return -(-ctypes.addressof(held) // 64) * 64


@contextlib.contextmanager
def recorded_by(recorder: Recorder) -> Generator[None]:
    """Within the block, give this thread's launches to `recorder`; no kernel runs."""
    _local.recorder = recorder
    try:
        yield
    finally:
        _local.recorder = None


@functools.cache
def address_in_torch(name: str) -> int:
    """Return the address of a C function in libtorch_cpu or a library it is linked to; 0 where there is none."""
    import torch

    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return ctypes.cast(ctypes.CDLL(str(library))[name], ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0


@functools.cache
def _gomp_parallel() -> Callable[..., None] | None:
    address = address_in_torch("GOMP_parallel")
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    return kind(address) if address else None
