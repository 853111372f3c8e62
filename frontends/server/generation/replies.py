"""The replies of completions and chats.

`UNSET` leaves a field out.  A whole reply says null where there is nothing to say, a chunk of a stream leaves most
of that out: the keys are those that vLLM sends.
"""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from trouper import __version__
from trouper.frontends.server.shared.usage import RequestMetrics, Usage

PromptLogprobs = list[dict[int, dict[str, Any]] | None]
FINGERPRINT = f"trouper-{__version__}"


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


class CompletionDelta(msgspec.Struct, kw_only=True):
    """The next piece of a choice in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionChoice(CompletionDelta, kw_only=True):
    """One whole completion."""

    prompt_logprobs: PromptLogprobs | None = None


class CompletionChunk(msgspec.Struct, kw_only=True):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionDelta]
    usage: Usage | UnsetType = UNSET
    system_fingerprint: str | UnsetType = UNSET  # with the last chunk
    metrics: RequestMetrics | UnsetType = UNSET  # with the usage at the end


class CompletionReply(msgspec.Struct, kw_only=True):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    service_tier: None = None
    system_fingerprint: str = FINGERPRINT
    kv_transfer_params: None = None
    metrics: RequestMetrics | None = None


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
    reasoning: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class WholeMessage(Message, kw_only=True):
    """The message of a whole reply, with the fields of OpenAI's that a model of text never fills."""

    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    reasoning: str | UnsetType | None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: WholeMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatReply(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_text: str | UnsetType | None = UNSET  # where it is asked for
    prompt_logprobs: PromptLogprobs | None = None
    service_tier: None = None
    system_fingerprint: str = FINGERPRINT
    kv_transfer_params: None = None
    metrics: RequestMetrics | None = None


class ChatDelta(msgspec.Struct, kw_only=True):
    index: int
    delta: Message
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET  # with the last delta
    token_ids: list[int] | UnsetType | None = UNSET  # not with the role


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatDelta]
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET  # with the first chunk
    prompt_text: str | UnsetType | None = UNSET  # the same
    system_fingerprint: str | UnsetType = UNSET  # with the last chunk
    metrics: RequestMetrics | UnsetType = UNSET  # with the usage at the end
