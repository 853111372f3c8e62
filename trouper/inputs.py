"""The types of prompts that callers can pass."""

from collections.abc import Sequence
from typing import Any, NotRequired, TypedDict


class TextPrompt(TypedDict):
    prompt: str
    cache_salt: NotRequired[str]


class InfillPrompt(TypedDict):
    """Two texts between which a model trained for fill-in-the-middle inserts a third.

    `prompt` precedes the gap and `suffix` follows it; `middle` is the beginning of the inserted text.  `files`, each with a
    `filename` and a `text`, are context before both.  If the prompt exceeds `max_prompt_tokens`, the text farthest from the
    gap is dropped.
    """

    prompt: str
    suffix: str
    middle: NotRequired[str]
    files: NotRequired[Sequence[dict[str, str]]]
    max_prompt_tokens: NotRequired[int]
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    token_type_ids: NotRequired[Sequence[int]]  # pooling models only


class PairPrompt(TypedDict):
    """Two texts that a cross-encoder reads together.

    The tokenizer joins them with its own separators.  `score` and `rerank` make them from a query
    and each document.
    """

    prompt: str
    text_pair: str


class ChatPrompt(TypedDict):
    """A conversation to be rendered by the chat template.

    `generate` accepts it like any other prompt.  `messages` have OpenAI's format; the optional keys
    are those of a chat request.
    """

    messages: Sequence[dict[str, Any]]
    chat_template: NotRequired[str | None]
    foreign_chat_template: NotRequired[str | None]
    """A template from an untrusted client.  It is rendered in a separate process, with lower limits."""
    add_generation_prompt: NotRequired[bool]
    continue_final_message: NotRequired[bool]
    tools: NotRequired[Sequence[dict[str, Any]] | None]
    chat_template_kwargs: NotRequired[dict[str, Any] | None]
    cache_salt: NotRequired[str]


class EmbedsPrompt(TypedDict):
    """Embeddings instead of tokens; needs `enable_prompt_embeds`.

    `prompt_embeds` is a floating-point torch tensor [tokens, hidden size], the bytes of a torch.save or safetensors file
    with one tensor, or such a file in base64.  Base64 is a string or a memoryview; a memoryview is released after
    reading.
    """

    prompt_embeds: Any
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


PromptType = (
    str
    | bytes
    | Sequence[int]
    | TextPrompt
    | InfillPrompt
    | TokensPrompt
    | ChatPrompt
    | EmbedsPrompt
)
PoolingPrompt = PromptType | PairPrompt
