"""Boundaries that tokenization never crosses, so a caller's text cannot form a control token.  Pure.

A chat template mixes trusted control tokens with text of the caller, and the result is one string.  If the caller writes
`<|im_end|>`, the tokenizer must not find the control token in it.  A boundary is one private-use character after the
first character of such a spelling; the tokenizer encodes the parts between boundaries separately.
"""

import re
from collections.abc import Collection

BOUNDARY = "\U000f0000"  # a private-use character; dropped from what callers write


def with_boundaries(text: str, tokens: Collection[str]) -> str:
    """Insert a boundary into each spelling of one of `tokens` in the text.

    The tokenizer never joins characters across a boundary, so none of these tokens results.
    """
    # Some models have hundreds of special tokens: look for each at the speed of `in`, which nearly always
    # ends the matter.  Only first characters are consumed, so overlapping spellings are all broken.
    spelled = [token for token in tokens if token in text]
    if not spelled:
        return text
    heads = "|".join(f"{re.escape(token[0])}(?={re.escape(token[1:])})" for token in spelled)
    return re.sub(heads, rf"\g<0>{BOUNDARY}", text)


def pieces_of(text: str, tokens: Collection[str]) -> list[str]:
    """Split a caller's text so that no part spells one of `tokens`."""
    return with_boundaries(text.replace(BOUNDARY, ""), tokens).split(BOUNDARY)
