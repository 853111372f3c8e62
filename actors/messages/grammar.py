"""A compiled grammar on its way from the renderer to the device."""

from typing import Any, Protocol

from trouper.actors.messages.thinking import Thinking


class Grammar(Protocol):
    """Rules for the outputs of one request, as devices see them.  Sequences share them, and they never change."""

    eos_token_ids: tuple[int, ...]  # all of them end the output
    ignore_eos: bool  # they are drawn only where nothing else can be
    num_tokens: int  # of the vocabulary that masks are made for
    thinking: Thinking | None  # reasoning that comes first

    def matcher(self) -> Any:
        """Return a matcher of `llguidance` at the beginning of an output; None: behind its reasoning it may be anything."""
        ...
