"""The token budget of a step: halved when the device ran out of memory, doubled when that is long ago.  Pure."""

PATIENCE = 64  # steps that must pass before a larger one is tried again


class Throttle:
    """`budget` is at most `most`, and at least one token."""

    def __init__(self, most: int) -> None:
        self.budget = most
        self._most = most
        self._num_passed = 0

    def __repr__(self) -> str:
        return f"<Throttle {self.budget} of {self._most}>"

    def shrink(self, num_tokens: int) -> bool:
        """A step of `num_tokens` was too large; False if none can be smaller."""
        if num_tokens <= 1:
            return False
        self.budget = min(self.budget, num_tokens // 2)
        self._num_passed = 0
        return True

    def passed(self) -> None:
        """A step had the memory that it needed."""
        self._num_passed += 1
        if self._num_passed >= PATIENCE:
            self.budget = min(self._most, 2 * self.budget)
            self._num_passed = 0
