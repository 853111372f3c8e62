"""Render responses, as one reply or as typed events.  Pure."""

from functools import partial
from typing import Any, ClassVar

import msgspec

from trouper.frontends.server.generation.adapter import (
    ChoiceUpdate,
    ParsedRequest,
    ReplyHead,
    ServedModel,
    StreamEvent,
    call_ids,
)
from trouper.frontends.server.generation.blocks import AnswerBlocks
from trouper.frontends.server.generation.logprobs import TokenSpans, chat_logprobs
from trouper.frontends.server.openai.chat import ChatAdapter
from trouper.frontends.server.responses.items import EventWriter, ItemForm
from trouper.frontends.server.responses.turn import ResponsesTurn
from trouper.frontends.server.shared.usage import CachedTokens, ReasoningUsage, Usage
from trouper.outputs import CompletionOutput, RequestOutput

JSONObject = dict[str, Any]
CLIENT_NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "structured_outputs": "text.format",
    "logprobs": "top_logprobs",
    "reasoning_effort": "reasoning.effort",
}


class ResponsesAdapter:
    """Render one response.  The blocks of the answer are its items, and `response` is its state so far.

    Every event has a sequence number, so a client can continue an interrupted stream.
    """

    # The last event marks the end itself.
    STREAM_END: ClassVar[bytes] = b""

    @staticmethod
    def parse(request: ResponsesTurn, model: ServedModel) -> ParsedRequest:
        parsed = ChatAdapter.parse(request.as_chat(), model)
        return msgspec.structs.replace(parsed, shows_usage=False, shows_cached=True)

    @staticmethod
    def client_name(request: ResponsesTurn, parameter: str) -> str:
        if parameter.startswith("tools["):
            return request.tools.client_name(parameter)
        # The grammar may have been made for the tools.
        if parameter == "structured_outputs":
            parameter = ChatAdapter.client_name(request.as_chat(), parameter)
        name = request.transcript.client_name(parameter)
        if getattr(request.body, name, None) is not None:
            return name  # the name is the same in both APIs
        return CLIENT_NAMES.get(name, name)

    def __init__(
        self, request: ResponsesTurn, parsed: ParsedRequest, model: ServedModel, head: ReplyHead
    ) -> None:
        self._spans = TokenSpans()
        self._num_top = request.body.top_logprobs or 0
        self._bytes_of = model.token_bytes
        self._blocks = AnswerBlocks(
            partial(call_ids(parsed, model, head).of, prefix="call"), self._spans.take
        )
        self._form = ItemForm(
            head.unique_id, request.tools, request.seals_reasoning, request.shows_logprobs
        )
        self._events = EventWriter(self._form)
        self._last: CompletionOutput | None = None
        self._is_created = False
        self._raw = RawMessages() if request.body.enable_response_messages else None
        self.response = _new_response(request, parsed, model.name, head)

    def queue(self) -> list[StreamEvent]:
        """Render the first events of a background response, before it starts."""
        self._is_created = True
        response = {**self.response, "status": "queued"}
        return [self.event(f"response.{name}", response) for name in ("created", "queued")]

    def event(self, kind: str, response: JSONObject) -> StreamEvent:
        """Render an event that contains the whole response."""
        return self._events.event(kind, response=response)

    def begin(self, output: RequestOutput, usage: Usage | None) -> list[StreamEvent]:
        names = ("in_progress",) if self._is_created else ("created", "in_progress")
        return [self.event(f"response.{name}", self.response) for name in names]

    def render(self, update: ChoiceUpdate, usage: Usage | None) -> list[StreamEvent]:
        self._note(update)
        is_last = update.completion.finish_reason is not None
        changes = self._blocks.feed(update.parts, is_last=is_last)
        return [event for change in changes for event in self._events.render(change)]

    def end(self, usage: Usage) -> list[StreamEvent]:
        changes = self._blocks.end(is_cut=not self._is_whole)
        events = [event for change in changes for event in self._events.render(change)]
        response = self.response = self._finished(usage)
        return [*events, self.event(f"response.{response['status']}", response)]

    def add(self, update: ChoiceUpdate) -> None:
        self._note(update)
        self._blocks.feed(update.parts, is_last=True)

    def reply(self, usage: Usage) -> JSONObject:
        self._blocks.end(is_cut=not self._is_whole)
        self.response = self._finished(usage)
        return self.response

    def _note(self, update: ChoiceUpdate) -> None:
        completion = self._last = update.completion
        if completion.logprobs is not None:
            found = chat_logprobs(
                completion.token_ids, completion.logprobs, self._num_top, bytes_of=self._bytes_of
            )
            self._spans.add(found.content)
        if self._raw is not None:
            self._raw.add(update)

    @property
    def _is_whole(self) -> bool:
        return self._last is not None and self._last.finish_reason == "stop"

    def _finished(self, usage: Usage) -> JSONObject:
        """Return the response, all blocks ended; the last of a cut answer is incomplete, as the answer is."""
        is_cut = self._last is not None and self._last.finish_reason == "length"
        details = {"reason": "max_output_tokens" if is_cut else "aborted"}
        status = "completed" if self._is_whole else "incomplete"
        *whole, last = self._blocks.all
        return {
            **self.response,
            "status": status,
            "incomplete_details": None if self._is_whole else details,
            "output": [
                *(self._form.item(block, "completed") for block in whole),
                self._form.item(last, status),
            ],
            "usage": _counts(usage),
            **({} if self._raw is None else self._raw.fields),
        }


class RawMessages:
    """The rendered prompt and the raw answer, for `enable_response_messages`.

    They show how the conversation was rendered for the model, which helps in debugging templates.
    """

    def __init__(self) -> None:
        self._prompt: JSONObject = {}
        self._text: list[str] = []
        self._ids: list[int] = []

    def add(self, update: ChoiceUpdate) -> None:
        output, completion = update.output, update.completion
        self._prompt = _raw_message(output.prompt or "", output.prompt_token_ids)
        self._text.append(completion.text)
        self._ids += completion.token_ids

    @property
    def fields(self) -> JSONObject:
        answer = _raw_message("".join(self._text), self._ids)
        return {"input_messages": [self._prompt], "output_messages": [answer]}


def _raw_message(text: str, token_ids: list[int]) -> JSONObject:
    return {"type": "raw_message_tokens", "message": text, "tokens": token_ids}


def _new_response(
    turn: ResponsesTurn, parsed: ParsedRequest, model_name: str, head: ReplyHead
) -> JSONObject:
    request = turn.body
    reasoning = request.reasoning
    return {
        "id": f"resp_{head.unique_id}",
        "object": "response",
        "created_at": head.created,
        "status": "in_progress",
        "background": bool(request.background),
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "model": model_name,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": None},
        "store": turn.is_stored,
        "temperature": parsed.params.temperature,
        "text": {"format": (request.text or {}).get("format") or {"type": "text"}},
        "tool_choice": request.tool_choice or "auto",
        "tools": turn.tools.shown,
        "top_logprobs": request.top_logprobs or 0,
        "top_p": parsed.params.top_p,
        "truncation": "disabled",
        "usage": None,
        "metadata": request.metadata or {},
    }


def _counts(usage: Usage) -> JSONObject:
    cached, reasoning = usage.prompt_tokens_details, usage.completion_tokens_details
    if not isinstance(cached, CachedTokens):
        cached = CachedTokens(0)
    num_reasoning = reasoning.reasoning_tokens if isinstance(reasoning, ReasoningUsage) else 0
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": cached.cached_tokens,
            "cache_write_tokens": cached.created_cache_tokens,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": usage.total_tokens,
    }
