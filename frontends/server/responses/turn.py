"""Combine a request of the Responses API with the conversation before it, and convert both to a chat.  Pure.

A null in a body means that the field is not given; the table in `fields.py` decides about all other fields.
"""

import re
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import msgspec

from trouper.errors import invalid
from trouper.frontends.server.generation.request_fields import ResponseFormat, SamplingFields
from trouper.frontends.server.generation.transcript import Transcript
from trouper.frontends.server.openai.requests import ChatRequest
from trouper.frontends.server.responses.conversation import add_items
from trouper.frontends.server.responses.tools import ResponseTools
from trouper.frontends.server.service.response_store import StoredResponse
from trouper.frontends.server.shared import fields

JSONObject = dict[str, Any]


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: str | None = None
    # The text itself is in the answer, so nothing is summarised.
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(SamplingFields, kw_only=True):
    """The body of `POST /v1/responses`.

    Items of `input` are checked one by one when they become messages.
    """

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
    # The default depends on the server's settings.
    store: bool | None = None
    background: bool | None = None
    metadata: JSONObject | None = None
    enable_response_messages: bool | None = None


class CompactRequest(ResponsesRequest, kw_only=True):
    """The body of `POST /v1/responses/compact` and `/v1/responses/input_tokens`, which do not continue a conversation."""

    input: str | list[JSONObject] | None = None  # type: ignore[assignment]  # the history may be all there is


SAME_NAME = ("stop", "parallel_tool_calls", "include_reasoning", "chat_template_kwargs")
FORMAT_MEMBERS = {
    "json_schema": {"type", "name", "description", "schema", "strict"},
    "json_object": {"type", "schema"},
}
INHERITED = ("model", "cache_salt", "priority")
ENCRYPTED = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
# Input items have their images anyway, and no response has calls of built-in tools.
INCLUDED = re.compile(r"message\.input_image\.image_url|\w+_call(_output)?\..+")


class ResponsesTurn:
    """A request, and the conversation that it continues.

    Args:
        body: the request.
        previous: the response before it.  Its model, salt and priority are the defaults.
        history: the items up to the end of that response.
        is_stored: whether the response is stored for follow-ups.

    Raises:
        TrouperValidationError, UnsupportedFeatureError: a field is invalid; the error names it.
    """

    def __init__(
        self,
        body: ResponsesRequest,
        previous: StoredResponse | None = None,
        history: Sequence[JSONObject] = (),
        *,
        is_stored: bool = False,
    ) -> None:
        self.body = body if previous is None else _inheriting(body, previous)
        self.model = self.body.model
        self.request_id = body.request_id
        self.is_stored = is_stored
        # The items up to the end of the input, to be stored.
        self.pieces: tuple[bytes, ...] = ()
        self.history = history
        _check_include(body.include or ())
        self.items = _input_items(body, is_first=not history)
        self.tools = ResponseTools(body.tools)
        self.transcript = Transcript()
        if body.instructions is not None:
            self.transcript.append("instructions", "system", body.instructions)
        add_items(self.transcript, history, "previous_response_id")
        add_items(self.transcript, self.items, "input")

    @property
    def seals_reasoning(self) -> bool:
        """Whether the client keeps the reasoning as one string for the next turn."""
        return ENCRYPTED in (self.body.include or ())

    @property
    def shows_logprobs(self) -> bool:
        return LOGPROBS in (self.body.include or ())

    def as_chat(self) -> ChatRequest:
        body = self.body
        if body.top_logprobs and not self.shows_logprobs:
            raise invalid("top_logprobs", f"needs include: [{LOGPROBS!r}]", body.top_logprobs)
        fields = {name: getattr(body, name) for name in SAME_NAME}
        response_format = _response_format(body)
        if response_format is not None and body.structured_outputs is not None:
            raise invalid("structured_outputs", "cannot be combined with text.format")
        return ChatRequest(
            messages=self.transcript.messages,
            max_completion_tokens=body.max_output_tokens,
            response_format=response_format,
            reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
            tools=self.tools.functions or None,
            tool_choice=self.tools.choice(body.tool_choice),
            logprobs=self.shows_logprobs or None,
            top_logprobs=body.top_logprobs if self.shows_logprobs else None,
            **fields,
            **body.shared(),
        )


def _check_include(names: Sequence[str]) -> None:
    for i, name in enumerate(names):
        if name not in (ENCRYPTED, LOGPROBS) and INCLUDED.fullmatch(name) is None:
            raise invalid(f"include[{i}]", f"must be {ENCRYPTED} or {LOGPROBS}", name)


def _inheriting(body: ResponsesRequest, previous: StoredResponse) -> ResponsesRequest:
    open_fields = [name for name in INHERITED if getattr(body, name) is None]
    fields = {name: getattr(previous, name) for name in open_fields}
    return msgspec.structs.replace(body, **fields)


def _input_items(request: ResponsesRequest, *, is_first: bool) -> list[JSONObject]:
    """Return the input as items; a text is a message of the user."""
    if isinstance(request.input, str):
        return [{"type": "message", "role": "user", "content": request.input}]
    if not request.input and is_first:
        raise invalid("input", "must not be empty")
    return request.input


def _response_format(request: ResponsesRequest) -> ResponseFormat | None:
    """Read `text.format`, which contains the fields of a schema next to its type."""
    given: Any = (request.text or {}).get("format")
    if given is None:
        return None
    if not isinstance(given, dict) or not isinstance(cast("JSONObject", given).get("type"), str):
        raise invalid("text.format", "must have a type")
    fields = {name: value for name, value in cast("JSONObject", given).items() if value is not None}
    kind, known = fields["type"], FORMAT_MEMBERS.get(fields["type"], {"type"})
    if unknown := fields.keys() - known:
        raise invalid("text.format", f"type {kind} has no {', '.join(sorted(unknown))[:128]}")
    schema = fields.get("schema")
    if kind == "json_object" or schema is None:
        return ResponseFormat(type=kind, schema=schema)
    return ResponseFormat(type=kind, json_schema={"schema": schema})
