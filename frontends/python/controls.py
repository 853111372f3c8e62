"""Implement the controls of all Python interfaces (pause, sleep, wake, adapters, caches, profiles, metrics), and check shared arguments.

The signatures are vLLM's, so some arguments have no meaning here. They raise an error if they are set, because a silently ignored
argument would change results without notice. `AsyncLLMEngine` inherits the controls, and `BlockingControls` wraps each of them for
blocking code, so each is written once.
"""

import warnings
from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

from trouper.config.model import ModelConfig
from trouper.errors import TrouperValidationError, UnsupportedFeatureError
from trouper.lora import LoRARequest
from trouper.metrics import Metric
from trouper.params import SamplingParams

if TYPE_CHECKING:
    from trouper.actors.engine.engine import Engine

T = TypeVar("T")
TOKENIZATION_OPTIONS = ("truncate_prompt_tokens", "truncation_side", "add_special_tokens")


def default_sampling_params(model: ModelConfig) -> SamplingParams:
    """Return the sampling defaults in the model's generation_config.json.

    Calls without `sampling_params` use them.  They can be different from the defaults of `SamplingParams()`.
    """
    return SamplingParams(**model.default_sampling)


def tokenization_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the supported `tokenization_kwargs`; warn about any other.

    Raises:
        TrouperValidationError: `options` is not a dict, or `add_special_tokens` is not a bool.
    """
    if options is None:
        return {}
    if not isinstance(options, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  # not every caller is typed
        raise TrouperValidationError(
            "must be a dict", parameter="tokenization_kwargs", value=type(options).__name__
        )
    known = {name: value for name, value in options.items() if name in TOKENIZATION_OPTIONS}
    for name in options.keys() - known.keys():
        warnings.warn(
            f"tokenization_kwargs: {name!r} is not supported and has no effect", stacklevel=3
        )
    adds = known.get("add_special_tokens")
    if not isinstance(adds, bool | None):
        raise TrouperValidationError(
            "must be True or False", parameter="add_special_tokens", value=adds
        )
    return known


def plain_prompt(prompt: Any) -> Any:
    """Convert token ids in an array (NumPy, torch) to a list; return any other prompt unchanged.

    The engine accepts lists only, but datasets usually contain arrays.
    """
    if isinstance(prompt, str):
        return prompt
    if hasattr(prompt, "tolist"):
        return prompt.tolist()
    if isinstance(prompt, Mapping):
        fields = cast("Mapping[str, Any]", prompt)
        if hasattr(fields.get("prompt_token_ids"), "tolist"):
            return {**fields, "prompt_token_ids": plain_prompt(fields["prompt_token_ids"])}
    return cast("object", prompt)


def check_unused(**options: Any) -> None:
    """Raise UnsupportedFeatureError if one of these arguments of vLLM, which trouper does not support, is not None.

    Ignoring such an argument would silently give other results than vLLM.
    """
    for name, value in options.items():
        if value is not None:
            raise UnsupportedFeatureError(f"{name} is not supported yet; leave it None")


def one_each(value: T | Sequence[T] | None, num_prompts: int, name: str) -> list[T | None]:
    """Return one value for each prompt: a scalar is repeated, a list must have as many entries as there are prompts.

    Raises TrouperValidationError, with the argument's name, if the lengths differ.
    """
    if not isinstance(value, list | tuple):
        return [cast("T | None", value)] * num_prompts
    values = cast("Sequence[T]", value)
    if len(values) != num_prompts:
        raise TrouperValidationError(
            f"{name} has {len(values)} entries for {num_prompts} prompts", parameter=name
        )
    return list(values)


class AsyncControls:
    """Control methods of `AsyncLLMEngine`, which provides `engine` and `profiler_dir`.

    They change the state of the whole engine, for all of its requests, and may be called while requests run.
    """

    @property
    @abstractmethod
    def engine(self) -> "Engine":
        """The running engine.  Raises EngineDeadError if it is not running."""

    async def pause_generation(self, mode: str = "abort", clear_cache: bool = True) -> None:
        """Stop scheduling new steps.

        Args:
            mode: `abort` ends open requests, `wait` lets them finish, `keep` freezes them until resumed.
            clear_cache: forget cached prefixes, for example before the weights change.
        """
        await self.engine.controls.pause(mode, clear_cache=clear_cache)

    async def resume_generation(self) -> None:
        """Resume scheduling.  Raises RuntimeError if the weights or the KV cache are not in memory.

        Paused requests continue where they stopped, without computing anything twice.
        """
        await self.engine.controls.resume()

    async def is_paused(self) -> bool:
        return self.engine.lifecycle.is_paused

    @asynccontextmanager
    async def paused(self, mode: str = "keep", clear_cache: bool = False) -> AsyncGenerator[None]:
        """Pause the engine during the block; every exit restores its earlier state.

        Modes are those of `pause_generation`: `keep` holds open requests, `wait` finishes them first, and `abort`
        ends them.
        """
        async with self.engine.controls.paused(mode, clear_cache=clear_cache):
            yield

    async def sleep(self, level: int = 1, mode: str = "abort", *, reload: bool = True) -> None:
        """Stop scheduling; from level 1 also release the memory of the KV cache and the weights.

        Args:
            level: 0 only pauses; 1 releases the KV cache and moves a GPU's weights to pinned host memory; 2 releases
                the weights too, so that waking reads them from the model's folder.
            mode: what happens to open requests, as in `pause_generation`.

        Raises:
            UnsupportedFeatureError: `reload=False`; waking from level 2 always reads the weights from their files.
        """
        if not reload:
            raise UnsupportedFeatureError("sleep: reload=False is not supported yet")
        if not await self.engine.controls.sleep(level, mode):
            warnings.warn(f"already asleep at level {level} or deeper", stacklevel=2)

    async def wake_up(self, tags: Iterable[str] | None = None) -> bool:
        """Restore some of `weights`, `kv_cache` and `scheduling`, or all.  Returns whether the engine is fully awake.

        Weights are read again if they were discarded.  Waking in parts lets a program load new weights before the KV
        cache takes memory.
        """
        return await self.engine.controls.wake(tags)

    async def is_sleeping(self) -> bool:
        """Return whether the engine is paused or some of its memory is released."""
        return self.engine.lifecycle.is_sleeping

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget all cached prefixes.  Returns False and changes nothing if a request uses a block.

        Args:
            reset_running_requests: preempt running requests first; they are computed again from their tokens.
            reset_connector: remove the files of this model from the tier on disk, too.
        """
        preempt = "resample" if reset_running_requests else "no"
        return await self.engine.controls.reset_prefix_cache(
            preempt=preempt, clears_tier=reset_connector
        )

    async def reset_mm_cache(self) -> None:
        """Forget all processed images and the vision tower's rows for them, except those of open requests."""
        prompts = self.engine.prompts
        if prompts is not None and prompts.images is not None:
            prompts.images.clear()

    async def reset_encoder_cache(self) -> None:
        """Do the same as `reset_mm_cache`."""
        await self.reset_mm_cache()

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load a LoRA adapter.  Returns False if it is already loaded.

        Raises:
            TrouperValidationError: its files do not fit the model, or the engine runs without `enable_lora`.
            UnsupportedFeatureError: its files hold more than LoRA weights.
            RetryableRequestError: `max_loras` adapters are loaded and requests use all of them.
        """
        return await self.engine.adapters.load(lora_request)

    async def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter after its open requests finish.  Returns whether it was loaded.

        New requests for it are refused at once.  Its number may then be used for another adapter.
        """
        return self.engine.adapters.unload(lora_id)

    async def pin_lora(self, lora_id: int) -> bool:
        """Protect an adapter from eviction.  Returns whether it is loaded.

        When all slots are in use, loading another adapter evicts the least recently used one that is not pinned.
        """
        return self.engine.adapters.pin(lora_id)

    async def list_loras(self) -> set[int]:
        """Return the integer ids of the loaded adapters."""
        return {request.lora_int_id for request in self.engine.adapters.requests}

    async def start_profile(
        self,
        profile_prefix: str | None = None,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
        profiler_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Start torch's profiler; `stop_profile` writes its trace to `profiler_config["torch_profiler_dir"]`.

        vLLM's arguments about iterations are refused, unless they are None.  Profiling slows every step.
        """
        check_unused(
            delay_iterations=delay_iterations,
            max_iterations=max_iterations,
            profiler_kwargs=profiler_kwargs,
        )
        engine = self.engine
        folder = engine.config.profile_folder()
        await engine.controls.start_profile(folder, profile_prefix or "trouper")

    async def stop_profile(self) -> None:
        """Stop the profiler and write its trace.

        The file is a Chrome trace, to be opened in Perfetto or chrome://tracing.  Raises TrouperValidationError if no
        folder is configured.
        """
        engine = self.engine
        # Raises an error if no folder is configured.
        engine.config.profile_folder()
        await engine.controls.stop_profile()

    async def get_metrics(self) -> list[Metric]:
        """Return all counters, gauges and histograms.  `LLM` collects them only with `disable_log_stats=False`.

        The values are the same as in the Prometheus text of `/metrics`, read at one moment.
        """
        return await self.engine.get_metrics()

    async def do_log_stats(self) -> None:
        """Log the line of statistics now instead of at the next interval.

        The line has the throughput, the number of running and queued requests, and the use of the KV cache.
        """
        await self.engine.log_stats()
