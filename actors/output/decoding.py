"""Protocols of the tokenizer's half that the detokenizer uses: text from tokens, never tokens from text."""

from collections.abc import Sequence
from typing import Protocol


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
