"""The bodies that clients send; null means "not given".  Fields that are not here are in the table of `fields.py`.

Ranges that the engine checks itself are not checked here a second time: one validator, one answer.
"""

from typing import Annotated, Any, ClassVar, cast

import msgspec
from msgspec import UNSET, Meta, UnsetType

from trouper.frontends.server.shared import fields
from trouper.params import RepetitionDetectionParams

Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Timestamp = Annotated[int, Meta(ge=0)]


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Format that an answer must have; `structured.py` says which fields belong to which type."""

    type: str
    json_schema: dict[str, Any] | None = None  # name, schema, strict
    schema: dict[str, Any] | None = None  # of the type json_object, as llama.cpp has it
    structures: list[dict[str, Any]] | None = None  # of a structural tag, with the triggers
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """The fields that every API has that generates: each means the same there, and is handed on as it is."""

    OTHERS: ClassVar[fields.Others] = fields.NONE

    model: str | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    thinking_token_budget: int | None = None
    bad_words: list[str] | None = None
    stream: bool | None = None
    stream_interval: int | None = None
    priority: Int64 | None = None
    request_id: str | None = None
    session_id: str | None = None
    data_parallel_rank: int | None = None
    cache_salt: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    structured_outputs: dict[str, Any] | None = None
    vllm_xargs: dict[str, str | int | float | list[str | int | float]] | None = None

    def shared(self) -> dict[str, Any]:
        """Return these fields, to be handed on to another API's request."""
        return {name: getattr(self, name) for name in SamplingFields.__struct_fields__}


class Generating(SamplingFields, kw_only=True):
    """The fields that completions and chats share."""

    n: int | None = None
    use_beam_search: bool | None = None  # n is the width
    length_penalty: float | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None

    @property
    def is_stream(self) -> bool:
        return bool(self.stream)


class CompletionRequest(Generating, kw_only=True):
    """`POST /v1/completions`."""

    OTHERS: ClassVar[fields.Others] = fields.COMPLETION

    prompt: str | list[Any] | None = None
    suffix: str | None = None
    prompt_embeds: str | list[str] | None = None  # base64
    logprobs: int | None = None

    def put_back(self, strings: dict[str, memoryview]) -> None:
        """Replace the placeholders of embedded payloads by their bytes, which are taken out of `strings`."""
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
    enable_thinking: bool | None = None  # a variable of the template, as Qwen's own clients send it
    return_prompt_text: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None  # only the prompt's ids in it

    def put_back(self, strings: dict[str, memoryview]) -> None:
        """Replace the placeholders in parts that are embeddings, as in `CompletionRequest`."""
        _put_back_parts(self.messages, strings)


class DerivedChat(ChatRequest, kw_only=True):
    """A chat that was made of another API's request."""

    # variables that the request does not name itself: a template that does not read them passes them over
    template_defaults: dict[str, Any] = {}


def _put_back_parts(messages: list[dict[str, Any]], strings: dict[str, memoryview]) -> None:
    for message in messages:
        content: Any = message.get("content")
        for part in cast("list[Any]", content) if isinstance(content, list) else ():
            if isinstance(part, dict):
                _put_back_part(cast("dict[str, Any]", part), strings)


def _put_back_part(part: dict[str, Any], strings: dict[str, memoryview]) -> None:
    data = part.get("data")
    if part.get("type") == "prompt_embeds" and isinstance(data, str):
        part["data"] = strings.pop(data, data)


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /tokenize`: a text or a conversation."""

    OTHERS: ClassVar[fields.Others] = fields.TOKENIZE

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class ChatBatchRequest(ChatRequest, kw_only=True):
    """`POST /v1/chat/completions/batch`: several conversations, one choice for each."""

    messages: list[list[dict[str, Any]]]  # type: ignore[assignment]  # one list for each conversation

    def put_back(self, strings: dict[str, memoryview]) -> None:
        """Replace the placeholders in each conversation, as in `ChatRequest`."""
        for conversation in self.messages:
            _put_back_parts(conversation, strings)


class InvocationKeys(msgspec.Struct, kw_only=True):
    """`POST /invocations`: the fields that tell the body of one route from another's, unread."""

    messages: msgspec.Raw | UnsetType = UNSET
    query: msgspec.Raw | UnsetType = UNSET
    queries: msgspec.Raw | UnsetType = UNSET
    text_1: msgspec.Raw | UnsetType = UNSET
    data_1: msgspec.Raw | UnsetType = UNSET


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/load_lora_adapter`."""

    OTHERS: ClassVar[fields.Others] = fields.ADAPTERS

    lora_name: str = ""
    lora_path: str = ""
    load_inplace: bool = False


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/unload_lora_adapter`."""

    OTHERS: ClassVar[fields.Others] = fields.ADAPTERS

    lora_name: str = ""


class AbortRequest(msgspec.Struct, kw_only=True):
    """`POST /abort_requests`; no ids: all."""

    request_ids: list[str] | None = None
