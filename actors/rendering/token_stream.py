"""Turn the tokens of a growing sequence into text, and keep a caller's text from forming control tokens.

`TokenStream` decodes one token at a time.  A character is given out when its last byte is there, never before, and never half of
it, so what `push` returned so far is a prefix of the whole text.  Memory and time per token are bounded: what is still no
character after `MAX_HELD` tokens never will be, and is given out as replacement characters.

The opposite direction has a danger.  A chat template mixes trusted control tokens with text of the caller, and the result is one
string.  If the caller writes `<|im_end|>`, the tokenizer must not find the control token in it.  So `with_boundaries` puts a
*boundary* into such a spelling, one private-use character after the first character, and the tokenizer encodes the parts between
boundaries separately.
"""

import logging
import re
from collections.abc import Collection, Mapping, Sequence

from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

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


MAX_HELD = 32  # a character has four bytes, so four tokens; the rest is patience
REPLACEMENT = "\ufffd"
PRIME_AT_LEAST, PRIME_AT_MOST = 4, 24  # prompt tokens that give the first output its context

log = logging.getLogger(__name__)


class TokenStream:
    """One sequence's incremental decoder.

    `silent` ids have no text.  `glued`, if given, are the added tokens to be written without the
    space that some decoders put between two of them.
    """

    def __init__(
        self,
        backend: Backend,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        silent: frozenset[int],
        max_id: int,
        glued: Mapping[int, str] | None = None,
    ) -> None:
        self._backend = backend
        self._skip_special_tokens = skip_special_tokens
        self._silent = silent
        self._max_id = max_id
        self._glued = glued
        self._last_was_glued = False
        self._held: list[int] = []  # tokens whose text is not complete yet
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        for token_id in self._context(prompt_token_ids):
            self.push(token_id)
        self._last_was_glued = False

    def push(self, token_id: int) -> str:
        """The text that this token completes; often its own, sometimes none."""
        if token_id in self._silent or not 0 <= token_id <= self._max_id:
            return ""
        text = self._step(token_id)
        if self._glued is None:
            return text
        added = self._glued.get(token_id)
        if added is not None and self._last_was_glued and text:
            text = added
        self._last_was_glued = added is not None
        return text

    def _step(self, token_id: int) -> str:
        try:
            text = self._stream.step(self._backend, token_id)
        except Exception as error:
            if not str(error).startswith("Invalid prefix"):
                raise
            log.warning("a decode stream is reset at token %d: %s", token_id, error)
            return self._restart(token_id)
        if text is not None:
            self._held.clear()
            return text
        if len(self._held) + 1 >= MAX_HELD:
            return self._restart(token_id)
        self._held.append(token_id)
        return ""

    def _restart(self, token_id: int) -> str:
        """Give out what is held as it is, and go on with a fresh stream."""
        ids, self._held = [*self._held, token_id], []
        self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
        return self._backend.decode(ids, skip_special_tokens=self._skip_special_tokens)

    def _context(self, prompt_token_ids: Sequence[int]) -> Sequence[int]:
        """A tail of the prompt that does not begin or end inside a character, if there is one."""
        known = [id for id in prompt_token_ids[-PRIME_AT_MOST:] if 0 <= id <= self._max_id]
        for size in range(PRIME_AT_LEAST, len(known) + 1):
            text = self._backend.decode(
                known[-size:], skip_special_tokens=self._skip_special_tokens
            )
            if REPLACEMENT not in text:
                return known[-size:]
        return known
