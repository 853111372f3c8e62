"""Define the interface between a device and the model that it runs (`ModelRunner`), and own a model's memory (`ResidentModel`).

A device decides in which thread or process a model runs, a runner how it is computed: on the CPU or a GPU, to generate or to
pool. This interface makes the two independent.

A sleeping engine frees its KV cache, and at level 2 also its weights. Either may therefore be absent when a runner needs it.
`ResidentModel` owns both, so that a runner only asks for what a step needs.
"""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch

from trouper.actors.executor.device import DeviceInfo, PendingResult, StepResult
from trouper.actors.executor.models.decoder import Decoder, KVCacheSpec, StateSpec
from trouper.actors.executor.steps.adapter_slots import AdapterSlots
from trouper.actors.executor.weights.decoder import Wrap
from trouper.actors.messages.steps import PoolPlan, StepPlan
from trouper.config.adapters import AdapterFiles
from trouper.errors import ProfilerAlreadyActiveError


class ModelRunner(Protocol):
    """Run a model with its memory on one device, synchronously and without scheduling state.

    It belongs to the thread that calls `load`.  Plans run in the order of the calls.
    """

    @property
    def is_tiny(self) -> bool:
        """Return whether one thread computes the model faster than several threads, which must wait for each other.

        The device then uses one thread, which also leaves cores for other processes.
        """
        ...

    def load(self) -> DeviceInfo:
        """Load the weights and allocate all memory, so that errors occur at start and not during a step.

        Raises:
            TrouperValidationError: the checkpoint does not fit the config, or the memory is too small.
        """
        ...

    def execute(
        self, plan: StepPlan | PoolPlan
    ) -> StepResult | PendingResult[StepResult | None] | None:
        """Run a plan, or launch it.  Returns None if another worker answers.

        After an exception, the sequences of the plan must be scheduled again.
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


DecoderT = TypeVar("DecoderT", bound=Decoder)
DecoderT_co = TypeVar("DecoderT_co", bound=Decoder, covariant=True)
DecoderT_contra = TypeVar("DecoderT_contra", bound=Decoder, contravariant=True)
MemoryT = TypeVar("MemoryT")


class Model(Protocol[DecoderT_co]):
    """One way to compute a model on one device: what is known before its weights are read, and how they are read."""

    @property
    def cache_specs(self) -> tuple[KVCacheSpec, ...] | None:
        """Return what the layers keep of each token, or None if only the loaded decoder knows."""
        ...

    @property
    def state_specs(self) -> tuple[StateSpec, ...] | None:
        """Return the states of recurrent mixers, or None if only the loaded decoder knows."""
        ...

    def load(self, wrap: Wrap | None) -> DecoderT_co:
        """Read the weights.

        Args:
            wrap: adds adapters to each projection of the layers.

        Raises:
            TrouperValidationError: the checkpoint does not fit the config.
            UnsupportedFeatureError: the model cannot be computed this way.
        """
        ...


class WeightMover(Protocol[DecoderT_contra]):
    """Moves weights, for a device with memory of its own: weights that sleep at level 1 wait in host memory."""

    def to_host(self, decoder: DecoderT_contra) -> None:
        """Move all weights to host memory. Called at sleep level 1; the decoder's tensors are replaced."""
        ...

    def to_device(self, decoder: DecoderT_contra) -> None:
        """Move all weights back to the device, before the first step after a sleep."""
        ...


class ResidentModel(Generic[DecoderT, MemoryT]):
    """The weights and the step memory of one runner. Only this class sets `decoder` and `memory`.

    Args:
        model: reads the weights.
        allocate: makes the step memory, which contains the KV cache, for a number of blocks.
        adapters: the slots of LoRA adapters, if the engine has any. They outlive the weights.
        mover: for a device with memory of its own. On the CPU, weights stay where they are at level 1.
    """

    def __init__(
        self,
        model: Model[DecoderT],
        allocate: Callable[[Sequence[KVCacheSpec], int], MemoryT],
        adapters: AdapterSlots | None = None,
        mover: WeightMover[DecoderT] | None = None,
    ) -> None:
        self._model, self._allocate = model, allocate
        self._adapters, self._mover = adapters, mover
        self._specs, self._state_specs = model.cache_specs, model.state_specs
        self.decoder: DecoderT | None = None
        self.memory: MemoryT | None = None
        self._is_on_host = False
        # The number of blocks of `memory`, which the runner sets while it loads.
        self.num_blocks = 0

    @property
    def cache_specs(self) -> tuple[KVCacheSpec, ...]:
        """Return what the layers keep of each token; reads the weights first if only they contain the answer."""
        if self._specs is None:
            self.load_weights()
        assert self._specs is not None
        return self._specs

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        """Return the states of recurrent mixers; reads the weights first if only they contain the answer."""
        if self._state_specs is None:
            self.load_weights()
        assert self._state_specs is not None
        return self._state_specs

    def load_weights(self) -> None:
        """Read the weights, or move them back from host memory, unless they are resident. Raises like `Model.load`."""
        with torch.inference_mode():
            if self.decoder is None:
                wrap = None if self._adapters is None else self._adapters.wrap
                self.decoder = self._model.load(wrap)
                self._specs = self.decoder.cache_specs
                self._state_specs = self.decoder.state_specs
            elif self._is_on_host and self._mover is not None:
                self._mover.to_device(self.decoder)
        self._is_on_host = False

    def allocate(self, num_blocks: int | None = None) -> None:
        """Allocate the step memory, such as the KV cache, unless it is resident.

        `num_blocks` is by default the number of blocks from the load.
        """
        if self.memory is None:
            with torch.inference_mode():
                self.memory = self._allocate(self.cache_specs, num_blocks or self.num_blocks)

    def drop_memory(self) -> None:
        """Free the step memory, but keep the weights.

        Running sequences are lost; the scheduler has preempted them before.
        """
        self.memory = None

    def wake(self, tags: frozenset[str]) -> None:
        """Load `weights` and `kv_cache`, whichever `tags` names, unless they are resident.

        Each is restored from where `sleep` put it.
        """
        if "weights" in tags:
            self.load_weights()
        if "kv_cache" in tags:
            self.allocate()

    def sleep(self, level: int) -> None:
        """Drop the step memory and move the weights to host memory at level 1; drop both at level 2."""
        if level >= 1:
            self.drop_memory()
        if level >= 2:
            self.decoder, self._is_on_host = None, False
        elif level == 1 and self.decoder is not None and self._mover and not self._is_on_host:
            with torch.inference_mode():
                self._mover.to_host(self.decoder)
            self._is_on_host = True

    def close(self) -> None:
        """Drop everything, including the adapters.  Idempotent."""
        self._adapters = None
        self.sleep(2)

    @property
    def is_resident(self) -> bool:
        """Whether everything that a step needs is in the device's memory."""
        return self.decoder is not None and not self._is_on_host and self.memory is not None

    def resident(self) -> tuple[DecoderT, MemoryT]:
        """Return the weights and the step memory, which a step needs.

        Raises:
            RuntimeError: one of them is not resident.
        """
        if self.decoder is None or self.memory is None or self._is_on_host:
            raise RuntimeError("cannot run a step: the weights or the KV cache are not loaded")
        return self.decoder, self.memory

    def load_adapter(self, slot: int, files: AdapterFiles) -> None:
        """Put an adapter into a slot, numbered from 1. If it cannot be loaded, the slot is unchanged.

        Raises:
            TrouperValidationError: the adapter does not fit the model, or is malformed.
            UnsupportedFeatureError: it contains more than the matrices of linear layers.
        """
        if self._adapters is None:
            raise RuntimeError("cannot load an adapter: the engine runs without enable_lora")
        with torch.inference_mode():
            self._adapters.load(slot, files)
