"""`LLM`: offline generation.  A thin synchronous face over the engine, which plays on trio in a thread.

Source: spec section 11.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NoReturn, Self, cast

from trouper.config.args import EngineArgs, ModelConfig
from trouper.errors import EnginePausedError, TrouperValidationError, UnsupportedFeatureError
from trouper.frontends.python.beam_search import BeamSearchOutput, beam_search
from trouper.frontends.python.bulk import (
    ProgressBar,
    as_list,
    final_only,
    gather,
    progress_bar,
    submit,
)
from trouper.frontends.python.llm_engine import LLMEngine
from trouper.frontends.python.llm_pooling import PoolingMethods
from trouper.frontends.python.options import default_sampling_params, one_each
from trouper.inputs import ChatPrompt, PromptType
from trouper.metrics import Metric
from trouper.outputs import RequestOutput
from trouper.params import BeamSearchParams, SamplingParams

Conversation = Sequence[dict[str, Any]]


class LLM(PoolingMethods):
    """Prompts in, `RequestOutput`s out, in the order of the prompts; or, with a pooling model, embeddings.

    ::

        with LLM() as llm:  # the bundled demo model
            print(llm.generate("def quicksort(items):")[0].outputs[0].text)

    Args:
        model: a folder or a hub id; None is the bundled demo model.
        engine_args: any field of `EngineArgs`.

    Raises:
        TrouperValidationError: the model or an option does not fit; the message names it.
        RuntimeError: inside trio, whose loop this would block: use `AsyncLLMEngine`, or a thread.
    """

    def __init__(self, model: str | None = None, **engine_args: Any) -> None:
        engine_args.setdefault("disable_log_stats", True)
        self.llm_engine = LLMEngine(EngineArgs(model=model, **engine_args), is_stepped=False)
        self._engine = self.llm_engine.async_engine
        self._queued = self.llm_engine.generations  # not waited for yet
        self._enqueued: list[str] = []
        self._completed: list[RequestOutput] = []  # of the wrong type for the last who asked

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        return cls(**vars(engine_args))

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | ProgressBar = True,
        lora_request: object | None = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or a list of them; results are in the order of the prompts.

        Args:
            sampling_params: one for all, or one for each prompt; None takes the model's defaults.
            use_tqdm: a progress bar on stderr, or a callable that makes one.
            priority: one for all or one for each; larger runs first.

        Raises:
            TrouperValidationError: a bad prompt or parameter; nothing of this call goes on.
        """
        self._check_schedules()
        ids = self._add_requests(
            as_list(prompts), sampling_params, use_tqdm, lora_request, priority,
            tokenization_kwargs, mm_processor_kwargs,
        )  # fmt: skip
        return self._finish(ids, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | ProgressBar = True,
        lora_request: object | None = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, through the model's chat template."""
        self._check_schedules()
        ids = self._add_chat_requests(
            messages=messages,
            sampling_params=sampling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            priority=priority,
            chat_template=chat_template,
            chat_template_content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        return self._finish(ids, use_tqdm)

    def enqueue(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: object | None = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool | ProgressBar = True,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[str]:
        """Add prompts without waiting for their completion; their ids, in order.

        Legal while the engine sleeps at level 0 or is paused with `keep`: they are queued.  If one prompt
        is bad, all of this call are aborted and its error is raised.
        """
        return self._keep(
            self._add_requests(
                as_list(prompts),
                sampling_params,
                use_tqdm,
                lora_request,
                priority,
                tokenization_kwargs,
                mm_processor_kwargs,
            )
        )

    def enqueue_chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | ProgressBar = True,
        lora_request: object | None = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[str]:
        """`chat` without waiting: the ids of the conversations, in order."""
        return self._keep(
            self._add_chat_requests(
                messages=messages,
                sampling_params=sampling_params,
                use_tqdm=use_tqdm,
                lora_request=lora_request,
                priority=priority,
                chat_template=chat_template,
                chat_template_content_format=chat_template_content_format,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
                tokenization_kwargs=tokenization_kwargs,
                mm_processor_kwargs=mm_processor_kwargs,
            )
        )

    def wait_for_completion(
        self,
        output_type: type | tuple[type, ...] | None = None,
        *,
        use_tqdm: bool | ProgressBar = True,
    ) -> list[RequestOutput]:
        """Wait for everything enqueued; the outputs are in the order in which it was enqueued.

        Raises:
            EnginePausedError: the engine is paused and something enqueued would need it.
            TypeError: an output is not of `output_type`; all outputs stay available.
        """
        open_ids = [id for id in self._enqueued if id in self._queued]
        if any(not self._queued[id].is_over for id in open_ids):
            self._check_schedules()
        self._enqueued = []
        self._completed += self._finish(open_ids, use_tqdm)
        for output in self._completed:
            if output_type is not None and not isinstance(output, output_type):
                raise TypeError(f"{output.request_id} yielded a {type(output).__name__}")
        outputs, self._completed = self._completed, []
        return outputs

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        lora_request: object | None = None,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:
        """The `beam_width` most probable completions of each prompt; spec section 2.2."""
        self._check_schedules()
        if lora_request is not None:
            raise UnsupportedFeatureError("lora_request is not supported yet")
        return [beam_search(self, prompt, params) for prompt in as_list(prompts)]

    # Lifecycle; spec section 10

    def sleep(self, level: int = 1, mode: str = "abort", *, reload: bool = True) -> None:
        """0: only stop scheduling; 1, 2: also give weights and KV memory back."""
        self.llm_engine.sleep(level, mode, reload=reload)

    def wake_up(self, tags: Iterable[str] | None = None) -> bool:
        """Bring back `weights`, `kv_cache`, `scheduling`, or all.  True when fully awake."""
        return self.llm_engine.wake_up(tags)

    def is_sleeping(self) -> bool:
        return self.llm_engine.is_sleeping()

    def pause_generation(self, mode: str = "abort", clear_cache: bool = True) -> None:
        """Stop scheduling; `abort` ends the requests, `wait` lets them finish, `keep` freezes them."""
        self.llm_engine.pause_generation(mode, clear_cache)

    def resume_generation(self) -> None:
        """Schedule again.  Raises RuntimeError while memory is absent."""
        self.llm_engine.resume_generation()

    def is_paused(self) -> bool:
        return self.llm_engine.is_paused()

    def paused(self, mode: str = "keep", clear_cache: bool = False) -> AbstractContextManager[None]:
        """`with llm.paused():` nothing is scheduled; on every way out as it was found."""
        return self.llm_engine.paused(mode, clear_cache)

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        return self.llm_engine.reset_prefix_cache(reset_running_requests, reset_connector)

    def reset_mm_cache(self) -> None:
        """There is none to reset: prompts are text."""
        self.llm_engine.reset_mm_cache()

    def start_profile(
        self,
        profile_prefix: str | None = None,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
        profiler_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.llm_engine.start_profile(
            profile_prefix, delay_iterations, max_iterations, profiler_kwargs
        )

    def stop_profile(self) -> None:
        self.llm_engine.stop_profile()

    # Of vLLM, and not here

    def collective_rpc(self, *_: object, **__: object) -> NoReturn:
        raise UnsupportedFeatureError("collective_rpc: there are no worker processes to call")

    def apply_model(self, *_: object, **__: object) -> NoReturn:
        raise UnsupportedFeatureError(
            "apply_model: the model is the engine's own, and not a torch module"
        )

    def release_kv_cache_memory(self, *_: object, **__: object) -> NoReturn:
        raise UnsupportedFeatureError("release_kv_cache_memory: sleep(1) gives the KV memory back")

    # State

    def get_default_sampling_params(self) -> SamplingParams:
        return default_sampling_params(self.model_config)

    def get_metrics(self) -> list[Metric]:
        """Every counter, gauge and histogram; needs `disable_log_stats=False`."""
        return self.llm_engine.get_metrics()

    def get_tokenizer(self) -> Any:
        """The model's transformers tokenizer."""
        return self.llm_engine.get_tokenizer()

    def get_world_size(self, include_dp: bool = True) -> int:
        return 1

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        return self.llm_engine.get_supported_tasks()

    @property
    def model_config(self) -> ModelConfig:
        return self.llm_engine.model_config

    def get_model_config(self) -> ModelConfig:
        return self.model_config

    def close(self) -> None:
        """End the engine; memory, threads and tasks are gone when this returns.  Idempotent."""
        self.llm_engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # Requests, step by step

    def _add_chat_requests(
        self,
        *,
        messages: Conversation | Sequence[Conversation],
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        **how: Any,
    ) -> list[str]:
        """The one place where conversations become requests, for `chat` and `enqueue_chat`."""
        if chat_template_content_format not in ("auto", "string", "openai"):
            raise TrouperValidationError(
                "must be auto, string or openai",
                parameter="chat_template_content_format",
                value=chat_template_content_format,
            )
        if chat_template_content_format == "openai":
            raise UnsupportedFeatureError(
                "chat_template_content_format='openai' is not supported yet; "
                "leave it at 'auto', which gives the template strings"
            )
        if not isinstance(messages, Sequence) or isinstance(messages, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # not every caller is typed
            raise TrouperValidationError(
                "must be a conversation or a list of conversations",
                parameter="messages",
                value=type(messages).__name__,
            )
        is_one = len(messages) > 0 and isinstance(messages[0], dict)
        prompts = [
            ChatPrompt(
                messages=cast("Conversation", conversation),
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in ([messages] if is_one else messages)
        ]
        return self._add_requests(prompts, mm_processor_kwargs=mm_processor_kwargs, **how)

    def _add_requests(
        self,
        prompts: Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | ProgressBar = True,
        lora_request: object | None = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[str]:
        """Check what concerns the call as a whole, then render and queue all prompts, or none."""
        self.llm_engine.check_open()
        if not prompts:
            raise TrouperValidationError("You must pass at least one prompt", parameter="prompt")
        all_params = one_each(sampling_params, len(prompts), "sampling_params")
        adapters = one_each(lora_request, len(prompts), "lora_request")
        priorities = one_each(priority, len(prompts), "priority")
        generations = [
            self._engine.generate(
                prompt,
                final_only(self.get_default_sampling_params() if params is None else params),
                lora_request=adapter,
                tokenization_kwargs=tokenization_kwargs,
                mm_processor_kwargs=mm_processor_kwargs,
                priority=urgency or 0,
            )
            for prompt, params, adapter, urgency in zip(
                prompts, all_params, adapters, priorities, strict=True
            )
        ]
        ids = [generation.request_id for generation in generations]
        self._queued.update(zip(ids, generations, strict=True))
        try:
            with progress_bar(use_tqdm, len(ids), "prompts") as bar:
                self.llm_engine.call(submit, generations, bar)
        except BaseException:
            self.llm_engine.forget(ids)
            raise
        return ids

    def _keep(self, ids: list[str]) -> list[str]:
        self._enqueued += ids
        return ids

    def _finish(self, ids: list[str], use_tqdm: bool | ProgressBar) -> list[RequestOutput]:
        """Wait for these; none is open afterwards, whatever happens."""
        try:
            with progress_bar(use_tqdm, len(ids), "requests") as bar:
                outputs = self.llm_engine.call(gather, [self._queued[id] for id in ids], bar)
        except BaseException:
            self.llm_engine.forget(ids)
            raise
        for id in ids:
            self._queued.pop(id, None)
        return outputs

    def _check_schedules(self) -> None:
        if self.llm_engine.is_sleeping():
            raise EnginePausedError("the engine is paused or asleep: wake_up() first")
