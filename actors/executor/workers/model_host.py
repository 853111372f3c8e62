"""A model on the thread that loads it: the part that a device in a thread and a worker process share.

Torch's intra-op settings, inference mode and current stream are thread-local, so one thread owns the model for its
whole life.  torch is imported here by `load` and nowhere before.

A thread in which grammars are compiled while the device computes.

It is nicer than those that compute and than the event loop, and the compiler does not hold the interpreter, so streams go on.
"""

import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, assert_never

from trouper.actors.executor.device import DeviceInfo, PendingResult, StepResult
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
from trouper.actors.messages.steps import PoolPlan, StepFailed, StepPlan
from trouper.actors.runtime.startup import (
    collections_paused,
    num_physical_cores,
    set_torch_environment,
)
from trouper.config.gguf.header import is_gguf
from trouper.config.parallel import CPU_BIND
from trouper.config.resolve import EngineConfig
from trouper.errors import UnsupportedFeatureError, invalid

if TYPE_CHECKING:
    from trouper.actors.executor.runners.model_runner import ModelRunner


logger = logging.getLogger(__name__)
loading = logging.getLogger("trouper.loading")  # a terminal shows its last record
Phase = Literal["import", "weights"]
PHASES: dict[Phase, str] = {"import": "importing torch", "weights": "loading the weights"}
WIDE = 2**17  # numbers, which torch shares out among its threads


class ModelHost:
    """Loads a model, or the part of it that a worker has, and runs its plans; an exception in a step fails the steps of its epoch.

    Args:
        rank: the number of the worker, of those of its device.
        files: descriptors of what it shares with the others.
    """

    def __init__(self, config: EngineConfig, rank: int = 0, files: Sequence[int] = ()) -> None:
        self._config = config
        self._rank, self._files = rank, files
        self._runner: ModelRunner | None = None
        self._refused_epoch = -1

    def __repr__(self) -> str:
        return (
            f"<ModelHost {self._config.model.name!r}, {'loaded' if self._runner else 'not loaded'}>"
        )

    def load(self, tell: Callable[[Phase], None]) -> DeviceInfo:
        """Import torch and load the model, on the thread that will run it; `tell` hears how far it is.

        Raises:
            TrouperValidationError: checkpoint, traits or KV memory do not fit the config.
            UnsupportedFeatureError: the architecture is not known.
        """
        num_workers = self._config.num_workers
        if self._config.cpu_bind is not None:
            _bind(self._config.cpu_bind[self._rank])
            num_workers = 1  # of those processors
        set_torch_environment()
        tell("import")
        with collections_paused():
            import torch
        num_elsewhere = torch.get_num_threads()
        num_cores = max(1, num_physical_cores() // num_workers)
        num_threads = min(num_elsewhere, num_cores)
        compute_with(num_threads, num_elsewhere)
        if self._config.device == "cpu":
            start_nice(lambda: torch.zeros(WIDE).neg_())  # the threads that help this one
        with collections_paused():
            self._runner = runner = self._make_runner()
        tell("weights")
        info = runner.load()
        if runner.is_tiny:
            num_threads = 1  # on a busy machine a barrier costs a time slice, 4 ms
        compute_with(num_threads, num_elsewhere)  # the runner may have set it for others
        if self._config.device == "cpu" and self._config.pooler is None and num_threads > 1:
            be_nice()  # as those that help
        return info

    def _make_runner(self) -> "ModelRunner":
        if self._config.pooler is not None:
            from trouper.actors.executor.runners.cpu.pooling_runner import PoolingRunner

            return PoolingRunner(self._config)
        if self._uses_transformers():
            from trouper.actors.executor.runners.cpu.models import HfModel
            from trouper.actors.executor.runners.cpu.runner import CpuRunner

            return CpuRunner(self._config, HfModel(self._config))
        if self._config.device == "cuda" and self._config.tensor_parallel_size > 1:
            from trouper.actors.executor.runners.cuda.rank_runner import RankRunner

            return RankRunner(self._config, self._rank, self._files)
        if self._config.device == "cuda":
            from trouper.actors.executor.runners.cuda.runner import CudaRunner

            return CudaRunner(self._config)
        if self._config.workers_per_replica > 1:
            from trouper.actors.executor.runners.cpu.stage_runner import StageRunner

            return StageRunner(self._config, self._rank, self._files)
        from trouper.actors.executor.runners.cpu.runner import CpuRunner

        return CpuRunner(self._config)

    def _uses_transformers(self) -> bool:
        """Whether the code of the transformers library computes the model.

        Raises:
            UnsupportedFeatureError: it does, and on a device where it is not supported.
        """
        from trouper.actors.executor.models.families.registry import has_own_code

        config, model = self._config, self._config.model
        if config.model_impl == "trouper" or is_gguf(Path(model.path)):
            return False
        if config.model_impl == "auto" and has_own_code(model.hf_config, model.architecture):
            return False
        if config.device != "cpu":
            raise UnsupportedFeatureError(
                f"{model.architecture} is computed by way of transformers, on the CPU alone; set device='cpu'",
                parameter="device",
            )
        for name, size, missing in (
            ("pipeline_parallel_size", config.num_stages, "stages"),
            ("tensor_parallel_size", config.tensor_parallel_size, "ranks"),
        ):
            if size > 1:
                raise UnsupportedFeatureError(
                    f"{model.architecture} is computed by way of transformers, which has no {missing}",
                    parameter=name,
                )
        if config.speculation is not None:
            raise UnsupportedFeatureError(
                f"{model.architecture} is computed by way of transformers, where more rows change the bits of one",
                parameter="speculative_config",
            )
        return True

    def execute(
        self, plan: StepPlan | PoolPlan
    ) -> StepResult | PendingResult[StepResult | None] | None:
        """Run a plan, or launch it; None: another worker answers.

        Raises:
            Exception: nothing runs on this device any more.
        """
        runner = self._loaded_runner
        return self._guarded(plan, lambda: runner.execute(plan))

    def call(self, action: DeviceAction) -> None:
        """Perform an action of `Device.call`; the caller has finished every launched step before."""
        runner = self._loaded_runner
        match action:
            case Sleep(level):
                runner.sleep(level)
            case Wake(tags):
                runner.wake(tags)
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
        """Give back memory and threads.  Idempotent."""
        if self._runner is not None:
            self._runner.close()

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

        # Nothing runs on this GPU any more; or the other workers are ahead of this one for good.
        if isinstance(error, torch.AcceleratorError) or self._config.workers_per_replica > 1:
            raise error
        columns = plan.request_slots if isinstance(plan, StepPlan) else plan.entries
        logger.error("step %d of %d columns failed", plan.step, len(columns), exc_info=error)
        self._refused_epoch = plan.epoch
        is_out_of_memory = isinstance(error, torch.OutOfMemoryError)
        return StepFailed(plan.step, f"{type(error).__name__}: {error}", is_out_of_memory)


def _bind(cpus: Sequence[int]) -> None:
    """Have this thread, and those that it starts from now on, run on these processors alone.

    Raises:
        TrouperValidationError: the machine has none of them, or this process may not use them.
    """
    try:
        os.sched_setaffinity(0, cpus)
    except (OSError, AttributeError) as error:
        raise invalid(CPU_BIND, f"cannot run on processors {list(cpus)}: {error}") from None


def log_phase(phase: Phase, *, where: str = "") -> None:
    """Tell in the log how far a load is."""
    loading.info("%s%s", where, PHASES[phase])


class GrammarThread:
    """Does one piece of work after another; begins at the first.

    Args:
        answer: is told of each grammar, in the thread.
    """

    def __init__(self, answer: Callable[[GrammarReady], None]) -> None:
        self._answer = answer
        # One grammar at a time, and a vocabulary.
        self._works: queue.SimpleQueue[tuple[bytes, Callable[[], object]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<GrammarThread: {self._works.qsize()} to do>"

    def do(self, work: Callable[[], object], key: bytes = b"") -> None:
        """Have something done; of a grammar, whose key it is, the end is told."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._serve, name="trouper-grammars", daemon=True
            )
            self._thread.start()
        self._works.put((key, work))

    def close(self) -> None:
        """End the thread when its work is done, which takes half a second at most."""
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
            except BaseException as raised:  # noqa: ASYNC103  # it is the request's; a panic of the library is no Exception
                error = f"{type(raised).__name__}: {raised}"
            if key:
                self._answer(GrammarReady(key, error))
