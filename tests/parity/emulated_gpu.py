"""A GPU without a GPU: tensors of the CPU, the kernels in Triton's interpreter, and CUDA's traps.

* Memory that is taken is full of NaN, or of a number that is no token.
* A copy to the host reads its tensors as late as it may: what a later step wrongly overwrites is seen.
* A graph replays what was captured: the same arguments, the same addresses; its outputs are NaN before.
* In a capture every operation that would wait for the device raises.
* Results are slow: a step is ready after `DELAY` looks at it, so two are in flight when they may.
"""

import gc
import weakref

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.interpreter import hasten_interpreter
from trouper.actors.executor.device import PendingResult

MIB = 2**20
POISON = -(2**30)
DELAY = 3
WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::lift_fresh", "aten::item"}


class EmulatedMachine:
    """`Machine` of 64 MiB, of which 16 are taken; any run is said to take `step_bytes`."""

    backend = "gloo"

    def __init__(self):
        hasten_interpreter()
        np.seterr(all="ignore")  # of this thread: lanes that are masked compute, too
        self.device = torch.device("cpu")
        self.name = "emulated"
        self.step_bytes = 2 * MIB
        self.num_launched = 0  # downloads begun
        self.num_finished = 0
        self.most_in_flight = 0
        self.num_replays = 0
        self.num_released = 0
        self.host_bytes = 0  # of weights that sleep
        self._taken = []  # weak references to what lies on the device
        self.fail = None  # called before each upload; what it raises happens to the step

    def num_alive(self):
        """Tensors that were put on the device, large ones, and are still there."""
        return sum(taken() is not None for taken in self._taken)

    def empty(self, shape, dtype):
        return self._take(torch.full(tuple(shape), _poison(dtype), dtype=dtype))

    def upload(self, host, out=None):
        if self.fail is not None:
            self.fail(host)
        copied = torch.from_numpy(host.copy())
        return copied if out is None else out.copy_(copied)

    def download(self, tensors):
        self.num_launched += 1
        self.most_in_flight = max(self.most_in_flight, self.num_launched - self.num_finished)
        looks = iter(range(DELAY))

        def finish():
            self.num_finished += 1
            return [tensor.numpy().copy() for tensor in tensors]

        return PendingResult(lambda: next(looks, None) is None, finish)

    def to_host(self, tensor):
        self.host_bytes += tensor.nbytes
        copied = tensor.clone()
        tensor.fill_(_poison(tensor.dtype))
        return copied

    def to_device(self, tensor):
        return self._take(tensor.clone())

    def _take(self, tensor):
        self._taken.append(weakref.ref(tensor))
        return tensor

    def capture(self, runs):
        graphs = []
        for run in runs:
            run()
            with NoWaiting():
                outputs = run()
            graphs.append(EmulatedGraph(self, run, outputs))
        return graphs

    def peak_of(self, run):
        run()
        return self.step_bytes

    def memory(self):
        return 48 * MIB, 64 * MIB

    def release(self):
        self.num_released += 1
        gc.collect()


class EmulatedGraph:
    def __init__(self, machine, run, outputs):
        self._machine, self._run, self.outputs = machine, run, outputs

    def replay(self):
        self._machine.num_replays += 1
        for output, found in zip(self.outputs, self._run(), strict=True):
            output.copy_(found)


class NoWaiting(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function._schema.name not in WAITS, f"{function} in a capture waits for the device"
        return function(*args, **(kwargs or {}))


def _poison(dtype):
    return torch.nan if dtype.is_floating_point else POISON
