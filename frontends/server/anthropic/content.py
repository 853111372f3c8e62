"""Render the blocks of an answer as content blocks of a message, and as their events in a stream.  Pure."""

from typing import Any

import msgspec

from trouper.frontends.server.generation.adapter import StreamEvent
from trouper.frontends.server.generation.blocks import (
    AnswerBlock,
    BlockEnded,
    BlockEvent,
    BlockGrown,
    BlockStarted,
)
from trouper.frontends.server.generation.transcript import seal

JSONObject = dict[str, Any]
DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
# Anthropic's proposed key for arguments without a JSON object.
INVALID = "INVALID_JSON"


def render_block(change: BlockEvent, *, omits_thinking: bool = False) -> list[StreamEvent]:
    """Return the events for one change of a block.

    A block begins with an event that contains its type, continues with deltas and ends with an event of its own.
    """
    is_omitted = omits_thinking and change.block.kind == "reasoning"
    match change:
        case BlockStarted(block):
            begun = content_block(block)
            if block.kind == "call":
                begun["input"] = {}  # clients append the deltas to it
            return [_event("start", block, content_block=begun)]
        case BlockGrown() if is_omitted:
            return []
        case BlockGrown(block, text):
            kind, name = DELTAS[block.kind]
            return [_event("delta", block, delta={"type": kind, name: text})]
        case BlockEnded(block) if is_omitted:
            signed = {"type": "signature_delta", "signature": seal("reasoning", block.text)}
            return [_event("delta", block, delta=signed), _event("stop", block)]
        case BlockEnded(block):
            return [_event("stop", block)]


def content_block(block: AnswerBlock, *, omits_thinking: bool = False) -> JSONObject:
    """Return a block in the format of the API.  Hidden thinking is only in the signature, which the client sends back.

    The arguments of a call are parsed, because the API wants an object and not a text.
    """
    match block.kind:
        case "text":
            return {"type": "text", "text": block.text}
        case "reasoning" if omits_thinking:
            return {"type": "thinking", "thinking": "", "signature": seal("reasoning", block.text)}
        case "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        case "call":
            return {
                "type": "tool_use",
                "id": block.call_id,
                "name": block.name,
                "input": _input(block.text),
            }


def _input(arguments: str) -> JSONObject:
    """Decode the arguments of a call.  Cut arguments, or other JSON than an object, become a text."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except msgspec.DecodeError:
        return {INVALID: arguments}


def _event(moment: str, block: AnswerBlock, **content: Any) -> StreamEvent:
    kind = f"content_block_{moment}"
    return StreamEvent({"type": kind, "index": block.index, **content}, kind)
