"""`POST /v1/responses`: the adapter of conversations without memory, whole or as typed events.

A request becomes a `ChatRequest`, and the same rules hold.
"""

from typing import Any, ClassVar, cast

import msgspec

from trouper.errors import TrouperValidationError
from trouper.frontends.server.http.context import RequestContext
from trouper.frontends.server.openai.adapter import (
    ChoiceUpdate,
    ParsedRequest,
    ReplyHead,
    ServedModel,
    StreamEvent,
)
from trouper.frontends.server.openai.chat import ChatAdapter
from trouper.frontends.server.openai.driver import drive
from trouper.frontends.server.openai.requests import ChatRequest, ResponseFormat, ResponsesRequest
from trouper.frontends.server.service import Service
from trouper.frontends.server.unsupported import unsupported
from trouper.frontends.server.usage import Usage
from trouper.outputs import CompletionOutput, RequestOutput

CHAT_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
}
SAME_NAME = ("model", "temperature", "top_p", "top_k", "seed", "stream", "priority", "cache_salt")


async def create_response(
    service: Service, context: RequestContext, request: ResponsesRequest
) -> None:
    """Answer a conversation without memory, whole or as typed events."""
    await drive(service, context, request, ResponsesAdapter)


class ResponsesAdapter:
    """One message as the only item of a response."""

    STREAM_END: ClassVar[bytes] = b""  # the last event says that it is the last

    @staticmethod
    def parse(request: ResponsesRequest, model: ServedModel) -> ParsedRequest:
        parsed = ChatAdapter.parse(_as_chat(request), model)
        return msgspec.structs.replace(parsed, shows_usage=False, shows_cached=True)

    @staticmethod
    def client_name(request: ResponsesRequest, parameter: str) -> str:
        name, bracket, rest = parameter.partition("[")
        return CHAT_NAMES.get(name, name) + bracket + rest

    def __init__(
        self, request: ResponsesRequest, parsed: ParsedRequest, model: ServedModel, head: ReplyHead
    ) -> None:
        self._num_events = 0
        self._text: list[str] = []
        self._last: CompletionOutput | None = None
        self._message_id = f"msg_{head.unique_id}"
        self._response: dict[str, Any] = {
            "id": f"resp_{head.request_id}",
            "object": "response",
            "created_at": head.created,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": model.name,
            "output": [],
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": parsed.params.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": parsed.params.top_p,
            "usage": None,
            "metadata": request.metadata or {},
        }

    def begin(self, output: RequestOutput, usage: Usage | None) -> list[StreamEvent]:
        item: dict[str, Any] = {**self._item("", "in_progress"), "content": []}
        return [
            self._event("response.created", response=self._response),
            self._event("response.in_progress", response=self._response),
            self._event("response.output_item.added", output_index=0, item=item),
            self._part_event("response.content_part.added", part=_part("")),
        ]

    def render(self, update: ChoiceUpdate, usage: Usage | None) -> list[StreamEvent]:
        self.add(update)
        text = update.text
        return [self._part_event("response.output_text.delta", delta=text)] if text else []

    def end(self, usage: Usage) -> list[StreamEvent]:
        response = self.reply(usage)
        (item,) = response["output"]
        (part,) = item["content"]
        return [
            self._part_event("response.output_text.done", text=part["text"]),
            self._part_event("response.content_part.done", part=part),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(f"response.{response['status']}", response=response),
        ]

    def add(self, update: ChoiceUpdate) -> None:
        self._text.append(update.text)
        self._last = update.completion

    def reply(self, usage: Usage) -> dict[str, Any]:
        finish_reason = None if self._last is None else self._last.finish_reason
        is_whole = finish_reason == "stop"
        reason = "max_output_tokens" if finish_reason == "length" else "aborted"
        status = "completed" if is_whole else "incomplete"
        return {
            **self._response,
            "status": status,
            "incomplete_details": None if is_whole else {"reason": reason},
            "output": [self._item("".join(self._text), status)],
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": usage.prompt_tokens_details,
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.total_tokens,
            },
        }

    def _part_event(self, kind: str, **content: Any) -> StreamEvent:
        is_text = kind.startswith("response.output_text")
        return self._event(
            kind,
            item_id=self._message_id,
            output_index=0,
            content_index=0,
            **content,
            **({"logprobs": []} if is_text else {}),
        )

    def _event(self, kind: str, **content: Any) -> StreamEvent:
        event = {"type": kind, "sequence_number": self._num_events, **content}
        self._num_events += 1
        return StreamEvent(event, kind)

    def _item(self, text: str, status: str) -> dict[str, Any]:
        return {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [_part(text)],
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def _as_chat(request: ResponsesRequest) -> ChatRequest:
    messages: list[dict[str, Any]] = []
    if request.instructions is not None:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        messages.append({"role": "user", "content": request.input})
    elif not request.input:
        raise TrouperValidationError("input: must not be empty", parameter="input")
    else:
        messages += [_message(i, item) for i, item in enumerate(request.input)]
    fields = {name: getattr(request, name) for name in SAME_NAME}
    return ChatRequest(
        messages=messages,
        max_completion_tokens=request.max_output_tokens,
        response_format=_response_format(request),
        **fields,
    )


def _response_format(request: ResponsesRequest) -> ResponseFormat | None:
    """Read `text.format`, which has the fields of a schema beside its type."""
    given: Any = (request.text or {}).get("format")
    if given is None:
        return None
    if not isinstance(given, dict) or not isinstance(cast("Any", given).get("type"), str):
        raise TrouperValidationError("text.format: must have a type", parameter="text.format")
    fields = cast("dict[str, Any]", given)
    kind, schema = fields["type"], fields.get("schema")
    return ResponseFormat(type=kind, json_schema={"schema": schema} if schema is not None else None)


def _message(i: int, item: dict[str, Any]) -> dict[str, Any]:
    kind = item.get("type", "message")
    if kind != "message":
        raise unsupported(f"input[{i}]", "only messages are")
    role = item.get("role")
    return {"role": "system" if role == "developer" else role, "content": item.get("content")}
