"""A device in this process: one thread owns the runner, and torch, for its whole life.

Torch's intra-op settings, inference mode and current stream are thread-local, and a thread pool may serve
each call from another thread, hence a thread of our own.  torch is imported in it and nowhere before.
A step may be launched and its result come later, from a GPU or from other threads: meanwhile the thread launches
what else is submitted.
"""

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import anyio

from trouper.actors.executor.cpu.thread_priority import be_nice, compute_with, start_nice
from trouper.actors.executor.device import DeviceInfo, PendingResult, StepResult
from trouper.actors.executor.devices.task import DeviceTask
from trouper.actors.executor.model_runner import ModelRunner
from trouper.actors.executor.topology import num_physical_cores
from trouper.actors.messages.plans import PoolPlan, StepPlan
from trouper.actors.messages.results import StepFailed
from trouper.actors.runtime.event_loop import EventLoop
from trouper.config.resolve import EngineConfig
from trouper.errors import UnsupportedFeatureError

logger = logging.getLogger(__name__)
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

Result = TypeVar("Result")
DEVICE_THREAD = "trouper-device"
CALLS = ("sleep", "wake", "start_profile", "stop_profile")
LOOK = "look"
WIDE = 2**17  # numbers, which torch shares out among its threads
POLL_S = 5e-5  # between two looks at a launched step, and at what is submitted behind it


class ThreadedDevice:
    """`Device` on the CPU or the GPU of this process.

    Everything runs in the order of its submission, and to its end even when no task waits for it any more.  An
    exception in a step fails the steps of its epoch; the request slots must be given again.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        # The executor's credits bound it: max_steps_in_flight steps, a call and the closing.
        # Beside them comes one `LOOK` for each launched step that tells when it is ready.
        self._tasks: queue.SimpleQueue[DeviceTask[Any] | str | None] = queue.SimpleQueue()
        self._steps: deque[DeviceTask[StepResult]] = deque()  # submitted, not received
        self._submitted = anyio.Event()
        self._loop: EventLoop | None = None  # which waits for the results
        self._thread: threading.Thread | None = None
        self._closing: DeviceTask[None] | None = None
        # Touched by the device thread alone:
        self._runner: ModelRunner | None = None
        self._launched: deque[DeviceTask[Any]] = deque()
        self._refused_epoch = -1

    def __repr__(self) -> str:
        alive = self._thread is not None and self._thread.is_alive()
        state = f"{len(self._steps)} steps out" if alive else "not running"
        return f"<ThreadedDevice {self._config.model.name!r} {state}>"

    async def load(self) -> DeviceInfo:
        """Start the thread, import torch, load the model.

        Raises:
            TrouperValidationError: checkpoint, traits or KV memory do not fit the config.
            UnsupportedFeatureError: the architecture is not known.
        """
        if self._thread is not None:
            raise RuntimeError("a device is loaded once")
        self._loop = EventLoop()
        self._thread = threading.Thread(target=self._serve, name=DEVICE_THREAD, daemon=True)
        self._thread.start()
        return await self._post(self._load).wait()

    def submit(self, plan: StepPlan | PoolPlan) -> None:
        self._steps.append(self._post(lambda: self._step(plan)))
        self._submitted.set()

    async def receive(self) -> StepResult:
        while not self._steps:
            self._submitted = anyio.Event()
            await self._submitted.wait()
        result = await self._steps[0].wait()
        self._steps.popleft()
        return result

    async def call(self, method: str, *args: object) -> object:
        if method != "probe" and method not in CALLS:
            raise UnsupportedFeatureError(f"this device cannot {method}")
        return await self._post(lambda: self._call(method, args)).wait()

    async def aclose(self) -> None:
        """End what is under way, give back the memory, end the thread.  Idempotent."""
        if self._thread is None:
            return
        if self._closing is None:
            self._closing = self._post(self._close)
            self._tasks.put(None)
        with anyio.CancelScope(shield=True):  # bounded: by the load or the steps under way
            await self._closing.wait()
        self._thread.join()  # it has nothing left to do

    def _post(self, work: Callable[[], Result | PendingResult[Result]]) -> DeviceTask[Result]:
        if self._loop is None or self._closing is not None:
            raise RuntimeError("the device is closed, or was never loaded")
        task = DeviceTask(work, self._loop)
        self._tasks.put(task)
        return task

    # From here on: the device thread.

    def _serve(self) -> None:
        while True:
            while self._launched and self._launched[0].is_ready():
                self._launched.popleft().finish()
            if self._launched and not self._launched[0].calls_back and self._tasks.empty():
                # Not `get` with a timeout: before CPython 3.13 that may wait for ever, if the thread loses
                # its processor in the moment in which it sets its clock.
                time.sleep(POLL_S)
                continue
            task = self._tasks.get()
            if task is None:
                return
            if isinstance(task, str):  # look
                continue
            task.run()
            if task.is_launched:
                self._launched.append(task)
                task.when_ready(partial(self._tasks.put, LOOK))

    def _finish_launched(self) -> None:
        while self._launched:
            self._launched.popleft().finish()

    def _load(self) -> DeviceInfo:
        for name, value in TORCH_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import torch

        num_elsewhere = torch.get_num_threads()
        num_threads = min(num_elsewhere, num_physical_cores())
        compute_with(num_threads, num_elsewhere)
        if self._config.device == "cpu":
            start_nice(lambda: torch.zeros(WIDE).neg_())  # the threads that help this one
        self._runner = runner = self._make_runner()
        info = runner.load()
        if runner.is_tiny:
            num_threads = 1  # on a busy machine a barrier costs a time slice, 4 ms
        compute_with(num_threads, num_elsewhere)  # the runner may have set it for others
        if self._config.device == "cpu" and self._config.pooler is None and num_threads > 1:
            be_nice()  # as those that help
        return info

    def _make_runner(self) -> ModelRunner:
        if self._config.pooler is not None:
            from trouper.actors.executor.cpu.pooling_runner import PoolingRunner

            return PoolingRunner(self._config)
        if self._config.device == "cuda":
            from trouper.actors.executor.cuda.runner import CudaRunner

            return CudaRunner(self._config)
        from trouper.actors.executor.cpu.runner import CpuRunner

        return CpuRunner(self._config)

    def _call(self, method: str, args: tuple[object, ...]) -> object:
        self._finish_launched()
        return None if method == "probe" else getattr(self._runner, method)(*args)

    def _step(self, plan: StepPlan | PoolPlan) -> StepResult | PendingResult[StepResult]:
        runner = self._runner
        if runner is None:
            raise RuntimeError("a step before load")
        return self._guarded(plan, lambda: runner.execute(plan))

    def _guarded(self, plan: StepPlan | PoolPlan, work: Callable[[], Any]) -> Any:
        """An error of the step fails its epoch, whose later steps may have been launched already."""
        if plan.epoch <= self._refused_epoch:
            return StepFailed(plan.step, "an earlier step failed")
        try:
            answer = work()
        except Exception as error:
            failed = self._failed(plan, error)
        else:
            if isinstance(answer, PendingResult):
                finish = partial(self._guarded, plan, answer.finish)
                return PendingResult(answer.is_ready, finish, answer.when_ready)
            return answer
        if failed.is_out_of_memory and self._runner:
            self._runner.release()  # only now, when nothing refers to the step's memory
        return failed

    def _failed(self, plan: StepPlan | PoolPlan, error: Exception) -> StepFailed:
        import torch

        if isinstance(error, torch.AcceleratorError):  # nothing runs on this GPU any more
            raise error
        columns = plan.request_slots if isinstance(plan, StepPlan) else plan.entries
        logger.error("step %d of %d columns failed", plan.step, len(columns), exc_info=error)
        self._refused_epoch = plan.epoch
        is_out_of_memory = isinstance(error, torch.OutOfMemoryError)
        return StepFailed(plan.step, f"{type(error).__name__}: {error}", is_out_of_memory)

    def _close(self) -> None:
        self._finish_launched()
        if self._runner is not None:
            self._runner.close()
