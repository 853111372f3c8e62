"""Blocks of an answer as output items, and as the events in which they come.  Pure."""

from typing import Any, Literal

from trouper.frontends.server.openai.adapter import StreamEvent
from trouper.frontends.server.openai.blocks import (
    AnswerBlock,
    BlockEnded,
    BlockEvent,
    BlockGrown,
    BlockStarted,
)

JSONObject = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete"]
PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}
DELTAS = {
    "reasoning": "response.reasoning_text",
    "text": "response.output_text",
    "call": "response.function_call_arguments",
}


class EventWriter:
    """Numbers the events of one response."""

    def __init__(self, response_id: str) -> None:
        self._id = response_id
        self._num_events = 0

    def event(self, kind: str, **content: Any) -> StreamEvent:
        event = {"type": kind, "sequence_number": self._num_events, **content}
        self._num_events += 1
        return StreamEvent(event, kind)

    def render(self, change: BlockEvent) -> list[StreamEvent]:
        """Return the events that tell what has become of a block."""
        block = change.block
        place = {"output_index": block.index}
        match change:
            case BlockStarted():
                item = output_item(block, self._id, "in_progress")
                events = [self.event("response.output_item.added", **place, item=item)]
                if block.kind != "call":
                    part = _part(block.kind, "")
                    events.append(self._in_part("content_part.added", block, part=part))
                return events
            case BlockGrown(_, text):
                return [self._of_text("delta", block, delta=text)]
            case BlockEnded(_, is_cut):
                return self._ended(block, "incomplete" if is_cut else "completed")

    def _ended(self, block: AnswerBlock, status: Status) -> list[StreamEvent]:
        item = output_item(block, self._id, status)
        if block.kind == "call":
            whole = {"name": block.name, "arguments": block.text}
            events = [self._of_text("done", block, **whole)]
        else:
            events = [
                self._of_text("done", block, text=block.text),
                self._in_part("content_part.done", block, part=_part(block.kind, block.text)),
            ]
        return [
            *events,
            self.event("response.output_item.done", output_index=block.index, item=item),
        ]

    def _of_text(
        self, moment: Literal["delta", "done"], block: AnswerBlock, **content: Any
    ) -> StreamEvent:
        kind = f"{DELTAS[block.kind]}.{moment}"
        if block.kind == "call":
            return self.event(
                kind, item_id=item_id(block, self._id), output_index=block.index, **content
            )
        more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        return self._in_part(kind.removeprefix("response."), block, **content, **more)

    def _in_part(self, kind: str, block: AnswerBlock, **content: Any) -> StreamEvent:
        return self.event(
            f"response.{kind}",
            item_id=item_id(block, self._id),
            output_index=block.index,
            content_index=0,
            **content,
        )


def output_item(block: AnswerBlock, response_id: str, status: Status) -> JSONObject:
    """Return the item of a block; one that is in progress has no content yet."""
    id = item_id(block, response_id)
    if block.kind == "call":
        return {
            "id": id,
            "type": "function_call",
            "status": status,
            "call_id": block.call_id,
            "name": block.name,
            "arguments": block.text,
        }
    content = [] if status == "in_progress" else [_part(block.kind, block.text)]
    if block.kind == "reasoning":
        return {"id": id, "type": "reasoning", "status": status, "summary": [], "content": content}
    return {"id": id, "type": "message", "role": "assistant", "status": status, "content": content}


def item_id(block: AnswerBlock, response_id: str) -> str:
    """Return an id that no other block of any response has."""
    return f"{PREFIXES[block.kind]}_{response_id}_{block.index}"


def response_of(item: str) -> str:
    """Return the id of the response that an item of this id belongs to."""
    return "resp_" + item.partition("_")[2].rpartition("_")[0]


def _part(kind: str, text: str) -> JSONObject:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": []}
