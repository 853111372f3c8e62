"""`LLMEngine`: run the engine step by step from blocking code, in vLLM's interface.

Some programs, such as training loops, must control when the model computes. This engine computes only in `step`; it
lives on trio in a thread of its own, and every method waits for its result there. `LLM` uses the same class with an
engine that runs continuously.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Self

from trouper.actors.engine.engine import EngineStatistics
from trouper.config.args import EngineArgs
from trouper.errors import ExecutionError
from trouper.frontends.python.async_engine import AsyncLLMEngine
from trouper.frontends.python.controls import AsyncControls
from trouper.frontends.python.engine_thread import BlockingControls, EngineThread, blocking
from trouper.inputs import PoolingPrompt
from trouper.lora import LoRARequest
from trouper.outputs import RequestOutput
from trouper.params import SamplingParams
from trouper.pooling import PoolingParams


class LLMEngine(BlockingControls):
    """An engine that computes only in `step`: add requests, then call `step` until none is unfinished.

    ::

        with LLMEngine.from_engine_args(EngineArgs()) as engine:
            engine.add_request("request-0", "def f(", SamplingParams(max_tokens=8))
            while engine.has_unfinished_requests():
                for output in engine.step():
                    print(output.outputs[0].text)

    `add_request` and `abort_request` may be called from other threads while `step` runs.

    Raises:
        RuntimeError: the caller runs inside trio, and waiting would block its loop.
    """

    def __init__(self, engine_args: EngineArgs, *, is_stepped: bool = True) -> None:
        self._is_stepped = is_stepped
        # Outputs of a step that raised an error; the next step returns them.
        self._kept: list[RequestOutput] = []
        # For vLLM's data-parallel loops, which set it on ranks without work.
        self.should_execute_dummy_batch = False
        self.thread = EngineThread(engine_args, is_stepped=is_stepped)

    def __repr__(self) -> str:
        state = "closed" if self.thread.is_closed else repr(self.thread.engine)
        return f"<LLMEngine {state}>"

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        return cls(engine_args)

    @property
    def async_engine(self) -> AsyncLLMEngine:
        """The engine behind this one; its methods may be called only on its own event loop.

        Use it to reach methods without a blocking counterpart, with `thread.call`.
        """
        return self.thread.engine

    # Requests

    def add_request(
        self,
        request_id: str,
        prompt: PoolingPrompt,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> None:
        """Render the prompt and queue the request; the model computes it in later steps.

        Args:
            arrival_time: wall-clock time in seconds, by default now; orders requests of equal priority.
            priority: larger numbers run first.

        Raises:
            TypeError: `request_id` is not a string, or `params` is neither SamplingParams nor PoolingParams.
            ValueError: another open request has this id, or the prompt or a parameter is invalid.
            NotImplementedError: the request needs a feature that the model lacks.
        """
        engine = self.thread.engine
        generation = self.thread.call(
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
        # In stepped mode no request ends before the next step, so waiting for a free adapter would never return.
        self.thread.call(generation.submit, waits=not self._is_stepped)
        self.thread.generations[request_id] = generation

    def step(self) -> list[RequestOutput]:
        """Schedule, compute and detokenize one step; return the new outputs, or `[]` if none is ready.

        Raises:
            ExecutionError: the model failed on the requests in `request_ids`, which are closed; the next step
                continues with the others.
            EngineDeadError: the engine has failed and cannot continue.
        """
        self.thread.check_open()
        if not self._is_stepped:
            raise RuntimeError("step() is only for LLMEngine: the engine of LLM runs continuously")
        if self.should_execute_dummy_batch:
            self.should_execute_dummy_batch = False
            self.execute_dummy_batch()
            return []
        if not self._kept or self.thread.engine.dead_error is None:
            self.thread.call(self.thread.engine.step)
        new, error = self.thread.call(self._take_outputs)
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
        """Abort requests; the next `step` returns their final outputs.  Unknown ids are ignored.

        Tokens generated before the abort are part of that final output, which has `finish_reason="abort"`.
        """
        self.thread.check_open()
        self.thread.call(self.thread.engine.abort, request_ids)

    def get_num_unfinished_requests(self) -> int:
        """Return the number of unfinished sequences; a request counts `n` times.

        Programs in vLLM's style call `step` as long as it is not 0.
        """
        return sum(
            generation.num_unfinished for generation in list(self.thread.generations.values())
        )

    def has_unfinished_requests(self) -> bool:
        return bool(self.thread.generations) or bool(self._kept)

    def execute_dummy_batch(self) -> None:
        """Do nothing; for vLLM's data-parallel loops, in which idle ranks must compute along with busy ones."""

    # State

    do_log_stats = blocking(AsyncControls.do_log_stats)
    reset_encoder_cache = blocking(AsyncControls.reset_encoder_cache)

    def get_supported_tasks(self) -> tuple[str, ...]:
        return self.thread.engine.config.supported_tasks

    def statistics(self) -> EngineStatistics:
        return self.thread.call(self.thread.engine.statistics)

    def close(self) -> None:
        """Stop the engine and drop unread outputs; see `BlockingControls.close`."""
        self._kept.clear()
        super().close()

    def _take_outputs(self) -> tuple[list[RequestOutput], Exception | None]:
        """Return the available outputs and the first error; a request with an error is closed."""
        outputs: list[RequestOutput] = []
        first_error: Exception | None = None
        for request_id, generation in list(self.thread.generations.items()):
            try:
                output = generation.take_nowait()
            except Exception as error:
                first_error = first_error or error
                generation.close()
                self.thread.generations.pop(request_id, None)
                continue
            if output is not None:
                outputs.append(output)
                if output.finished:
                    self.thread.generations.pop(request_id, None)
        return outputs, first_error
