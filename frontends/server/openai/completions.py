"""`POST /v1/completions`: n × m choices, whole or as a stream.  Source: spec sections 16.2 and 16.3."""

import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from trouper.errors import TrouperValidationError
from trouper.frontends.python.cooperative import InTurns
from trouper.frontends.server.http.exchange import Exchange
from trouper.frontends.server.openai.logprobs import completion_logprobs, prompt_logprobs
from trouper.frontends.server.openai.requests import CompletionRequest
from trouper.frontends.server.openai.responses_types import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionReply,
)
from trouper.frontends.server.openai.sampling import check_sequences, completion_params
from trouper.frontends.server.service import Service
from trouper.frontends.server.streams import Counted, each_output, final_outputs
from trouper.outputs import CompletionOutput, LogprobsOnePosition, RequestOutput

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trouper.actors.engine.generation import Generation

MAX_PROMPTS = 1024


async def create_completion(
    service: Service, exchange: Exchange, request: CompletionRequest
) -> None:
    answer = _Answer(service, exchange, request)
    if request.is_stream:
        await answer.stream()
    else:
        await answer.whole()


class _Answer:
    """One request on its way: checked when made, and the state of its choices."""

    def __init__(self, service: Service, exchange: Exchange, request: CompletionRequest) -> None:
        settings = service.settings
        self._service = service
        self._exchange = exchange
        self._request = request
        self._model = service.check_model(request.model)
        self._prompts, self._places = _prompts(request)
        self._params = completion_params(
            request, service.config.model.default_sampling, service.config.max_model_len
        )
        check_sequences(len(self._prompts), self._params.n)
        exchange.name_by(request.request_id)
        self._id = f"cmpl-{exchange.request_id}"
        self._created = int(time.time())
        self._as_ids = bool(request.return_tokens_as_token_ids)
        self._as_ids |= settings.return_tokens_as_token_ids
        self._is_prompt_only = request.max_tokens == 0
        self._counted = Counted(
            len(self._prompts), shows_cached=settings.enable_prompt_tokens_details
        )
        options = request.stream_options
        forced = settings.force_include_usage
        self._ends_with_usage = forced or bool(options and options.include_usage)
        self._shows_usage = forced or bool(options and options.continuous_usage_stats)
        self._offsets: dict[int, int] = defaultdict(int)  # of the next token's text, by choice
        self._begun: set[int] = set()  # choices that have been heard of

    async def whole(self) -> None:
        outputs = await final_outputs(
            self._service, self._exchange, self._generations(), self._places
        )
        choices: list[CompletionChoice] = []
        async for i, output in InTurns(enumerate(outputs)):
            choices += await self._choices(i, output)
        reply = self._reply(sorted(choices, key=lambda choice: choice.index))
        reply.usage = self._counted.usage
        await self._exchange.send_json(reply)

    async def stream(self) -> None:
        async def pump(i: int, output: RequestOutput) -> None:
            choices = await self._choices(i, output)
            if not self._exchange.has_started:
                await self._exchange.start_events()
            for choice in choices:
                if _says_something(choice):
                    chunk = self._reply([choice])
                    if self._shows_usage:
                        chunk.usage = self._counted.usage
                    await self._exchange.send_event(chunk)

        await each_output(self._service, self._exchange, self._generations(), self._places, pump)
        if self._ends_with_usage:
            last = self._reply([])
            last.usage = self._counted.usage
            await self._exchange.send_event(last)
        await self._exchange.end_events()

    def _generations(self) -> "Iterator[Generation]":
        return self._service.generations(self._exchange, self._prompts, self._params, self._request)

    def _reply(self, choices: list[CompletionChoice]) -> CompletionReply:
        return CompletionReply(
            id=self._id, created=self._created, model=self._model, choices=choices
        )

    async def _choices(self, i: int, output: RequestOutput) -> list[CompletionChoice]:
        if self._is_prompt_only:
            for completion in output.outputs:
                completion.text, completion.token_ids, completion.logprobs = "", [], []
        self._counted.add(i, output)
        is_echoed = self._request.echo and any(
            self._index(i, completion) not in self._begun for completion in output.outputs
        )
        prompt = await self._service.prompt_text(output) if is_echoed else ""
        return [self._choice(i, output, completion, prompt) for completion in output.outputs]

    def _choice(
        self, i: int, output: RequestOutput, completion: CompletionOutput, prompt: str
    ) -> CompletionChoice:
        index = self._index(i, completion)
        is_first = index not in self._begun
        self._begun.add(index)
        choice = CompletionChoice(
            index=index,
            text=(prompt if is_first else "") + completion.text,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )
        token_ids: list[int] = list(completion.token_ids)
        positions: list[LogprobsOnePosition | None] = list(completion.logprobs or ())
        if self._request.return_token_ids:
            choice.token_ids = completion.token_ids
            choice.prompt_token_ids = output.prompt_token_ids if is_first else UNSET
        if self._request.prompt_logprobs is not None and output.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        if self._request.logprobs is not None:
            if self._request.echo and is_first:
                token_ids = [*output.prompt_token_ids, *token_ids]
                positions = [*(output.prompt_logprobs or ()), *positions]
            choice.logprobs = self._logprobs(index, token_ids, positions)
        return choice

    def _logprobs(
        self, index: int, token_ids: list[int], positions: list[LogprobsOnePosition | None]
    ) -> CompletionLogprobs:
        made = completion_logprobs(
            token_ids,
            positions,
            self._request.logprobs or 0,
            text_of=self._service.token_text,
            offset=self._offsets[index],
            as_ids=self._as_ids,
        )
        self._offsets[index] += sum(map(len, made.tokens))
        return made

    def _index(self, i: int, completion: CompletionOutput) -> int:
        return i * self._params.n + completion.index


def _says_something(choice: CompletionChoice) -> bool:
    has_logprobs = choice.logprobs is not None and bool(choice.logprobs.tokens)
    return bool(choice.text or choice.finish_reason or choice.token_ids or has_logprobs)


def _prompts(request: CompletionRequest) -> tuple[list[Any], list[str]]:
    """The prompts in the engine's form, and what the client calls each."""
    if request.max_tokens == 0 and not request.echo:
        raise _bad("max_tokens", "must be at least 1 without echo")
    if request.prompt_embeds is None:
        return _text_prompts(request)
    prompts, places = _embeds_prompts(request)
    if request.prompt:
        more, names = _text_prompts(request)
        prompts, places = prompts + more, places + names
    return prompts, places


def _text_prompts(request: CompletionRequest) -> tuple[list[Any], list[str]]:
    given = request.prompt
    if not given:
        raise _bad("prompt", "must not be empty")
    if isinstance(given, str):
        return [_salted("prompt", given, request)], ["prompt"]
    if _is_ids(given):
        return [_salted("prompt_token_ids", given, request)], ["prompt"]
    if len(given) > MAX_PROMPTS:
        raise _bad("prompt", f"at most {MAX_PROMPTS} prompts")
    kind = type(given[0])
    prompts: list[Any] = []
    for i, prompt in enumerate(given):
        place = f"prompt[{i}]"
        if type(prompt) is not kind or kind not in (str, list):
            raise _bad(place, "must be text, or a list of token ids, as the others")
        if not prompt:
            raise _bad(place, "must not be empty")
        if kind is list and not _is_ids(prompt):
            raise _bad(place, "must hold integers")
        prompts.append(_salted("prompt" if kind is str else "prompt_token_ids", prompt, request))
    return prompts, [f"prompt[{i}]" for i in range(len(prompts))]


def _embeds_prompts(request: CompletionRequest) -> tuple[list[Any], list[str]]:
    given = request.prompt_embeds
    if request.echo:
        raise _bad("echo", "not with prompt_embeds")
    if isinstance(given, str | memoryview):
        return [_salted("prompt_embeds", given, request)], ["prompt_embeds"]
    if not given:
        raise _bad("prompt_embeds", "must not be empty")
    if len(given) > MAX_PROMPTS:
        raise _bad("prompt_embeds", f"at most {MAX_PROMPTS} prompts")
    places = [f"prompt_embeds[{i}]" for i in range(len(given))]
    return [_salted("prompt_embeds", text, request) for text in given], places


def _salted(key: str, prompt: Any, request: CompletionRequest) -> dict[str, Any]:
    salt = {} if request.cache_salt is None else {"cache_salt": request.cache_salt}
    return {key: prompt, **salt}


def _is_ids(given: list[Any]) -> bool:
    return all(type(token_id) is int for token_id in given)


def _bad(name: str, rule: str) -> TrouperValidationError:
    return TrouperValidationError(f"{name}: {rule}", parameter=name)
