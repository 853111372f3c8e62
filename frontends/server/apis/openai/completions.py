"""Serve `POST /v1/completions`: the adapter of completions, with n choices for each of m prompts."""

from collections import defaultdict
from collections.abc import Awaitable
from typing import Any, ClassVar, cast

import msgspec
from msgspec import UNSET, UnsetType

from trouper.errors import TrouperValidationError, invalid
from trouper.frontends.server.apis.openai.requests import (
    FINGERPRINT,
    CompletionChoice,
    CompletionChunk,
    CompletionDelta,
    CompletionReply,
    CompletionRequest,
)
from trouper.frontends.server.apis.openai.sampling import (
    check_sequences,
    choices_of,
    completion_beams,
    completion_params,
    parsed_request,
)
from trouper.frontends.server.generation.adapter import (
    ChoiceUpdate,
    LastMetrics,
    ParsedRequest,
    ReplyHead,
    ServedModel,
    StreamEvent,
)
from trouper.frontends.server.generation.driver import drive
from trouper.frontends.server.generation.logprobs import (
    CompletionLogprobs,
    completion_logprobs,
    prompt_logprobs,
)
from trouper.frontends.server.generation.request_fields import way_of
from trouper.frontends.server.http.context import DONE, RequestContext
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared.usage import Usage
from trouper.outputs import LogprobsOnePosition, RequestOutput

MAX_PROMPTS = 1024


def create_completion(
    service: Service, context: RequestContext, request: CompletionRequest
) -> Awaitable[None]:
    """Complete prompts, as one reply or as a stream.

    A prompt can be a text or token ids, and a list of prompts is answered in one reply.
    """
    return drive(service, context, request, CompletionAdapter)


class CompletionAdapter:
    """Render n choices for each prompt.  The chunks of a stream have the format of whole replies.

    Choices of the same prompt are adjacent: choice i belongs to prompt i // n.
    """

    STREAM_END: ClassVar[bytes] = DONE

    @staticmethod
    def parse(request: CompletionRequest, model: ServedModel) -> ParsedRequest:
        prompts, places = _prompts(request)
        limits = model.default_sampling, model.max_model_len
        beams = completion_beams(request, *limits) if request.use_beam_search else None
        params = completion_params(request, *limits) if beams is None else choices_of(beams)
        check_sequences(len(prompts), params.n)
        reasoning = None if params.thinking_token_budget is None else model.answers.reasoning
        parsed = parsed_request(request, model.settings, prompts, places, params, reasoning)
        parsed.beams = beams
        parsed.is_prompt_only = request.max_tokens == 0
        parsed.shows_prompt = bool(request.echo)
        return parsed

    @staticmethod
    def client_name(request: CompletionRequest, parameter: str) -> str:
        if parameter == "structured_outputs":
            return way_of(request)
        return "n" if parameter == "beam_width" else parameter

    def __init__(
        self, request: CompletionRequest, parsed: ParsedRequest, model: ServedModel, head: ReplyHead
    ) -> None:
        self._request = request
        self._ends_with_usage = parsed.ends_with_usage
        self._id = f"cmpl-{head.request_id}"
        self._created = head.created
        self._model = model
        self._as_ids = bool(request.return_tokens_as_token_ids)
        self._as_ids |= model.settings.return_tokens_as_token_ids
        self._offsets: dict[int, int] = defaultdict(int)  # of the next token's text, by choice
        self._choices: list[CompletionChoice] = []
        self._metrics = LastMetrics(parsed)

    def begin(self, output: RequestOutput, usage: Usage | None) -> list[StreamEvent]:
        return []

    def render(self, update: ChoiceUpdate, usage: Usage | None) -> list[StreamEvent]:
        delta = self._delta(update)
        if not _says_something(delta):
            return []
        is_last = delta.finish_reason is not None and not self._ends_with_usage
        fingerprint = FINGERPRINT if is_last else UNSET
        return [StreamEvent(self._chunk([delta], usage and usage.without_details(), fingerprint))]

    def end(self, usage: Usage) -> list[StreamEvent]:
        if not self._ends_with_usage:
            return []
        chunk = self._chunk([], usage, FINGERPRINT)
        chunk.metrics = self._metrics.shown or UNSET
        return [StreamEvent(chunk)]

    def add(self, update: ChoiceUpdate) -> None:
        choice = CompletionChoice(**msgspec.structs.asdict(self._delta(update)))
        logprobs = update.output.prompt_logprobs
        if logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(logprobs)
        self._choices.append(choice)

    def reply(self, usage: Usage) -> CompletionReply:
        return CompletionReply(
            id=self._id,
            created=self._created,
            model=self._model.name,
            choices=sorted(self._choices, key=lambda choice: choice.index),
            usage=usage.with_nulls(),
            metrics=self._metrics.shown,
        )

    def _chunk(
        self, deltas: list[CompletionDelta], usage: Usage | None, fingerprint: str | UnsetType
    ) -> CompletionChunk:
        return CompletionChunk(
            id=self._id,
            created=self._created,
            model=self._model.name,
            choices=deltas,
            usage=UNSET if usage is None else usage,
            system_fingerprint=fingerprint,
        )

    def _delta(self, update: ChoiceUpdate) -> CompletionDelta:
        completion, output = update.completion, update.output
        self._metrics.stats = output.metrics
        delta = CompletionDelta(
            index=update.index,
            text=update.prompt_text + update.text,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )
        if self._request.return_token_ids:
            delta.token_ids = completion.token_ids
            delta.prompt_token_ids = output.prompt_token_ids if update.is_first else None
        if self._request.logprobs is not None:
            delta.logprobs = self._logprobs(update)
        return delta

    def _logprobs(self, update: ChoiceUpdate) -> CompletionLogprobs:
        completion, output = update.completion, update.output
        token_ids: list[int] = list(completion.token_ids)
        positions: list[LogprobsOnePosition | None] = list(completion.logprobs or ())
        if self._request.echo and update.is_first:
            token_ids = [*output.prompt_token_ids, *token_ids]
            positions = [*(output.prompt_logprobs or ()), *positions]
        made = completion_logprobs(
            token_ids,
            positions,
            self._request.logprobs or 0,
            text_of=self._model.token_text,
            bytes_of=self._model.token_bytes,
            offset=self._offsets[update.index],
            as_ids=self._as_ids,
        )
        self._offsets[update.index] += sum(map(len, made.tokens))
        return made


def _says_something(delta: CompletionDelta) -> bool:
    has_logprobs = delta.logprobs is not None and bool(delta.logprobs.tokens)
    return bool(delta.text or delta.finish_reason or delta.token_ids or has_logprobs)


def _prompts(request: CompletionRequest) -> tuple[list[Any], list[str]]:
    """Return the prompts in the engine's form, and the client's name for each."""
    if request.max_tokens == 0 and not request.echo:
        raise invalid("max_tokens", "must be at least 1 without echo", 0)
    if request.suffix:
        return _gaps(request)
    if not request.prompt and not request.prompt_embeds:
        text = "Either prompt or prompt_embeds must be provided and non-empty."
        name = "prompt" if request.prompt_embeds is None else "prompt_embeds"
        raise TrouperValidationError(text, parameter=name)
    if not request.prompt_embeds:
        return _text_prompts(request)
    prompts, places = _embeds_prompts(request)
    if request.prompt:
        more, names = _text_prompts(request)
        prompts, places = prompts + more, places + names
    return prompts, places


def _gaps(request: CompletionRequest) -> tuple[list[Any], list[str]]:
    """Return the prompts of a request with a suffix; each is the text before the gap."""
    if request.prompt_embeds:
        raise invalid("prompt_embeds", "not with suffix")
    if request.echo:
        raise invalid("echo", "not with suffix")
    if request.truncate_prompt_tokens is not None:
        raise invalid("truncate_prompt_tokens", "not with suffix")
    prompts, places = _text_prompts(request)
    for prompt, place in zip(prompts, places, strict=True):
        if "prompt" not in prompt:
            raise invalid(place, "must be text with suffix")
        prompt["suffix"] = request.suffix
    return prompts, places


def _text_prompts(request: CompletionRequest) -> tuple[list[Any], list[str]]:
    given = request.prompt
    if not given:
        raise invalid("prompt", "must not be empty")
    if isinstance(given, str):
        return [_salted("prompt", given, request)], ["prompt"]
    if _is_ids(given):
        return [_salted("prompt_token_ids", given, request)], ["prompt"]
    if len(given) > MAX_PROMPTS:
        raise invalid("prompt", f"at most {MAX_PROMPTS} prompts", len(given))
    kind = cast("type[object]", type(given[0]))
    prompts: list[Any] = []
    for i, prompt in enumerate(given):
        place = f"prompt[{i}]"
        if type(prompt) is not kind or kind not in (str, list):
            raise invalid(
                place,
                "must have the type of the other inputs: either all are texts or all are lists of token ids",
            )
        if not prompt:
            raise invalid(place, "must not be empty")
        if kind is list and not _is_ids(cast("list[Any]", prompt)):
            raise invalid(place, "must hold integers")
        prompts.append(_salted("prompt" if kind is str else "prompt_token_ids", prompt, request))
    return prompts, [f"prompt[{i}]" for i in range(len(prompts))]


def _embeds_prompts(request: CompletionRequest) -> tuple[list[Any], list[str]]:
    given = request.prompt_embeds
    if request.echo:
        raise invalid("echo", "not with prompt_embeds")
    if isinstance(given, str | memoryview):
        return [_salted("prompt_embeds", given, request)], ["prompt_embeds"]
    if not given:
        raise invalid("prompt_embeds", "must not be empty")
    if len(given) > MAX_PROMPTS:
        raise invalid("prompt_embeds", f"at most {MAX_PROMPTS} prompts", len(given))
    places = [f"prompt_embeds[{i}]" for i in range(len(given))]
    return [_salted("prompt_embeds", text, request) for text in given], places


def _salted(key: str, prompt: Any, request: CompletionRequest) -> dict[str, Any]:
    salt = {} if request.cache_salt is None else {"cache_salt": request.cache_salt}
    return {key: prompt, **salt}


def _is_ids(given: list[Any]) -> bool:
    return all(type(token_id) is int for token_id in given)
