"""The replies of completions and chats.  `UNSET` leaves a field out."""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from trouper.frontends.server.usage import Usage

PromptLogprobs = list[dict[int, dict[str, Any]] | None]


class CompletionLogprobs(msgspec.Struct):
    """Logprobs of a completion, in four lists of one length."""

    text_offset: list[int] = msgspec.field(default_factory=list[int])
    token_logprobs: list[float | None] = msgspec.field(default_factory=list[float | None])
    tokens: list[str] = msgspec.field(default_factory=list[str])
    top_logprobs: list[dict[str, float] | None] = msgspec.field(
        default_factory=list[dict[str, float] | None]
    )


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatToken(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatToken]


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionReply(msgspec.Struct, kw_only=True):
    """A whole completion, or one chunk of a stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType = UNSET


class FunctionCall(msgspec.Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """A call, or in a stream a piece of one; only pieces have an index."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionCall


class Message(msgspec.Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: Message
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatReply(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatDelta(msgspec.Struct, kw_only=True):
    index: int
    delta: Message
    logprobs: ChatLogprobs | UnsetType = UNSET
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatDelta]
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
