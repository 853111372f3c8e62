"""The settings of a server, which are fixed when it starts."""

import math
from typing import Any, Literal

import msgspec

from trouper.errors import TrouperValidationError, invalid
from trouper.frontends.dialects.answer_format import AUTO, check_parser_names
from trouper.frontends.dialects.table import Dialect
from trouper.lora import LoRARequest

KIB, MIB = 2**10, 2**20


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Keys, limits and habits.  Limits are described in docs/security.md; None means "derived from the engine" or "off".

    Raises:
        TrouperValidationError: an empty key, which would protect nothing; a budget that has no room for one body.
    """

    served_model_names: tuple[str, ...] = ()  # empty: the model's own name
    api_keys: tuple[str, ...] = ()  # empty: no key is needed
    admin_key: str | None = None  # mounts the control routes on the public listener
    is_dev_mode: bool = False  # mounts them openly
    lora_modules: tuple[LoRARequest, ...] = ()  # adapters that are loaded at start
    lora_root: str | None = (
        None  # the folder that adapters lie in which are loaded by HTTP; None: none are
    )
    allows_lora_updates: bool = False  # adapters are loaded and unloaded with a user's key
    # Which requests share cached prefixes: those of one API key, or all.  `auto` is `key` with two or more keys.
    cache_scope: Literal["auto", "key", "shared"] = "auto"
    protect_metrics: bool = False
    max_requests: int | None = None  # sequences open at once; 4 × max_num_seqs
    max_waiting_tokens: int | None = None  # what fits the KV cache, or 10 s of the throughput
    max_queue_delay_s: float = (
        math.inf
    )  # wait of the next to start, for a second: the newest are refused
    request_timeout_s: float = 600.0
    max_step_age_s: float = 10.0  # without a step while there is work: /health/step fails
    max_refusing_s: float = 5.0  # all requests refused for longer: /health/ready fails
    max_body: int = 32 * MIB
    max_body_memory: int | None = None  # bytes of all bodies under way; 8 × max_body
    body_timeout_s: float = 30.0
    body_start_timeout_s: float = 5.0  # to the first byte
    min_body_rate: int = 4 * KIB  # bytes a second, after body_start_timeout_s
    max_header_bytes: int = 64 * KIB
    max_headers: int = 256
    max_path: int = 8 * KIB
    response_role: str = "assistant"
    trust_request_chat_template: bool = False
    default_chat_template_kwargs: dict[str, Any] = {}  # where a request says nothing
    tool_call_parser: str = AUTO
    dialects: tuple[Dialect, ...] = ()  # beside those of the table
    tool_strict_level: Literal["auto", "function", "parameter"] = "auto"
    exclude_tools_when_tool_choice_none: bool = False
    reasoning_parser: str = AUTO
    reasoning_field: Literal["reasoning", "reasoning_content", "both"] = "reasoning"
    enable_prompt_tokens_details: bool = False
    force_include_usage: bool = False
    responses_store_bytes: int = 64 * MIB  # that clients may come back to; 0: none is kept
    shows_tokenizer_info: bool = False  # at /tokenizer_info
    shows_metrics: bool = False  # of each request, with its answer
    return_tokens_as_token_ids: bool = False
    is_smaller_priority_first: bool = False  # --priority-order vllm
    sse_keep_alive_interval_s: float = 0.0  # 0: off
    allowed_origins: tuple[str, ...] = ()  # of browsers; empty: no CORS headers, "*": all
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    has_timing: bool = True  # answers say when their first token is expected
    logs_access: bool = False
    unlogged_paths: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_parser_names(self.tool_call_parser, self.reasoning_parser, self.dialects)
        for name, keys in (("api_key", self.api_keys), ("admin_key", (self.admin_key,))):
            if any(key is not None and not key.strip() for key in keys):
                raise TrouperValidationError(f"{name}: a key must not be empty", parameter=name)
        if self.cache_scope == "key" and not self.api_keys:
            rule = "key needs API keys (--api-key)"
            raise invalid("cache_scope", rule, self.cache_scope)
        if self.max_body_memory is not None and self.max_body_memory < self.max_body:
            name = "max_body_memory"
            raise TrouperValidationError(
                f"{name}: must be at least max_body ({self.max_body})", parameter=name
            )
