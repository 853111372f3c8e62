"""Convert the engine's logprobs to OpenAI's two formats, and assign tokens to the parts of an answer.  Pure."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from trouper.outputs import Logprob, LogprobsOnePosition

PromptLogprobs = list[dict[int, dict[str, Any]] | None]

# The replacement of -inf, which JSON lacks.
LEAST = -9999.0


class CompletionLogprobs(msgspec.Struct):
    """Logprobs of a completion, in four lists of one length.

    Entry i of each list describes token i.  The first token of an echoed prompt has no logprob.
    """

    text_offset: list[int] = msgspec.field(default_factory=list[int])
    token_logprobs: list[float | None] = msgspec.field(default_factory=list[float | None])
    tokens: list[str] = msgspec.field(default_factory=list[str])
    top_logprobs: list[dict[str, float] | None] = msgspec.field(
        default_factory=list[dict[str, float] | None]
    )


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatToken(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatToken]


def completion_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[LogprobsOnePosition | None],
    num_top: int,
    *,
    text_of: Callable[[int], str],
    bytes_of: Callable[[int], bytes],
    offset: int = 0,
    as_ids: bool = False,
) -> CompletionLogprobs:
    """Convert logprobs to the format of completions: four lists of equal length.

    Args:
        text_of: returns the text of a token without a logprob.
        bytes_of: returns the bytes of a token.  An alternative with only part of a character is named by its bytes, like in
            OpenAI's API.
        offset: the length of the text before these tokens.
        as_ids: names tokens by their ids.
    """
    made = CompletionLogprobs()
    for token_id, position in zip(token_ids, positions, strict=True):
        chosen = None if position is None else position.get(token_id)
        # The first token of a prompt has no logprob.
        is_bare = chosen is None and not as_ids
        token = text_of(token_id) if is_bare else _name(token_id, chosen, as_ids)
        made.text_offset.append(offset)
        made.tokens.append(token)
        made.token_logprobs.append(None if chosen is None else max(chosen.logprob, LEAST))
        made.top_logprobs.append(
            None
            if position is None
            else {
                (
                    _name(id, entry, as_ids)
                    or (id != token_id and f"bytes:{_escaped(bytes_of(id))}")
                    or ""
                ): max(entry.logprob, LEAST)
                for id, entry in _shown(position, token_id, num_top)
            }
        )
        offset += len(token)
    return made


def chat_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[LogprobsOnePosition],
    num_top: int,
    *,
    bytes_of: Callable[[int], bytes],
    as_ids: bool = False,
) -> ChatLogprobs:
    content: list[ChatToken] = []
    for token_id, position in zip(token_ids, positions, strict=True):
        chosen = _entry(token_id, position[token_id], as_ids)
        top = sorted(position.items(), key=lambda item: -item[1].logprob)
        shown = top if num_top == -1 else top[:num_top]
        content.append(
            ChatToken(
                chosen.token,
                chosen.logprob,
                chosen.bytes,
                [
                    _entry(id, entry, as_ids)
                    if as_ids or id == token_id or entry.decoded_token != ""
                    else _part(entry, bytes_of(id))
                    for id, entry in shown
                ],
            )
        )
    return ChatLogprobs(content)


def prompt_logprobs(positions: Sequence[LogprobsOnePosition | None]) -> PromptLogprobs:
    return [None if position is None else _plain(position) for position in positions]


def _plain(position: LogprobsOnePosition) -> dict[int, dict[str, Any]]:
    return {
        id: {
            "logprob": max(entry.logprob, LEAST),
            "rank": entry.rank,
            "decoded_token": entry.decoded_token,
        }
        for id, entry in position.items()
    }


def _shown(position: LogprobsOnePosition, chosen: int, num_top: int) -> list[tuple[int, Logprob]]:
    """Return the chosen token, then the other ones of the `num_top` likeliest, in vLLM's order."""
    top = sorted(position.items(), key=lambda item: -item[1].logprob)
    shown = [item for i, item in enumerate(top) if num_top == -1 or i < num_top]
    first = [item for item in top if item[0] == chosen]
    return first + [item for item in shown if item[0] != chosen]


def _entry(token_id: int, entry: Logprob, as_ids: bool) -> TokenLogprob:
    token = _name(token_id, entry, as_ids)
    return TokenLogprob(token, max(entry.logprob, LEAST), list(token.encode(errors="replace")))


def _part(entry: Logprob, raw: bytes) -> TokenLogprob:
    """Convert an alternative with only part of a character: it has bytes but no readable text."""
    return TokenLogprob(_escaped(raw), max(entry.logprob, LEAST), list(raw))


def _escaped(raw: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in raw)


def _name(token_id: int, entry: Logprob | None, as_ids: bool) -> str:
    text = None if entry is None else entry.decoded_token
    return f"token_id:{token_id}" if as_ids or text is None else text


class _TextSpan(NamedTuple):
    start: int  # in the text of all tokens
    end: int
    token: ChatToken


class TokenSpans:
    """The tokens of one answer without a part of the text yet.

    The parsers emit parts of text without their tokens: they remove marks, and hold back text that may become a mark.  But parts
    keep the order of the tokens, so each part is searched after the end of the last one, and tokens in between are marks.  A part
    that the tokens do not spell, such as arguments rewritten by a parser, gets no tokens.  At most the tokens of one answer
    are held.
    """

    def __init__(self) -> None:
        self._spans: deque[_TextSpan] = deque()
        # The text of the tokens from `_start` on.
        self._text = ""
        self._start = 0
        self._end = 0

    def add(self, tokens: list[ChatToken]) -> None:
        for token in tokens:
            start, self._end = self._end, self._end + len(token.token)
            self._spans.append(_TextSpan(start, self._end, token))
        self._text += "".join([token.token for token in tokens])

    def take(self, piece: str) -> list[ChatToken]:
        """Return the tokens of the next part of the answer.  A token in two parts belongs to the first one.

        The parts of an answer (text, reasoning, calls) are cut by characters, while logprobs belong to tokens.
        """
        place = self._text.find(piece) if piece else -1
        if place < 0:
            return []
        begin = self._start + place
        end = begin + len(piece)
        found: list[ChatToken] = []
        while self._spans and self._spans[0].start < end:
            span = self._spans.popleft()
            # A token without a text is a part of a character that a later token completes.
            if span.end > begin or span.start == begin:
                found.append(span.token)
        self._text, self._start = self._text[place + len(piece) :], end
        return found
