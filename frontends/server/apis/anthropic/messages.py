"""Serve `POST /v1/messages`: the adapter of Anthropic's Messages API, and its error format.

A request is converted to a `ChatRequest`, so that all checks and features of chats apply here, too.
"""

from collections.abc import Awaitable
from functools import partial
from typing import Any, ClassVar

import msgspec

from trouper.frontends.server.apis.anthropic.conversation import (
    BUDGET,
    EFFORT,
    FORMAT,
    CountTokensRequest,
    MessagesRequest,
    chat_of,
    client_name,
    content_block,
    render_block,
)
from trouper.frontends.server.apis.openai.chat import ChatAdapter
from trouper.frontends.server.apis.openai.requests import ChatRequest
from trouper.frontends.server.apis.openai.tokens import conversation_ids
from trouper.frontends.server.generation.adapter import (
    ChoiceUpdate,
    ParsedRequest,
    ReplyHead,
    ServedModel,
    StreamEvent,
    call_ids,
)
from trouper.frontends.server.generation.driver import client_names, drive
from trouper.frontends.server.generation.parsers import AnswerBlocks, BlockEvent
from trouper.frontends.server.generation.transcript import Transcript, chat_prompt
from trouper.frontends.server.http.context import RequestContext
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared.errors import (
    MAX_MESSAGE,
    MAX_PARAM,
    THREAD_NOT_FOUND,
    ErrorBody,
    ErrorForm,
    clean,
)
from trouper.frontends.server.shared.usage import CachedTokens, Usage
from trouper.outputs import CompletionOutput, RequestOutput

JSONObject = dict[str, Any]
CLIENT_NAMES = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "reasoning_effort": EFFORT,
    "response_format": FORMAT,
    "structured_outputs": FORMAT,
    "thinking_token_budget": BUDGET,
}
# The reply reports that no edit of `context_management` was applied.
NO_EDITS: JSONObject = {"context_management": {"applied_edits": []}}
# Other reasons keep their names.
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}


class MessagesTurn:
    """Convert a request of the Messages API to a chat, and translate parameters in errors back to the client's names.

    Raises:
        TrouperValidationError, UnsupportedFeatureError: a field is invalid; the error names it.
    """

    def __init__(self, body: CountTokensRequest) -> None:
        self.model = body.model
        self.request_id = body.request_id
        self.reports_edits = body.context_management is not None
        self._body = body
        self.omits_thinking = (body.thinking or {}).get("display") == "omitted"
        self._transcript = Transcript()
        self.chat = chat_of(body, self._transcript)

    def client_name(self, parameter: str) -> str:
        """Translate a parameter of the chat to the field of the client's body from which it was derived."""
        # The grammar may stem from the tools instead of a format.
        if parameter == "structured_outputs":
            parameter = ChatAdapter.client_name(self.chat, parameter)
        if getattr(self._body, parameter, None) is not None:
            # The name is the same in both APIs.
            return parameter
        if parameter in CLIENT_NAMES:
            return CLIENT_NAMES[parameter]
        if parameter.startswith("tools["):
            return client_name(parameter)
        place = self._transcript.client_name(parameter)
        if place.endswith(".image_url"):
            # An image block has its URL in `source.url`.
            place = f"{place.removesuffix('.image_url')}.source.url"
        return place


def create_message(
    service: Service, context: RequestContext, request: MessagesRequest
) -> Awaitable[None]:
    """Answer a conversation, as one reply or as a stream of named events in the fixed order that Anthropic's clients check."""
    return drive(service, context, MessagesTurn(request), MessagesAdapter)


async def count_tokens(
    service: Service, context: RequestContext, request: CountTokensRequest
) -> None:
    """Count the tokens of a conversation, rendered by the chat template exactly as for an answer."""
    service.check_model(request.model)
    turn = MessagesTurn(request)
    with client_names(turn.client_name):
        prompt = chat_prompt(turn.chat, service.settings)
        ids = await conversation_ids(service, context, prompt)
    reply: dict[str, Any] = {"input_tokens": len(ids)}
    if turn.reports_edits:
        reply["context_management"] = {"original_input_tokens": len(ids)}
    await context.send_json(reply)


class MessagesAdapter:
    """Render one message, whose content is the blocks of the answer.  Its events number the blocks."""

    # The last event marks the end itself.
    STREAM_END: ClassVar[bytes] = b""

    @staticmethod
    def parse(request: MessagesTurn, model: ServedModel) -> ParsedRequest:
        parsed = ChatAdapter.parse(_within_limits(request.chat, model), model)
        return msgspec.structs.replace(parsed, shows_usage=True, shows_cached=True)

    @staticmethod
    def client_name(request: MessagesTurn, parameter: str) -> str:
        return request.client_name(parameter)

    def __init__(
        self, request: MessagesTurn, parsed: ParsedRequest, model: ServedModel, head: ReplyHead
    ) -> None:
        self._id = f"msg_{head.request_id}"
        self._model = model.name
        self._omits = request.omits_thinking
        self._edits: dict[str, Any] = NO_EDITS if request.reports_edits else {}
        self._blocks = AnswerBlocks(partial(call_ids(parsed, model, head).of, prefix="toolu"))
        self._last: CompletionOutput | None = None

    def begin(self, output: RequestOutput, usage: Usage | None) -> list[StreamEvent]:
        # Like in vLLM, the whole prompt counts as input here, and the last event reports the cached part.
        counts = _usage(usage and Usage(usage.prompt_tokens, 0, usage.prompt_tokens))
        return [_event("message_start", message=self._message(counts)), _event("ping")]

    def render(self, update: ChoiceUpdate, usage: Usage | None) -> list[StreamEvent]:
        self._last = update.completion
        changes = self._blocks.feed(update.parts)
        return [event for each in changes for event in self._render(each)]

    def end(self, usage: Usage) -> list[StreamEvent]:
        changes = self._blocks.end()
        return [
            *(event for each in changes for event in self._render(each)),
            _event("message_delta", delta=self._ending(), usage=_usage(usage), **self._edits),
            _event("message_stop"),
        ]

    def add(self, update: ChoiceUpdate) -> None:
        self._last = update.completion
        self._blocks.feed(update.parts)

    def reply(self, usage: Usage) -> dict[str, Any]:
        self._blocks.end()
        content = [content_block(b, omits_thinking=self._omits) for b in self._blocks.all]
        message = self._message(_usage(usage))
        return {**message, "content": content, **self._ending(), **self._edits}

    def _render(self, change: BlockEvent) -> list[StreamEvent]:
        return render_block(change, omits_thinking=self._omits)

    def _message(self, usage: dict[str, int]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _ending(self) -> dict[str, str | None]:
        """Return why the message has ended; a stop sequence is named, a stop token is not."""
        if self._last is None:
            return {"stop_reason": None, "stop_sequence": None}
        if isinstance(self._last.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": self._last.stop_reason}
        reason = str(self._last.finish_reason)
        if reason == "stop" and self._blocks.has_calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        return {"stop_reason": STOP_REASONS.get(reason, reason), "stop_sequence": None}


def _within_limits(chat: ChatRequest, model: ServedModel) -> ChatRequest:
    """Return the chat with limits that suit this model.

    The API requires `max_tokens`, so agents send a value for the largest models: more than this model's context means no limit.  A model
    that does not reason meets every thinking budget.
    """
    max_tokens, budget = chat.max_tokens, chat.thinking_token_budget
    if max_tokens is not None:
        max_tokens = min(max_tokens, model.max_model_len)
    if model.answers.reasoning is None:
        budget = None
    return msgspec.structs.replace(chat, max_tokens=max_tokens, thinking_token_budget=budget)


def _event(kind: str, **content: Any) -> StreamEvent:
    return StreamEvent({"type": kind, **content}, kind)


def _usage(usage: Usage | None) -> dict[str, int]:
    """Return the token counts.  In this API, input tokens exclude tokens read from or written to the cache."""
    assert usage is not None  # `parse` asks for it with every update
    details = usage.prompt_tokens_details
    cached = details if isinstance(details, CachedTokens) else CachedTokens(0)
    num_read, num_created = cached.cached_tokens, cached.created_cache_tokens
    return {
        "input_tokens": usage.prompt_tokens - num_read - num_created,
        "cache_creation_input_tokens": num_created,
        "cache_read_input_tokens": num_read,
        "output_tokens": usage.completion_tokens,
    }


TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 500: "api_error",
    503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
OTHERS = "invalid_request_error"
# Anthropic's phrase, by which clients recognise that they must shorten the conversation.
TOO_LONG = "prompt is too long"


def _render(problem: ErrorBody, request_id: str) -> dict[str, Any]:
    """Return the body of an error.  Its message begins with the name of the parameter."""
    message = problem.message
    if problem.code == "context_length_exceeded":
        has_counts = problem.length is not None and problem.limit is not None
        shown = f": {problem.length} tokens > {problem.limit} maximum" if has_counts else ""
        message = f"{TOO_LONG}{shown}; {message}"
    if problem.param is not None and problem.param not in message:
        message = f"{clean(problem.param, MAX_PARAM)}: {message}"
    kind = TYPES.get(problem.status, OTHERS)
    error: JSONObject = {"type": kind, "message": clean(message, MAX_MESSAGE)}
    if problem.code == THREAD_NOT_FOUND:
        error["details"] = {"error_code": problem.code}
    return {"type": "error", "error": error, "request_id": request_id}


ANTHROPIC_ERRORS = ErrorForm(_render, event="error", stream_end=b"", schema="NamedError")
