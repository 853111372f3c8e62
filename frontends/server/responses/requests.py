"""Declare the bodies of the Responses API.

A null means that the field is not given; the table in `fields.py` decides about all other fields.
"""

from typing import Any, ClassVar

import msgspec

from trouper.frontends.server.generation.requests import SamplingFields
from trouper.frontends.server.shared import fields

JSONObject = dict[str, Any]


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None  # the text itself is in the answer, so nothing is summed up
    generate_summary: str | None = None


class ResponsesRequest(SamplingFields, kw_only=True):
    """The body of `POST /v1/responses`."""

    OTHERS: ClassVar[fields.Others] = fields.RESPONSES

    input: str | list[JSONObject]
    instructions: str | None = None
    max_output_tokens: int | None = None
    stop: str | list[str] | None = None
    text: JSONObject | None = None
    tools: list[JSONObject] | None = None
    tool_choice: str | JSONObject | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: JSONObject | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    previous_response_id: str | None = None
    store: bool | None = None  # by default what this server can
    background: bool | None = None
    metadata: JSONObject | None = None
    enable_response_messages: bool | None = None


class CompactRequest(ResponsesRequest, kw_only=True):
    """The body of `POST /v1/responses/compact` and `/v1/responses/input_tokens`, which do not continue a conversation."""

    input: str | list[JSONObject] | None = None  # type: ignore[assignment]  # the history may be all there is
