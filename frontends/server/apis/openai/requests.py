"""Declare the bodies of completions, chats and tokenization, and the replies of completions and chats.

In a body, a null means that the field is not given; the table in `fields.py` decides about all other fields.  The keys of replies
are exactly vLLM's.  A whole reply contains null for missing values, and a chunk of a stream omits most of them; `UNSET` omits a
field.
"""

from typing import Any, ClassVar, cast

import msgspec
from msgspec import UNSET, UnsetType

from trouper import __version__
from trouper.frontends.server.generation.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprobs,
)
from trouper.frontends.server.generation.request_fields import Generating
from trouper.frontends.server.generation.tools import ToolCall
from trouper.frontends.server.shared import fields
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


class CompletionRequest(Generating, kw_only=True):
    """`POST /v1/completions`."""

    OTHERS: ClassVar[fields.Others] = fields.COMPLETION

    prompt: str | list[Any] | None = None
    suffix: str | None = None
    prompt_embeds: str | list[str] | None = None  # base64
    logprobs: int | None = None

    def put_back(self, strings: dict[str, memoryview]) -> None:
        """Replace placeholders of embedded payloads by their bytes, taken out of `strings`.

        Long strings are taken out before JSON is parsed, because parsing them would block the event loop.
        """
        given = self.prompt_embeds
        if isinstance(given, list):
            self.prompt_embeds = [strings.pop(text, text) for text in given]  # type: ignore[misc]  # text, all the same
        elif given is not None:
            self.prompt_embeds = strings.pop(given, given)  # type: ignore[assignment]  # the same


class ChatRequest(Generating, kw_only=True):
    """`POST /v1/chat/completions`."""

    OTHERS: ClassVar[fields.Others] = fields.CHAT

    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None
    # A variable of the template, sent in this form by Qwen's own clients.
    enable_thinking: bool | None = None
    return_prompt_text: bool | None = None
    # Only the ids of the prompt in it are used.
    kv_transfer_params: dict[str, Any] | None = None

    def put_back(self, strings: dict[str, memoryview]) -> None:
        """Replace placeholders in parts of embeddings, images and recordings, like `CompletionRequest.put_back`."""
        _put_back_parts(self.messages, strings)


class DerivedChat(ChatRequest, kw_only=True):
    """A chat made from another API's request.

    The chat adapter then serves it, so all APIs follow the same rules.
    """

    # variables that the request does not name itself: a template that does not read them passes them over
    template_defaults: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])


def _put_back_parts(messages: list[dict[str, Any]], strings: dict[str, memoryview]) -> None:
    for message in messages:
        content: Any = message.get("content")
        for part in cast("list[Any]", content) if isinstance(content, list) else ():
            if isinstance(part, dict):
                _put_back_part(cast("dict[str, Any]", part), strings)


def _put_back_part(part: dict[str, Any], strings: dict[str, memoryview]) -> None:
    match part:
        case {"type": "prompt_embeds", "data": str(data)}:
            part["data"] = strings.pop(data, data)
        case {"image_url": {"url": str(url)}}:
            part["image_url"]["url"] = strings.pop(url, url)
        case {"image_url": str(url)}:
            part["image_url"] = strings.pop(url, url)
        case {"audio_url": {"url": str(url)}}:
            part["audio_url"]["url"] = strings.pop(url, url)
        case {"audio_url": str(url)}:
            part["audio_url"] = strings.pop(url, url)
        case {"input_audio": {"data": str(data)}}:
            part["input_audio"]["data"] = strings.pop(data, data)
        case _:
            pass


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /tokenize`: a text or a conversation in vLLM's form, or a text in llama.cpp's.

    A conversation is rendered with the chat template first, exactly as for an answer.  `content` selects llama.cpp's form,
    whose fields and answer differ.
    """

    OTHERS: ClassVar[fields.Others] = fields.NONE

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    content: str | None = None
    add_special: bool | None = None
    with_pieces: bool | None = None
    parse_special: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None

    def put_back(self, strings: dict[str, memoryview]) -> None:
        """Replace placeholders in the parts of a conversation, like `ChatRequest.put_back`."""
        _put_back_parts(self.messages or [], strings)


class ChatBatchRequest(ChatRequest, kw_only=True):
    """`POST /v1/chat/completions/batch`: several conversations, one choice for each."""

    messages: list[list[dict[str, Any]]]  # type: ignore[assignment]  # one list for each conversation

    def put_back(self, strings: dict[str, memoryview]) -> None:
        """Replace placeholders in each conversation, like `ChatRequest.put_back`."""
        for conversation in self.messages:
            _put_back_parts(conversation, strings)


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


class ApplyTemplateRequest(msgspec.Struct, kw_only=True):
    """`POST /apply-template`: a conversation to render with the chat template."""

    OTHERS: ClassVar[fields.Others] = fields.TEMPLATE

    messages: list[dict[str, Any]]
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None

    def put_back(self, strings: dict[str, memoryview]) -> None:
        """Replace placeholders in the parts of a conversation, like `ChatRequest.put_back`."""
        _put_back_parts(self.messages, strings)
