"""Follow the reasoning at the beginning of an output, and force its end when its token budget is used up. Pure."""

from collections.abc import Callable

from trouper.actors.messages.requests import ReasoningRules


class ReasoningProgress:
    """Follows the tokens of one output.

    Law: what may come next depends only on the tokens before. A sequence computed again after a preemption, or in
    steps planned ahead, is therefore forced at the same token.

    Args:
        thinking: the marks around the reasoning, and its budget.
        text_of: returns the text of a token.
        has_grammar: whether the output must match a grammar behind its reasoning. Only the exact ids of the opening mark
            begin a reasoning then.
    """

    def __init__(
        self, thinking: ReasoningRules, text_of: Callable[[int], str], *, has_grammar: bool
    ) -> None:
        self._thinking, self._text_of = thinking, text_of
        self._has_grammar = has_grammar
        self.is_inside = thinking.begins_inside
        self.is_over = False
        # How many tokens of the opening mark have been generated.
        self._num_opening = 0
        self._num_inside = 0
        # The end of the text, which may contain the beginning of a mark.
        self._tail = ""

    @property
    def opening(self) -> int | None:
        """Return the token that may open the reasoning instead of a token that the grammar allows, or None."""
        is_open = self.is_inside or self.is_over or self._num_opening
        return None if is_open else self._thinking.start_ids[0]

    @property
    def forced(self) -> int | None:
        """Return the only token that may come next, within the opening or the closing mark, or None if there is a
        choice.

        The budget of reasoning tokens decides about the closing mark.
        """
        if self.is_over:
            return None
        if not self.is_inside:
            is_forced = self._has_grammar and self._num_opening
            return self._thinking.start_ids[self._num_opening] if is_forced else None
        budget = self._thinking.budget
        if budget is None or self._num_inside < budget:
            return None
        return self._thinking.end_ids[self._num_inside - budget]

    def take(self, token: int) -> bool:
        """Follow the next token of the output. Returns whether it belongs to the answer, and thus to the grammar."""
        if self.is_over:
            return True
        self._tail += self._text_of(token)
        if self.is_inside:
            self._take_inside()
            return False
        return self._take_before(token)

    def _take_before(self, token: int) -> bool:
        thinking, began = self._thinking, self._tail.lstrip()
        may_open = thinking.start.startswith(began) or began.startswith(thinking.start)
        if self._has_grammar:
            may_open = token == thinking.start_ids[self._num_opening]
        self.is_over = not may_open
        self._num_opening += may_open
        is_spelled = self._has_grammar and self._num_opening == len(thinking.start_ids)
        if may_open and (is_spelled or began.startswith(thinking.start)):
            self.is_inside, self._tail = True, ""
        return not may_open

    def _take_inside(self) -> None:
        thinking = self._thinking
        self._num_inside += 1
        budget = self._num_inside if thinking.budget is None else thinking.budget
        is_spelled = self._num_inside - budget == len(thinking.end_ids)
        self.is_over = is_spelled or thinking.end in self._tail
        self.is_inside = not self.is_over
        self._tail = self._tail[-len(thinking.end) :]
