"""Read the prompts of `LLM`'s methods, and run their requests together on the engine's event loop.

A call with 10,000 prompts crosses to the engine's thread once to queue all requests and once to wait for them,
instead of once for each request.
"""

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
