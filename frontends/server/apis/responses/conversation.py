"""Declare the requests of the Responses API, and convert each to a chat, together with the conversation before it.  Pure.

The API sends and stores a conversation as items, but the engine takes the messages of a chat.  A request adds its items to those of the
response that it continues.  The input items of a stored response are listed in pages.

A null in a body means that the field was not sent.  The table in `fields.py` defines the treatment of all other fields.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, cast

import msgspec

from trouper.errors import invalid
from trouper.frontends.server.apis.openai.requests import ChatRequest
from trouper.frontends.server.apis.responses.tools import (
    SHELL,
    SHELL_SCHEMA,
    ResponseTools,
    custom_arguments,
    function_name,
)
from trouper.frontends.server.generation.request_fields import ResponseFormat, SamplingFields
from trouper.frontends.server.generation.transcript import Transcript, unseal
from trouper.frontends.server.service.response_store import StoredResponse
from trouper.frontends.server.shared import fields
from trouper.frontends.server.shared.errors import unsupported

JSONObject = dict[str, Any]
MAX_ITEMS = 100  # of a page
PREFIXES = {
    "message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"
}  # fmt: skip


class Page(NamedTuple):
    """The requested part of a list.

    Attributes:
        limit: the maximum number of items.
        is_descending: whether the newest item comes first.
        after: the id of the item before the page.
    """

    limit: int = 20
    is_descending: bool = True
    after: str | None = None

    @classmethod
    def of(cls, query: Mapping[str, Sequence[str]]) -> "Page":
        """Read the fields of a query.  Other fields are ignored.

        Raises:
            TrouperValidationError: a field is invalid; the error names it.

        The default is 20 items, newest first, as in OpenAI's API.
        """
        given = {name: query[name][-1] for name in ("limit", "order", "after") if name in query}
        limit, order = given.get("limit", "20"), given.get("order", "desc")
        if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MAX_ITEMS):
            raise invalid("limit", f"must be an integer from 1 to {MAX_ITEMS}", limit[:64])
        if order not in ("asc", "desc"):
            raise invalid("order", "must be asc or desc", order[:64])
        return cls(int(limit), order == "desc", given.get("after"))


def listed(items: Sequence[JSONObject], response_id: str, page: Page) -> JSONObject:
    """Return one page of the items.  Every item gets an id, the same one in all pages.

    Raises:
        TrouperValidationError: `after` is not the id of an item.
    """
    places = range(len(items))[:: -1 if page.is_descending else 1]
    if page.after is not None:
        last = _place_of(page.after, items, response_id, places)
        if last is None:
            raise invalid("after", "must be the id of an item of this list", page.after[:64])
        places = places[places.index(last) + 1 :]
    data = [_named(items[i], _id(items[i], response_id, i)) for i in places[: page.limit]]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": page.limit < len(places),
    }


def _place_of(
    name: str, items: Sequence[JSONObject], response_id: str, places: range
) -> int | None:
    """Return the index of an item by its id, or None.  A generated id contains the index; among equal ids, the first in `places` counts."""
    _, mark, number = name.rpartition(f"_{response_id}_in")
    if mark and number.isascii() and number.isdigit():
        place = int(number[:9])
        if place < len(items) and _id(items[place], response_id, place) == name:
            return place
    return next((i for i in places if name and items[i].get("id") == name), None)


def _id(item: JSONObject, response_id: str, index: int) -> str:
    """Return the item's own id, or one generated from its index."""
    given = item.get("id")
    if isinstance(given, str) and given:
        return given
    return f"{PREFIXES.get(item.get('type', 'message'), 'it')}_{response_id}_in{index}"


def _named(item: JSONObject, name: str) -> JSONObject:
    """Complete an item with its type, its id and the fields that OpenAI's clients require."""
    kind = item.get("type", "message")
    content = item.get("content")
    whole = {"status": "completed", **item, "id": name, "type": kind}
    if kind == "reasoning":
        whole.setdefault("summary", [])
    if kind == "message" and isinstance(content, str):
        whole["content"] = [_text(content, item.get("role"))]
    return whole


def _text(text: str, role: object) -> JSONObject:
    if role == "assistant":
        return {"type": "output_text", "text": text, "annotations": []}
    return {"type": "input_text", "text": text}


ANSWERS = ("content", "tool_calls", "reasoning_content")
SHOWN_TEXT = ("reasoning_text", "summary_text")
TAKEN = "messages, reasoning, compactions, calls and their outputs"
RESULTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
# Items that record an action of another server, without content that a model could read.
PASSED_OVER = ("web_search_call", "ghost_snapshot")
SUMMARY = "Summary of the conversation so far:"


def add_items(transcript: Transcript, items: Iterable[JSONObject], name: str) -> None:
    """Append items.  `name` is the client's name of their list.

    Raises:
        TrouperValidationError, UnsupportedFeatureError: a field of an item is invalid; the error names it.

    Items of one turn, such as reasoning and calls, are combined into one message.
    """
    for i, item in enumerate(items):
        _add(transcript, f"{name}[{i}]", item)
    transcript.place_images()


def _add(transcript: Transcript, place: str, item: JSONObject) -> None:
    match item.get("type", "message"):
        case "message" if item.get("role") == "assistant":
            message = transcript.assistant(place, "content", "tool_calls")
            message["content"] = item.get("content")
        case "message":
            role = item.get("role")
            transcript.append(place, "system" if role == "developer" else role, item.get("content"))
        case "reasoning":
            text = _reasoning_text(place, item)
            if text is not None:
                message = transcript.assistant(place, *ANSWERS)
                message["reasoning_content"] = text
        case "function_call" | "custom_tool_call" | "local_shell_call":
            call_id = _string(place, item, "call_id")
            transcript.add_call(place, call_id, *_call(place, item))
        case kind if kind in RESULTS:
            _add_result(transcript, place, item)
        case "compaction" | "compaction_summary":
            transcript.append(place, "user", f"{SUMMARY}\n{_summary(place, item)}")
        case kind if kind in PASSED_OVER:
            pass
        case str(kind):
            text = f"items of type {kind[:64]} cannot be used; send {TAKEN}"
            raise unsupported(f"{place}.type", text)
        case _:
            raise invalid(f"{place}.type", "must be a string")


def _string(place: str, item: JSONObject, name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise invalid(f"{place}.{name}", "must be a string")
    return value


def _call(place: str, item: JSONObject) -> tuple[str, str]:
    """Return the name and arguments of the chat function for a call of any kind."""
    if item["type"] == "local_shell_call":
        given: Any = item.get("action")
        if not isinstance(given, dict):
            raise invalid(f"{place}.action", "must be an object")
        action = cast("JSONObject", given)
        fields = {name: action[name] for name in SHELL_SCHEMA["properties"] if action.get(name)}
        return SHELL, msgspec.json.encode(fields).decode()
    name = function_name(_string(place, item, "name"), item.get("namespace"))
    if item["type"] == "custom_tool_call":
        return name, custom_arguments(_string(place, item, "input"))
    return name, _string(place, item, "arguments")


def _add_result(transcript: Transcript, place: str, item: JSONObject) -> None:
    output = item.get("output")
    if not isinstance(output, str | list):
        raise invalid(f"{place}.output", "must be a string or a list of parts")
    # OpenAI's type for the output of a shell has the call's id in the field `id`.
    is_by_id = item["type"] == "local_shell_call_output" and "call_id" not in item
    name = "id" if is_by_id else "call_id"
    transcript.add_result(place, name, item.get(name), output, "output")


def _summary(place: str, item: JSONObject) -> str:
    summary = unseal("compaction", item.get("encrypted_content"))
    if summary is None:
        advice = "only a compaction created by this server can be read"
        raise unsupported(f"{place}.encrypted_content", advice)
    return summary


def _reasoning_text(place: str, item: JSONObject) -> str | None:
    """Return the text of a reasoning item, or else its summary.

    Returns None if another server encrypted the reasoning, because it cannot be read here.
    """
    texts: list[str] = []
    sealed = unseal("reasoning", item.get("encrypted_content"))
    for name in ("content", "summary"):
        parts: Any = item.get(name) or ()
        for part in cast("list[Any]", parts) if isinstance(parts, list) else ():
            fields: JSONObject = cast("JSONObject", part) if isinstance(part, dict) else {}
            text = fields.get("text")
            if fields.get("type") not in SHOWN_TEXT or not isinstance(text, str):
                raise invalid(f"{place}.{name}", "must be a list of texts")
            texts.append(text)
        if texts:
            return "\n".join(texts)
        if sealed is not None:
            return sealed
    return None if item.get("encrypted_content") else ""


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: str | None = None
    # Accepted without effect, because the answer contains the reasoning itself instead of a summary.
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
    """Combine a request with the conversation that it continues, as items and as chat messages.

    Args:
        body: the request.
        previous: the response before it, whose model, cache salt and priority are the defaults.
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
    """Return the input as items.  A text becomes a message of the user."""
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
