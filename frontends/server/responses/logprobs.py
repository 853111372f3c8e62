"""Find the tokens of each piece of an answer, for the logprobs of its texts.  Pure."""

from collections import deque
from typing import NamedTuple

from trouper.frontends.server.openai.responses_types import ChatToken


class _TextSpan(NamedTuple):
    start: int  # in the text of all tokens
    end: int
    token: ChatToken


class TokenSpans:
    """The tokens of one answer that belong to no piece yet.

    The parsers give pieces of text, which do not say what tokens they came from: marks are left out, and what may be the
    beginning of a mark comes later than its tokens. But the pieces are in the order of the tokens, so each piece is looked for
    behind the end of the last one, and tokens in between are marks. A piece that the tokens do not spell, such as arguments
    that a parser has rewritten, gets none. At most the tokens of one answer are held.
    """

    def __init__(self) -> None:
        self._spans: deque[_TextSpan] = deque()
        self._text = ""  # of the tokens, from `_start` on
        self._start = 0
        self._end = 0

    def add(self, tokens: list[ChatToken]) -> None:
        for token in tokens:
            start, self._end = self._end, self._end + len(token.token)
            self._spans.append(_TextSpan(start, self._end, token))
        self._text += "".join([token.token for token in tokens])

    def take(self, piece: str) -> list[ChatToken]:
        """Return the tokens of the next piece of the answer. A token that is in two pieces belongs to the first one."""
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
