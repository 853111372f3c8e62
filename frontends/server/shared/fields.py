"""The table of fields that other servers know: each is honoured, refused or harmless, in every API.

A request's type declares the honoured fields.  For every other field, this table decides which of two laws holds:

* A field that would change the answer is refused with a 400 that names it, its value and what to use in its place.
* A harmless field is ignored.  The table contains the reason why it is harmless.

A refused field may have a neutral value (null, false, an empty value, or one of `NEUTRAL`), because clients send the defaults of all
fields that they know.  An unknown field is ignored, and named in the log and in a response header.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from trouper.frontends.server.shared.errors import (
    NO_MEMORY_OF_ITEMS,
    NO_TOOLS,
    unsupported,
)


class Others(NamedTuple):
    """The known but not honoured fields of one request type, each with a reason.

    A harmless field has no effect on the answer here.  A refused one would have, so the request fails with the
    reason.
    """

    refused: Mapping[str, str]
    harmless: Mapping[str, str]


USE_FORMAT = "use response_format or structured_outputs"
USE_ADAPTER = "use the adapter's name as the model"
USE_TEMPLATE = 'use chat_template_kwargs, for many models {"enable_thinking": …}'
USE_BUDGET = "use thinking_token_budget"
PENALTIES = "use repetition_penalty, presence_penalty or frequency_penalty"
LEAVE_OUT = "leave it out"
ONLY_TEXT = "answers are text; leave it out"
USE_PARTS = "use parts of type image_url in a message"
USE_MEDIA = "use /v1/chat/completions with images or recordings in a message"

# Fields that change the generated text or its description, in any API.
REFUSED = {
    # vLLM
    "best_of": "use n and choose among the completions",
    "early_stopping": "a beam search ends when max_tokens or no beam is left; leave it out",
    "logits_processors": "use logit_bias, allowed_token_ids or bad_words",
    "watermarking": "texts are never marked; leave it out",
    "documents": "put the documents into a message",
    "return_prompt_text": "use /v1/chat/completions, or prompt and echo of /v1/completions",
    # llama.cpp
    **dict.fromkeys(("grammar", "json_schema", "regex", "ebnf", "structural_tag"), USE_FORMAT),
    "mirostat": "use temperature with top_p or min_p",
    "dry_multiplier": PENALTIES,
    "repeat_penalty": "use repetition_penalty",
    "xtc_probability": "use temperature with min_p",
    "typical_p": "use top_p or min_p",
    "top_n_sigma": "use top_p or min_p",
    "top_a": "use min_p",
    "tfs_z": "use top_p or min_p",
    "adaptive_target": "use temperature with min_p",
    "dynatemp_range": "use temperature",
    "samplers": "they run in one order; leave it out",
    "min_keep": LEAVE_OUT,
    "n_predict": "use max_tokens",
    "n_indent": "put the indentation into the prompt",
    "n_cmpl": "use n",
    "n_probs": "use logprobs",
    "post_sampling_probs": "use logprobs, which contain the model's own probabilities",
    "return_tokens": "use return_token_ids",
    "t_max_predict_ms": "use the header X-Request-Timeout-Ms",
    "response_fields": "an answer has all its fields; leave it out",
    "lora": USE_ADAPTER,
    "reasoning_format": "reasoning is never left in the content; set the field for all requests by --reasoning-field",
    "thinking_forced_open": "the chat template opens it if the model needs it so",
    "generation_prompt": "use add_generation_prompt, or continue_final_message with a message of the assistant",
    "parse_tool_calls": 'use tool_choice "none"',
    "thinking_budget_tokens": USE_BUDGET,
    "reasoning_budget": USE_BUDGET,
    # SGLang
    "lora_path": USE_ADAPTER,
    "stop_regex": "use stop, or structured_outputs",
    "no_stop_trim": "use include_stop_str_in_output",
    "min_new_tokens": "use min_tokens",
    "max_new_tokens": "use max_tokens",
    "custom_logit_processor": "use logit_bias, allowed_token_ids or bad_words",
    "custom_params": LEAVE_OUT,
    "input_ids": "use prompt of /v1/completions",
    "input_embeds": "use prompt_embeds of /v1/completions",
    "return_hidden_states": "use /pooling of a model that embeds",
    "extra_key": "use cache_salt",
    "session_params": "send the whole conversation with every request",
    "separate_reasoning": "reasoning is always apart from the content",
    "stream_reasoning": "reasoning is streamed as it comes; use include_reasoning",
    # Media of several servers, and of vLLM's prompts in Python
    **dict.fromkeys(
        ("image_data", "audio_data", "video_data", "images", "multimodal_data", "multi_modal_data", "multi_modal_uuids"),
        USE_MEDIA),
    # Ollama and gateways
    "options": "give each option as a field of the request",
    "num_ctx": "the context is set at start, by --max-model-len",
    "num_predict": "use max_tokens",
    "format": USE_FORMAT,
    "think": USE_TEMPLATE,
    "enable_thinking": USE_TEMPLATE,
    # OpenAI
    "moderation": LEAVE_OUT,
    "web_search_options": "put what was found into a message",
    "audio": ONLY_TEXT,
    "modalities": ONLY_TEXT,
    "functions": "use tools",
    "function_call": "use tool_choice",
}  # fmt: skip

DOES_NOTHING = "has no effect without a refused field"
ONLY_SPEED = "changes how fast the answer comes, not the answer"
ONLY_RECORDS = "is for the records of the service that it was made for"
ONLY_MEDIA = "describes how to read media, and this route takes none"
HARMLESS = {
    **dict.fromkeys(
        ("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "xtc_threshold", "mirostat_tau",
         "mirostat_eta", "dynatemp_exponent", "repeat_last_n", "adaptive_decay", "penalty_last_n"), DOES_NOTHING),
    **dict.fromkeys(
        ("cache_prompt", "id_slot", "n_cache_reuse", "prediction", "prompt_cache_key", "prompt_cache_options",
         "prompt_cache_retention", "service_tier", "keep_alive", "speculative", "speculative.n_max", "speculative.n_min",
         "speculative.p_min", "speculative.type", "guided_decoding_backend", "sse_ping_interval", "kv_transfer_params",
         "ec_transfer_params"), ONLY_SPEED),
    **dict.fromkeys(
        ("user", "metadata", "store", "safety_identifier", "rid", "verbose", "timings_per_token", "return_progress", "usage",
         "provider", "models", "route", "transforms"), ONLY_RECORDS),
    **dict.fromkeys(("n_keep", "n_discard"), "a context is never shifted: an overlong text is refused"),
    **dict.fromkeys(("return_token_offsets", "return_mm_kwargs"), "belongs to routes that render, as in vLLM"),
    "routed_experts_prompt_start": "the experts of tokens are not shown",
    "verbosity": "is a hint that no chat template here reads",
    "stream_options": "the events of this API have nothing to choose",
}  # fmt: skip

# Harmless on routes that take no media.
IN_TEXTS = HARMLESS | dict.fromkeys(
    ("media_io_kwargs", "mm_processor_kwargs", "mm_payload", "media_path"), ONLY_MEDIA
)

# Neutral values besides null, false and empty ones, mostly the defaults of those servers.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "mirostat": (0,),
    "dry_multiplier": (0,),
    "repeat_penalty": (1,),
    "xtc_probability": (0,),
    "typical_p": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (0, -1),
    "adaptive_target": (-1,),
    "dynatemp_range": (0,),
    "min_keep": (0,),
    "min_new_tokens": (0,),
    "n_predict": (-1,),
    "num_predict": (-1,),
    "n_indent": (0,),
    "n_cmpl": (1,),
    "n_probs": (0,),
    "n": (1,),
    "t_max_predict_ms": (0, -1),
    "thinking_budget_tokens": (-1,),
    "reasoning_budget": (-1,),
    "reasoning_format": ("auto", "deepseek"),
    "modalities": (["text"],),
    "function_call": ("none", "auto"),
    "chunking_strategy": ("auto",),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
    "use_beam_search": (0,),
    "length_penalty": (1,),
    "context_management": ({"edits": []},),
    "padding": ("do_not_pad", "longest", True),
}
ON_BY_DEFAULT = frozenset(("parse_tool_calls", "separate_reasoning", "stream_reasoning"))

# Fields of the text APIs for which APIs of items or blocks have other names.
BY_OTHER_NAMES = {
    "n": "send the request again",
    "use_beam_search": "use /v1/chat/completions",
    "length_penalty": "use /v1/chat/completions",
    "prompt_logprobs": "use /v1/chat/completions",
    "logprobs": "use /v1/chat/completions",
    "top_logprobs": "use /v1/chat/completions",
    "logprob_token_ids": "use /v1/chat/completions",
    "return_tokens_as_token_ids": "use /v1/chat/completions",
    "return_token_ids": "use /v1/chat/completions",
    "echo": "use /v1/chat/completions",
    "suffix": "use /v1/completions",
    "prompt_embeds": "use /v1/completions",
    "chat_template": "use /v1/chat/completions",
    "add_generation_prompt": "use /v1/chat/completions",
    "continue_final_message": "use /v1/chat/completions",
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_whitespace_pattern"),
        "use structured_outputs",
    ),
}  # fmt: skip
USE_CHAT, USE_RESPONSES = "use /v1/chat/completions", "use /v1/responses"
OF_RESPONSES = {
    "input": "use messages, or prompt of /v1/completions",
    "instructions": "put them into a message of the system",
    "max_output_tokens": "use max_tokens",
    "text": USE_FORMAT,
    "reasoning": "use reasoning_effort",
    **dict.fromkeys(("include", "background", "previous_response_id", "enable_response_messages"), USE_RESPONSES),
}  # fmt: skip
OF_MESSAGES = {
    "system": "put it into a message of the system",
    "stop_sequences": "use stop",
    "output_config": USE_FORMAT,
    "thinking": USE_TEMPLATE,
    "context_management": "send fewer messages; a conversation is never shortened here",
    "thread": "send the whole conversation with every request",
}
OF_CHAT = dict.fromkeys(
    ("tools", "tool_choice", "parallel_tool_calls", "chat_template", "chat_template_kwargs",
     "add_generation_prompt", "continue_final_message", "include_reasoning", "reasoning_effort"),
    USE_CHAT,
)  # fmt: skip
OF_PROCESSORS = {
    **dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs"), USE_CHAT),
    **dict.fromkeys(("mm_payload", "media_path"), "use images in a message"),
}
CHAT = Others(
    {
        **REFUSED,
        **OF_RESPONSES,
        **OF_MESSAGES,
        "suffix": "use /v1/completions",
        "prompt_embeds": "use a part of type prompt_embeds in a message",
        **dict.fromkeys(("mm_payload", "media_path"), USE_PARTS),
    },
    HARMLESS,
)
TRANSCRIPTION = Others(
    {
        "include": "logprobs of transcripts are not returned; leave it out",
        "chunking_strategy": "a recording is transcribed as a whole; leave it out",
        **dict.fromkeys(
            ("known_speaker_names", "known_speaker_references"),
            "speakers are not told apart; leave it out",
        ),
        "hotwords": "use prompt, which Qwen3-ASR reads",
        "to_language": "use /v1/chat/completions with a part input_audio",
    },
    HARMLESS,
)
COMPLETION = Others(
    {
        **REFUSED,
        **OF_RESPONSES,
        **OF_MESSAGES,
        **OF_CHAT,
        "max_completion_tokens": "use max_tokens",
        "top_logprobs": "use logprobs, a number",
    },
    IN_TEXTS,
)
RESPONSES = Others(
    {
        **REFUSED,
        **BY_OTHER_NAMES,
        **dict.fromkeys(("max_tokens", "max_completion_tokens", "n_predict"), "use max_output_tokens"),
        "messages": "use input",
        "response_format": "use text.format or structured_outputs",
        "reasoning_effort": "use reasoning.effort",
        "conversation": NO_MEMORY_OF_ITEMS,
        "previous_input_messages": NO_MEMORY_OF_ITEMS,
        "truncation": "leave items out yourself",
        "prompt": "put the text of the prompt into input or instructions",
        "image": "use a part of type input_image in a message",
        **OF_PROCESSORS,
        "access_programs": LEAVE_OUT,
        **OF_MESSAGES,
    },
    {
        **HARMLESS,
        "max_tool_calls": "limits the calls of built-in tools, and there are none",
        "background_options": ONLY_SPEED,
        "client_metadata": ONLY_RECORDS,  # of Codex
    },
)  # fmt: skip
MESSAGES = Others(
    {
        **REFUSED,
        **BY_OTHER_NAMES,
        **OF_RESPONSES,
        "include_reasoning": "use thinking, of type disabled",
        "prompt": "use messages",
        **OF_PROCESSORS,
        "stop": "use stop_sequences",
        "max_completion_tokens": "use max_tokens",
        "response_format": "use output_config.format or structured_outputs",
        "output_format": "use output_config.format",
        "reasoning_effort": "use thinking",
        "parallel_tool_calls": "use tool_choice.disable_parallel_tool_use",
        "mcp_servers": NO_TOOLS,
        "container": NO_TOOLS,
        "compaction": "ask for a summary in a message",
    },
    {
        **HARMLESS,
        **dict.fromkeys(
            ("billing_policy", "fallback_credit_token", "user_profile_id", "workspace_id", "diagnostics"), ONLY_RECORDS),
        **dict.fromkeys(("cache_control", "speed", "inference_geo"), ONLY_SPEED),
        "betas": "names features, and each feature has a field of its own",
        "fallbacks": "names models for declined requests, and no request is declined",
    },
)  # fmt: skip
COUNTING = Others(
    MESSAGES.refused,
    {
        **MESSAGES.harmless,
        **dict.fromkeys(("max_tokens", "stop_sequences"), "does not change the count"),
    },
)

POOLING = Others(
    {
        "padding": "no padding counts here: texts are never made longer; leave it out",
        "late_interaction_params": "use /score or /rerank of a model for late interaction",
        "data": "use input or messages",
        **dict.fromkeys(
            ("image_data", "images", "multi_modal_data", "multi_modal_uuids"),
            "use messages with images",
        ),
    },
    {name: HARMLESS[name] for name in ("user", "metadata")},
)
SCORING = Others(
    {
        **POOLING.refused,
        "instruction": "put it into the query",
        "chat_template_kwargs": "put what the template shall know into the query",
        **dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs"), "give the server's --mm-processor-kwargs"),
    },
    POOLING.harmless,
)  # fmt: skip
COHERE = Others({}, {})
NO_GRAMMAR = "use suffix and structured_outputs of /v1/completions"
INFILL = Others(
    {
        **REFUSED,
        "grammar": NO_GRAMMAR,
        "json_schema": NO_GRAMMAR,
        "n_probs": "use suffix and logprobs of /v1/completions",
        "logit_bias": "use suffix and logit_bias of /v1/completions",
    },
    IN_TEXTS,
)
LLAMA_COMPLETION = Others(
    {
        **{
            name: why
            for name, why in REFUSED.items()
            if name not in ("n_probs", "json_schema", "return_tokens", "response_fields")
        },
        "grammar": "use json_schema, or structured_outputs of /v1/completions",
    },
    IN_TEXTS,
)
NONE = Others({}, {})
TEMPLATE = Others(
    {"json_schema": USE_FORMAT, "grammar": USE_FORMAT}, {"stream": "nothing is generated"}
)
ADAPTERS = Others(
    {"is_3d_lora_weight": "weights of experts in one tensor are not read"},
    {"lora_int_id": "is a number of the engine's own; adapters are told apart by lora_name"},
)


def verdict(kind: type[msgspec.Struct], name: str) -> str:
    """Return how a request type treats a field: honoured, refused, harmless or unknown.

    Tests and the documentation page use it to list every field of every route.
    """
    others: Others = getattr(kind, "OTHERS", NONE)
    if name in kind.__struct_encode_fields__:
        return "honoured"
    if name in others.refused:
        return "refused"
    return "harmless" if name in others.harmless else "unknown"


def check_others(given: Mapping[str, Any], others: Others) -> tuple[str, ...]:
    """Refuse unsupported fields, and return the names of the unknown ones.

    Args:
        given: the undeclared fields of a body.

    Raises:
        UnsupportedFeatureError: for the first refused field of the body.
    """
    for name, value in given.items():
        if name in others.refused and not _asks_for_nothing(name, value):
            raise unsupported(name, others.refused[name], value)
    return tuple(name for name in given if not any(name in rows for rows in others))


def _asks_for_nothing(name: str, value: Any) -> bool:
    if name in ON_BY_DEFAULT:
        return value is None or value is True
    is_empty = value is None or value is False or value in ("", [], {})  # 0 is not: it is a number
    return is_empty or value in NEUTRAL.get(name, ())
