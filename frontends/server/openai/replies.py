"""Declare the replies of completions and chats.

The keys are exactly vLLM's.  A whole reply contains null for missing values, and a chunk of a stream omits most of them; `UNSET`
omits a field.
"""

import msgspec
from msgspec import UNSET, UnsetType

from trouper import __version__
from trouper.frontends.server.generation.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprobs,
)
from trouper.frontends.server.generation.tools import ToolCall
from trouper.frontends.server.shared.usage import RequestMetrics, Usage

FINGERPRINT = f"trouper-{__version__}"


class CompletionDelta(msgspec.Struct, kw_only=True):
    """The next part of a choice in a stream.

    Chunks for different choices can alternate; `index` assigns them.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionChoice(CompletionDelta, kw_only=True):
    """One whole completion.

    It has the same fields as the chunks of a stream, so clients can share code.
    """

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


class Message(msgspec.Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class WholeMessage(Message, kw_only=True):
    """The message of a whole reply, with OpenAI's fields that a text model always leaves null."""

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
    # The text of the prompt, if the request wants it.
    prompt_text: str | UnsetType | None = UNSET
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
