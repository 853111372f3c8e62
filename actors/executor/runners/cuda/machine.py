"""The runner's interface to CUDA itself, and its one implementation: streams, events, graphs, memory.

Nothing is decided here, so that decisions need no GPU.  Tests put a machine in this one's place that runs
the kernels in Triton's interpreter.
"""

import gc
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from trouper.actors.executor.device import PendingResult
from trouper.actors.executor.steps.arrays import from_numpy
from trouper.errors import TrouperValidationError


class Graph(Protocol):
    """A captured run: the same launches on the same addresses, whatever they hold now."""

    outputs: tuple[Tensor, ...]  # of the run

    def replay(self) -> None: ...


class Machine(Protocol):
    """A device as the runner uses it, from the thread that makes it.  Work is queued in the order of the calls; none waits for it,
    but those that say so."""

    device: torch.device
    name: str
    backend: str  # torch's, of collective calls between such devices

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor: ...

    def upload(self, host: np.ndarray, out: Tensor | None = None) -> Tensor:
        """Copy to the device; `host` may be changed as soon as this returns."""
        ...

    def download(self, tensors: Sequence[Tensor]) -> PendingResult[list[np.ndarray]]:
        """Begin to copy to the host.  The tensors must not be written to until the copies are ready."""
        ...

    def to_host(self, tensor: Tensor) -> Tensor:
        """Copy to pinned memory of the host.  Waits."""
        ...

    def to_device(self, tensor: Tensor) -> Tensor: ...

    def capture(self, runs: Iterable[Callable[[], tuple[Tensor, ...]]]) -> list[Graph]:
        """Run each once for real, so that every kernel is loaded, and once to record.  Waits.

        The graphs share their memory: of the outputs only those of the last replay are there.
        """
        ...

    def peak_of(self, run: Callable[[], object]) -> int:
        """Measure the bytes that the run takes at its worst, beyond what it finds.  Waits."""
        ...

    def memory(self) -> tuple[int, int]:
        """Return the (free, total) bytes of the device, the use of all processes counted."""
        ...

    def release(self) -> None:
        """Give back memory that nothing refers to any more.  Waits."""
        ...


class CudaMachine:
    """A CUDA device.

    Copies to the device are on the engine's stream, ahead of the launches that read them; copies back are on
    a stream of their own.  Pinned memory comes from torch's cache, which gives it away again only when the
    copy that reads or writes it is over, so there is always a fresh buffer and no ring to manage.
    """

    backend = "nccl"

    def __init__(self, index: int | None = None) -> None:
        """Take a device of those that are visible, or the current one, for this thread.

        Raises:
            TrouperValidationError: with CUDA's own words, e.g. that the driver is too old for this torch.
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
        torch.cuda.set_stream(self._stream)  # of this thread

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
        pool = torch.cuda.graph_pool_handle()  # one whose graphs have died cannot be used again
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
    """`Graph` of CUDA."""

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: tuple[Tensor, ...]) -> None:
        self.outputs = outputs
        self.replay = graph.replay
