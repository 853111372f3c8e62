"""Load a model, run its plans on one thread and time them: the code shared by a device in a thread and by worker processes.

Torch's intra-op settings, inference mode and current stream are thread-local, so one thread owns the model
for its whole life. Torch is imported only in `load`. A second thread compiles grammars while the first computes.

From the durations of steps, the scheduler learns how long the next ones will take. The device's own thread measures them, because the
event loop may receive two answers in one iteration, so that the second step would seem to take no time, and because uvloop's clock
counts whole milliseconds, while steps of small models take less than one.
"""

import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, assert_never, cast

import msgspec

from trouper.actors.executor.device import DeviceInfo, PendingResult, StepResult, timed
from trouper.actors.executor.runners.cpu.process_resources import be_nice, compute_with, start_nice
from trouper.actors.messages.controls import (
    DeviceAction,
    ExplainLosses,
    LoadAdapter,
    ProbeDevice,
    Sleep,
    StartProfile,
    StopProfile,
    Wake,
)
from trouper.actors.messages.requests import GrammarReady
from trouper.actors.messages.steps import (
    PoolPlan,
    StepFailed,
    StepPlan,
    TierAnswer,
    TierOrder,
)
from trouper.actors.runtime.startup import (
    collections_paused,
    num_physical_cores,
    set_torch_environment,
)
from trouper.config.engine_config import EngineConfig
from trouper.config.parallel import CPU_BIND
from trouper.errors import UnsupportedFeatureError, invalid

if TYPE_CHECKING:
    from trouper.actors.executor.runners.resident_model import ModelRunner
    from trouper.actors.executor.steps.cache_memory import KeptMemory
    from trouper.actors.executor.steps.tier_thread import TierThread


class StepTimer:
    """Time each plan while it is the oldest without a result.  Results come in the order of the plans."""

    def __init__(self) -> None:
        # The start of each running plan; the scheduler bounds the plans in flight.
        self._begun_s: deque[float] = deque()
        self._ended_s = 0.0

    def __repr__(self) -> str:
        return f"<StepTimer: {len(self._begun_s)} plans run>"

    def start(self) -> None:
        """Record that a plan begins."""
        self._begun_s.append(perf_counter())

    def idle_s(self) -> float:
        """Return the seconds since the last plan ended, or 0 while one runs.  Any thread may call it."""
        return 0.0 if self._begun_s else perf_counter() - self._ended_s

    def stop(self, result: StepResult | None) -> StepResult | None:
        """Record that the oldest plan has ended.  Returns its result with its duration, or None if another worker answers."""
        now = perf_counter()
        seconds = now - max(self._begun_s.popleft(), self._ended_s)
        self._ended_s = now
        return None if result is None else timed(result, seconds)


logger = logging.getLogger(__name__)
# The command line displays the last record of this logger while the engine starts.
loading = logging.getLogger("trouper.loading")
Phase = Literal["import", "weights"]
PHASES: dict[Phase, str] = {"import": "importing torch", "weights": "loading the weights"}
# A tensor of this many elements makes torch use all its threads.
WIDE = 2**17


class ModelHost:
    """Load a model, or a worker's part of it, and run its plans. An exception in a step also fails the later steps of its epoch.

    Args:
        rank: index of the worker within its device.
        files: descriptors of the memory and links shared with other workers.
        kept: descriptor of a memory file for the KV cache, which outlives this process; None to use ordinary memory.
    """

    def __init__(
        self,
        config: EngineConfig,
        rank: int = 0,
        files: Sequence[int] = (),
        kept: int | None = None,
    ) -> None:
        self._config = config
        self._rank, self._files, self._kept_file = rank, files, kept
        self._kept: KeptMemory | None = None
        self._runner: ModelRunner | None = None
        self._refused_epoch = -1
        self._timer = StepTimer()
        # None without a tier on disk.
        self._tier: TierThread | None = None

    def __repr__(self) -> str:
        return (
            f"<ModelHost {self._config.model.name!r}, {'loaded' if self._runner else 'not loaded'}>"
        )

    def load(self, on_phase: Callable[[Phase], None]) -> DeviceInfo:
        """Import torch and load the model, on the thread that will run it. Calls `on_phase` at the beginning of each phase.

        Raises:
            TrouperValidationError: the checkpoint, its traits or the KV memory do not fit the config.
            UnsupportedFeatureError: the architecture is not supported.
        """
        num_workers = self._config.num_workers
        if self._config.cpu_bind is not None:
            _bind(self._config.cpu_bind[self._rank])
            num_workers = 1
        set_torch_environment()
        on_phase("import")
        with collections_paused():
            import torch

            from trouper.actors.executor.steps.cache_memory import KeptMemory
        if self._kept_file is not None:
            self._kept = KeptMemory(self._kept_file)
        num_elsewhere = torch.get_num_threads()
        num_cores = max(1, num_physical_cores() // num_workers)
        num_threads = min(num_elsewhere, num_cores)
        compute_with(num_threads, num_elsewhere)
        if self._config.device == "cpu":
            # Start torch's helper threads with a lower priority.
            start_nice(lambda: torch.zeros(WIDE).neg_())
        if self._config.tier is not None:
            self._start_tier(num_threads)
        with collections_paused():
            self._runner = runner = self._make_runner()
        on_phase("weights")
        info = runner.load()
        if runner.is_tiny:
            # On a busy machine a barrier between threads costs a time slice of 4 ms.
            num_threads = 1
        # The runner may have changed the setting while it loaded.
        compute_with(num_threads, num_elsewhere)
        if self._config.device == "cpu" and self._config.pooler is None and num_threads > 1:
            be_nice()
        self._attach_tier()
        return info

    def _start_tier(self, num_threads: int) -> None:
        """Start the thread of the tier on disk, which lists its files while the model is loading."""
        from trouper.actors.executor.steps.tier_thread import TierThread
        from trouper.actors.executor.workers.tier_space import find_space

        config = self._config
        assert config.tier is not None
        # All workers write at the same time, so they share the rate.
        rate = max(1, config.tier.write_rate // config.workers_per_replica)
        space = partial(find_space, config, self._rank, num_threads)
        tier = msgspec.structs.replace(config.tier, write_rate=rate)
        self._tier = TierThread(tier, space, self._timer.idle_s)

    def open_tier(self, answer: Callable[[TierAnswer], None]) -> None:
        """Make the tier on disk, if there is one, send its answers. Call it after `load`.

        Args:
            answer: called with each answer, on the tier's thread or on the thread that runs plans.
        """
        if self._tier is not None:
            self._tier.begin(answer)

    def _attach_tier(self) -> None:
        """Attach the KV cache to the tier, unless the cache was dropped by a sleep."""
        if self._tier is None:
            return
        from trouper.actors.executor.runners.cpu.runner import CpuRunner
        from trouper.actors.executor.runners.cpu.stage_runner import StageRunner

        runner = self._runner
        if isinstance(runner, StageRunner):
            runner = runner.runner
        assert isinstance(runner, CpuRunner), "the config refuses a tier with other runners"
        if caches := runner.kv_caches:
            self._tier.attach(caches, self._config.block_size, runner.states)

    def order_tier(self, order: TierOrder) -> None:
        """Queue an order for the tier, after all earlier plans have run."""
        if self._tier is not None:
            self._tier.order(order)

    @property
    def layout(self) -> str:
        """Describe the tensors in the memory file; empty without one."""
        return "" if self._kept is None else self._kept.layout

    def _make_runner(self) -> "ModelRunner":
        if self._config.pooler is not None:
            if self._config.pooler.has_two_towers:
                from trouper.actors.executor.runners.cpu.unpaged_decoder import TwoTowerRunner

                return TwoTowerRunner(self._config)
            from trouper.actors.executor.runners.cpu.pooling_runner import PoolingRunner

            return PoolingRunner(self._config)
        if self._uses_transformers():
            from trouper.actors.executor.runners.cpu.models import HfModel
            from trouper.actors.executor.runners.cpu.runner import CpuRunner

            return CpuRunner(self._config, HfModel(self._config), kept=self._kept)
        if self._config.device == "cuda" and self._config.tensor_parallel_size > 1:
            from trouper.actors.executor.runners.cuda.runner import RankRunner

            return RankRunner(self._config, self._rank, self._files)
        if self._config.device == "cuda":
            from trouper.actors.executor.runners.cuda.runner import CudaRunner

            return CudaRunner(self._config)
        if self._config.workers_per_replica > 1:
            from trouper.actors.executor.runners.cpu.stage_runner import StageRunner

            return StageRunner(self._config, self._rank, self._files, self._kept)
        from trouper.actors.executor.runners.cpu.runner import CpuRunner

        return CpuRunner(self._config, kept=self._kept)

    def _uses_transformers(self) -> bool:
        """Return whether transformers computes this model, instead of trouper's own decoder.

        Raises:
            UnsupportedFeatureError: it does, but not on this device or with these options.
        """
        from trouper.actors.executor.models.families.registry import has_own_code

        config, model = self._config, self._config.model
        if config.model_impl == "trouper" or model.is_gguf:
            return False
        if config.model_impl == "auto" and has_own_code(model.hf_config, model.architecture):
            return False
        if config.device != "cpu":
            raise UnsupportedFeatureError(
                f"{model.architecture} is computed by transformers, which runs on the CPU only; set device='cpu'",
                parameter="device",
            )
        for name, size, missing in (
            ("pipeline_parallel_size", config.num_stages, "stages"),
            ("tensor_parallel_size", config.tensor_parallel_size, "ranks"),
        ):
            if size > 1:
                raise UnsupportedFeatureError(
                    f"{model.architecture} is computed by transformers, which does not support {missing}",
                    parameter=name,
                )
        if config.speculation is not None:
            raise UnsupportedFeatureError(
                f"{model.architecture} is computed by transformers, which cannot verify drafts because the bits of a row depend on the other rows",
                parameter="speculative_config",
            )
        return True

    def execute(
        self, plan: StepPlan | PoolPlan
    ) -> StepResult | PendingResult[StepResult | None] | None:
        """Run a plan, or launch it. Returns None if another worker answers.

        Raises:
            Exception: the device is broken and must not run further plans.
        """
        runner = self._loaded_runner
        self._timer.start()
        answer = self._guarded(plan, lambda: runner.execute(plan))
        if not isinstance(answer, PendingResult):
            return self._timer.stop(answer)
        finish = cast("Callable[[], StepResult | None]", answer.finish)
        return answer._replace(finish=lambda: self._timer.stop(finish()))

    def call(self, action: DeviceAction) -> None:
        """Perform an action other than a step, such as a sleep or the load of an adapter.

        The caller must have finished all launched steps.
        """
        runner = self._loaded_runner
        match action:
            case Sleep(level):
                if self._tier is not None and level >= 1:
                    self._tier.detach()
                runner.sleep(level)
            case Wake(tags):
                runner.wake(tags)
                self._attach_tier()
            case LoadAdapter(slot, files):
                runner.load_adapter(slot, files)
            case StartProfile(folder, prefix):
                runner.start_profile(folder, prefix)
            case StopProfile():
                runner.stop_profile()
            case ProbeDevice() | ExplainLosses():
                # A probe only needs the answer, and losses are explained to `ProcessDevice`, not to a worker.
                pass
            case _:
                assert_never(action)

    @property
    def _loaded_runner(self) -> "ModelRunner":
        if self._runner is None:
            raise RuntimeError("the model is not loaded")
        return self._runner

    def close(self) -> None:
        """Release memory and threads. Idempotent."""
        if self._tier is not None:
            self._tier.close()
        if self._runner is not None:
            self._runner.close()

    def _guarded(self, plan: StepPlan | PoolPlan, work: Callable[[], Any]) -> Any:
        """Run `work`. An exception also fails the later steps of the epoch, even if they were already launched."""
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
            # Release memory outside of the except clause, because the exception's traceback refers to the failed step's tensors.
            self._runner.release()
        return failed

    def _failed(self, plan: StepPlan | PoolPlan, error: Exception) -> StepFailed:
        import torch

        # After an AcceleratorError the GPU is unusable until the process restarts. With several workers, the others have
        # advanced past this step and cannot go back.
        if isinstance(error, torch.AcceleratorError) or self._config.workers_per_replica > 1:
            raise error
        columns = plan.request_slots if isinstance(plan, StepPlan) else plan.entries
        logger.error("step %d with %d entries failed", plan.step, len(columns), exc_info=error)
        self._refused_epoch = plan.epoch
        is_out_of_memory = isinstance(error, torch.OutOfMemoryError)
        return StepFailed(plan.step, f"{type(error).__name__}: {error}", is_out_of_memory)


def _bind(cpus: Sequence[int]) -> None:
    """Restrict this thread, and the threads that it starts later, to these processors.

    Raises:
        TrouperValidationError: the processors do not exist, or this process may not use them.
    """
    try:
        os.sched_setaffinity(0, cpus)
    except (OSError, AttributeError) as error:
        raise invalid(CPU_BIND, f"cannot run on processors {list(cpus)}: {error}") from None


def log_phase(phase: Phase, *, where: str = "") -> None:
    """Log the phase of loading, such as the import of torch, for the command line to display meanwhile."""
    loading.info("%s%s", where, PHASES[phase])


class GrammarThread:
    """Compile grammars one after another, on a thread that starts with the first.

    The thread has a lower priority than computing threads and the event loop, and the compiler releases the
    interpreter lock, so streams continue meanwhile.

    Args:
        answer: called on this thread with the result of each grammar.
    """

    def __init__(self, answer: Callable[[GrammarReady], None]) -> None:
        self._answer = answer
        # Bounded: at most one grammar and a vocabulary at a time.
        self._works: queue.SimpleQueue[tuple[bytes, Callable[[], object]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<GrammarThread: {self._works.qsize()} to do>"

    def do(self, work: Callable[[], object], key: bytes = b"") -> None:
        """Queue work for the thread. `answer` is called afterwards if a key is passed, which identifies a grammar."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._serve, name="trouper-grammars", daemon=True
            )
            self._thread.start()
        self._works.put((key, work))

    def close(self) -> None:
        """End the thread after its current work, which takes at most half a second."""
        if self._thread is not None:
            self._works.put(None)
            self._thread.join()
            self._thread = None

    def _serve(self) -> None:
        be_nice()
        while (work := self._works.get()) is not None:
            key, compile = work
            error = None
            try:
                compile()
            # The error belongs to the request. Catch BaseException, because a panic of the Rust library is not an Exception.
            except BaseException as raised:  # noqa: ASYNC103
                error = f"{type(raised).__name__}: {raised}"
            if key:
                self._answer(GrammarReady(key, error))
