"""The body of the Responses API.  Unknown fields are ignored; null means "not given"."""

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from trouper.frontends.server import unsupported
from trouper.frontends.server.openai.requests import Int64

JSONObject = dict[str, Any]


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None  # the text itself is in the answer, so nothing is summed up
    generate_summary: str | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/responses`: a conversation to be continued."""

    PASSED_OVER: ClassVar[tuple[str, ...]] = ("user", "metadata")
    UNSUPPORTED: ClassVar[Mapping[str, str]] = unsupported.RESPONSES

    input: str | list[JSONObject]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stream: bool | None = None
    priority: Int64 | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    text: JSONObject | None = None
    tools: list[JSONObject] | None = None
    tool_choice: str | JSONObject | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    previous_response_id: str | None = None
    store: bool | None = None  # by default what this server can
    background: bool | None = None
    user: str | None = None
    metadata: JSONObject | None = None
