"""Seams in a text: no token is found across one, so what a caller spells is never parsed as a control token.  Pure."""

import re
from collections.abc import Collection

SEAM = "\U000f0000"  # a private-use character; dropped from what callers write


def sew(text: str, tokens: Collection[str]) -> str:
    """Put a seam into each of `tokens` that the text spells."""
    # Some models have hundreds of special tokens: look for each at the speed of `in`, which nearly always
    # ends the matter.  Only first characters are consumed, so overlapping spellings are all broken.
    spelled = [token for token in tokens if token in text]
    if not spelled:
        return text
    heads = "|".join(f"{re.escape(token[0])}(?={re.escape(token[1:])})" for token in spelled)
    return re.sub(heads, rf"\g<0>{SEAM}", text)


def pieces_of(text: str, tokens: Collection[str]) -> list[str]:
    """Return a caller's text in pieces, of which none spells one of `tokens`."""
    return sew(text.replace(SEAM, ""), tokens).split(SEAM)
