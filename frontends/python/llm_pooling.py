"""The methods of `LLM` for pooling models (encode, embed, classify, reward and score), and the requests of all its methods.

The methods are a base class of `LLM` in vLLM's interface, because vLLM has one class for both kinds of models.

`submit` and `gather` run the requests of a call together on the engine's event loop.  A call with 10,000 prompts crosses to the
engine's thread once to queue all requests and once to wait for them, instead of once for each request.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import anyio
import msgspec

from trouper.actors.engine.generation import Generation
from trouper.errors import (
    EngineDeadError,
    EnginePausedError,
    TrouperValidationError,
    UnsupportedFeatureError,
)
from trouper.frontends.python.controls import check_unused, one_each, plain_prompt
from trouper.frontends.python.engine_thread import BlockingControls
from trouper.frontends.python.scoring import Pooled, Scorer, as_pairs, collect
from trouper.inputs import ChatPrompt, PoolingPrompt, PromptType
from trouper.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from trouper.params import RequestOutputKind, SamplingParams
from trouper.pooling import PoolingParams

ProgressBar = Callable[..., Any]
Conversation = Sequence[dict[str, Any]]


async def submit(
    generations: list[Generation[RequestOutput]], bar: Any, *, waits: bool = True
) -> None:
    """Render and queue all requests; if one is invalid, abort all and raise its error.

    Args:
        bar: progress bar, updated by one for each queued request.
        waits: if all adapter slots are in use, wait for earlier requests to end instead of raising an error.
    """
    try:
        for generation in generations:
            await generation.prepare(waits=waits)
            generation.open()
        for generation in generations:
            await generation.submit()
            bar.update(1)
    except BaseException:
        for generation in generations:
            generation.close()
        raise


async def gather(generations: list[Generation[RequestOutput]], bar: Any) -> list[RequestOutput]:
    """Wait for all requests and return the last output of each, in order.

    The first error aborts the other requests and is raised itself, not in an exception group.

    Raises:
        EngineDeadError: another task has closed some of the requests.
    """
    outputs: dict[int, RequestOutput] = {}
    failure: Exception | None = None

    async def finish(index: int, generation: Generation[RequestOutput]) -> None:
        nonlocal failure
        try:
            async with generation as stream:
                async for output in stream:
                    outputs[index] = output
            bar.update(1)
        except Exception as error:
            failure = failure or error
            tg.cancel_scope.cancel()

    try:
        async with anyio.create_task_group() as tg:
            for index, generation in enumerate(generations):
                tg.start_soon(finish, index, generation)
    finally:
        for generation in generations:
            generation.close()
    if failure is not None:
        raise failure
    if len(outputs) < len(generations):
        raise EngineDeadError("requests were closed before they finished")
    return [outputs[index] for index in range(len(generations))]


def as_list(prompts: PromptType | Sequence[PromptType]) -> Sequence[PromptType]:
    """Convert one prompt or several to a list of prompts, and arrays of token ids to lists.

    Raises:
        TrouperValidationError: `prompts` is neither a prompt nor a list of prompts.
    """
    if isinstance(prompts, str | Mapping):
        return [cast("PromptType", prompts)]
    given = plain_prompt(prompts)
    if not isinstance(given, Sequence) or isinstance(given, bytes | bytearray):
        raise TrouperValidationError(
            "must be one prompt (text, token ids or a prompt dict) or a list of prompts",
            parameter="prompts",
            value=type(prompts).__name__,
        )
    entries = cast("Sequence[Any]", given)
    is_one = len(entries) > 0 and _is_integer(entries[0])
    return [entries] if is_one else entries


def as_chat_prompts(
    messages: Conversation | Sequence[Conversation],
    chat_template: str | None,
    chat_template_content_format: str,
    add_generation_prompt: bool,
    continue_final_message: bool,
    tools: list[dict[str, Any]] | None,
    chat_template_kwargs: dict[str, Any] | None,
) -> list[PromptType]:
    """Convert one conversation or several to a list of prompts for the chat template.

    Raises:
        TrouperValidationError, UnsupportedFeatureError: an argument is invalid; the error names it.
    """
    if chat_template_content_format not in ("auto", "string", "openai"):
        raise TrouperValidationError(
            "must be auto, string or openai",
            parameter="chat_template_content_format",
            value=chat_template_content_format,
        )
    if chat_template_content_format == "openai":
        raise UnsupportedFeatureError(
            "chat_template_content_format='openai' is not supported yet; "
            "use 'auto', which passes texts to the template as strings"
        )
    if not isinstance(messages, Sequence) or isinstance(messages, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # not every caller is typed
        raise TrouperValidationError(
            "must be a conversation or a list of conversations",
            parameter="messages",
            value=type(messages).__name__,
        )
    is_one = len(messages) > 0 and isinstance(messages[0], dict)
    return [
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


def final_only(params: SamplingParams) -> SamplingParams:
    """Return a copy of the parameters that requests only the final output.

    A blocking call returns once, so intermediate outputs would only cost time.  The caller's object is not changed.
    """
    if not isinstance(params, SamplingParams):  # pyright: ignore[reportUnnecessaryIsInstance]  # not every caller is typed
        raise TypeError(f"sampling_params must be SamplingParams, not {type(params).__name__}")
    params = params.clone()
    params.output_kind = RequestOutputKind.FINAL_ONLY
    return params


def progress_bar(use_tqdm: bool | ProgressBar, total: int, what: str) -> Any:
    """Return a progress bar as a context manager: tqdm's, a caller's own, or a hidden one.

    A function given by the caller is used like tqdm's class.  tqdm is imported only here.
    """
    from tqdm import tqdm

    make = use_tqdm if callable(use_tqdm) else tqdm
    return make(total=total, desc=what, disable=not use_tqdm, leave=False)


def _is_integer(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


Params = PoolingParams | Sequence[PoolingParams] | None
# A text, or `{"content": parts of a message}` with images.
ScoreInput = str | Mapping[str, Any]
Prompts = PoolingPrompt | Sequence[PoolingPrompt]


class PoolingMethods(BlockingControls):
    """Pooling methods of `LLM`; results are in the order of the prompts.

    All of them raise TrouperValidationError if the model generates text, and EnginePausedError if the engine is
    paused or asleep.
    """

    def encode(
        self,
        prompts: Prompts,
        pooling_params: Params = None,
        *,
        use_tqdm: bool | ProgressBar = True,
        lora_request: object | None = None,
        pooling_task: str | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Run a pooling task on one prompt or a list of prompts.

        Args:
            pooling_params: parameters for all prompts, or one for each; None means the model's defaults.
            pooling_task: `embed`, `classify`, `token_embed` or `token_classify`; required.

        Raises:
            TrouperValidationError: no task, a task that the model does not support, or an invalid prompt or parameter.
        """
        self._check_pools()
        if pooling_task is None:
            known = ", ".join(self.thread.engine.config.supported_tasks)
            raise TrouperValidationError(
                f"encode needs a task; this model supports: {known}", parameter="pooling_task"
            )
        check_unused(lora_request=lora_request)
        given = as_list(prompts)  # type: ignore[arg-type]  # pairs are mappings, too
        if not given:
            raise TrouperValidationError("You must pass at least one prompt", parameter="prompt")
        engine = self.thread.engine
        encodings = [
            engine.encode(prompt, _with_task(params, pooling_task), tokenization_kwargs=tokenization_kwargs)
            for prompt, params in zip(
                given, one_each(pooling_params, len(given), "pooling_params"), strict=True
            )
        ]  # fmt: skip
        with progress_bar(use_tqdm, len(given), "prompts") as bar:
            return self.thread.call(collect, encodings, bar)

    def embed(
        self,
        prompts: Prompts,
        *,
        use_tqdm: bool | ProgressBar = True,
        pooling_params: Params = None,
        lora_request: object | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Embed each prompt; `output.outputs.embedding` is a list of floats.

        Results have the order of the prompts.  Embeddings are normalised if the model's files or `pooling_params` ask
        for it.
        """
        outputs = self.encode(
            prompts, pooling_params, use_tqdm=use_tqdm, lora_request=lora_request,
            pooling_task="embed", tokenization_kwargs=tokenization_kwargs,
        )  # fmt: skip
        return [EmbeddingRequestOutput.from_base(output) for output in outputs]

    def classify(
        self,
        prompts: Prompts,
        *,
        use_tqdm: bool | ProgressBar = True,
        pooling_params: Params = None,
        lora_request: object | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Classify each prompt; `output.outputs.probs` has one probability for each label of the model.

        Results have the order of the prompts.  With `use_activation=False` they are logits.  Raises
        TrouperValidationError for a model without classes.
        """
        outputs = self.encode(
            prompts, pooling_params, use_tqdm=use_tqdm, lora_request=lora_request,
            pooling_task="classify", tokenization_kwargs=tokenization_kwargs,
        )  # fmt: skip
        return [ClassificationRequestOutput.from_base(output) for output in outputs]

    def reward(
        self,
        prompts: Prompts,
        *,
        use_tqdm: bool | ProgressBar = True,
        pooling_params: Params = None,
        lora_request: object | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the rewards of each prompt's tokens; the same as `encode` with the task `token_classify`.

        The array of each output has one row for each token of the prompt and one column for each label.
        """
        return self.encode(
            prompts, pooling_params, use_tqdm=use_tqdm, lora_request=lora_request,
            pooling_task="token_classify", tokenization_kwargs=tokenization_kwargs,
        )  # fmt: skip

    def score(
        self,
        data_1: ScoreInput | Sequence[ScoreInput],
        data_2: ScoreInput | Sequence[ScoreInput],
        /,
        *,
        use_tqdm: bool | ProgressBar = True,
        pooling_params: PoolingParams | None = None,
        lora_request: object | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Score the similarity of pairs of texts: 1 with 1, 1 with N, or N with N texts.

        The model determines the method: a classifier with one label reads both texts together (cross-encoder), an
        embedding model returns the cosine of both embeddings, and a late-interaction model sums, over the tokens of
        the first text, the best match among the tokens of the second.  A side with images is a dict with `content`, the
        parts of a message.
        """
        self._check_pools()
        check_unused(lora_request=lora_request, chat_template=chat_template)
        queries, documents, places = as_pairs(data_1, data_2, ("data_1", "data_2"))
        engine = self.thread.engine
        encode = partial(engine.encode, tokenization_kwargs=tokenization_kwargs)
        scorer = Scorer(encode, engine.config.pooler, pooling_params, places=places)
        with progress_bar(use_tqdm, len(documents), "pairs") as bar:
            outputs: list[Pooled] = self.thread.call(scorer.score, queries, documents, bar)
        return [ScoringRequestOutput.from_base(output) for output in outputs]

    def _check_pools(self) -> None:
        self.thread.check_open()
        if self.is_sleeping():
            raise EnginePausedError("the engine is paused or asleep: wake_up() first")
        config = self.thread.engine.config
        if config.pooler is None:
            rule = "this engine generates text; pooling needs an engine with runner='pooling'"
            raise TrouperValidationError(rule, parameter="runner")


def _with_task(params: PoolingParams | None, task: str) -> PoolingParams:
    if params is None:
        return PoolingParams(task=task)
    if not isinstance(params, PoolingParams):  # pyright: ignore[reportUnnecessaryIsInstance]  # not every caller is typed
        raise TypeError(f"pooling_params must be PoolingParams, not {type(params).__name__}")
    if params.task not in (None, task):
        raise TrouperValidationError(
            f"the task of pooling_params is not {task!r}", parameter="task", value=params.task
        )
    return msgspec.structs.replace(params, task=task)
