"""The bodies of the Messages API.  Unknown fields are ignored; null means "not given"."""

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from trouper.frontends.server import unsupported


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/messages/count_tokens`: a conversation."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = unsupported.MESSAGES

    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    context_management: Any = None  # nothing is cleared or summed up; answers say so


class MessagesRequest(CountTokensRequest, kw_only=True):
    """`POST /v1/messages`: a conversation to be continued."""

    PASSED_OVER: ClassVar[tuple[str, ...]] = ("metadata", "context_management")

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    request_id: str | None = None
