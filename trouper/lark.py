"""Write grammars in llguidance's dialect of Lark, which adds special tokens by id and JSON that matches a schema."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

# Small models may never stop writing whitespace if it is unbounded.
WHITESPACE = r"\n?[ ]{0,16}"


class Lark:
    """The rules of one grammar, written one after the other.

    Args:

        token_ids: ids of the added tokens, by their text.  A mark that is an added token matches only this token, not other
            tokens with the same text, because models are trained on the former.
    """

    def __init__(self, token_ids: Mapping[str, int]) -> None:
        self._token_ids = token_ids
        self._rules: list[str] = []

    def source(self, start: str) -> str:
        """Return the source of the grammar whose outputs match `start`."""
        return "\n".join([f"start: {start}", *self._rules])

    def rule(self, body: str, attribute: str = "") -> str:
        """Add a rule and return its name."""
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{attribute}: {body}")
        return name

    def literal(self, text: str) -> str:
        """Match a text exactly.

        Parts equal to an added token, such as a tag of a tool call, match that one token and not
        its characters, because the model was trained to produce the token.
        """
        if not text:
            return ""
        tokens = sorted((t for t in self._token_ids if t in text), key=len, reverse=True)
        if not tokens:
            return json.dumps(text, ensure_ascii=False)
        pieces = re.split(f"({'|'.join(map(re.escape, tokens))})", text)
        return " ".join(
            f"<[{self._token_ids[piece]}]>"
            if piece in self._token_ids
            else json.dumps(piece, ensure_ascii=False)
            for piece in pieces
            if piece
        )

    def json(self, schema: Mapping[str, Any]) -> str:
        """Add a rule for JSON valid under a schema, and return its name.

        White space is limited to what models usually write, so an output cannot consist of endless blanks.
        """
        given = {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}
        return self.rule(f"%json {json.dumps(given)}")

    def text_before(self, mark: str) -> str:
        """Match any text without a mark, followed by the mark.

        The mark may be an added token, a text or a mixture of both.
        """
        if not any(token in mark for token in self._token_ids):
            return self.rule(f"/(?s:.*){_regex(mark)}/", "[lazy]")
        name = f"TEXT_{len(self._rules)}"
        self._rules.append(f"{name}: /(?s:.*)/ & ~/(?s:.*){_regex(mark)}(?s:.*)/")
        return f"{name} {self.literal(mark)}"

    def text(self) -> str:
        """Match any text."""
        return self.rule("/(?s:.*)/")

    def regex(self, pattern: str) -> str:
        """Match an expression."""
        return self.rule(f"/{_slashed(pattern)}/".replace("\n", r"\n"))

    def terminal(self, pattern: str, names: Sequence[str]) -> str:
        """Match a regular expression, except for these names.

        It is for additional names next to alternatives with fixed names: without the exclusion the grammar would be ambiguous.
        """
        name = f"TEXT_{len(self._rules)}"
        others = "|".join(map(_regex, names))
        self._rules.append(f"{name}: /{_slashed(pattern)}/ & ~/{others}/".replace("\n", r"\n"))
        return name

    def grammar(self, source: str) -> str:
        """Match another grammar in Lark."""
        return self.rule(f"%lark {{\n{source}\n}}")

    def one_of(self, choices: Sequence[str]) -> str:
        """Match one of several expressions."""
        return choices[0] if len(choices) == 1 else self.rule(" | ".join(choices))


def repeated(first: str, again: str, most: int) -> str:
    """Match `first`, followed by any number of `again` up to `most` items in total.

    The bound is part of the grammar, so the model cannot write an endless list.
    """
    return first if most == 1 else f"{first} ({again}){{0,{most - 1}}}"


def joined(required: Sequence[str], optional: Sequence[str], comma: str) -> str:
    """Match the required members in order, then any of the optional ones, with commas between them.

    Optional members keep their order too, and each may be absent.
    """
    rest = " ".join(f"({comma} {member})?" for member in optional)
    if required:
        return f" {comma} ".join(required) + " " + rest
    starts = [
        " ".join([member, *(f"({comma} {later})?" for later in optional[i + 1 :])])
        for i, member in enumerate(optional)
    ]
    return f"({' | '.join(starts)})?" if starts else ""


def _slashed(pattern: str) -> str:
    """Escape the slashes of an expression."""
    return re.sub(r"\\.|/", lambda found: found[0] if len(found[0]) > 1 else r"\/", pattern)


def _regex(text: str) -> str:
    return re.sub(r"([.*+?^${}()|\[\]\\/])", r"\\\1", text).replace("\n", r"\n")
