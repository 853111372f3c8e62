"""How many drafts a step may verify, and what became of those of the steps before.  Pure."""

from trouper.actors.messages.results import StepDone

# Tokens of a step that verifies drafts, all sequences together: eight rows cost 1.2 to 1.55 of one on the CPU, sixteen twice.
MAX_VERIFIED = 16


class Lookahead:
    """The drafts of one engine.

    Args:
        most: of one sequence in a step; 0 = none.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.num_drafts = 0  # runs of tokens
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0  # that were right

    def __repr__(self) -> str:
        return f"<Lookahead of {self._most}, {self.num_accepted_tokens} of {self.num_draft_tokens} right>"

    def per_sequence(self, num_running: int, num_tokens: int) -> int:
        """Share what a step of `num_tokens` can verify among the running sequences, all of which find room in it."""
        if not self._most or not num_running:
            return 0
        return max(0, min(self._most, min(MAX_VERIFIED, num_tokens) // num_running - 1))

    def note(self, done: StepDone) -> None:
        """Count the drafts of a step."""
        if not done.num_draft_tokens:
            return
        for num_tokens, token_ids in zip(done.num_draft_tokens, done.token_ids, strict=True):
            self.num_drafts += num_tokens > 0
            self.num_draft_tokens += num_tokens
            self.num_accepted_tokens += max(0, len(token_ids) - 1)
