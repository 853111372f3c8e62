"""Load a model, run its plans on one thread and time them: the part shared by a device in a thread and by worker processes.

Torch's intra-op settings, inference mode and current stream are thread-local, so one thread owns the model
for its whole life. `load` imports torch; nothing before it does. A second thread compiles grammars while the
first computes.

The scheduler learns from the seconds of steps how long the next ones take. The device's own thread measures them, because the
event loop may receive two answers in one turn, so the second step seems to have taken no time, and uvloop's clock counts
whole milliseconds. Steps of small models take less than one.
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
from trouper.actors.runtime.process_resources import (
    be_nice,
    collections_paused,
    compute_with,
    num_physical_cores,
    set_torch_environment,
    start_nice,
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
        # One for each plan that runs: at most those in flight.
        self._begun_s: deque[float] = deque()
        self._ended_s = 0.0

    def __repr__(self) -> str:
        return f"<StepTimer: {len(self._begun_s)} plans run>"

    def start(self) -> None:
        """Note that a plan begins."""
        self._begun_s.append(perf_counter())

    def idle_s(self) -> float:
        """Return the seconds since the last plan ended, or 0 while one runs.  Any thread may call it."""
        return 0.0 if self._begun_s else perf_counter() - self._ended_s

    def stop(self, result: StepResult | None) -> StepResult | None:
        """Note that the oldest plan has ended.  Returns its result with the seconds; None if another worker answers."""
        now = perf_counter()
        seconds = now - max(self._begun_s.popleft(), self._ended_s)
        self._ended_s = now
        return None if result is None else timed(result, seconds)


logger = logging.getLogger(__name__)
# A terminal shows the last record of this logger while the engine starts.
loading = logging.getLogger("trouper.loading")
Phase = Literal["import", "weights"]
PHASES: dict[Phase, str] = {"import": "importing torch", "weights": "loading the weights"}
# Elements enough for torch to use all its threads.
WIDE = 2**17


class ModelHost:
    """Loads a model, or a worker's part of it, and runs its plans. An exception in a step fails the later steps
    of its epoch.

    Args:
        rank: number of the worker among those of its device.
        files: descriptors of the memory and links shared with other workers.
        kept: descriptor of a memory file for the KV cache, which outlives this process.
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

    def load(self, tell: Callable[[Phase], None]) -> DeviceInfo:
        """Import torch and load the model, in the thread that will run it. `tell` is called with each phase.

        Raises:
            TrouperValidationError: the checkpoint, its traits or the KV memory do not fit the config.
            UnsupportedFeatureError: the architecture is not supported.
        """
        num_workers = self._config.num_workers
        if self._config.cpu_bind is not None:
            _bind(self._config.cpu_bind[self._rank])
            num_workers = 1
        set_torch_environment()
        tell("import")
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
        tell("weights")
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
        """Start the thread of the tier on disk, which finds its files while the model is loaded."""
        from trouper.actors.executor.steps.tier_thread import TierThread
        from trouper.actors.executor.workers.tier_space import find_space

        config = self._config
        assert config.tier is not None
        # The workers write their parts of a block at the same time.
        rate = max(1, config.tier.write_rate // config.workers_per_replica)
        space = partial(find_space, config, self._rank, num_threads)
        tier = msgspec.structs.replace(config.tier, write_rate=rate)
        self._tier = TierThread(tier, space, self._timer.idle_s)

    def open_tier(self, answer: Callable[[TierAnswer], None]) -> None:
        """Let the tier on disk answer, if the config has one. Call it after `load`.

        Args:
            answer: called in the tier's thread, or in the thread that runs plans, with each answer.
        """
        if self._tier is not None:
            self._tier.begin(answer)

    def _attach_tier(self) -> None:
        """Give the KV cache to the tier, if it is in memory."""
        if self._tier is None:
            return
        from trouper.actors.executor.runners.cpu.runner import CpuRunner
        from trouper.actors.executor.runners.cpu.stage_runner import StageRunner

        runner = self._runner
        if isinstance(runner, StageRunner):
            runner = runner.runner
        assert isinstance(runner, CpuRunner), "the options of a tier are checked before"
        if caches := runner.kv_caches:
            self._tier.attach(caches, self._config.block_size, runner.states)

    def order_tier(self, order: TierOrder) -> None:
        """Queue an order for the tier, behind the plans that have run."""
        if self._tier is not None:
            self._tier.order(order)

    @property
    def layout(self) -> str:
        """Describe the tensors in memory that outlives this process; empty if there are none."""
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
        """Whether the transformers library computes this model.

        Raises:
            UnsupportedFeatureError: it does, but not with this device or these options.
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
            Exception: the device can run nothing any more.
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

        The caller has finished every launched step before.
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
                # A device in this process is never lost without its engine, so no loss needs an explanation.
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
        """Run `work`. Its exception fails all later steps of the epoch, which may already be launched."""
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
            # Only here does nothing refer to the memory of the failed step.
            self._runner.release()
        return failed

    def _failed(self, plan: StepPlan | PoolPlan, error: Exception) -> StepFailed:
        import torch

        # After such an error this GPU runs nothing any more, and with several workers the others are ahead of
        # this one for good.
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
    """Log the phase of a load, such as the import of torch or the reading of weights.

    A terminal shows it while the user waits.
    """
    loading.info("%s%s", where, PHASES[phase])


class GrammarThread:
    """Compiles grammars one after another in a thread that starts with the first.

    The thread has a lower priority than those that compute and than the event loop, and the compiler releases
    the interpreter lock, so streams continue.

    Args:
        answer: called in this thread with the result of each grammar.
    """

    def __init__(self, answer: Callable[[GrammarReady], None]) -> None:
        self._answer = answer
        # At most one grammar and a vocabulary.
        self._works: queue.SimpleQueue[tuple[bytes, Callable[[], object]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<GrammarThread: {self._works.qsize()} to do>"

    def do(self, work: Callable[[], object], key: bytes = b"") -> None:
        """Queue work for the thread, which starts with the first work.

        For a grammar, pass its key to receive an answer.
        """
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
            # The error belongs to the request. A panic of the library is not an Exception.
            except BaseException as raised:  # noqa: ASYNC103
                error = f"{type(raised).__name__}: {raised}"
            if key:
                self._answer(GrammarReady(key, error))
