"""A device in this process: one thread owns the runner, and torch, for its whole life.

Torch's intra-op settings, inference mode and current stream are thread-local, and a thread pool may serve
each call from another thread, hence a thread of our own.  torch is imported in it and nowhere before.
A step may be launched and its answer come later, from a GPU or from other threads: meanwhile the thread launches
what else is posted.
"""

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

import anyio

from trouper.actors.executor.cpu.thread_priority import (
    be_nice,
    compute_with,
    start_nice,
)
from trouper.actors.executor.device import Answer, DeviceInfo, Later
from trouper.actors.executor.model_runner import ModelRunner
from trouper.actors.executor.topology import num_physical_cores
from trouper.actors.messages.plans import PoolPlan, StepPlan
from trouper.actors.messages.results import StepFailed
from trouper.actors.runtime.event_loop import EventLoop
from trouper.config.args import EngineConfig
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
POLL_S = 5e-5  # between two looks at a launched step, and at what is posted behind it


class LocalDevice:
    """`Device` on the CPU or the GPU of this process.

    Everything that is posted runs in order, and runs to its end even if nobody waits any more.  An
    exception in a step fails the steps of its epoch; the rows must be given again.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        # The executor's credits bound it: max_steps_in_flight steps, a call and the closing.
        # Beside them comes one `LOOK` for each launched step that tells when it is ready.
        self._posts: queue.SimpleQueue[_Post[Any] | str | None] = queue.SimpleQueue()
        self._steps: deque[_Post[Answer]] = deque()  # submitted, not delivered
        self._answer: Callable[[Answer], None] | None = None  # who takes the answers
        self._broken = anyio.Event()
        self._error: BaseException | None = None  # that broke it
        self._loop: EventLoop | None = None  # which takes the answers
        self._thread: threading.Thread | None = None
        self._closing: _Post[None] | None = None
        # Touched by the device thread alone:
        self._runner: ModelRunner | None = None
        self._launched: deque[_Post[Any]] = deque()  # whose results come later
        self._refused_epoch = -1

    def __repr__(self) -> str:
        alive = self._thread is not None and self._thread.is_alive()
        state = f"{len(self._steps)} steps out" if alive else "not running"
        return f"<LocalDevice {self._config.model.name!r} {state}>"

    async def load(self) -> DeviceInfo:
        """Start the thread, import torch, load the model.

        Raises:
            TrouperValidationError: checkpoint, traits or KV memory do not fit the config.
            UnsupportedFeatureError: the architecture is not known.
        """
        if self._thread is not None:
            raise RuntimeError("a device is loaded once")
        # It returns at once: the thread goes on with the next step while the loop wakes up.
        self._loop = EventLoop()
        self._thread = threading.Thread(target=self._serve, name=DEVICE_THREAD, daemon=True)
        self._thread.start()
        return await self._post(self._load).wait()

    def submit(self, plan: StepPlan | PoolPlan) -> None:
        self._steps.append(self._post(lambda: self._step(plan), self._deliver))

    async def deliver(self, answer: Callable[[Answer], None]) -> None:
        self._answer = answer
        try:
            self._deliver()
            await self._broken.wait()
        finally:
            self._answer = None
        assert self._error is not None
        raise self._error

    def _deliver(self) -> None:
        """Called by the loop itself, not by a task that would first have to be woken: so it must not raise."""
        answer = None if self._error else self._answer
        try:
            while answer is not None and self._steps and self._steps[0].is_done:
                answer(self._steps.popleft().result())
        except BaseException as error:  # noqa: ASYNC103  # `deliver` raises it
            self._error = error
            self._broken.set()

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
            self._posts.put(None)
        with anyio.CancelScope(shield=True):  # bounded: by the load or the steps under way
            await self._closing.wait()
        self._thread.join()  # it has nothing left to do

    def _post(
        self, work: Callable[[], Result | Later[Result]], tell: Callable[[], object] | None = None
    ) -> "_Post[Result]":
        if self._loop is None or self._closing is not None:
            raise RuntimeError("the device is closed, or was never loaded")
        post = _Post(work, self._loop, tell)
        self._posts.put(post)
        return post

    # From here on: the device thread.

    def _serve(self) -> None:
        while True:
            while self._launched and self._launched[0].is_ready():
                self._launched.popleft().finish()
            if self._launched and not self._launched[0].tells and self._posts.empty():
                # Not `get` with a timeout: before CPython 3.13 that may wait for ever, if the thread loses
                # its processor in the moment in which it sets its clock.
                time.sleep(POLL_S)
                continue
            post = self._posts.get()
            if post is None:
                return
            if isinstance(post, str):  # look
                continue
            post.run()
            if post.is_launched:
                self._launched.append(post)
                post.when_ready(partial(self._posts.put, LOOK))

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

    def _step(self, plan: StepPlan | PoolPlan) -> Answer | Later[Answer]:
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
            if isinstance(answer, Later):
                finish = partial(self._guarded, plan, answer.finish)
                return Later(answer.is_ready, finish, answer.when_ready)
            return answer
        if (
            failed.is_out_of_memory and self._runner
        ):  # only now does nobody hold what the step had taken
            self._runner.release()
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


class _Post(Generic[Result]):
    """A piece of work for the device thread, and the way back to the event loop that posted it.

    `tell` is called there when it is done; without it, one may `wait`.
    """

    def __init__(
        self,
        work: Callable[[], Result | Later[Result]],
        loop: EventLoop,
        tell: Callable[[], object] | None,
    ) -> None:
        self._work: Callable[[], Result | Later[Result]] = work
        self._loop = loop
        self._waited: anyio.Event | None = None
        if tell is None:
            self._waited = anyio.Event()
            tell = self._waited.set
        self._tell = tell
        self.is_done = False
        self._later: Later[Result] | None = None
        self._result: Result | None = None
        self._error: BaseException | None = None

    @property
    def is_launched(self) -> bool:
        return self._later is not None

    @property
    def tells(self) -> bool:
        """Of a launched one: `when_ready` is heard."""
        return self._later is not None and self._later.when_ready is not None

    def when_ready(self, act: Callable[[], None]) -> None:
        """Of a launched one: call `act` then, if anybody can tell."""
        if self._later is not None and self._later.when_ready is not None:
            self._later.when_ready(act)

    def is_ready(self) -> bool:
        """Of a launched one: `finish` would not wait."""
        assert self._later is not None
        try:
            return self._later.is_ready()
        except Exception:
            return True  # `finish` meets it, too, and tells who waits

    def run(self) -> None:
        """Do the work, or launch it."""
        self._settle(self._work)

    def finish(self) -> None:
        assert self._later is not None
        later, self._later = self._later, None
        self._settle(later.finish)

    def _settle(self, work: Callable[[], Result | Later[Result]]) -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: ASYNC103  # a thread: it belongs to the caller
            self._error = error
        else:
            if isinstance(result, Later):
                self._later = result
                return
            self._result = result
        self.is_done = True
        try:
            self._loop.call_soon(self._tell)
        except RuntimeError:  # the loop has ended: nobody waits any more
            pass

    async def wait(self) -> Result:
        assert self._waited is not None
        await self._waited.wait()
        return self.result()

    def result(self) -> Result:
        """Of a post that is done; raises what it raised."""
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # set, since there is no error
