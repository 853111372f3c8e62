"""Protocols of the tokenizer's half that the detokenizer uses: text from tokens, never tokens from text.

From the device's logprobs of one position to those that a client reads.  Pure.
"""

from collections.abc import Sequence
from typing import Protocol

from trouper.actors.messages.steps import TokenLogprobs
from trouper.outputs import Logprob, LogprobsOnePosition


class TextStream(Protocol):
    """The text of one growing sequence."""

    def push(self, token_id: int) -> str:
        """Append a token; return the text that it completes."""
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
        """Open the text of a sequence that continues the prompt."""
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
    """Make the table of one position: the sampled (or prompt) token first, then by falling logprob.

    `before` holds the tokens before this position: they complete a character that was cut in two.
    `is_ranked` is False where the candidates are the caller's choice: only the first has a rank then.
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
            rank += 1  # the place that the first token takes
        text = _text(tokenizer, token_id, before)
        table[token_id] = Logprob(logprob, rank if is_ranked else None, text)
    return table


def _text(tokenizer: TokenDecoder | None, token_id: int, before: Sequence[int]) -> str | None:
    return None if tokenizer is None else tokenizer.token_text(token_id, before)
