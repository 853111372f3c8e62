"""Serve `POST /v1/chat/completions/batch`: several conversations in one request, one choice for each."""

from collections.abc import Awaitable
from typing import Any

import msgspec

from trouper.errors import invalid
from trouper.frontends.server.generation.adapter import ParsedRequest, ReplyHead, ServedModel
from trouper.frontends.server.generation.driver import drive
from trouper.frontends.server.http.context import RequestContext
from trouper.frontends.server.openai.chat import ChatAdapter
from trouper.frontends.server.openai.requests import ChatBatchRequest, ChatRequest
from trouper.frontends.server.service.service import Service

MAX_CONVERSATIONS = 1024


def create_chat_batch(
    service: Service, context: RequestContext, request: ChatBatchRequest
) -> Awaitable[None]:
    """Answer several conversations in one reply.

    The conversations share one admission ticket and their sampling fields.  Streams are not supported.
    """
    return drive(service, context, request, ChatBatchAdapter)


class ChatBatchAdapter(ChatAdapter):
    """Render a chat in which each choice answers its own conversation.

    Choice i belongs to conversation i, so clients get one reply for the whole batch.
    """

    @staticmethod
    def parse(request: ChatRequest, model: ServedModel) -> ParsedRequest:
        if request.stream:
            raise invalid("stream", "not with a batch of conversations")
        if request.n not in (None, 1):
            raise invalid("n", "a batch has one choice for each conversation", request.n)
        if request.use_beam_search:
            raise invalid("use_beam_search", "not with a batch of conversations")
        if request.tools:
            raise invalid("tools", "not with a batch of conversations")
        if request.echo:
            raise invalid("echo", "not with a batch of conversations")
        if (request.kv_transfer_params or {}).get("prompt_token_ids") is not None:
            raise invalid("kv_transfer_params", "prompt_token_ids are of one conversation")
        conversations: list[Any] = request.messages
        if not conversations:
            raise invalid("messages", "must not be empty")
        if len(conversations) > MAX_CONVERSATIONS:
            rule = f"at most {MAX_CONVERSATIONS} conversations"
            raise invalid("messages", rule, len(conversations))
        alone = [
            ChatAdapter.parse(_with_messages(request, messages), model)
            for messages in conversations
        ]
        parsed = alone[0]
        parsed.prompts = [prompt for each in alone for prompt in each.prompts]
        parsed.places = [f"messages[{i}]" for i in range(len(alone))]
        return parsed

    def __init__(
        self, request: ChatRequest, parsed: ParsedRequest, model: ServedModel, head: ReplyHead
    ) -> None:
        super().__init__(_with_messages(request, request.messages[0]), parsed, model, head)


def _with_messages(request: ChatRequest, messages: Any) -> ChatRequest:
    """Return the request of one conversation."""
    fields = {**msgspec.structs.asdict(request), "messages": messages}
    return ChatRequest(**fields)
