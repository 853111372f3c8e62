"""Many requests of `LLM` at once, run on the engine's event loop, and the reading of their prompts."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import anyio

from trouper.actors.engine.generation import Generation
from trouper.errors import EngineDeadError, TrouperValidationError, UnsupportedFeatureError
from trouper.frontends.python.options import plain_prompt
from trouper.inputs import ChatPrompt, PromptType
from trouper.outputs import RequestOutput
from trouper.params import RequestOutputKind, SamplingParams

ProgressBar = Callable[..., Any]
Conversation = Sequence[dict[str, Any]]


async def submit(
    generations: list[Generation[RequestOutput]], bar: Any, *, waits: bool = True
) -> None:
    """Render and queue all; if one is bad, all are aborted.

    Args:
        waits: for the first ones to end, where they use all adapters that may be loaded.
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
    """Run all at once and return their last outputs; the first failure ends the others and is raised as it is.

    Raises:
        EngineDeadError: another task has closed some of them.
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
        raise EngineDeadError("requests were closed before they had ended")
    return [outputs[index] for index in range(len(generations))]


def as_list(prompts: PromptType | Sequence[PromptType]) -> Sequence[PromptType]:
    """Return a list of prompts; one prompt is a list of one, and arrays of token ids become lists.

    Raises:
        TrouperValidationError: neither a prompt nor a list of prompts.
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
    """Return one prompt for each conversation; a single conversation is a list of one.

    Raises:
        TrouperValidationError, UnsupportedFeatureError: the argument that is wrong is named.
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
            "leave it at 'auto', which gives the template strings"
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
    """Return a copy that yields one output, at the end."""
    if not isinstance(params, SamplingParams):  # pyright: ignore[reportUnnecessaryIsInstance]  # not every caller is typed
        raise TypeError(f"sampling_params must be SamplingParams, not {type(params).__name__}")
    params = params.clone()
    params.output_kind = RequestOutputKind.FINAL_ONLY
    return params


def progress_bar(use_tqdm: bool | ProgressBar, total: int, what: str) -> Any:
    from tqdm import tqdm

    make = use_tqdm if callable(use_tqdm) else tqdm
    return make(total=total, desc=what, disable=not use_tqdm, leave=False)


def _is_integer(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)
