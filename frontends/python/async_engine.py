"""`AsyncLLMEngine`: run the engine inside an asyncio or trio program.

The engine's actors need an event loop. This class uses the program's own, so a request costs no thread hop and the
program's cancellation ends it. `LLM` and `LLMEngine` run this same class in a thread of their own for blocking code,
and the server is built on it.
"""

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
from trouper.actors.messages.requests import RequestOptions
from trouper.actors.rendering.tokenizer import Tokenizer
from trouper.config.args import EngineArgs
from trouper.config.engine_config import ConfigView, EngineConfig, ModelView, vllm_config
from trouper.config.model import ModelConfig
from trouper.config.resolve import resolve
from trouper.errors import EngineDeadError, invalid
from trouper.frontends.python.autostart import BackgroundTask, LazyGeneration, can_start
from trouper.frontends.python.controls import (
    AsyncControls,
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
    """An engine that runs inside an `async with` block: entering starts it, leaving aborts open requests and stops it.

    Asyncio programs may omit the block: the first request then starts the engine, and `close` or `shutdown` stops it.
    All methods belong to the event loop that started the engine; none may be called from another thread.

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
    ) -> None:
        # Arguments, or a configuration already resolved by the caller.
        self._plan = engine_args
        # Offline use allows larger batches than a server, which must answer new requests soon.
        self._offline = offline
        self._is_stepped = is_stepped
        self._launch_worker = launcher or launch
        self._stack = AsyncExitStack()
        self._background_task: BackgroundTask | None = None
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
        return resolve(plan, offline=self._offline)

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        self._is_entered = True
        # In a thread, because resolving reads files and may download a model.
        config = await anyio.to_thread.run_sync(self._resolved, limiter=anyio.CapacityLimiter(1))
        async with (
            _open_devices(config, self._launch_worker) as devices,
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
    ) -> Generation[RequestOutput]:
        """Start one request and return an async iterator of `RequestOutput`; the last one has `finished=True`.

        Use it as `async for output in engine.generate(…)`. If the loop may end early, use
        `async with engine.generate(…) as stream`, which aborts the request at the end of the block.

        Args:
            sampling_params: None means the model's defaults.
            request_id: appears in the outputs and identifies the request in `abort`; generated if it is None.
            priority: larger numbers run first.
            lora_request: the adapter to use; the first request that names it loads it.
            data_parallel_rank: run on this replica while it lives; by default the engine chooses one.
            session_id: requests of a session run on the same replica, to reuse their prefix in its cache.
            prompt_text: must be None.

        Raises:
            TypeError: `request_id` is not a string, or `sampling_params` is not SamplingParams.
            While iterating: TrouperValidationError for an invalid prompt or parameter, ValueError if another
            open request has the same id, EngineDeadError if the engine has failed.
        """
        check_unused(prompt_text=prompt_text)
        options = RequestOptions(
            priority=priority,
            arrival_time=arrival_time,
            mm_processor_kwargs=mm_processor_kwargs,
            lora_request=lora_request,
            trace_headers=trace_headers,
            data_parallel_rank=data_parallel_rank,
            session_id=session_id,
            **tokenization_options(tokenization_kwargs),
        )
        return self._generate(prompt, sampling_params, request_id, options)

    def _generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None,
        request_id: str | None,
        options: RequestOptions,
    ) -> Generation[RequestOutput]:
        """Start a request with all options in one object; returns and errors are those of `generate`."""
        if self._starts_itself:
            make = partial(self._generate, prompt, sampling_params, request_id, options)
            return cast("Any", LazyGeneration(self._start_itself, make))
        engine = self.engine
        if sampling_params is None:
            sampling_params = default_sampling_params(engine.config.model)
        return engine.generate(
            plain_prompt(prompt), sampling_params, self._named(request_id), options
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
    ) -> Generation[PoolingRequestOutput[PoolingOutput]]:
        """Start one pooling request and return an async iterator of its only output; use it like `generate`.

        Args:
            pooling_params: if it is None or names no task, the engine's default task is used.
            max_text_tokens: maximum tokens of the text, or of each text of a pair, without special tokens.
            data_parallel_rank: run on this replica while it lives; by default the engine chooses one.

        Raises:
            TypeError: `request_id` is not a string, or `pooling_params` is not PoolingParams.
            TrouperValidationError: the model does not pool, or the replica does not exist.
            While iterating: the errors listed in `generate`.
        """
        check_unused(lora_request=lora_request, trace_headers=trace_headers)
        options = RequestOptions(
            priority=priority,
            arrival_time=arrival_time,
            max_text_tokens=max_text_tokens,
            data_parallel_rank=data_parallel_rank,
            **tokenization_options(tokenization_kwargs),
        )
        return self._encode(prompt, pooling_params, request_id, options)

    def _encode(
        self,
        prompt: PoolingPrompt,
        pooling_params: PoolingParams | None,
        request_id: str | None,
        options: RequestOptions,
    ) -> Generation[PoolingRequestOutput[PoolingOutput]]:
        """Start a pooling request with all options in one object; returns and errors are those of `encode`."""
        if self._starts_itself:
            make = partial(self._encode, prompt, pooling_params, request_id, options)
            return cast("Any", LazyGeneration(self._start_itself, make))
        params = PoolingParams() if pooling_params is None else pooling_params
        return self.engine.encode(plain_prompt(prompt), params, self._named(request_id), options)

    def _named(self, request_id: str | None) -> str:
        return f"request-{next(self._numbers)}" if request_id is None else request_id

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
        """Render and queue a request before returning it; the caller must iterate or close it.

        `generate` queues its request only when iteration begins.

        Raises:
            TrouperValidationError: the prompt or a parameter is invalid; the request is closed.
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
        """Abort requests; each reader gets a final output with `finish_reason="abort"`.

        Unknown and finished ids are ignored.  The blocks of the requests' KV cache become free after the step in
        flight.
        """
        self.engine.abort(request_id)

    async def step(self) -> None:
        """Run one iteration of an engine in stepped mode; its outputs are then available to readers.

        Stepped mode is for programs that control when the model computes, such as training loops.
        """
        await self.engine.controls.step()

    async def start(self) -> None:
        """Start the engine without an `async with` block, for programs that cannot use one.

        Call `close` in the same task. A cancel scope must not surround only one of the two calls: no `fail_after`,
        and before Python 3.12 no `asyncio.wait_for`, which runs the call in a new task.
        """
        await self._stack.enter_async_context(self)

    async def close(self, timeout: float | None = None) -> None:  # noqa: ASYNC109  # vLLM's signature
        """Stop an engine that `start` or its first request started; further calls do nothing.

        Args:
            timeout: seconds that open requests have to finish; None means `shutdown_timeout`.
        """
        self._is_closed = True
        try:
            if timeout is not None and self._engine is not None:
                await self._engine.shut_down(timeout)
        finally:
            await self._stack.aclose()
            if self._background_task is not None:
                # A cancelled `close` may leave the rest to the task.
                await self._background_task.aclose()  # noqa: ASYNC102

    def shutdown(self, timeout: float | None = None) -> None:
        """Begin to stop an engine that its first request started, without waiting; `close` waits for the end.

        Args:
            timeout: accepted for compatibility with vLLM and ignored: open requests are aborted.
        """
        self._is_closed = True
        if self._background_task is not None:
            self._background_task.stop()

    @property
    def _starts_itself(self) -> bool:
        """Whether a request must start the engine: the program has neither entered nor closed it."""
        is_its_own = self._background_task is not None or not self._is_entered
        return self._engine is None and is_its_own and not self._is_closed and can_start()

    async def _start_itself(self) -> None:
        if self._background_task is None:
            self._background_task = BackgroundTask(self)
        await self._background_task.wait_started()

    async def wait_for_requests_to_drain(self, timeout: float = 300) -> None:  # noqa: ASYNC109  # vLLM's signature
        """Wait until no request is open.

        Raises:
            TimeoutError: requests are still open after `timeout` seconds.
        """
        with anyio.fail_after(timeout):
            await self.engine.wait_idle()

    # State

    async def is_tracing_enabled(self) -> bool:
        return self.engine.config.otlp_traces_endpoint is not None

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return self.engine.config.supported_tasks

    async def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Raise the error with which a new request of `n` completions would be refused now; else return.

        A server can thus refuse a request before it reads or renders the prompt.  Nothing is reserved.
        """
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
        """The configuration that the engine runs with, resolved from its arguments and the model's files.

        It has no open choices: context length, dtype, device and KV cache are those in use.  It is frozen.
        """
        return self.engine.config

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that renders prompts; None with `skip_tokenizer_init`.

        It encodes and decodes in the caller's thread; use a worker thread for long texts, because they would block an
        event loop.
        """
        return self.engine.tokenizer

    @property
    def model_config(self) -> ModelConfig:
        return self.engine.config.model

    def get_model_config(self) -> ModelView:
        """Return the model's facts under vLLM's names, with the maximum length and dtype that the engine uses.

        Names that vLLM's ModelConfig has and trouper lacks raise AttributeError with a hint.
        """
        return ModelView(self.engine.config)

    @property
    def vllm_config(self) -> ConfigView:
        """The configuration under vLLM's names, for scripts written for vLLM."""
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
        """Raise EngineDeadError if the engine has failed or is not running.

        It only reads a flag and does not wait for the device, so it is cheap enough for a liveness probe.
        """
        if self.engine.dead_error is not None:
            raise self.engine.dead_error


@asynccontextmanager
async def _open_devices(config: EngineConfig, launcher: Launcher) -> AsyncGenerator[list[Device]]:
    """Create a device for each replica; with several machines, also accept their connections during the block.

    Raises:
        TrouperValidationError: this machine is not the coordinator, or its address or port cannot be used.
    """
    replicas = range(config.data_parallel_size)
    if config.device_worker == "inline":
        yield [ThreadedDevice(config)]
        return
    files = await anyio.to_thread.run_sync(sample_model, config)
    if config.nodes is None:
        yield [ProcessDevice(config, launcher, replica=r, files=files) for r in replicas]
    else:
        from trouper.actors.executor.workers.machines.launch_hosts import open_nodes
        from trouper.actors.executor.workers.machines.launch_ray import open_ray

        if config.nodes.rank > 0:
            rule = (
                "must be 0 in the process of the engine; run `trouper serve` on the other machines"
            )
            raise invalid("node_rank", rule, config.nodes.rank)
        open_workers = open_ray if config.nodes.backend == "ray" else open_nodes
        async with open_workers(config, config.nodes) as launcher_of:
            yield [
                ProcessDevice(config, replica=r, launch_workers=launcher_of(r), files=files)
                for r in replicas
            ]


AsyncLLM = AsyncLLMEngine
