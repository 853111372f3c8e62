"""The interface between a device and the model that computes its plans, and the profiler around its work.

Devices differ in where the model runs; runners differ in what runs: on the CPU or a GPU, generating or
pooling. The interface keeps both independent.
"""

import logging
import time
from pathlib import Path
from typing import Protocol

import torch

from trouper.actors.executor.device import DeviceInfo, PendingResult, StepResult
from trouper.actors.messages.steps import PoolPlan, StepPlan
from trouper.config.adapters import AdapterFiles
from trouper.errors import ProfilerAlreadyActiveError


class ModelRunner(Protocol):
    """A model with its memory on one device, synchronous and without scheduling state.

    It belongs to the thread that calls `load`.  Plans run in the order of the calls.
    """

    @property
    def is_tiny(self) -> bool:
        """Whether one thread computes the model faster than several threads, which wait for each other.

        The device then uses one, also for the sake of other processes.
        """
        ...

    def load(self) -> DeviceInfo:
        """Read the weights and take all memory: everything that can fail at start.

        Raises:
            TrouperValidationError: the checkpoint does not fit the config, or the memory is too small.
        """
        ...

    def execute(
        self, plan: StepPlan | PoolPlan
    ) -> StepResult | PendingResult[StepResult | None] | None:
        """Run a plan of the kind that the model is for, or launch it.  Returns None if another worker answers.

        After an exception the rows of the plan must be given again.
        """
        ...

    def sleep(self, level: int) -> None:
        """Give memory back: at level 1 the KV memory, and weights as far as the host keeps them; at level 2 both.

        A runner in this state refuses plans.
        """
        ...

    def wake(self, tags: frozenset[str]) -> None:
        """Load `weights` and `kv_cache`, whichever `tags` names, unless they are loaded.

        Raises the errors of loading if the files have changed. Plans can run once both are loaded.
        """
        ...

    def load_adapter(self, slot: int, files: AdapterFiles) -> None:
        """Load an adapter into a slot.

        Raises:
            TrouperValidationError: the adapter does not fit the model, or adapters are not enabled.
        """
        ...

    def start_profile(self, folder: str, prefix: str) -> None:
        """Begin a trace of all further work.

        Raises:

            ProfilerAlreadyActiveError: a trace is already being recorded; stop it first.
        """
        ...

    def stop_profile(self) -> None:
        """End the trace and write it to its file.

        Without a trace it only warns, because a client may repeat its request. Writing a long trace takes seconds.
        """
        ...

    def release(self) -> None:
        """Return unused memory to the system or the device. Called after the memory of a model has been freed."""
        ...

    def close(self) -> None:
        """Release all memory and threads.  Idempotent. The runner cannot be used afterwards."""
        ...


logger = logging.getLogger(__name__)


class Profiler:
    """Records at most one trace at a time with torch's profiler.

    Traces contain the operations of the CPU and, on a GPU, the kernels.
    """

    def __init__(self) -> None:
        self._profile: tuple[torch.profiler.profile, Path] | None = None

    def start(self, folder: str, prefix: str) -> None:
        """Begin a trace; `stop` writes it as a Chrome trace into the folder.

        Raises:
            ProfilerAlreadyActiveError: a trace is being recorded.
        """
        if self._profile is not None:
            raise ProfilerAlreadyActiveError(
                "a profile is already being recorded: call stop_profile first"
            )
        profile = torch.profiler.profile()
        profile.start()
        self._profile = profile, Path(folder) / f"{prefix}-{time.time_ns()}.json"

    def stop(self) -> None:
        """End the trace and write it.

        Logs a warning if none is being recorded.  The folder is created if necessary.
        """
        if self._profile is None:
            logger.warning("no profile is being recorded: call start_profile first")
            return
        (profile, file), self._profile = self._profile, None
        profile.stop()
        file.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(file))
