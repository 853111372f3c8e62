"""Declare the bodies of the Messages API.

A null means that the field is not given; the table in `fields.py` decides about all other fields.
"""

from typing import Any, ClassVar

from trouper.frontends.server.generation.requests import SamplingFields
from trouper.frontends.server.shared import fields


class CountTokensRequest(SamplingFields, kw_only=True):
    """The body of `POST /v1/messages/count_tokens`.  Fields without an influence on the count are accepted."""

    OTHERS: ClassVar[fields.Others] = fields.COUNTING

    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    context_management: Any = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """The body of `POST /v1/messages`."""

    OTHERS: ClassVar[fields.Others] = fields.MESSAGES

    max_tokens: int
    stop_sequences: list[str] | None = None
