"""`AsyncLLMEngine`: the engine inside an asyncio or trio program."""

from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import count
from typing import Any, Self, cast

import anyio
import anyio.to_thread
from anyio import AsyncContextManagerMixin

from trouper.actors.engine.generation import Generation
from trouper.actors.engine.wiring import Engine, EngineStatistics, open_engine
from trouper.actors.executor.device import Device
from trouper.actors.executor.devices.process import ProcessDevice
from trouper.actors.executor.devices.threaded import ThreadedDevice
from trouper.actors.executor.workers.launching import Launcher, launch
from trouper.actors.executor.workers.model_files import sample_model
from trouper.actors.messages.sinks import MakeVisible
from trouper.actors.rendering.tokenizers.tokenizer import Tokenizer
from trouper.config.args import EngineArgs
from trouper.config.generation import Frontend, Marks
from trouper.config.model import ModelConfig
from trouper.config.resolve import EngineConfig, resolve
from trouper.config.view import ConfigView, ModelView, vllm_config
from trouper.errors import EngineDeadError
from trouper.frontends.python.autostart import HoldingTask, StartingGeneration, can_start
from trouper.frontends.python.controls import AsyncControls
from trouper.frontends.python.options import (
    check_unused,
    default_sampling_params,
    plain_prompt,
    tokenization_options,
)
from trouper.inputs import PoolingPrompt, PromptType
from trouper.lora import LoRARequest
from trouper.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from trouper.params import SamplingParams
from trouper.pooling import PoolingParams


class AsyncLLMEngine(AsyncControls, AsyncContextManagerMixin):
    """An engine that runs inside its `async with` block: entering starts the actors, leaving aborts and ends them.

    In asyncio it may be used without a block, too: the first request starts it, and `close` or `shutdown` ends it.

    ::

        async with AsyncLLMEngine.from_engine_args(EngineArgs()) as engine:
            async for output in engine.generate("def f(", SamplingParams(max_tokens=32), "my-id"):
                print(output.outputs[0].text)
    """

    def __init__(
        self,
        engine_args: EngineArgs | EngineConfig,
        *,
        offline: bool = False,
        is_stepped: bool = False,
        launcher: Launcher | None = None,
        frontend: Frontend = "library",
    ) -> None:
        self._plan = engine_args  # as options, or resolved already
        self._offline = offline  # LLM's batch limits instead of the server's
        self._is_stepped = is_stepped
        self._frontend: Frontend = frontend
        self._launcher = launcher or launch  # of worker processes
        self._stack = AsyncExitStack()
        self._holding: HoldingTask | None = None  # of an engine that has started itself
        self._is_entered = False
        self._is_closed = False
        self._engine: Engine | None = None
        self._numbers = count()

    def __repr__(self) -> str:
        return f"<AsyncLLMEngine {self._engine!r}>"

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        return cls(engine_args)

    def _resolved(self) -> EngineConfig:
        plan = self._plan
        if isinstance(plan, EngineConfig):
            return plan
        return resolve(plan, offline=self._offline, frontend=self._frontend)

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        self._is_entered = True
        config = await anyio.to_thread.run_sync(  # reads files, and may download
            self._resolved, limiter=anyio.CapacityLimiter(1)
        )
        async with (
            _open_devices(config, self._launcher) as devices,
            open_engine(config, devices, is_stepped=self._is_stepped) as engine,
        ):
            self._engine = engine
            try:
                yield self
            finally:
                self._engine = None
                self._is_closed = True

    def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        prompt_text: str | None = None,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        loads_adapter: bool = True,
        reasoning: Marks | None = None,
        key: str = "",
        cache_scope: bytes = b"",
        visible: MakeVisible | None = None,
    ) -> Generation[RequestOutput]:
        """Return one request as an async iterator of `RequestOutput`; the last has `finished=True`.

        Use it as `async for output in engine.generate(…)`, or, when the loop may be left early, as
        `async with engine.generate(…) as stream`.  Leaving aborts the request.

        Args:
            sampling_params: None takes the model's own defaults.
            request_id: echoed in the outputs and the handle for `abort`; None mints one.
            priority: larger runs first.
            lora_request: the adapter; it is loaded when it is first named.
            loads_adapter: False refuses a request whose adapter is not known.
            reasoning: marks around the model's reasoning, where no option names them.
            visible: gives, by the text of the prompt, what tells the text of an output in which stop strings count; there they
                stay in the text, to be cut off by the caller.  None: they count everywhere, and are cut off.
            data_parallel_rank: the replica that it runs on while that one lives; None leaves the choice to the engine.
            session_id: requests of a session go to one replica, whose cache has their prefix.
            key: of the client, which has a share of the steps, and half of the room for grammars at most; empty: there is one client.
            cache_scope: requests share prefixes of the cache, and drafts from recent answers, only within one scope.
            prompt_text: accepted at None only.

        Raises:
            TypeError: `request_id` is not a string, or `sampling_params` not SamplingParams.
            While iterating: TrouperValidationError for a bad prompt or parameter, ValueError for a
            request id in flight, EngineDeadError when the engine has failed.
        """
        check_unused(prompt_text=prompt_text)
        if self._starts_itself:
            make = partial(
                self.generate, prompt, sampling_params, request_id,
                arrival_time=arrival_time, tokenization_kwargs=tokenization_kwargs,
                mm_processor_kwargs=mm_processor_kwargs, trace_headers=trace_headers, priority=priority,
                lora_request=lora_request, loads_adapter=loads_adapter, reasoning=reasoning,
                data_parallel_rank=data_parallel_rank, session_id=session_id, key=key,
                cache_scope=cache_scope, visible=visible,
            )  # fmt: skip
            return cast("Any", StartingGeneration(self._start_itself, make))
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
            lora_request=lora_request,
            loads_adapter=loads_adapter,
            reasoning=reasoning,
            visible=visible,
            data_parallel_rank=data_parallel_rank,
            session_id=session_id,
            key=key,
            cache_scope=cache_scope,
            **tokenization_options(tokenization_kwargs),
        )

    def encode(
        self,
        prompt: PoolingPrompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        max_text_tokens: tuple[int | None, ...] = (),
        data_parallel_rank: int | None = None,
        key: str = "",
    ) -> Generation[PoolingRequestOutput[PoolingOutput]]:
        """Return one pooling request as an async iterator of one output, to be used like `generate`'s.

        Args:
            pooling_params: None, or no task in it, takes the engine's default.
            max_text_tokens: the most of the text, or of each of a pair, that is read; special tokens are not counted.
            data_parallel_rank: the replica that it runs on while that one lives; None leaves the choice to the engine.
            key: names a client; texts of different ones have equal parts of the steps, where `max_step_ms` is not 0.

        Raises:
            TypeError: `request_id` is not a string, or `pooling_params` not PoolingParams.
            TrouperValidationError: the model does not pool, or there is no such replica.
            While iterating: as `generate`.
        """
        check_unused(lora_request=lora_request, trace_headers=trace_headers)
        if self._starts_itself:
            make = partial(
                self.encode, prompt, pooling_params, request_id,
                arrival_time=arrival_time, tokenization_kwargs=tokenization_kwargs, priority=priority,
                max_text_tokens=max_text_tokens, data_parallel_rank=data_parallel_rank, key=key,
            )  # fmt: skip
            return cast("Any", StartingGeneration(self._start_itself, make))
        return self.engine.encode(
            plain_prompt(prompt),
            PoolingParams() if pooling_params is None else pooling_params,
            f"request-{next(self._numbers)}" if request_id is None else request_id,
            priority=priority,
            arrival_time=arrival_time,
            max_text_tokens=max_text_tokens,
            data_parallel_rank=data_parallel_rank,
            key=key,
            **tokenization_options(tokenization_kwargs),
        )

    async def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> Generation[RequestOutput]:
        """Queue a request as `generate` makes it; the caller reads or closes it.

        Raises:
            TrouperValidationError: a bad prompt or parameter; nothing is left open.
        """
        if self._starts_itself:
            await self._start_itself()
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
        """Abort requests; each reader gets a final output with `finish_reason="abort"`."""
        self.engine.abort(request_id)

    async def step(self) -> None:
        """Run one iteration of an engine that is stepped by hand; readers then find its outputs."""
        await self.engine.controls.step()

    async def start(self) -> None:
        """Start the actors, as entering does; for a program that cannot nest.

        Close it in the same task, and put no scope around one of the two alone: no `fail_after`, and before Python
        3.12 no `asyncio.wait_for`, which makes a task.
        """
        await self._stack.enter_async_context(self)

    async def close(self, timeout: float | None = None) -> None:  # noqa: ASYNC109  # vLLM's signature
        """End what `start` began.  Idempotent.

        Args:
            timeout: seconds in which open requests may finish; None takes `shutdown_timeout`.
        """
        self._is_closed = True
        try:
            if timeout is not None and self._engine is not None:
                await self._engine.shut_down(timeout)
        finally:
            await self._stack.aclose()
            if self._holding is not None:
                await self._holding.aclose()  # noqa: ASYNC102  # a cancelled close may leave it to its task

    def shutdown(self, timeout: float | None = None) -> None:
        """End an engine that has started itself, soon; `close` waits for the end.

        Args:
            timeout: accepted for vLLM's sake: open requests are aborted.
        """
        self._is_closed = True
        if self._holding is not None:
            self._holding.stop()

    @property
    def _starts_itself(self) -> bool:
        """Whether a request starts the engine: the program has neither entered nor closed it."""
        is_its_own = self._holding is not None or not self._is_entered
        return self._engine is None and is_its_own and not self._is_closed and can_start()

    async def _start_itself(self) -> None:
        if self._holding is None:
            self._holding = HoldingTask(self)
        await self._holding.wait_started()

    async def wait_for_requests_to_drain(self, timeout: float = 300) -> None:  # noqa: ASYNC109  # vLLM's signature
        """Wait until no request is open.

        Raises:
            TimeoutError: one still is.
        """
        with anyio.fail_after(timeout):
            await self.engine.wait_idle()

    # State

    async def is_tracing_enabled(self) -> bool:
        return self.engine.config.otlp_traces_endpoint is not None

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return self.engine.config.supported_tasks

    async def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Raises what a request of n completions would raise now."""
        self.engine.check_admission(n, request_id)

    def statistics(self) -> EngineStatistics:
        return self.engine.statistics()

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise EngineDeadError("the engine is not running: use it inside `async with`")
        return self._engine

    @property
    def config(self) -> EngineConfig:
        """The resolved configuration of the engine."""
        return self.engine.config

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The renderers' tokenizer; None with `skip_tokenizer_init`."""
        return self.engine.tokenizer

    @property
    def model_config(self) -> ModelConfig:
        return self.engine.config.model

    def get_model_config(self) -> ModelView:
        """Return the model under vLLM's names, with the length and the dtype in force."""
        return ModelView(self.engine.config)

    @property
    def vllm_config(self) -> ConfigView:
        """The configuration under vLLM's names, for scripts that read them."""
        return vllm_config(self.engine.config)

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

    async def check_health(self) -> None:
        """Raises EngineDeadError when the engine has failed or is not running."""
        if self.engine.dead_error is not None:
            raise self.engine.dead_error


@asynccontextmanager
async def _open_devices(config: EngineConfig, launcher: Launcher) -> AsyncGenerator[list[Device]]:
    """Make a device for each replica, and listen for other machines while the block runs, if there are any."""
    replicas = range(config.data_parallel_size)
    if config.device_worker == "inline":
        yield [ThreadedDevice(config)]
        return
    files = await anyio.to_thread.run_sync(sample_model, config)
    if config.nodes is None:
        yield [ProcessDevice(config, launcher, replica=r, files=files) for r in replicas]
    else:
        from trouper.actors.executor.workers.machines.opening import open_workers

        async with open_workers(config, config.nodes) as launcher_of:
            yield [
                ProcessDevice(config, replica=r, launch_workers=launcher_of(r), files=files)
                for r in replicas
            ]


AsyncLLM = AsyncLLMEngine
