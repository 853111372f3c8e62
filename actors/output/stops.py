"""The text of one growing sequence: stop strings, hold-back, and what may be shown.  Pure.

Laws.
1.  Each push costs O(new text): only a bounded tail of the text is kept.
2.  The concatenation of what `push` returns is the final text, however the tokens were cut into pushes.
3.  Of all matches the one that completes earliest wins; ties go to the order of the list.
4.  A match lies in text produced after the `min_tokens`-th token, and completes in a token after it.
5.  Until the end, the last `max(len(stop)) - 1` characters are withheld: they may be the head of a
    match whose text is cut.  With `include` nothing is ever cut, so nothing is withheld.

    text produced   |--- returned by earlier pushes ---|--------- tail --------|
                                                       | returned |  withheld  |
                    |---------------- floor: no match may begin before it ------…
"""

from collections.abc import Callable, Sequence

import msgspec

from trouper.actors.messages.sinks import VisibleText


class TextDelta(msgspec.Struct, frozen=True):
    """Text that one push adds to what the client has already."""

    text: str
    num_tokens: int  # how many of the pushed tokens count; those after a match do not
    stop: str | None = None  # the stop string that ended the sequence


class TextState:
    """The text of one sequence; `decode_next` turns the next token into the text that it completes."""

    def __init__(
        self,
        decode_next: Callable[[int], str],
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._decode_next = decode_next
        self._stop = tuple(stop)
        self._ending_with: dict[str, list[str]] = {}  # the stop strings by their last character
        for text in self._stop:
            self._ending_with.setdefault(text[-1], []).append(text)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._reach = max(map(len, self._stop), default=1) - 1  # a match may begin so far back
        self._num_tokens = 0
        self._tail = ""  # the end of the text: at least what is withheld and what a match can reach
        self._num_returned = 0  # of the tail's characters
        self._floor = 0  # in the tail: where the first legal match may begin

    def __repr__(self) -> str:
        return f"<TextState {self._num_tokens} tokens, tail {self._tail!r}>"

    def push(
        self, token_ids: Sequence[int], *, is_last: bool = False, ends_with_stop_token: bool = False
    ) -> TextDelta:
        """Append tokens; return what they add.

        `is_last` releases what is withheld.  `ends_with_stop_token` leaves the last token's text out,
        unless stop strings are included in the output; the token itself counts.
        """
        silent = len(token_ids) - 1 if ends_with_stop_token and not self._include_stop else -1
        texts: list[str] = []
        if not self._stop:
            texts += [self._decode_next(id) for i, id in enumerate(token_ids) if i != silent]
            return TextDelta("".join(texts), len(token_ids))
        withheld = 0 if self._include_stop else self._reach
        for position, token_id in enumerate(token_ids):
            text = "" if position == silent else self._decode_next(token_id)
            if (found := self._append(text)) is not None:
                stop, end = found
                self._tail = self._tail[:end]
                texts.append(self._release(0))
                return TextDelta("".join(texts), position + 1, stop)
            texts.append(self._release(withheld))
        if is_last:
            texts.append(self._release(0))
        return TextDelta("".join(texts), len(token_ids))

    def _append(self, text: str) -> tuple[str, int] | None:
        """Take one token's text; return the stop string that it completes and where to cut."""
        new_from = len(self._tail)
        self._tail += text
        self._num_tokens += 1
        if self._num_tokens <= self._min_tokens:
            self._floor = len(self._tail)
            return None
        return self._find(new_from) if text else None

    def _find(self, new_from: int) -> tuple[str, int] | None:
        """Look at each new character that ends a stop string: most texts have none."""
        tail, floor = self._tail, self._floor
        for position in range(new_from, len(tail)):
            for stop in self._ending_with.get(tail[position], ()):
                if tail.endswith(stop, floor, position + 1):
                    return stop, position + 1 - (0 if self._include_stop else len(stop))
        return None

    def _release(self, withheld: int) -> str:
        """Return what may be shown now, and forget what no later match can reach."""
        shown = max(self._num_returned, len(self._tail) - withheld)
        text = self._tail[self._num_returned : shown]
        forget = max(0, min(shown, len(self._tail) - self._reach))
        self._tail = self._tail[forget:]
        self._num_returned = shown - forget
        self._floor = max(0, self._floor - forget)
        return text


class VisibleStops:
    """The text of a sequence whose stop strings count only in what its reader will see.

    The text is given out as it is, the stop string too: what is visible is cut where it is told apart.
    """

    def __init__(
        self,
        decode_next: Callable[[int], str],
        stop: Sequence[str],
        visible: VisibleText,
        *,
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        self._decode_next = decode_next
        self._visible = visible
        self._shown = ""  # what the token at hand has made visible
        self._include_stop = include_stop  # the text of a stop token, too
        self._seen = TextState(self._show, stop, include_stop=True, min_tokens=min_tokens)

    def __repr__(self) -> str:
        return f"<VisibleStops {self._seen!r}>"

    def _show(self, _token_id: int) -> str:
        return self._shown

    def push(
        self, token_ids: Sequence[int], *, is_last: bool = False, ends_with_stop_token: bool = False
    ) -> TextDelta:
        """Append tokens, as `TextState.push` does."""
        last = len(token_ids) - 1
        silent = last if ends_with_stop_token and not self._include_stop else -1
        texts: list[str] = []
        for position, token_id in enumerate(token_ids):
            texts.append("" if position == silent else self._decode_next(token_id))
            self._shown = self._visible.feed(texts[-1], is_last=is_last and position == last)
            found = self._seen.push((token_id,))
            if found.stop is not None:
                return TextDelta("".join(texts), position + 1, found.stop)
        return TextDelta("".join(texts), len(token_ids))
