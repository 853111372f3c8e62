"""`LLM`: offline inference with blocking calls, in vLLM's interface.

A script has a list of prompts and wants the list of results. `LLM` runs an engine in a thread, submits all prompts
at once so that they are batched, and returns when the last one is finished.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn, Self, cast

from trouper.config.args import EngineArgs
from trouper.errors import EnginePausedError, TrouperValidationError, UnsupportedFeatureError
from trouper.frontends.python.beam_search import BeamSearchOutput, SearchLimits, beam_search
from trouper.frontends.python.controls import default_sampling_params, one_each
from trouper.frontends.python.llm_engine import LLMEngine
from trouper.frontends.python.llm_pooling import (
    Conversation,
    PoolingMethods,
    ProgressBar,
    as_chat_prompts,
    as_list,
    final_only,
    gather,
    progress_bar,
    submit,
)
from trouper.inputs import PromptType
from trouper.lora import LoRARequest
from trouper.outputs import RequestOutput
from trouper.params import BeamSearchParams, SamplingParams

# One adapter for all prompts, or one for each prompt.
LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None


class LLM(PoolingMethods):
    """An engine for lists of prompts; results are in the order of the prompts.

    A generation model completes prompts and answers chats; a pooling model embeds, classifies or scores texts.

    ::

        with LLM() as llm:  # the bundled demo model
            print(llm.generate("def quicksort(items):")[0].outputs[0].text)

    Args:
        model: a folder or a hub id; None means the bundled demo model.
        engine_args: any field of `EngineArgs`.

    Raises:
        TrouperValidationError: the model or an option is invalid; the message names it.
        RuntimeError: the caller runs inside trio, and waiting would block its loop.
    """

    def __init__(self, model: str | None = None, **engine_args: Any) -> None:
        engine_args.setdefault("disable_log_stats", True)
        self.llm_engine = LLMEngine(EngineArgs(model=model, **engine_args), is_stepped=False)
        self.thread = self.llm_engine.thread
        self._queued = self.thread.generations
        self._enqueued: list[str] = []
        # Outputs of a `wait_for_completion` that raised TypeError, for the next call.
        self._completed: list[RequestOutput] = []

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        return cls(**cast("dict[str, Any]", vars(engine_args)))

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | ProgressBar = True,
        lora_request: LoRARequests = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or a list of prompts; results are in the order of the prompts.

        Args:
            sampling_params: parameters for all prompts, or one for each; None means the model's defaults.
            use_tqdm: whether to show a progress bar on stderr, or a callable that creates one.
            lora_request: an adapter for all prompts, or one for each.
            priority: a number for all prompts, or one for each; larger numbers run first.

        Raises:
            TrouperValidationError: a prompt or parameter is invalid; all requests of this call are aborted.
            EnginePausedError: the engine is paused or asleep.
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
        lora_request: LoRARequests = None,
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
        """Answer one conversation or a list of conversations, rendered by the model's chat template.

        Args:
            messages: a list of messages with `role` and `content`, or a list of such lists.
            chat_template: replaces the model's own template.
            add_generation_prompt: end the prompt with the start of the assistant's message.
            continue_final_message: let the model continue the last message instead of answering it.
            tools: functions in the OpenAI format, for templates that support tools.
            chat_template_kwargs: further variables for the template, for example `enable_thinking`.

        The other arguments and the errors are those of `generate`.
        """
        self._check_schedules()
        prompts = as_chat_prompts(
            messages, chat_template, chat_template_content_format, add_generation_prompt,
            continue_final_message, tools, chat_template_kwargs,
        )  # fmt: skip
        ids = self._add_requests(
            prompts, sampling_params, use_tqdm, lora_request, priority,
            tokenization_kwargs, mm_processor_kwargs,
        )  # fmt: skip
        return self._finish(ids, use_tqdm)

    def enqueue(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRARequests = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool | ProgressBar = True,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[str]:
        """Queue prompts without waiting for their completion, and return their request ids in order.

        An engine that sleeps at level 0 or is paused with `keep` accepts them too and runs them later. If one prompt
        is invalid, all requests of this call are aborted and its error is raised. See `wait_for_completion`.
        """
        ids = self._add_requests(
            as_list(prompts), sampling_params, use_tqdm, lora_request, priority,
            tokenization_kwargs, mm_processor_kwargs,
        )  # fmt: skip
        return self._keep(ids)

    def enqueue_chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | ProgressBar = True,
        lora_request: LoRARequests = None,
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
        """Queue conversations without waiting for their completion, and return their request ids in order.

        The arguments are those of `chat`, the rules those of `enqueue`.
        """
        prompts = as_chat_prompts(
            messages, chat_template, chat_template_content_format, add_generation_prompt,
            continue_final_message, tools, chat_template_kwargs,
        )  # fmt: skip
        ids = self._add_requests(
            prompts, sampling_params, use_tqdm, lora_request, priority,
            tokenization_kwargs, mm_processor_kwargs,
        )  # fmt: skip
        return self._keep(ids)

    def wait_for_completion(
        self,
        output_type: type | tuple[type, ...] | None = None,
        *,
        use_tqdm: bool | ProgressBar = True,
    ) -> list[RequestOutput]:
        """Wait for all enqueued requests and return their outputs in the order of queueing.

        Raises:
            EnginePausedError: the engine is paused and enqueued requests are unfinished.
            TypeError: an output is not of `output_type`; the next call returns all of them again.
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
        lora_request: LoRARequests = None,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:
        """Return the `beam_width` most probable completions of each prompt, best first.

        Each round of the search generates one token for every beam; the prefix cache computes shared prefixes once.

        Raises:
            TrouperValidationError: `max_logprobs` of the engine is less than `2 * beam_width`.
        """
        self._check_schedules()
        config = self.thread.engine.config
        limits = SearchLimits.of(config, self.thread.engine.tokenizer)
        given = as_list(prompts)
        return [
            beam_search(
                prompt, params, limits,
                generate=partial(self.generate, use_tqdm=False, lora_request=adapter),
                decode=self._decode,
            )
            for prompt, adapter in zip(
                given, one_each(lora_request, len(given), "lora_request"), strict=True
            )
        ]  # fmt: skip

    # Methods of vLLM that cannot exist here

    def collective_rpc(self, *_: object, **__: object) -> NoReturn:
        raise UnsupportedFeatureError(
            "collective_rpc is not supported: workers run no code of their callers"
        )

    def apply_model(self, *_: object, **__: object) -> NoReturn:
        raise UnsupportedFeatureError(
            "apply_model is not supported: the model is not a torch module"
        )

    def release_kv_cache_memory(self, *_: object, **__: object) -> NoReturn:
        raise UnsupportedFeatureError(
            "release_kv_cache_memory is not supported: sleep(1) releases the KV cache"
        )

    # State

    def get_default_sampling_params(self) -> SamplingParams:
        return default_sampling_params(self.model_config)

    def get_world_size(self, include_dp: bool = True) -> int:
        return 1

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        return self.thread.engine.config.supported_tasks

    # Requests, step by step

    def _add_requests(
        self,
        prompts: Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | ProgressBar = True,
        lora_request: LoRARequests = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[str]:
        """Check the arguments of the whole call, then render and queue all prompts, or none of them."""
        self.thread.check_open()
        if not prompts:
            raise TrouperValidationError("You must pass at least one prompt", parameter="prompt")
        all_params = one_each(sampling_params, len(prompts), "sampling_params")
        adapters = one_each(lora_request, len(prompts), "lora_request")
        priorities = one_each(priority, len(prompts), "priority")
        generations = [
            self.thread.engine.generate(
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
                # While the engine is paused no request ends, so waiting for a free adapter would never return.
                self.thread.call(submit, generations, bar, waits=not self.is_sleeping())
        except BaseException:
            self.thread.forget(ids)
            raise
        return ids

    def _decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        tokenizer = self.thread.engine.tokenizer
        return "" if tokenizer is None else tokenizer.decode(token_ids, skip_special_tokens)

    def _keep(self, ids: list[str]) -> list[str]:
        self._enqueued += ids
        return ids

    def _finish(self, ids: list[str], use_tqdm: bool | ProgressBar) -> list[RequestOutput]:
        """Wait for these requests and return their outputs; an error closes all of them."""
        try:
            with progress_bar(use_tqdm, len(ids), "requests") as bar:
                outputs = self.thread.call(gather, self.thread.find(ids), bar)
        except BaseException:
            self.thread.forget(ids)
            raise
        for id in ids:
            self._queued.pop(id, None)
        return outputs

    def _check_schedules(self) -> None:
        if self.is_sleeping():
            raise EnginePausedError("the engine is paused or asleep: wake_up() first")
