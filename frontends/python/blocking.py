"""The controls of `controls.py` for code that waits for them, one line each."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from trouper.config.model import ModelConfig
from trouper.config.model_view import ConfigView, ModelView
from trouper.errors import TrouperValidationError
from trouper.frontends.python.controls import AsyncControls
from trouper.frontends.python.engine_thread import EngineThread

P = ParamSpec("P")
T = TypeVar("T")


def blocking(
    method: Callable[Concatenate[Any, P], Awaitable[T]],
) -> Callable[Concatenate["BlockingControls", P], T]:
    """Return a method of `AsyncLLMEngine` as one that waits for its result."""

    @wraps(method)
    def wait(self: "BlockingControls", *args: P.args, **kwargs: P.kwargs) -> T:
        return self.thread.call(method, self.thread.engine, *args, **kwargs)

    return wait


class BlockingControls:
    """Base of `LLM` and `LLMEngine`: the same controls over an engine that runs in a thread."""

    thread: EngineThread

    sleep = blocking(AsyncControls.sleep)
    wake_up = blocking(AsyncControls.wake_up)
    is_sleeping = blocking(AsyncControls.is_sleeping)
    pause_generation = blocking(AsyncControls.pause_generation)
    resume_generation = blocking(AsyncControls.resume_generation)
    is_paused = blocking(AsyncControls.is_paused)
    reset_prefix_cache = blocking(AsyncControls.reset_prefix_cache)
    reset_mm_cache = blocking(AsyncControls.reset_mm_cache)
    add_lora = blocking(AsyncControls.add_lora)
    remove_lora = blocking(AsyncControls.remove_lora)
    pin_lora = blocking(AsyncControls.pin_lora)
    list_loras = blocking(AsyncControls.list_loras)
    start_profile = blocking(AsyncControls.start_profile)
    stop_profile = blocking(AsyncControls.stop_profile)
    get_metrics = blocking(AsyncControls.get_metrics)

    def paused(self, mode: str = "keep", clear_cache: bool = False) -> AbstractContextManager[None]:
        """Pause inside the block; on every way out the engine is again as it was before."""
        return self.thread.entered(self.thread.engine.paused(mode, clear_cache=clear_cache))

    @property
    def model_config(self) -> ModelConfig:
        return self.thread.engine.model_config

    def get_model_config(self) -> ModelView:
        """Return the model under vLLM's names, with the length and the dtype in force."""
        return self.thread.engine.get_model_config()

    @property
    def vllm_config(self) -> ConfigView:
        """The configuration under vLLM's names, for scripts that read them."""
        return self.thread.engine.vllm_config

    def get_tokenizer(self) -> Any:
        """Return the model's transformers tokenizer; needs the extra `transformers`."""
        self.thread.check_open()
        tokenizer = self.thread.engine.tokenizer
        if tokenizer is None:
            raise TrouperValidationError("skip_tokenizer_init is set", parameter="tokenizer")
        return tokenizer.hf_tokenizer()

    def close(self) -> None:
        """End the engine; memory, threads and tasks are gone when this returns.  Idempotent.

        Called by one of the engine's own threads, or inside trio, it only begins the end, for which that thread must be free.
        """
        self.thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
