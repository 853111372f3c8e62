"""The controls of an engine beside its requests: pause, sleep, wake, profile, metrics."""

import warnings
from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from trouper.errors import UnsupportedFeatureError
from trouper.frontends.python.options import check_unused
from trouper.lora import LoRARequest
from trouper.metrics import Metric

if TYPE_CHECKING:
    from trouper.actors.engine.engine import Engine


class AsyncControls:
    """Base of `AsyncLLMEngine`, which brings the running engine."""

    @property
    @abstractmethod
    def engine(self) -> "Engine":
        """The running engine.  Raises EngineDeadError when there is none."""

    async def pause_generation(self, mode: str = "abort", clear_cache: bool = True) -> None:
        """Stop scheduling; `abort` ends the requests, `wait` lets them finish, `keep` freezes them."""
        await self.engine.controls.pause(mode, clear_cache=clear_cache)

    async def resume_generation(self) -> None:
        """Schedule again.  Raises RuntimeError while memory is absent."""
        await self.engine.controls.resume()

    async def is_paused(self) -> bool:
        return self.engine.lifecycle.is_paused

    @asynccontextmanager
    async def paused(self, mode: str = "keep", clear_cache: bool = False) -> AsyncGenerator[None]:
        """Pause inside the block; on every way out the engine is again as it was before."""
        async with self.engine.controls.paused(mode, clear_cache=clear_cache):
            yield

    async def sleep(self, level: int = 1, mode: str = "abort", *, reload: bool = True) -> None:
        """Stop scheduling (level 0), and give the memory of weights and KV cache back (levels 1 and 2).

        Raises:
            UnsupportedFeatureError: `reload=False`; after level 2 the weights always come from the files.
        """
        if not reload:
            raise UnsupportedFeatureError("sleep: reload=False is not supported yet")
        if not await self.engine.controls.sleep(level, mode):
            warnings.warn(f"already asleep at level {level} or deeper", stacklevel=2)

    async def wake_up(self, tags: Iterable[str] | None = None) -> bool:
        """Bring back `weights`, `kv_cache`, `scheduling`, or all.  Returns True when fully awake."""
        return await self.engine.controls.wake(tags)

    async def is_sleeping(self) -> bool:
        """Return True while the engine is paused or short of memory."""
        return self.engine.lifecycle.is_sleeping

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget all prefixes; returns False, and changes nothing, while any block is held."""
        preempt = "resample" if reset_running_requests else "no"
        return await self.engine.controls.reset_prefix_cache(preempt=preempt)

    async def reset_mm_cache(self) -> None:
        """Do nothing: prompts are text, so there is no such cache."""

    async def reset_encoder_cache(self) -> None:
        """Do nothing: prompts are text, so there is no such cache."""

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter; returns False when it is there already.

        Raises:
            TrouperValidationError: its files do not fit the model, or the engine was started without `enable_lora`.
            UnsupportedFeatureError: it is more than a LoRA adapter.
            RetryableRequestError: requests use all adapters that may be loaded.
        """
        return await self.engine.adapters.load(lora_request)

    async def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter; requests that use it finish first.  Returns whether it was there."""
        return self.engine.adapters.unload(lora_id)

    async def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter loaded however long no request uses it; returns whether it is there."""
        return self.engine.adapters.pin(lora_id)

    async def list_loras(self) -> set[int]:
        """Return the numbers of the adapters that requests may name."""
        return {request.lora_int_id for request in self.engine.adapters.requests}

    async def start_profile(
        self,
        profile_prefix: str | None = None,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
        profiler_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Trace the device with torch's profiler, into `profiler_config["torch_profiler_dir"]`."""
        check_unused(
            delay_iterations=delay_iterations,
            max_iterations=max_iterations,
            profiler_kwargs=profiler_kwargs,
        )
        engine = self.engine
        folder = engine.config.profile_folder()
        await engine.controls.start_profile(folder, profile_prefix or "trouper")

    async def stop_profile(self) -> None:
        """Write the trace."""
        engine = self.engine
        engine.config.profile_folder()  # raises if no folder is configured
        await engine.controls.stop_profile()

    async def get_metrics(self) -> list[Metric]:
        """Return every counter, gauge and histogram; needs `disable_log_stats=False`, which `LLM` must be given."""
        return await self.engine.get_metrics()

    async def do_log_stats(self) -> None:
        """Write the line of the statistics log now."""
        await self.engine.log_stats()
