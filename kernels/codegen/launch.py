"""Launch compiled kernels on the OpenMP threads of torch, so that there is no second thread pool.

A kernel is a C function with one argument, a pointer to int64.  Every thread of the team calls it:

    args[0]    next work item, incremented by `KernelBuilder.work_items`
    args[1]    number of threads that have asked for their number
    args[2]    number of work items
    args[3 …]  the kernel's own arguments

`GOMP_parallel` is looked up through libtorch_cpu, so it belongs to the runtime that torch itself calls: the same
threads and the same waiting, one parallel region after the other.  Without that symbol (macOS, Windows) a kernel runs
on one thread.

Law: the result of a work item depends neither on the thread that computes it nor on the number of threads.

Measured on one EPYC core: a launch with ten arguments takes 2.5 µs, mostly in ctypes.
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
    """Receives launches instead of running them; see `recording.Recording`.

    A protocol keeps this module independent of recordings. Only the thread that records passes its launches to it.
    """

    def add(self, address: int, num_threads: int, arguments: tuple[int, ...]) -> None:
        """Append one launch of a kernel, with its address, number of threads and arguments.

        The arguments are the numbers that the kernel will receive again.
        """
        ...

    def keep(self, memory: object) -> None:
        """Keep memory alive to which a launch refers by its address.

        Python would otherwise free it before the recording is repeated. It is released together with the recording.
        """
        ...


class Kernel:
    """A compiled kernel that can be called like a Python function.

    It keeps the machine code alive, because ctypes does not. Calls run on torch's threads.
    """

    __slots__ = ("_address", "_call", "_code", "name")

    def __init__(self, name: str, address: int, code: object) -> None:
        self.name = name
        self._address, self._code = address, code
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)

    def __repr__(self) -> str:
        return f"<Kernel {self.name}>"

    @property
    def address(self) -> int:
        return self._address

    def __call__(self, num_items: int, *arguments: int, num_threads: int = 1) -> None:
        """Run the kernel for all work items, or pass the launch to this thread's recorder.

        Args:
            num_items: number of work items that the threads share.
            arguments: addresses and integers; `float_bits` converts floats.
            num_threads: 1, or torch's own number.  OpenMP would end the team and create another one for a different number.
        """
        recorder: Recorder | None = getattr(_local, "recorder", None)
        if recorder is not None:
            recorder.add(self._address, num_threads, (0, 0, num_items, *arguments))
            return
        args = (ctypes.c_int64 * (3 + len(arguments)))(0, 0, num_items, *arguments)
        if num_threads > 1 and num_items > 1 and (fork := _gomp_parallel()) is not None:
            fork(self._address, args, num_threads, 0)
        elif num_items:
            self._call(args)


@functools.cache
def compiled(write: Callable[..., None], *options: object) -> Kernel:
    """Return the kernel that `write(code, *options)` writes.

    It is compiled once in a process, and loaded from disk if it was compiled before. Several threads may call it.
    """
    from trouper.kernels.codegen.compiler import address_of

    name = "_".join((write.__name__, *map(str, options)))
    # `functools.cache` would let two threads compile the same kernel and then drop one, whose address may be recorded.
    with _making:
        key = write, options
        if key not in _made:
            _made[key] = Kernel(name, *address_of(name, write, *options))
        return _made[key]


def name_of(address: int) -> str:
    """Return the name of the compiled kernel at this address.

    Measurements use it: launches and recordings contain only addresses.
    """
    return next(kernel.name for kernel in _made.values() if kernel.address == address)


def float_bits(x: float) -> int:
    """Return the bits of a float64 as an integer, the form in which kernels receive floats.

    `CoreBuilder.f32_argument` converts them back inside of the kernel.
    """
    return struct.unpack("q", struct.pack("d", x))[0]


def scratch(num_bytes: int) -> int:
    """Return the address of this thread's scratch memory, aligned to cache lines.

    The content is valid until the thread's next call. Recordings keep it alive for their own launches.
    """
    held: ctypes.Array[Any] | None = getattr(_local, "scratch", None)
    if held is None or len(held) < num_bytes + 64:
        held = _local.scratch = (ctypes.c_char * (2 * num_bytes + 64))()
    recorder: Recorder | None = getattr(_local, "recorder", None)
    if recorder is not None:
        recorder.keep(held)
    return -(-ctypes.addressof(held) // 64) * 64


def is_recorded() -> bool:
    """Return whether this thread's launches are recorded, so that all threads are awake when they run."""
    return getattr(_local, "recorder", None) is not None


@contextlib.contextmanager
def recorded_by(recorder: Recorder) -> Generator[None]:
    """Pass this thread's launches to `recorder` inside the block.

    No kernel runs meanwhile, so their outputs have no meaning. Other threads launch as usual.
    """
    _local.recorder = recorder
    try:
        yield
    finally:
        _local.recorder = None


@functools.cache
def address_in_torch(name: str) -> int:
    """Return the address of a C function in libtorch_cpu or one of its libraries, or 0 if it does not exist.

    Kernels are launched by functions of torch's own OpenMP library.
    """
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
