"""Measure the offline throughput of trouper, vLLM or transformers on the same requests.

vLLM and trouper have the same API, so one class runs both.
"""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Literal, Protocol, Self

import anyio
import msgspec
from anyio.from_thread import start_blocking_portal

from trouper.actors.executor.devices.threaded import DEVICE_THREAD
from trouper.actors.runtime.startup import num_physical_cores
from trouper.bench.datasets import SampleRequest
from trouper.bench.peers import Settings, Workload, started
from trouper.config.args import EngineArgs
from trouper.config.engine_config import EngineConfig
from trouper.config.model import DEMO_MODEL
from trouper.config.resolve import resolve
from trouper.errors import TrouperValidationError, UnsupportedFeatureError

Backend = Literal["trouper", "trouper-chat", "vllm", "vllm-chat", "hf", "hf-cb"]
OURS = ("trouper", "trouper-chat")
PACKAGES = {"vllm": "vllm", "vllm-chat": "vllm", "hf": "transformers", "hf-cb": "transformers"}


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a run of requests, apart from the engine's own."""

    backend: Backend = "trouper"
    n: int = 1
    prequeue_requests: bool = False
    async_engine: bool = False
    profile: bool = False
    disable_detokenize: bool = False
    hf_max_batch_size: int | None = None
    use_tqdm: bool = False

    @property
    def is_chat(self) -> bool:
        return self.backend.endswith("-chat")

    def check(self, engine_args: EngineArgs, dataset_name: str) -> None:
        """Check the options before anything is loaded.  Two of the messages are vLLM's.

        Raises:
            TrouperValidationError: options contradict each other.
            UnsupportedFeatureError: the backend does not support an option, or is not installed.
        """
        if self.prequeue_requests and self.backend not in OURS:
            raise TrouperValidationError(
                "--prequeue-requests requires --backend trouper or trouper-chat"
            )
        if self.prequeue_requests and self.async_engine:
            raise TrouperValidationError("--prequeue-requests is not supported with --async-engine")
        if self.async_engine and self.backend not in OURS:
            raise UnsupportedFeatureError("--async-engine needs --backend trouper or trouper-chat")
        if (self.backend == "hf") != (self.hf_max_batch_size is not None):
            raise TrouperValidationError("--hf-max-batch-size and --backend hf need each other")
        if self.backend in ("hf", "hf-cb") and (self.profile or self.n != 1):
            raise UnsupportedFeatureError(
                f"--backend {self.backend} takes neither --profile nor --n"
            )
        if self.profile and "torch_profiler_dir" not in (engine_args.profiler_config or {}):
            raise TrouperValidationError(
                "--profile needs --profiler-config with a folder in torch_profiler_dir"
            )
        # These backends have no grammars.
        if dataset_name == "schema" and self.backend in ("hf", "hf-cb"):
            raise UnsupportedFeatureError(
                f"--dataset-name schema is not supported with --backend {self.backend}"
            )
        package = PACKAGES.get(self.backend)
        if package is not None and find_spec(package) is None:
            raise UnsupportedFeatureError(
                f"--backend {self.backend} needs {package}, which is not installed here"
            )


class Run(msgspec.Struct, frozen=True):
    """One run of all requests; tokens are counted from the outputs.

    Attributes:
        front_s: processor time of all Python threads except the device's.
        num_steps: steps of trouper's scheduler.
    """

    seconds: float
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    front_s: float | None = None
    num_steps: int | None = None

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


class MeasuredEngine(Protocol):
    """An engine with its model loaded, which can run the requests repeatedly; a context manager."""

    def num_steps(self) -> int | None:
        """Return the number of steps since the start; None for other engines than trouper."""

    def generate_all(self, requests: Sequence[SampleRequest], *, prequeue: bool) -> Run: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


def open_engine(wishes: RunOptions, engine_args: EngineArgs) -> MeasuredEngine:
    if wishes.backend in ("hf", "hf-cb"):
        return TransformersEngine(wishes, engine_args)
    return (AsyncEngine if wishes.async_engine else OfflineEngine)(wishes, engine_args)


class OfflineEngine:
    """`LLM` of trouper or vLLM."""

    def __init__(self, wishes: RunOptions, engine_args: EngineArgs) -> None:
        self._wishes = wishes
        self._api = import_module("trouper" if wishes.backend in OURS else "vllm")
        options = given_options(engine_args) | {"model": model_path(engine_args)}
        self._llm = self._api.LLM(**options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._wishes.backend in OURS:
            self._llm.close()

    def num_steps(self) -> int | None:
        if self._wishes.backend not in OURS:
            return None
        return self._llm.llm_engine.statistics().scheduler.num_steps

    def generate_all(self, requests: Sequence[SampleRequest], *, prequeue: bool) -> Run:
        """Run all requests, starting with an empty prefix cache.

        With `prequeue` all requests are queued before the scheduler starts, so the batches do not depend on the speed
        of queueing; the measured time includes queueing.
        """
        wishes, llm = self._wishes, self._llm
        prompts = prompts_of(requests, is_chat=wishes.is_chat)
        params = [sampling(self._api, request, wishes) for request in requests]
        generate = llm.chat if wishes.is_chat else llm.generate
        llm.reset_prefix_cache()
        if prequeue:
            llm.sleep(level=0, mode="abort")
        started = perf_counter()
        if wishes.profile:
            llm.start_profile()
        if prequeue:
            enqueue = llm.enqueue_chat if wishes.is_chat else llm.enqueue
            try:
                enqueue(prompts, params, use_tqdm=wishes.use_tqdm)
            finally:
                llm.wake_up(tags=["scheduling"])
            outputs = llm.wait_for_completion(
                output_type=self._api.RequestOutput, use_tqdm=wishes.use_tqdm
            )
        else:
            outputs = generate(prompts, params, use_tqdm=wishes.use_tqdm)
        if wishes.profile:
            llm.stop_profile()
        return counted(perf_counter() - started, outputs)


class AsyncEngine:
    """`AsyncLLMEngine`, with a task for each request."""

    def __init__(self, wishes: RunOptions, engine_args: EngineArgs) -> None:
        import trouper

        self._api, self._wishes = trouper, wishes
        with ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal("trio"))
            self._engine = stack.enter_context(
                self._portal.wrap_async_context_manager(
                    trouper.AsyncLLMEngine(engine_args, offline=True)
                )
            )
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def num_steps(self) -> int:
        return self._portal.call(self._engine.statistics).scheduler.num_steps

    def generate_all(self, requests: Sequence[SampleRequest], *, prequeue: bool) -> Run:
        assert not prequeue
        return self._portal.call(self._run, requests)

    async def _run(self, requests: Sequence[SampleRequest]) -> Run:
        engine, outputs = self._engine, []
        prompts = prompts_of(requests, is_chat=self._wishes.is_chat)
        if self._wishes.is_chat:
            prompts = [{"messages": messages} for messages in prompts]
        await engine.reset_prefix_cache()

        async def finish(prompt: Any, request: SampleRequest) -> None:
            params = sampling(self._api, request, self._wishes)
            params.output_kind = self._api.RequestOutputKind.FINAL_ONLY
            async with engine.generate(prompt, params) as stream:
                outputs.extend([output async for output in stream])

        started = perf_counter()
        if self._wishes.profile:
            await engine.start_profile()
        async with anyio.create_task_group() as tasks:
            for prompt, request in zip(prompts, requests, strict=True):
                tasks.start_soon(finish, prompt, request)
        if self._wishes.profile:
            await engine.stop_profile()
        return counted(perf_counter() - started, outputs)


class TransformersEngine:
    """transformers in its own process, with continuous batching or with `generate` on padded batches."""

    def __init__(self, wishes: RunOptions, engine_args: EngineArgs) -> None:
        self._batch_size = wishes.hf_max_batch_size
        config = resolve(engine_args, offline=True)
        largest = Workload(config.scheduler.max_num_seqs, config.max_model_len, 0)
        name = "transformers" if wishes.backend == "hf" else "transformers-cb"
        with ExitStack() as stack:
            settings = Settings(
                model=stack.enter_context(model_folder(config)),
                dtype=config.dtype,
                threads=num_physical_cores(),
                load_format=config.load_format,
            )
            self._peer = stack.enter_context(started(name, settings, [largest]))
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def num_steps(self) -> None:
        return None

    def generate_all(self, requests: Sequence[SampleRequest], *, prequeue: bool) -> Run:
        """Run all requests; a padded batch runs to its longest output, but only requested tokens are counted."""
        assert not prequeue
        size = self._batch_size or len(requests)
        seconds = 0.0
        for first in range(0, len(requests), size):
            batch = requests[first : first + size]
            lengths = [request.output_len for request in batch]
            prompts = [list(request.prompt_token_ids) for request in batch]
            wanted = lengths if self._batch_size is None else max(lengths)
            seconds += self._peer.measure(prompts, wanted).seconds
        return Run(
            seconds,
            len(requests),
            sum(len(request.prompt_token_ids) for request in requests),
            sum(request.output_len for request in requests),
        )


def run_observed(
    engine: MeasuredEngine, requests: Sequence[SampleRequest], *, prequeue: bool
) -> Run:
    """Run all requests; for trouper also count steps and the processor time of everything except the device."""
    num_before, before = engine.num_steps(), _thread_times()
    run = engine.generate_all(requests, prequeue=prequeue)
    num_after = engine.num_steps()
    if num_before is None or num_after is None:
        return run
    spent = [now - before.get(thread, 0.0) for thread, now in _thread_times().items()]
    return msgspec.structs.replace(
        run, front_s=sum(spent) if spent else None, num_steps=num_after - num_before
    )


def _thread_times() -> dict[threading.Thread, float]:
    """Return the processor time of each Python thread except the device's; empty if the system has no such clocks."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return {}
    threads = [t for t in threading.enumerate() if t.name != DEVICE_THREAD]
    return {t: time.clock_gettime(time.pthread_getcpuclockid(t.ident)) for t in threads if t.ident}


@contextmanager
def model_folder(config: EngineConfig) -> Iterator[str]:
    """Yield a folder with the model's config.json for other engines; that of a preset is written to a new folder."""
    if Path(config.model.path).is_dir():
        yield config.model.path
        return
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config.model.hf_config))
        yield folder


def given_options(engine_args: EngineArgs) -> dict[str, Any]:
    """Return the arguments that differ from their defaults, under vLLM's names."""
    return {
        field.name: getattr(engine_args, field.name)
        for field in fields(engine_args)
        if getattr(engine_args, field.name) != field.default
    }


def model_path(engine_args: EngineArgs) -> str:
    return engine_args.model or str(DEMO_MODEL)


def prompts_of(requests: Sequence[SampleRequest], *, is_chat: bool) -> list[Any]:
    """Return the requests as prompts of token ids, or as conversations with one message."""
    if is_chat:
        return [[{"role": "user", "content": request.text}] for request in requests]
    return [{"prompt_token_ids": list(request.prompt_token_ids)} for request in requests]


def sampling(api: Any, request: SampleRequest, wishes: RunOptions) -> Any:
    """Return the sampling parameters of vLLM's benchmark: exactly `output_len` tokens, or fewer with a schema."""
    more: dict[str, Any] = {}
    if request.schema is not None:
        is_ours = wishes.backend in OURS
        module = api if is_ours else import_module("vllm.sampling_params")
        more["structured_outputs"] = module.StructuredOutputsParams(json=request.schema)
    return api.SamplingParams(
        n=wishes.n,
        temperature=request.temperature,
        top_p=1.0,
        ignore_eos=True,
        max_tokens=request.output_len,
        detokenize=not wishes.disable_detokenize,
        **more,
    )


def counted(seconds: float, outputs: Sequence[Any]) -> Run:
    return Run(
        seconds,
        len(outputs),
        sum(len(output.prompt_token_ids or ()) for output in outputs),
        sum(len(c.token_ids) for output in outputs for c in output.outputs),
    )
