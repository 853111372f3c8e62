"""Find stop strings in the growing text of a sequence, and withhold text that may belong to one.

A stop string may begin in one token and end in a later one, and a client must never see text that is cut off afterwards.

Laws:
1.  Each push costs O(new text), because only a bounded tail of the text is kept.
2.  The concatenated results of `push` are the final text, however the tokens are divided into pushes.
3.  The first complete match wins.  Ties go to the order of the list.
4.  A match begins behind the text of the first `min_tokens` tokens.
5.  Until the end, the last `max(len(stop)) - 1` characters are withheld, because they may be the beginning of a match.  If stop strings
    are included in the output, nothing is cut and nothing is withheld.

    text produced   |--- returned by earlier pushes ---|--------- tail --------|
                                                       | returned |  withheld  |
                    |---------------- floor: no match may begin before it ------…
"""

from collections.abc import Callable, Sequence

import msgspec

from trouper.actors.messages.sinks import VisibleText


class TextDelta(msgspec.Struct, frozen=True):
    """The text that one push adds to the client's text.

    Text that may still belong to a stop string is withheld, and comes with a later delta.
    """

    text: str
    # The pushed tokens without those behind a match.
    num_tokens: int
    # The stop string that ended the sequence.
    stop: str | None = None


class TextState:
    """The text of one sequence with its stop strings.

    Args:
        decode_next: returns the text that the next token completes.
        include_stop: keep the stop string in the text.
        min_tokens: stop strings count only behind this many tokens.
    """

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
        # The stop strings by their last character.
        self._ending_with: dict[str, list[str]] = {}
        for text in self._stop:
            self._ending_with.setdefault(text[-1], []).append(text)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        # A match may begin this many characters in front of new text.
        self._reach = max(map(len, self._stop), default=1) - 1
        self._num_tokens = 0
        # The end of the text: the withheld characters, and those that a match can reach.
        self._tail = ""
        # Characters of the tail that earlier pushes have returned.
        self._num_returned = 0
        # The position in the tail at which the first legal match may begin.
        self._floor = 0

    def __repr__(self) -> str:
        return f"<TextState {self._num_tokens} tokens, tail {self._tail!r}>"

    def push(
        self, token_ids: Sequence[int], *, is_last: bool = False, ends_with_stop_token: bool = False
    ) -> TextDelta:
        """Append tokens.  Returns the text to show now.

        Args:
            is_last: release the withheld text.
            ends_with_stop_token: leave out the text of the last token, unless stop strings are included.  The token itself counts.
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
        """Append the text of one token.  Returns the stop string that it completes, and the position at which to cut."""
        new_from = len(self._tail)
        self._tail += text
        self._num_tokens += 1
        if self._num_tokens <= self._min_tokens:
            self._floor = len(self._tail)
            return None
        return self._find(new_from) if text else None

    def _find(self, new_from: int) -> tuple[str, int] | None:
        """Find a stop string that ends in the new text.  Only characters that end a stop string are compared: most texts have none."""
        tail, floor = self._tail, self._floor
        for position in range(new_from, len(tail)):
            for stop in self._ending_with.get(tail[position], ()):
                if tail.endswith(stop, floor, position + 1):
                    return stop, position + 1 - (0 if self._include_stop else len(stop))
        return None

    def _release(self, withheld: int) -> str:
        """Return the text to show now, and drop the part of the tail that no later match can reach."""
        shown = max(self._num_returned, len(self._tail) - withheld)
        text = self._tail[self._num_returned : shown]
        forget = max(0, min(shown, len(self._tail) - self._reach))
        self._tail = self._tail[forget:]
        self._num_returned = shown - forget
        self._floor = max(0, self._floor - forget)
        return text


class VisibleStops:
    """The text of a sequence, with stop strings that count only in its visible part, outside of reasoning and tool calls.

    The text is returned whole, including the stop string.  The server cuts the visible part when it separates it.
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
        # The text that the current token has made visible.
        self._shown = ""
        # Whether the text of a stop token is included, too.
        self._include_stop = include_stop
        self._seen = TextState(self._show, stop, include_stop=True, min_tokens=min_tokens)

    def __repr__(self) -> str:
        return f"<VisibleStops {self._seen!r}>"

    def _show(self, _token_id: int) -> str:
        return self._shown

    def push(
        self, token_ids: Sequence[int], *, is_last: bool = False, ends_with_stop_token: bool = False
    ) -> TextDelta:
        """Append tokens, like `TextState.push`."""
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
