"""The runner's interface to CUDA itself, and its only implementation: streams, events, graphs, memory.

It contains no decisions, so that decisions can be tested without a GPU. Tests replace it by a machine that runs the kernels
in Triton's interpreter.
"""

import gc
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from trouper.actors.executor.device import PendingResult
from trouper.actors.executor.steps.batch import from_numpy
from trouper.errors import TrouperValidationError


class Graph(Protocol):
    """A captured run: the same launches on the same addresses, with whatever data these now contain."""

    outputs: tuple[Tensor, ...]

    def replay(self) -> None:
        """Queue all launches of the run, which overwrite `outputs`.

        It returns before they have run.  One call replaces hundreds of launches from Python.
        """
        ...


class Machine(Protocol):
    """A device as the runner uses it, only from the thread that makes it.

    Work is queued in the order of the calls. A method waits for queued work only if its docstring states it. `backend` is
    torch's name for collective calls between such devices.
    """

    device: torch.device
    name: str
    backend: str

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate a tensor on the device without setting its numbers.

        Raises torch's out-of-memory error if there is no room.
        """
        ...

    def upload(self, host: np.ndarray, out: Tensor | None = None) -> Tensor:
        """Copy an array to the device, into `out` if given. The array may change as soon as this returns."""
        ...

    def download(self, tensors: Sequence[Tensor]) -> PendingResult[list[np.ndarray]]:
        """Begin to copy tensors to the host. They must not be overwritten until the copies are ready."""
        ...

    def to_host(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to pinned memory of the host, and wait for the copy.

        Pinned memory makes the way back faster. The original tensor can be freed afterwards.
        """
        ...

    def to_device(self, tensor: Tensor) -> Tensor:
        """Copy a tensor of the host to the device. Later launches on the same stream see the copy."""
        ...

    def capture(self, runs: Iterable[Callable[[], tuple[Tensor, ...]]]) -> list[Graph]:
        """Run each function once, so that every kernel is loaded, and record it once. Waits.

        The graphs share their memory, so only the outputs of the last replay are valid.
        """
        ...

    def peak_of(self, run: Callable[[], object]) -> int:
        """Measure the peak memory in bytes that a run needs beyond what is already allocated. Waits."""
        ...

    def memory(self) -> tuple[int, int]:
        """Return the (free, total) bytes of the device. Memory of all processes counts as used."""
        ...

    def release(self) -> None:
        """Give back memory to which nothing refers any more.

        Waits for the device first, since launched work may still use it. It takes milliseconds, so steps never call
        it.
        """
        ...


class CudaMachine:
    """A CUDA device.

    Copies to the device are queued on the engine's stream, ahead of the launches that read them. Copies back have a stream of
    their own. Pinned memory comes from torch's cache, which reuses a buffer only when the copy that reads or writes it has
    finished, so no ring of buffers must be managed here.
    """

    backend = "nccl"

    def __init__(self, index: int | None = None) -> None:
        """Use a visible device, by default the current one, in this thread.

        Raises:
            TrouperValidationError: CUDA cannot be used; the message contains CUDA's own, such as that the driver is too old.
        """
        try:
            if index is not None:
                torch.cuda.set_device(index)
            self.device = torch.device("cuda", torch.cuda.current_device())
        except RuntimeError as error:
            raise TrouperValidationError(
                f"CUDA cannot be used: {error}", parameter="device", value="cuda"
            ) from error
        self.name = torch.cuda.get_device_name(self.device)
        self._stream = torch.cuda.Stream(self.device)
        self._copies = torch.cuda.Stream(self.device)
        torch.cuda.set_stream(self._stream)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def upload(self, host: np.ndarray, out: Tensor | None = None) -> Tensor:
        source = from_numpy(host)
        pinned = torch.empty_like(source, pin_memory=True).copy_(source)
        out = torch.empty_like(source, device=self.device) if out is None else out
        return out.copy_(pinned, non_blocking=True)

    def download(self, tensors: Sequence[Tensor]) -> PendingResult[list[np.ndarray]]:
        computed, arrived = torch.cuda.Event(), torch.cuda.Event()
        computed.record(self._stream)
        hosts: list[Tensor] = []
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(computed)
            for tensor in tensors:
                host = torch.empty_like(tensor, device="cpu", pin_memory=True)
                hosts.append(host.copy_(tensor, non_blocking=True))
                tensor.record_stream(self._copies)
            arrived.record(self._copies)

        def finish() -> list[np.ndarray]:
            arrived.synchronize()
            return [host.numpy() for host in hosts]

        return PendingResult(arrived.query, finish)

    def to_host(self, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)

    def capture(self, runs: Iterable[Callable[[], tuple[Tensor, ...]]]) -> list[Graph]:
        # A new pool each time, because a pool cannot be reused after its graphs have been freed.
        pool = torch.cuda.graph_pool_handle()
        graphs: list[Graph] = []
        for run in runs:
            run()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(
                graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                outputs = run()
            graphs.append(_Captured(graph, outputs))
        return graphs

    def peak_of(self, run: Callable[[], object]) -> int:
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        run()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before

    def memory(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(self.device)

    def release(self) -> None:
        torch.cuda.synchronize(self.device)
        gc.collect()
        torch.cuda.empty_cache()


class _Captured:
    """A graph of CUDA. Implements `Graph`."""

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: tuple[Tensor, ...]) -> None:
        self.outputs = outputs
        self.replay = graph.replay
