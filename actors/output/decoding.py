"""Turn tokens into text, and the device's logprobs into those that a client reads.

The detokenizer needs only one half of a tokenizer: text from tokens.  The protocols here name that half, so the output actors do not
depend on the renderer, which owns the tokenizer.
"""

from collections.abc import Sequence
from typing import Protocol

from trouper.actors.messages.steps import TokenLogprobs
from trouper.outputs import Logprob, LogprobsOnePosition


class TextStream(Protocol):
    """Decode one growing sequence token by token."""

    def push(self, token_id: int) -> str:
        """Append a token.  Returns the text that it completes, which is empty inside a character."""
        ...


class TokenDecoder(Protocol):
    """The decoding half of a tokenizer."""

    def stream(
        self,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> TextStream:
        """Open a stream for a sequence behind the prompt."""
        ...

    def token_text(self, token_id: int, before: Sequence[int] = ()) -> str:
        """Return the text of one token behind the tokens `before`, for logprobs."""
        ...


def position_logprobs(
    position: TokenLogprobs,
    tokenizer: TokenDecoder | None,
    before: Sequence[int],
    *,
    is_ranked: bool = True,
) -> LogprobsOnePosition:
    """Return the candidates at one position: the sampled (or prompt) token first, then the others by falling logprob.

    Args:
        before: the tokens in front of this position, which may contain the first bytes of a character.
        is_ranked: False if the caller has chosen the candidates.  Then only the first one has a rank.
    """
    first, *others = position.token_ids
    table = {first: Logprob(position.logprobs[0], position.rank, _text(tokenizer, first, before))}
    rank = 0
    first_is_repeated = first in others
    for token_id, logprob in zip(others, position.logprobs[1:], strict=True):
        rank += 1
        if token_id == first:
            continue
        if rank == position.rank and not first_is_repeated:
            # This rank belongs to the first token.
            rank += 1
        text = _text(tokenizer, token_id, before)
        table[token_id] = Logprob(logprob, rank if is_ranked else None, text)
    return table


def _text(tokenizer: TokenDecoder | None, token_id: int, before: Sequence[int]) -> str | None:
    return None if tokenizer is None else tokenizer.token_text(token_id, before)
