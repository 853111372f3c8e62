"""`POST /v1/messages`: the adapter of Anthropic's conversations, whole or as named events.

A request becomes a `ChatRequest`, and the same rules hold.
"""

from typing import Any, ClassVar

import msgspec

from trouper.frontends.server.anthropic.conversation import chat_of
from trouper.frontends.server.anthropic.requests import CountTokensRequest, MessagesRequest
from trouper.frontends.server.http.context import RequestContext
from trouper.frontends.server.openai.adapter import (
    ChoiceUpdate,
    ParsedRequest,
    ReplyHead,
    ServedModel,
    StreamEvent,
)
from trouper.frontends.server.openai.chat import ChatAdapter
from trouper.frontends.server.openai.chat_prompt import chat_prompt
from trouper.frontends.server.openai.driver import drive
from trouper.frontends.server.openai.tokens import conversation_ids
from trouper.frontends.server.service import Service
from trouper.frontends.server.usage import Usage
from trouper.outputs import CompletionOutput, RequestOutput

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}  # others keep their names


async def create_message(
    service: Service, context: RequestContext, request: MessagesRequest
) -> None:
    """Continue a conversation, whole or as named events."""
    await drive(service, context, request, MessagesAdapter)


async def count_tokens(
    service: Service, context: RequestContext, request: CountTokensRequest
) -> None:
    """Count the tokens of a conversation."""
    service.check_model(request.model)
    prompt = chat_prompt(chat_of(request), service.settings)
    ids = await conversation_ids(service, prompt)
    await context.send_json({"input_tokens": len(ids)})


class MessagesAdapter:
    """One message with one block of text."""

    STREAM_END: ClassVar[bytes] = b""  # the last event says that it is the last

    @staticmethod
    def parse(request: MessagesRequest, model: ServedModel) -> ParsedRequest:
        parsed = ChatAdapter.parse(chat_of(request), model)
        return msgspec.structs.replace(parsed, shows_usage=True, shows_cached=True)

    @staticmethod
    def client_name(request: MessagesRequest, parameter: str) -> str:
        return "stop_sequences" if parameter == "stop" else parameter

    def __init__(
        self, request: MessagesRequest, parsed: ParsedRequest, model: ServedModel, head: ReplyHead
    ) -> None:
        self._id = f"msg_{head.request_id}"
        self._model = model.name
        self._text: list[str] = []
        self._last: CompletionOutput | None = None

    def begin(self, output: RequestOutput, usage: Usage | None) -> list[StreamEvent]:
        return [
            _event("message_start", message=self._message(_usage(usage))),
            _event("content_block_start", index=0, content_block=_text_block("")),
            _event("ping"),
        ]

    def render(self, update: ChoiceUpdate, usage: Usage | None) -> list[StreamEvent]:
        self._last = update.completion
        if not update.text:
            return []
        delta = {"type": "text_delta", "text": update.text}
        return [_event("content_block_delta", index=0, delta=delta)]

    def end(self, usage: Usage) -> list[StreamEvent]:
        return [
            _event("content_block_stop", index=0),
            _event("message_delta", delta=self._ending(), usage=_usage(usage)),
            _event("message_stop"),
        ]

    def add(self, update: ChoiceUpdate) -> None:
        self._text.append(update.text)
        self._last = update.completion

    def reply(self, usage: Usage) -> dict[str, Any]:
        text = _text_block("".join(self._text))
        return {**self._message(_usage(usage)), "content": [text], **self._ending()}

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
        return {"stop_reason": STOP_REASONS.get(reason, reason), "stop_sequence": None}


def _event(kind: str, **content: Any) -> StreamEvent:
    return StreamEvent({"type": kind, **content}, kind)


def _text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _usage(usage: Usage | None) -> dict[str, int]:
    """Return the counts; there, tokens that the cache held are not among the input tokens."""
    assert usage is not None  # `parse` asks for it with every update
    details = usage.prompt_tokens_details
    num_cached = 0 if isinstance(details, msgspec.UnsetType) else details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": usage.completion_tokens,
    }
