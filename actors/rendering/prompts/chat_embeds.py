"""Conversations with embeddings: `{"type": "prompt_embeds", "data": …}` among the parts of a message.  Pure.

The template receives a mark in place of each such part, and the rendered text is split at the marks, so no token spans
one.  If the template drops a part, its embeddings are dropped as well.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec

from trouper.actors.messages.requests import Embeds
from trouper.actors.rendering.chat.messages import MARK
from trouper.actors.rendering.tokenizers.tokenizer import Tokenizer

KIND = "prompt_embeds"
MARKED = re.compile(f"{MARK}([0-9]{{1,9}}){MARK}")


def take_embeds(
    messages: Sequence[Any], decode: Callable[[Any], Embeds]
) -> tuple[list[Any], list[Embeds]]:
    """The messages with the number of its matrix in place of each payload, and the matrices."""
    found: list[Embeds] = []

    def taken(part: Any) -> Any:
        if not _is_embeds(part):
            return part
        found.append(decode(part.get("data")))
        return {"type": KIND, "index": len(found) - 1}

    rest: list[Any] = []
    for message in messages:
        fields = cast("Mapping[str, Any]", message if isinstance(message, Mapping) else {})
        content = fields.get("content")
        if isinstance(content, list | tuple) and any(map(_is_embeds, cast("list[Any]", content))):
            message = {**fields, "content": [taken(part) for part in cast("list[Any]", content)]}
        rest.append(message)
    return rest, found


def encode_mixed(
    pieces: Sequence[str],
    embeds: Sequence[Embeds],
    tokenizer: Tokenizer,
    add_special_tokens: bool,
    max_length: int,
) -> tuple[list[int], tuple[Embeds, ...]]:
    """Return token ids, with zeros in place of embeddings, and the matrices in their places.

    Ends when there are more than `max_length`: a template may place a matrix as often as it likes.
    """
    ids: list[int] = []
    placed: list[Embeds] = []
    is_first = True
    for segment in _segments(pieces):
        if isinstance(segment, list):
            adds = add_special_tokens and is_first
            ids += tokenizer.encode_pieces(segment, adds, continues=not is_first)
        elif segment < len(embeds):  # a caller may have written a mark of its own somewhere
            placed.append(msgspec.structs.replace(embeds[segment], first=len(ids)))
            ids += [0] * placed[-1].num_rows
        if len(ids) > max_length:
            break
        is_first = False
    return ids, tuple(placed)


def unmarked(pieces: Sequence[str]) -> str:
    return MARKED.sub("", "".join(pieces))


def _segments(pieces: Sequence[str]) -> Iterator[list[str] | int]:
    """Pieces up to the next mark, the number in it, and so on."""
    segment: list[str] = []
    for piece in pieces:
        text, *more = MARKED.split(piece)
        segment.append(text)
        for number, following in zip(more[::2], more[1::2], strict=True):
            yield segment
            yield int(number)
            segment = [following]
    yield segment


def _is_embeds(part: Any) -> bool:
    return isinstance(part, Mapping) and cast("Mapping[Any, Any]", part).get("type") == KIND
