"""Render the blocks of an answer as output items, and as their events in a stream.  Pure."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from trouper.frontends.server.generation.adapter import StreamEvent
from trouper.frontends.server.generation.blocks import (
    AnswerBlock,
    BlockEnded,
    BlockEvent,
    BlockGrown,
    BlockStarted,
)
from trouper.frontends.server.generation.logprobs import ChatToken
from trouper.frontends.server.generation.transcript import seal
from trouper.frontends.server.responses.tools import ResponseTools, custom_input, shell_action

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

        A custom tool has a text as its input, for example, which is only known after its JSON is complete.
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
