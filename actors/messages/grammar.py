"""A compiled grammar on its way from the renderer to the device."""

from typing import Any, Protocol


class Grammar(Protocol):
    """A compiled grammar of one request, as devices see it.  Sequences share it, and it never changes."""

    eos_token_ids: tuple[int, ...]  # all of them end the output
    ignore_eos: bool  # they are drawn only where nothing else can be
    num_tokens: int  # of the vocabulary that masks are made for

    def matcher(self) -> Any:
        """Return a matcher of `llguidance` at the beginning of an output."""
        ...
