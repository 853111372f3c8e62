"""`LLMEngine`: the engine stepped by hand, from synchronous code.  Source: spec section 12.

The troupe plays on trio in a thread of its own; every method crosses to it and back.  `LLM` uses the same
class over an engine that runs by itself.
"""

import atexit
import threading
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

import trio
from anyio.from_thread import BlockingPortal, start_blocking_portal

from trouper.actors.engine.engine import EngineStatistics
from trouper.actors.engine.generation import Generation
from trouper.config.args import EngineArgs, ModelConfig
from trouper.errors import EngineDeadError, ExecutionError, TrouperValidationError
from trouper.frontends.python.async_engine import AsyncLLMEngine
from trouper.inputs import PoolingPrompt
from trouper.metrics import Metric
from trouper.outputs import RequestOutput
from trouper.params import SamplingParams
from trouper.pooling import PoolingParams

THREADS = "trouper"  # how the names of an engine's own threads begin: the portal's and the device's


class LLMEngine:
    """`add_request`, then `step` until nothing is unfinished.  A context manager with `close()`.

    ::

        with LLMEngine.from_engine_args(EngineArgs()) as engine:
            engine.add_request("request-0", "def f(", SamplingParams(max_tokens=8))
            while engine.has_unfinished_requests():
                for output in engine.step():
                    print(output.outputs[0].text)

    `add_request` and `abort_request` may be called from other threads while `step` runs.

    Raises:
        RuntimeError: inside trio, whose loop all of this would block: use `AsyncLLMEngine`, or a thread.
    """

    def __init__(self, engine_args: EngineArgs, *, is_stepped: bool = True) -> None:
        _refuse_trio()
        self._is_stepped = is_stepped
        self.generations: dict[str, Generation] = {}  # open, by request id; closed with the engine
        self._owner = threading.get_ident()  # never one of the engine's own threads
        self._kept: list[RequestOutput] = []  # ready, but a step had an error to raise instead
        self.should_execute_dummy_batch = (
            False  # data parallelism: a peer works and this rank does not
        )
        with ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal("trio", name="trouper"))
            self.async_engine = stack.enter_context(
                self._portal.wrap_async_context_manager(
                    AsyncLLMEngine(engine_args, offline=True, is_stepped=is_stepped)
                )
            )
            self._exit_stack = stack.pop_all()
        # Interpreter exit: the threads are daemons, so the engine must end before they are frozen.
        self._at_exit = weakref.WeakMethod(self.close)
        atexit.register(_close_at_exit, self._at_exit)
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<LLMEngine {'closed' if self._is_closed else repr(self.async_engine)}>"

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        return cls(engine_args)

    # Requests

    def add_request(
        self,
        request_id: str,
        prompt: PoolingPrompt,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: object | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> None:
        """Render the prompt, register the request and queue it; nothing is computed here.

        Args:
            arrival_time: wall clock, seconds; default now.  Breaks ties between equal priorities.
            priority: larger runs first.

        Raises:
            TypeError: `request_id` is not a string, or `params` neither Sampling- nor PoolingParams.
            ValueError: the id is in flight; or the prompt or a parameter is bad.
            NotImplementedError: the model lacks a feature that was asked for.
        """
        engine = self.async_engine
        generation = self.call(
            engine.encode if isinstance(params, PoolingParams) else engine.generate,
            prompt,
            params,
            request_id,
            arrival_time=arrival_time,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            trace_headers=trace_headers,
            priority=priority,
        )
        self.call(generation.submit)
        self.generations[request_id] = generation

    def step(self) -> list[RequestOutput]:
        """One iteration: schedule, execute, detokenise.  `[]` when there is nothing to do or to tell.

        Raises:
            ExecutionError: the model could not compute these requests.  They are gone; the next step
                goes on with the others.
            EngineDeadError: the engine cannot go on.
        """
        self.check_open()
        if not self._is_stepped:
            raise RuntimeError("this engine runs by itself; step() is for LLMEngine")
        if self.should_execute_dummy_batch:
            self.should_execute_dummy_batch = False
            self.execute_dummy_batch()
            return []
        if not self._kept or self.async_engine.dead_error is None:
            self.call(self.async_engine.engine.step)
        new, error = self.call(self._take_outputs)
        outputs, self._kept = [*self._kept, *new], []
        if error is not None:
            self._kept = outputs
            raise error
        broken = [o for o in outputs if o.error is not None and o.error.code == "execution_error"]
        if broken:
            self._kept = [output for output in outputs if output not in broken]
            assert broken[0].error is not None
            raise ExecutionError(broken[0].error.message, [output.request_id for output in broken])
        return outputs

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests; the next `step` returns their final outputs.  Unknown ids are ignored."""
        self.check_open()
        self.call(self.async_engine.engine.abort, request_ids)

    def get_num_unfinished_requests(self) -> int:
        """Sequences whose end has not been handed out; n > 1 counts its unfinished children."""
        return sum(generation.num_unfinished for generation in list(self.generations.values()))

    def has_unfinished_requests(self) -> bool:
        return bool(self.generations) or bool(self._kept)

    def execute_dummy_batch(self) -> None:
        """Keep in step with data-parallel peers; alone there is nobody to keep in step with."""

    # State

    @property
    def model_config(self) -> ModelConfig:
        return self.async_engine.model_config

    def get_model_config(self) -> ModelConfig:
        return self.model_config

    def get_supported_tasks(self) -> tuple[str, ...]:
        return self.async_engine.engine.config.supported_tasks

    def get_tokenizer(self) -> Any:
        """The model's transformers tokenizer; needs the extra `transformers`."""
        self.check_open()
        tokenizer = self.async_engine.engine.tokenizer
        if tokenizer is None:
            raise TrouperValidationError("skip_tokenizer_init is set", parameter="tokenizer")
        return tokenizer.hf_tokenizer()

    def get_metrics(self) -> list[Metric]:
        """Every counter, gauge and histogram; needs `disable_log_stats=False`."""
        return self.call(self.async_engine.get_metrics)

    def do_log_stats(self) -> None:
        """Write the line of the statistics log now."""
        self.call(self.async_engine.do_log_stats)

    def statistics(self) -> EngineStatistics:
        return self.call(self.async_engine.statistics)

    # Lifecycle; spec section 10

    def sleep(self, level: int = 1, mode: str = "abort", *, reload: bool = True) -> None:
        self.call(self.async_engine.sleep, level, mode, reload=reload)

    def wake_up(self, tags: Iterable[str] | None = None) -> bool:
        return self.call(self.async_engine.wake_up, tags)

    def is_sleeping(self) -> bool:
        self.check_open()
        return self.async_engine.engine.lifecycle.is_sleeping

    def pause_generation(self, mode: str = "abort", clear_cache: bool = True) -> None:
        self.call(self.async_engine.pause_generation, mode, clear_cache)

    def resume_generation(self) -> None:
        self.call(self.async_engine.resume_generation)

    def is_paused(self) -> bool:
        self.check_open()
        return self.async_engine.engine.lifecycle.is_paused

    @contextmanager
    def paused(self, mode: str = "keep", clear_cache: bool = False) -> Generator[None]:
        """Paused inside the block; on every way out as it was found."""
        self.check_open()
        with self._portal.wrap_async_context_manager(
            self.async_engine.paused(mode, clear_cache=clear_cache)
        ):
            yield

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        return self.call(self.async_engine.reset_prefix_cache, reset_running_requests)

    def reset_mm_cache(self) -> None:
        """There is none to reset: prompts are text."""
        self.check_open()

    def reset_encoder_cache(self) -> None:
        """There is none to reset: prompts are text."""
        self.check_open()

    def start_profile(
        self,
        profile_prefix: str | None = None,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
        profiler_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.call(
            self.async_engine.start_profile,
            profile_prefix,
            delay_iterations,
            max_iterations,
            profiler_kwargs,
        )

    def stop_profile(self) -> None:
        self.call(self.async_engine.stop_profile)

    def close(self) -> None:
        """End the engine; memory, threads and tasks are gone when this returns.  Idempotent.

        Called by one of the engine's own threads, or inside trio, it only begins the end, for which that thread must be free.
        """
        self._close(waits=not threading.current_thread().name.startswith(THREADS))

    def _close(self, *, waits: bool) -> None:
        if getattr(self, "_is_closed", True):
            return
        self._is_closed = True
        atexit.unregister(self._at_exit)
        generations = list(self.generations.values())
        self.generations.clear()
        self._kept.clear()
        arguments = self._portal, generations, self._exit_stack
        if waits and not trio.lowlevel.in_trio_run():
            _end(*arguments)
        else:
            threading.Thread(target=_end, args=arguments, name="closing", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True):
            # The garbage collector calls from any thread, and only the owner is sure not to be waited for.
            waits = threading.get_ident() == self._owner
            try:
                warnings.warn(f"dropped without close(): {self!r}", ResourceWarning, 2, source=self)
            finally:
                self._close(waits=waits)

    # For `LLM`

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function, async or not, beside the actors and wait for its result.

        Ctrl-C and any other exception here cancels it there.
        """
        self.check_open()
        _refuse_trio()
        future = self._portal.start_task_soon(_run, function, args, kwargs)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def check_open(self) -> None:
        """Raises EngineDeadError once it is closed."""
        if self._is_closed:
            raise EngineDeadError("the engine is closed")

    def forget(self, request_ids: Iterable[str]) -> None:
        """Close these requests, whatever state they are in; unknown ids are ignored."""
        generations = [self.generations.pop(id) for id in request_ids if id in self.generations]
        if generations and not self._is_closed:
            self.call(_close_all, generations)

    def _take_outputs(self) -> tuple[list[RequestOutput], Exception | None]:
        """What is due, and the first error; a request that raises is gone, the others are taken."""
        outputs: list[RequestOutput] = []
        first_error: Exception | None = None
        for request_id, generation in list(self.generations.items()):
            try:
                output = generation.take_nowait()
            except Exception as error:
                first_error = first_error or error
                generation.close()
                self.generations.pop(request_id, None)
                continue
            if output is not None:
                outputs.append(output)
                if output.finished:
                    self.generations.pop(request_id, None)
        return outputs, first_error


def _refuse_trio() -> None:
    if trio.lowlevel.in_trio_run():
        raise RuntimeError(
            "this would block trio: use AsyncLLMEngine, or a thread (trio.to_thread.run_sync)"
        )


def _end(portal: BlockingPortal, generations: list[Generation], engine: ExitStack) -> None:
    with engine:
        portal.call(_close_all, generations)


def _close_all(generations: Iterable[Generation]) -> None:
    for generation in generations:
        generation.close()


async def _run(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    result = function(*args, **kwargs)
    return await result if hasattr(result, "__await__") else result


def _close_at_exit(method: "weakref.WeakMethod[Callable[[], None]]") -> None:
    close = method()
    if close is not None:
        close()
