"""The forms of a prompt that callers can pass."""

from collections.abc import Sequence
from typing import Any, NotRequired, TypedDict


class TextPrompt(TypedDict):
    prompt: str
    cache_salt: NotRequired[str]


class InfillPrompt(TypedDict):
    """A gap between two texts, to be filled in by a model trained for it.

    `prompt` is the text before the gap and `suffix` the text behind it.  `middle` is the beginning of the answer.
    Each of `files` has a `filename` and a `text`, and precedes both as context.  If the prompt exceeds
    `max_prompt_tokens`, the text farthest from the gap is dropped.
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
    """A template of a client that is not trusted: rendered in a process of its own, on a smaller budget."""
    add_generation_prompt: NotRequired[bool]
    continue_final_message: NotRequired[bool]
    tools: NotRequired[Sequence[dict[str, Any]] | None]
    chat_template_kwargs: NotRequired[dict[str, Any] | None]
    cache_salt: NotRequired[str]


class EmbedsPrompt(TypedDict):
    """Rows of numbers in place of the embeddings of tokens; needs `enable_prompt_embeds`.

    `prompt_embeds` is a floating torch tensor [tokens, hidden size], the bytes of a torch.save or safetensors file
    with one, or the base64 of such a file.  The base64 is a string or a memoryview; a memoryview is released after
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
