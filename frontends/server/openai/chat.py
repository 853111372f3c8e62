"""`POST /v1/chat/completions`: whole or as a stream.  Source: spec sections 16.2 and 16.3."""

import time
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from trouper.errors import TrouperValidationError, UnsupportedFeatureError
from trouper.frontends.server.http.exchange import Exchange
from trouper.frontends.server.openai.logprobs import chat_logprobs, prompt_logprobs
from trouper.frontends.server.openai.requests import ChatRequest
from trouper.frontends.server.openai.responses_types import (
    ChatChoice,
    ChatChunk,
    ChatDelta,
    ChatLogprobs,
    ChatReply,
    Message,
)
from trouper.frontends.server.openai.sampling import chat_params
from trouper.frontends.server.service import Service
from trouper.frontends.server.settings import ServerSettings
from trouper.frontends.server.streams import Counted, each_output, final_outputs
from trouper.outputs import CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trouper.actors.engine.generation import Generation

MAX_MESSAGES = 4096
MAX_PARTS = 256  # in one message


async def create_chat(service: Service, exchange: Exchange, request: ChatRequest) -> None:
    try:
        answer = _Answer(service, exchange, request)
        if request.is_stream:
            await answer.stream()
        else:
            await answer.whole()
    except TrouperValidationError as error:
        for name, new_name in (
            ("logprobs", "top_logprobs"),
            ("max_tokens", "max_completion_tokens"),
        ):
            if error.parameter == name and getattr(request, new_name) is not None:
                error.parameter = new_name  # what the client calls it
        raise


class _Answer:
    """One request on its way: checked when made, and the state of its choices."""

    def __init__(self, service: Service, exchange: Exchange, request: ChatRequest) -> None:
        settings = service.settings
        self._service = service
        self._exchange = exchange
        self._request = request
        self._model = service.check_model(request.model)
        self._prompt: Any = chat_prompt(request, settings)
        self._params = chat_params(
            request, service.config.model.default_sampling, service.config.max_model_len
        )
        exchange.name_by(request.request_id)
        self._id = f"chatcmpl-{exchange.request_id}"
        self._created = int(time.time())
        self._as_ids = bool(request.return_tokens_as_token_ids)
        self._as_ids |= settings.return_tokens_as_token_ids
        self._role = settings.response_role
        if request.add_generation_prompt is False:
            self._role = str(request.messages[-1].get("role", self._role))
        self._echo = _echoed(request, self._role)
        self._counted = Counted(1, shows_cached=settings.enable_prompt_tokens_details)
        options = request.stream_options
        forced = settings.force_include_usage
        self._ends_with_usage = forced or bool(options and options.include_usage)
        self._shows_usage = forced or bool(options and options.continuous_usage_stats)

    async def whole(self) -> None:
        (output,) = await final_outputs(
            self._service, self._exchange, self._generations(), ["messages"]
        )
        self._counted.add(0, output)
        wants_ids = self._request.return_token_ids
        reply = ChatReply(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[self._choice(completion) for completion in output.outputs],
            usage=self._counted.usage,
            prompt_token_ids=output.prompt_token_ids if wants_ids else UNSET,
        )
        if output.prompt_logprobs is not None:
            reply.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        await self._exchange.send_json(reply)

    async def stream(self) -> None:
        async def pump(_: int, output: RequestOutput) -> None:
            self._counted.add(0, output)
            if not self._exchange.has_started:
                await self._begin(output)
            for completion in output.outputs:
                if _says_something(completion):
                    await self._send(self._delta(completion))

        await each_output(self._service, self._exchange, self._generations(), ["messages"], pump)
        if self._ends_with_usage:
            last = self._chunk([])
            last.usage = self._counted.usage
            await self._exchange.send_event(last)
        await self._exchange.end_events()

    async def _begin(self, output: RequestOutput) -> None:
        """Whose turn it is, for each choice; an echo is the first thing said."""
        await self._exchange.start_events()
        for index in range(self._params.n):
            delta = ChatDelta(index=index, delta=Message(role=self._role, content=""))
            chunk = self._chunk([delta])
            if self._request.return_token_ids and index == 0:
                chunk.prompt_token_ids = output.prompt_token_ids
            await self._exchange.send_event(chunk)
            if self._echo:
                await self._send(ChatDelta(index=index, delta=Message(content=self._echo)))

    async def _send(self, delta: ChatDelta) -> None:
        chunk = self._chunk([delta])
        if self._shows_usage:
            chunk.usage = self._counted.usage
        await self._exchange.send_event(chunk)

    def _generations(self) -> "Iterator[Generation]":
        return self._service.generations(
            self._exchange, [self._prompt], self._params, self._request
        )

    def _chunk(self, choices: list[ChatDelta]) -> ChatChunk:
        return ChatChunk(id=self._id, created=self._created, model=self._model, choices=choices)

    def _choice(self, completion: CompletionOutput) -> ChatChoice:
        return ChatChoice(
            index=completion.index,
            message=Message(role=self._role, content=self._echo + completion.text),
            logprobs=self._logprobs(completion),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            token_ids=completion.token_ids if self._request.return_token_ids else UNSET,
        )

    def _delta(self, completion: CompletionOutput) -> ChatDelta:
        stop_reason = completion.stop_reason
        return ChatDelta(
            index=completion.index,
            delta=Message(content=completion.text) if completion.text else Message(),
            logprobs=self._logprobs(completion) or UNSET,
            finish_reason=completion.finish_reason,
            stop_reason=UNSET if stop_reason is None else stop_reason,
            token_ids=completion.token_ids if self._request.return_token_ids else UNSET,
        )

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if not self._request.logprobs or completion.logprobs is None:
            return None
        num_top = self._request.top_logprobs or 0
        if self._request.logprob_token_ids is not None:
            num_top = -1  # all that were asked for by name
        return chat_logprobs(
            completion.token_ids, completion.logprobs, num_top, as_ids=self._as_ids
        )


def chat_prompt(request: Any, settings: ServerSettings) -> dict[str, Any]:
    """A conversation in the engine's form, from a ChatRequest or TokenizeRequest.

    Raises:
        TrouperValidationError, UnsupportedFeatureError: naming the field.
    """
    messages: list[dict[str, Any]] = request.messages
    if not messages:
        raise _bad("messages", "must not be empty")
    if len(messages) > MAX_MESSAGES:
        raise _bad("messages", f"at most {MAX_MESSAGES} messages")
    for i, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list) and len(content) > MAX_PARTS:
            raise _bad(f"messages[{i}].content", f"at most {MAX_PARTS} parts")
    if request.chat_template is not None and not settings.trust_request_chat_template:
        raise _bad("chat_template", "this server renders its own template only")
    _check_tools(request.tools, getattr(request, "tool_choice", "none"))
    variables = dict(settings.default_chat_template_kwargs)
    if (effort := getattr(request, "reasoning_effort", None)) is not None:
        variables["reasoning_effort"] = effort
    variables |= request.chat_template_kwargs or {}
    prompt: dict[str, Any] = {"messages": messages, "chat_template_kwargs": variables}
    if request.chat_template is not None:
        prompt["foreign_chat_template"] = request.chat_template
    for name in ("add_generation_prompt", "continue_final_message", "tools", "cache_salt"):
        if (value := getattr(request, name, None)) is not None:
            prompt[name] = value
    return prompt


def _check_tools(tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None) -> None:
    if tools is None:
        if choice not in (None, "none"):
            raise _bad("tool_choice", "needs tools")
    elif not tools:
        raise _bad("tools", "must not be empty")
    elif choice != "none":
        raise UnsupportedFeatureError("tools: only tool_choice none is supported yet")


def _echoed(request: ChatRequest, role: str) -> str:
    """The message that the answer goes on with, where the client wants to see it again."""
    last = request.messages[-1]
    content = last.get("content")
    is_wanted = request.echo and last.get("role") == role and isinstance(content, str)
    return str(content) if is_wanted else ""


def _says_something(completion: CompletionOutput) -> bool:
    return bool(completion.text or completion.finish_reason or completion.logprobs)


def _bad(name: str, rule: str) -> TrouperValidationError:
    return TrouperValidationError(f"{name}: {rule}", parameter=name)
