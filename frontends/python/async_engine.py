"""`AsyncLLMEngine`: the engine inside somebody else's asyncio or trio program.  Source: spec section 13."""

import warnings
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from typing import Any, Self

import anyio
import anyio.to_thread
from anyio import AsyncContextManagerMixin

from trouper.actors.engine.generation import Generation
from trouper.actors.engine.wiring import Engine, EngineStatistics, open_engine
from trouper.actors.executor.devices.threaded import LocalDevice
from trouper.config.args import EngineArgs, ModelConfig
from trouper.errors import EngineDeadError, TrouperValidationError, UnsupportedFeatureError
from trouper.frontends.python.options import (
    check_unused,
    default_sampling_params,
    plain_prompt,
    tokenization_options,
)
from trouper.inputs import PoolingPrompt, PromptType
from trouper.metrics import Metric
from trouper.outputs import RequestOutput
from trouper.params import SamplingParams
from trouper.pooling import PoolingParams
from trouper.pooling_outputs import PoolingOutput, PoolingRequestOutput


class AsyncLLMEngine(AsyncContextManagerMixin):
    """Entering starts the actors, leaving aborts what is open and ends them.

    ::

        async with AsyncLLMEngine.from_engine_args(EngineArgs()) as engine:
            async for output in engine.generate("def f(", SamplingParams(max_tokens=32), "my-id"):
                print(output.outputs[0].text)
    """

    def __init__(
        self, engine_args: EngineArgs, *, offline: bool = False, is_stepped: bool = False
    ) -> None:
        self._args = engine_args
        self._offline = offline  # LLM's batch limits instead of the server's
        self._is_stepped = is_stepped
        self._stack = AsyncExitStack()
        self._engine: Engine | None = None
        self._numbers = count()

    def __repr__(self) -> str:
        return f"<AsyncLLMEngine {self._engine!r}>"

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        return cls(engine_args)

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        config = await anyio.to_thread.run_sync(  # reads files, and may download
            lambda: self._args.resolve(offline=self._offline), limiter=anyio.CapacityLimiter(1)
        )
        device = LocalDevice(config)
        async with open_engine(config, device, is_stepped=self._is_stepped) as engine:
            self._engine = engine
            try:
                yield self
            finally:
                self._engine = None

    def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        arrival_time: float | None = None,
        lora_request: object | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        prompt_text: str | None = None,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
    ) -> Generation[RequestOutput]:
        """One request as an async iterator of `RequestOutput`; the last has `finished=True`.

        Use it as `async for output in engine.generate(…)`, or, when the loop may be left early, as
        `async with engine.generate(…) as stream`.  Leaving aborts the request.

        Args:
            sampling_params: None takes the model's own defaults.
            request_id: echoed in the outputs and the handle for `abort`; None mints one.
            priority: larger runs first.
            prompt_text, data_parallel_rank, session_id: accepted at None only.

        Raises:
            TypeError: `request_id` is not a string, or `sampling_params` not SamplingParams.
            While iterating: TrouperValidationError for a bad prompt or parameter, ValueError for a
            request id in flight, EngineDeadError when the engine has failed.
        """
        check_unused(
            lora_request=lora_request,
            prompt_text=prompt_text,
            data_parallel_rank=data_parallel_rank,
            session_id=session_id,
        )
        engine = self.engine
        return engine.generate(
            plain_prompt(prompt),
            default_sampling_params(engine.config.model)
            if sampling_params is None
            else sampling_params,
            f"request-{next(self._numbers)}" if request_id is None else request_id,
            priority=priority,
            arrival_time=arrival_time,
            mm_processor_kwargs=mm_processor_kwargs,
            trace_headers=trace_headers,
            **tokenization_options(tokenization_kwargs),
        )

    def encode(
        self,
        prompt: PoolingPrompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        arrival_time: float | None = None,
        lora_request: object | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> Generation[PoolingRequestOutput[PoolingOutput]]:
        """One pooling request: an async iterator of one output, to be used like `generate`'s.

        Args:
            pooling_params: None, or no task in it, takes the engine's default (spec section 14.1).

        Raises:
            TypeError: `request_id` is not a string, or `pooling_params` not PoolingParams.
            TrouperValidationError: the model does not pool.
            While iterating: as `generate`.
        """
        check_unused(lora_request=lora_request, trace_headers=trace_headers)
        return self.engine.encode(
            plain_prompt(prompt),
            PoolingParams() if pooling_params is None else pooling_params,
            f"request-{next(self._numbers)}" if request_id is None else request_id,
            priority=priority,
            arrival_time=arrival_time,
            **tokenization_options(tokenization_kwargs),
        )

    async def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: object | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> Generation[RequestOutput]:
        """Like `generate`, and already queued when this returns; the caller reads or closes it.

        Raises:
            TrouperValidationError: a bad prompt or parameter; nothing is left open.
        """
        generation = self.generate(
            prompt,
            params,
            request_id,
            arrival_time=arrival_time,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            trace_headers=trace_headers,
            priority=priority,
        )
        await generation.submit()
        return generation

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; each reader gets its final output with `finish_reason="abort"`."""
        self.engine.abort(request_id)

    async def start(self) -> None:
        """Like entering; for a program that cannot nest.

        Close it in the same task, and put no scope around one of the two alone: no `fail_after`, and before Python
        3.12 no `asyncio.wait_for`, which makes a task.
        """
        await self._stack.enter_async_context(self)

    async def close(self, timeout: float | None = None) -> None:  # noqa: ASYNC109  # vLLM's signature
        """The counterpart of `start`.  Idempotent.

        Args:
            timeout: seconds in which open requests may finish; None takes `shutdown_timeout`.
        """
        try:
            if timeout is not None and self._engine is not None:
                await self._engine.shut_down(timeout)
        finally:
            await self._stack.aclose()

    # Lifecycle; spec section 10

    async def pause_generation(self, mode: str = "abort", clear_cache: bool = True) -> None:
        """Stop scheduling; `abort` ends the requests, `wait` lets them finish, `keep` freezes them."""
        await self.engine.pause(mode, clear_cache=clear_cache)

    async def resume_generation(self) -> None:
        """Schedule again.  Raises RuntimeError while memory is absent."""
        await self.engine.resume()

    async def is_paused(self) -> bool:
        return self.engine.lifecycle.is_paused

    @asynccontextmanager
    async def paused(self, mode: str = "keep", clear_cache: bool = False) -> AsyncGenerator[None]:
        """Paused inside the block; on every way out as it was found."""
        async with self.engine.paused(mode, clear_cache=clear_cache):
            yield

    async def sleep(self, level: int = 1, mode: str = "abort", *, reload: bool = True) -> None:
        """0: only stop scheduling; 1, 2: also give weights and KV memory back.

        Raises:
            UnsupportedFeatureError: `reload=False`; after level 2 the weights always come from the files.
        """
        if not reload:
            raise UnsupportedFeatureError("sleep: reload=False is not supported yet")
        if not await self.engine.sleep(level, mode):
            warnings.warn(f"already asleep at level {level} or deeper", stacklevel=2)

    async def wake_up(self, tags: Iterable[str] | None = None) -> bool:
        """Bring back `weights`, `kv_cache`, `scheduling`, or all.  True when fully awake."""
        return await self.engine.wake(tags)

    async def is_sleeping(self) -> bool:
        """Paused, or short of memory."""
        return self.engine.lifecycle.is_sleeping

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget all prefixes; False, and nothing changes, while any block is held."""
        preempt = "resample" if reset_running_requests else "no"
        return await self.engine.reset_prefix_cache(preempt=preempt)

    async def reset_mm_cache(self) -> None:
        """There is none to reset: prompts are text."""

    async def reset_encoder_cache(self) -> None:
        """There is none to reset: prompts are text."""

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
        await self.engine.start_profile(self._profiler_dir(), profile_prefix or "trouper")

    async def stop_profile(self) -> None:
        """Write the trace."""
        self._profiler_dir()
        await self.engine.stop_profile()

    async def wait_for_requests_to_drain(self, timeout: float = 300) -> None:  # noqa: ASYNC109  # vLLM's signature
        """Wait until no request is open.

        Raises:
            TimeoutError: one still is.
        """
        with anyio.fail_after(timeout):
            await self.engine.wait_idle()

    # State

    async def get_metrics(self) -> list[Metric]:
        """Every counter, gauge and histogram; needs `disable_log_stats=False`."""
        return await self.engine.get_metrics()

    async def do_log_stats(self) -> None:
        """Write the line of the statistics log now."""
        await self.engine.log_stats()

    async def is_tracing_enabled(self) -> bool:
        return self.engine.config.otlp_traces_endpoint is not None

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return self.engine.config.supported_tasks

    async def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Raises what a request of n completions would raise now; spec sections 10.2 and 13.4."""
        self.engine.check_admission(n, request_id)

    def statistics(self) -> EngineStatistics:
        return self.engine.statistics()

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise EngineDeadError("the engine is not running: use it inside `async with`")
        return self._engine

    @property
    def model_config(self) -> ModelConfig:
        return self.engine.config.model

    def get_model_config(self) -> ModelConfig:
        return self.model_config

    @property
    def is_running(self) -> bool:
        return self._engine is not None and self._engine.dead_error is None

    @property
    def is_stopped(self) -> bool:
        return not self.is_running

    @property
    def errored(self) -> bool:
        return self._engine is not None and self._engine.dead_error is not None

    @property
    def dead_error(self) -> EngineDeadError | None:
        return self._engine.dead_error if self._engine else None

    def _profiler_dir(self) -> str:
        settings = self._args.profiler_config or {}
        if "torch_profiler_dir" not in settings:
            raise TrouperValidationError(
                "needs a folder in torch_profiler_dir", parameter="profiler_config", value=settings
            )
        return str(settings["torch_profiler_dir"])

    async def check_health(self) -> None:
        """Raises EngineDeadError when the engine has failed or is not running."""
        if self.engine.dead_error is not None:
            raise self.engine.dead_error


AsyncLLM = AsyncLLMEngine
