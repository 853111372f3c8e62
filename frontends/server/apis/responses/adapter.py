"""Render responses, as one reply or as typed events, and the blocks of an answer as output items.  Pure."""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec

from trouper.frontends.server.apis.openai.chat import ChatAdapter
from trouper.frontends.server.apis.responses.conversation import ResponsesTurn
from trouper.frontends.server.apis.responses.tools import ResponseTools, custom_input, shell_action
from trouper.frontends.server.generation.adapter import (
    ChoiceUpdate,
    ParsedRequest,
    ReplyHead,
    ServedModel,
    StreamEvent,
    call_ids,
)
from trouper.frontends.server.generation.logprobs import ChatToken, TokenSpans, chat_logprobs
from trouper.frontends.server.generation.parsers import (
    AnswerBlock,
    AnswerBlocks,
    BlockEnded,
    BlockEvent,
    BlockGrown,
    BlockStarted,
)
from trouper.frontends.server.generation.transcript import seal
from trouper.frontends.server.shared.usage import CachedTokens, ReasoningUsage, Usage
from trouper.outputs import CompletionOutput, RequestOutput

JSONObject = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete"]
PREFIXES = {
    "reasoning": "rs", "text": "msg", "function": "fc", "custom": "ctc", "local_shell": "lsh"
}  # fmt: skip
DELTAS = {
    "reasoning": "response.reasoning_text",
    "text": "response.output_text",
    "call": "response.function_call_arguments",
}
CUSTOM_INPUT = "response.custom_tool_call_input"


class ItemForm(NamedTuple):
    """How the items of one response are rendered.

    Attributes:
        id: the unique part of the response in the ids of its items.
        tools: the callable tools.
        seals_reasoning: whether reasoning items also contain `encrypted_content`.
        shows_logprobs: whether texts contain the logprobs of their tokens.
    """

    id: str
    tools: ResponseTools
    seals_reasoning: bool = False
    shows_logprobs: bool = False

    def item_id(self, block: AnswerBlock) -> str:
        """Return an id, unique among all items of all responses.

        It contains the id of the response, so an item can be traced back without a search.
        """
        kind = self._call_kind(block) if block.kind == "call" else block.kind
        return f"{PREFIXES[kind]}_{self.id}_{block.index}"

    def item(self, block: AnswerBlock, status: Status) -> JSONObject:
        """Return the item of a block.  While the block is in progress, the item has no content.

        Statuses are in_progress, completed and incomplete.
        """
        head: JSONObject = {"id": self.item_id(block), "status": status}
        if block.kind == "call":
            return {**head, **self._call(block, status)}
        content = [] if status == "in_progress" else [self.part(block)]
        if block.kind == "text":
            return {**head, "type": "message", "role": "assistant", "content": content}
        item = {**head, "type": "reasoning", "summary": [], "content": content}
        if self.seals_reasoning and content:
            item["encrypted_content"] = seal("reasoning", block.text)
        return item

    def part(self, block: AnswerBlock) -> JSONObject:
        """Return the content of a reasoning or text item.

        Logprobs are included if the request wants them, and annotations are always empty.
        """
        part = _part(block.kind, block.text)
        if self.shows_logprobs and block.kind == "text":
            part["logprobs"] = list(block.tokens)
        return part

    def is_held_back(self, block: AnswerBlock) -> bool:
        """Return whether a call is shown only when complete, because its item represents the arguments differently.

        A custom tool has a text as its input, for example: it is only known after its JSON is complete.
        """
        return block.kind == "call" and self.tools.called(block.name).kind != "function"

    def _call(self, block: AnswerBlock, status: Status) -> JSONObject:
        tool = self.tools.called(block.name)
        kind = self._call_kind(block)
        call: JSONObject = {"type": f"{kind}_call", "call_id": block.call_id}
        if kind == "local_shell":
            return {**call, "action": shell_action(block.text)}
        call["name"] = tool.name
        if tool.namespace is not None:
            call["namespace"] = tool.namespace
        if kind == "custom":
            text = "" if status == "in_progress" else custom_input(block.text)
            return {**call, "type": "custom_tool_call", "input": text}
        return {**call, "arguments": block.text}

    def _call_kind(self, block: AnswerBlock) -> str:
        """Return the kind of a call.  A call of `local_shell` without a command is shown as a function call."""
        kind = self.tools.called(block.name).kind
        is_broken = kind == "local_shell" and shell_action(block.text) is None
        return "function" if is_broken else kind


class EventWriter:
    """Number the events of one response.

    Numbers increase by one over all events, which clients use to detect gaps.
    """

    def __init__(self, form: ItemForm) -> None:
        self._form = form
        self._num_events = 0

    def event(self, kind: str, **content: Any) -> StreamEvent:
        event = {"type": kind, "sequence_number": self._num_events, **content}
        self._num_events += 1
        return StreamEvent(event, kind)

    def render(self, change: BlockEvent) -> list[StreamEvent]:
        """Return the events for one change of a block."""
        block = change.block
        if self._form.is_held_back(block):
            if not isinstance(change, BlockEnded):
                return []
            return [*self._started(block), *self._ended(block, change.is_cut)]
        match change:
            case BlockStarted():
                return self._started(block)
            case BlockGrown(_, text, tokens):
                return [self._of_text("delta", block, tokens, delta=text)]
            case BlockEnded(_, is_cut):
                return self._ended(block, is_cut)

    def _started(self, block: AnswerBlock) -> list[StreamEvent]:
        item = self._form.item(block, "in_progress")
        added = self.event("response.output_item.added", output_index=block.index, item=item)
        if block.kind == "call":
            return [added]
        return [added, self._in_part("content_part.added", block, part=_part(block.kind, ""))]

    def _ended(self, block: AnswerBlock, is_cut: bool) -> list[StreamEvent]:
        item = self._form.item(block, "incomplete" if is_cut else "completed")
        if block.kind != "call":
            events = [
                self._of_text("done", block, block.tokens, text=block.text),
                self._in_part("content_part.done", block, part=self._form.part(block)),
            ]
        elif item["type"] == "function_call":
            whole = {"name": item["name"], "arguments": block.text}
            events: list[StreamEvent] = []
            if self._form.is_held_back(block):
                events.append(self._of_text("delta", block, delta=block.text))
            events.append(self._of_text("done", block, (), **whole))
        elif item["type"] == "custom_tool_call":
            place = {"item_id": item["id"], "output_index": block.index}
            events = [
                self.event(f"{CUSTOM_INPUT}.delta", **place, delta=item["input"]),
                self.event(f"{CUSTOM_INPUT}.done", **place, input=item["input"]),
            ]
        else:
            events = []
        done = self.event("response.output_item.done", output_index=block.index, item=item)
        return [*events, done]

    def _of_text(
        self,
        moment: Literal["delta", "done"],
        block: AnswerBlock,
        tokens: Sequence[ChatToken] = (),
        **content: Any,
    ) -> StreamEvent:
        kind = f"{DELTAS[block.kind]}.{moment}"
        if block.kind == "call":
            item_id = self._form.item_id(block)
            return self.event(kind, item_id=item_id, output_index=block.index, **content)
        more: dict[str, Any] = {"logprobs": list(tokens)} if block.kind == "text" else {}
        return self._in_part(kind.removeprefix("response."), block, **content, **more)

    def _in_part(self, kind: str, block: AnswerBlock, **content: Any) -> StreamEvent:
        return self.event(
            f"response.{kind}",
            item_id=self._form.item_id(block),
            output_index=block.index,
            content_index=0,
            **content,
        )


def response_of(item: str) -> str:
    """Return the id of the response to which an item belongs, from the id of the item."""
    return "resp_" + item.partition("_")[2].rpartition("_")[0]


def _part(kind: str, text: str) -> JSONObject:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": []}


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
