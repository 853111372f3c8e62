"""How far an output has come in the reasoning that it may begin with.  Pure."""

from collections.abc import Callable

from trouper.actors.messages.requests import Thinking


class ReasoningProgress:
    """Follows the tokens of one output.

    Law: what may come next is a function of the tokens before.  So a sequence that is given again after a preemption, or
    whose steps were planned ahead, is forced at the same token.

    Args:
        text_of: gives the text of a token.
        has_grammar: the output must match a grammar behind its reasoning; then the reasoning is opened by the mark's own
            ids only.
    """

    def __init__(
        self, thinking: Thinking, text_of: Callable[[int], str], *, has_grammar: bool
    ) -> None:
        self._thinking, self._text_of = thinking, text_of
        self._has_grammar = has_grammar
        self.is_inside = thinking.begins_inside
        self.is_over = False
        self._num_opening = 0  # tokens of the mark that opens it
        self._num_inside = 0
        self._tail = ""  # of the text, where a mark may have begun

    @property
    def opening(self) -> int | None:
        """The token that opens the reasoning, where it may stand beside what the grammar allows."""
        is_open = self.is_inside or self.is_over or self._num_opening
        return None if is_open else self._thinking.start_ids[0]

    @property
    def forced(self) -> int | None:
        """The only token that may come next: of an opening that has begun, or of the end."""
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
        """Take the next token of the output; True: it is not of the reasoning, and the grammar's."""
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
