"""Differences that are meant, as rows of the table in docs/coming-from-vllm.md."""

import re
from typing import NamedTuple

from .compare import Difference


class Accepted(NamedTuple):
    """One row: the cases and the paths that it covers, as expressions that match a whole name, and the reason."""

    cases: str
    paths: str
    reason: str
    reference: str = r".*"  # what the reference has there


ANY = r".*"
ABSENT_FEATURES = (
    r"routed_experts|ec_transfer_params|prompt_text|created_cache_tokens|multimodal_tokens"
)

ACCEPTED = [
    Accepted(
        ANY,
        rf"(\$|\w+ chunk)\.(.*\.)?({ABSENT_FEATURES})",
        "`routed_experts`, `ec_transfer_params`, `multimodal_tokens` and `created_cache_tokens` belong to features that are not here; `prompt_text` is sent where it is asked for",
    ),
    Accepted(
        "chat: stream.*",
        r"\w+ chunk\.usage\.completion_tokens_details",
        "the usage of a chunk has three counts in completions and chats alike",
    ),
    Accepted(
        "completion: .*logprobs in a stream",
        r"(text|last) chunk\.choices\[\]\.logprobs\.(text_offset|token_logprobs|tokens|top_logprobs)",
        "two servers cut one text into different chunks",
    ),
    Accepted(
        "pooling: Cohere: types",
        r"status",
        "`/v2/embed` has Cohere's `int8` and `uint8` too, which vLLM has not",
    ),
    Accepted(
        "chat: beam search in a stream",
        r"status",
        "a beam search refuses `stream` in chats as in completions; vLLM streams samples there",
    ),
    Accepted(
        ".*stream with continuous usage|.*stream",
        r"text chunk\.usage\.(completion|total)_tokens",
        "two servers cut one text into different chunks",
    ),
    Accepted(
        ANY,
        r"\$\.error\.code",
        "`code` is a text, as OpenAI has it: `invalid_value`, `context_length_exceeded`; the status is in the status line",
    ),
    Accepted(
        ANY,
        r"\$\.error\.type",
        "every 400 has the type `BadRequestError`; vLLM has `Bad Request` where its own schema refuses a body",
        "Bad Request",
    ),
    Accepted(
        r".*wrong: stop token ids",
        "names",
        "a wrong type in a body is named by its place and its type, and the value is not repeated",
    ),
    Accepted(
        r"unknown route|method",
        r"\$\.(detail|error).*",
        "an unknown route or method has the form of every other error",
    ),
    Accepted(
        r"unsupported: .*",
        "status",
        "routes exist whatever the model does: a task that it does not have is a 400 that names the task and those it has",
    ),
    Accepted(
        r"completion: echo( with logprobs)? in a stream",
        r"text chunk\.choices\[\]\.prompt_token_ids(\[\])?",
        "`prompt_token_ids` are sent where `return_token_ids` asks for them; vLLM also sends them with `echo` in a stream",
    ),
    Accepted(
        r"chat: echo of an answer that goes on",
        r"\$\.prompt_logprobs(\[\])?",
        "`prompt_logprobs` are sent where they are asked for; vLLM also sends them with `echo` in a chat",
    ),
    Accepted(
        r"completion: echo of the prompt alone.*",
        r"\$\.usage\.(completion|total)_tokens",
        "with `max_tokens=0` and `echo` the usage counts no output token; vLLM counts the one that it drops",
    ),
    Accepted(
        r"chat: developer",
        r"\$\.usage\.(prompt|total)_tokens",
        "the role `developer` reaches a template that shows it as it is; vLLM renders it as `system` where the template does not name it",
    ),
    Accepted(
        r"models",
        r"\$\.data\[\]\.permission\[\]",
        "`permission` is an empty list: OpenAI has dropped it",
    ),
    Accepted(
        r"tokenizer info",
        r"\$\..*",
        "`/tokenizer_info` shows `tokenizer_config.json` and the template as they are; vLLM shows what transformers made of them",
    ),
    Accepted(
        r"detokenize: an id beyond the vocabulary",
        "status",
        "`/detokenize` refuses an id that is no token; vLLM drops it",
    ),
    Accepted(
        r"batch of chats: a stream",
        "status",
        "a batch of conversations refuses `stream`; vLLM ignores it",
    ),
    Accepted(
        r"batch of chats",
        r"\$\.usage\.prompt_tokens_details",
        "with `--enable-prompt-tokens-details` a batch has the details, too",
    ),
    Accepted(
        r"pooling: (score|rerank).*",
        r"\$\.usage\.(prompt|total)_tokens",
        "the usage of scores counts a query with each of its documents; vLLM counts it once",
    ),
    Accepted(
        r"pooling: pooling.*",
        "status",
        "an embedding model answers `/pooling` for `embed` and for `token_embed`, whichever of them `--pooler-config.task` names",
    ),
    Accepted(
        r"pooling: (classification of a model that embeds|unsupported: .*)",
        "status",
        "routes exist whatever the model pools: a 400 says what it can do",
    ),
    Accepted(
        r"pooling: Cohere",
        "status",
        "`input_type` is checked and changes nothing; vLLM refuses it where the model has no instructions",
    ),
]


def accepted(case: str, difference: Difference) -> Accepted | None:
    """Return the row that covers a difference."""
    for row in ACCEPTED:
        facts = (
            (row.cases, case),
            (row.paths, difference.path),
            (row.reference, difference.reference),
        )
        if all(re.fullmatch(pattern, text, re.DOTALL) for pattern, text in facts):
            return row
    return None
