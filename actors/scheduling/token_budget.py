"""The token budget of a step: halved when the device ran out of memory, doubled when that is long ago.  Pure."""

PATIENCE = 64  # steps that must pass before a larger one is tried again


class TokenBudget:
    """A number of tokens, at least one and at most `most`."""

    def __init__(self, most: int) -> None:
        self.num_tokens = most
        self._most = most
        self._num_passed = 0

    def __repr__(self) -> str:
        return f"<TokenBudget {self.num_tokens} of {self._most}>"

    def shrink(self, num_tokens: int) -> bool:
        """Note that a step of `num_tokens` was too large; False if none can be smaller."""
        if num_tokens <= 1:
            return False
        self.num_tokens = min(self.num_tokens, num_tokens // 2)
        self._num_passed = 0
        return True

    def passed(self) -> None:
        """Note that a step had the memory that it needed."""
        self._num_passed += 1
        if self._num_passed >= PATIENCE:
            self.num_tokens = min(self._most, 2 * self.num_tokens)
            self._num_passed = 0
