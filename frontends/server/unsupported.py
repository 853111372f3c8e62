"""The table of fields that are known from other servers and are not built here.

Ignoring such a field would give an answer that is not what was asked for, so a request that uses one is a 400 that names it
and what to use in its place.  A value that asks for nothing (null, false, an empty value or `NEUTRAL`) is allowed.
"""

from collections.abc import Mapping
from typing import Any

from trouper.errors import UnsupportedFeatureError

USE_FORMAT = "use response_format or structured_outputs"
NO_GRAMMAR = "use suffix and structured_outputs of /v1/completions"
NO_MEDIA = "send text only"
NO_TOOLS = "describe the functions in a message and parse the answer"
NO_MEMORY = (
    "this server keeps no responses; start it with --responses-store-bytes, or send the whole "
    "conversation with every request"
)
STRUCTURE = dict.fromkeys(("grammar", "json_schema", "regex", "ebnf", "structural_tag"), USE_FORMAT)
GENERATING = {
    **STRUCTURE,
    "best_of": "use n and choose among the completions",
    "early_stopping": "a beam search ends when max_tokens or no beam is left; leave it out",
    "logits_processors": "use logit_bias, allowed_token_ids or bad_words",
    "repetition_detection": "use repetition_penalty, or stop",
    "kv_transfer_params": "leave it out",
}
COMPLETION = GENERATING
INFILL = {
    "grammar": NO_GRAMMAR,
    "json_schema": NO_GRAMMAR,
    "n_probs": "use suffix and logprobs of /v1/completions",
    "logit_bias": "use suffix and logit_bias of /v1/completions",
    "lora": "use the adapter's name as the model",
}
CHAT = {
    **GENERATING,
    "documents": "put the documents into a message",
    "media_io_kwargs": NO_MEDIA,
    "mm_processor_kwargs": NO_MEDIA,
    "audio": NO_MEDIA,
    "modalities": NO_MEDIA,
    "functions": NO_TOOLS,
    "function_call": NO_TOOLS,
    "web_search_options": "put what was found into a message",
    "prediction": "leave it out",
}
RESPONSES = {
    **STRUCTURE,
    "conversation": "use previous_response_id, or send the whole conversation with every request",
    "truncation": "leave items out yourself",
    "top_logprobs": "use /v1/chat/completions",
    "prompt": "put the text of the prompt into input or instructions",
}
MESSAGES = {
    "mcp_servers": NO_TOOLS,
    "container": NO_TOOLS,
    "output_format": "use output_config.format",
}
POOLING = {"padding": "texts are never padded; leave it out", "mm_processor_kwargs": NO_MEDIA}
COHERE = {"images": NO_MEDIA, "inputs": NO_MEDIA}
SCORING = {
    **POOLING,
    "instruction": "put it into the query",
}
NEUTRAL: dict[str, Any] = {
    "best_of": 1,
    "modalities": ["text"],
    "truncation": "disabled",
    "top_logprobs": 0,
    "function_call": "none",
    "n_probs": 0,
    "padding": "do_not_pad",
}


def check_supported(fields: Mapping[str, Any], table: Mapping[str, str]) -> None:
    """Raises UnsupportedFeatureError for the first field of the table that asks for something."""
    for name, value in fields.items():
        if name in table and not _asks_for_nothing(name, value):
            raise unsupported(name, table[name])


def unsupported(name: str, advice: str) -> UnsupportedFeatureError:
    """The refusal of a field whose name, or whose value, is not built."""
    return UnsupportedFeatureError(f"{name} is not supported: {advice}", parameter=name)


def _asks_for_nothing(name: str, value: Any) -> bool:
    is_empty = value is None or value is False or value in ("", [], {})  # 0 is not: it is a number
    return is_empty or (name in NEUTRAL and value == NEUTRAL[name])
