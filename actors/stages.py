"""Decide what a pipeline stage sends and awaits.  Pure: scheduler, stages and the model check use it.

A model's layers are cut into stages, one process each.  Plans run in order on every stage; hidden states go
from a stage to the next, sampled tokens from the last stage back to the first.

Rules:
P1. Tokens of a step are sent if any entry of its plan wants a token.  A step of unfinished chunks sends none.
P2. The first stage takes what has come at every plan, and waits only while a token that this plan reads is
    still to come.  No stage waits for a discarded token.
P3. Rows, block tables and lengths follow the plan on every stage, whatever is sent.
P4. A token is written to its row only if the row has not been given to another sequence since.
P5. The ring of tokens has room for `num_ring_entries` steps, as many as may be under way: sending a token never waits.
    A ring of hidden states may be smaller: its sender waits for room while nothing that the receiver needs is behind it.
P6. At most `max_steps_in_flight` steps are under way.

A ring of tokens that is read only when a token is needed would fill up with those that no stage needs, and one
with fewer entries than steps in flight can stop all stages: `tests/simulation/stages/stage_protocol.py` finds both.
"""

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

MIN_CHUNKS_PER_STAGE = 4  # of a prompt without others: n chunks keep s stages n / (n + s - 1) busy
MIN_CHUNK = 128  # tokens; below, a step's fixed costs outweigh the overlap


# Steps under way


def num_ring_entries(num_stages: int) -> int:
    """Steps that the ring of tokens holds: all that may be under way (rule P5)."""
    return num_stages + 1


def decode_quota(num_decoding: int, num_stages: int) -> int:
    """Rows past their prompt that one plan may take, so that each stage has some while the others have theirs."""
    return -(-num_decoding // num_stages)


def is_due(num_plans_since: int, num_stages: int) -> bool:
    """Whether a sequence with a sample in flight may decode again: its token comes before the plan is run.

    Args:
        num_plans_since: plans made since the one that samples.
    """
    return num_plans_since >= num_stages - 1


def max_chunk(num_prompt_tokens: int, num_stages: int, budget: int) -> int:
    """Tokens of one chunk of a prompt without others: small enough to keep all stages busy."""
    if num_stages == 1:
        return budget
    share = -(-num_prompt_tokens // (MIN_CHUNKS_PER_STAGE * num_stages))
    return min(budget, max(share, MIN_CHUNK))


# Messages


def sends_tokens(num_wanted: Iterable[int]) -> bool:
    """Whether the last stage sends its tokens of a step to the first (rule P1).

    Args:
        num_wanted: tokens wanted of each entry of the plan.
    """
    return any(num_wanted)


class TokenWrite(msgspec.Struct, frozen=True):
    """A sampled token that belongs into a row of the first stage: `position` counts from the prompt's start."""

    row: int
    position: int
    token_id: int


class Feedback:
    """Record, on the first stage, of the tokens that the last has sampled or is going to sample.

    Its owner calls `note_plan` for each plan before running it, `take` for each message of tokens, and `must_wait`
    to learn whether a token that the plan reads is still to come.
    """

    def __init__(self) -> None:
        self._generations: dict[int, int] = {}  # of rows; a new sequence in a row starts another
        # (step, (row, position, generation) of each entry that samples); at most the steps in flight
        self._expected: deque[tuple[int, tuple[tuple[int, int, int] | None, ...]]] = deque()

    def __repr__(self) -> str:
        return f"<Feedback: waits for steps {[step for step, _ in self._expected]}>"

    def note_plan(
        self,
        step: int,
        *,
        new_rows: Iterable[int],
        rows: Sequence[int],
        ends: Sequence[int],
        num_wanted: Sequence[int],
    ) -> None:
        """Follow a plan: its new rows start over, and its samples are expected.

        Args:
            new_rows: rows that a sequence takes with this plan.
            rows: the row of each entry.
            ends: the position behind the last that an entry computes; there its token belongs.
            num_wanted: tokens wanted of each entry.
        """
        for row in new_rows:
            self._generations[row] = self._generations.get(row, 0) + 1
        if sends_tokens(num_wanted):
            entries = tuple(
                (row, end, self._generations.get(row, 0)) if wanted else None
                for row, end, wanted in zip(rows, ends, num_wanted, strict=True)
            )
            self._expected.append((step, entries))

    def must_wait(self, reads: int) -> bool:
        """Whether a token of step `reads` or of one before is still to come (rule P2); 0 = nothing is read."""
        return bool(self._expected) and self._expected[0][0] <= reads

    def take(self, step: int, token_ids: Sequence[int]) -> list[TokenWrite]:
        """Take the tokens of a step and return the rows to which they belong (rule P4).

        Raises:
            RuntimeError: these are not the tokens that come next.
        """
        if not self._expected or self._expected[0][0] != step:
            raise RuntimeError(f"tokens of step {step}, but {self!r}")
        _, entries = self._expected.popleft()
        return [
            TokenWrite(entry[0], entry[1], token_id)
            for entry, token_id in zip(entries, token_ids, strict=True)
            if entry is not None
            and token_id >= 0
            and self._generations.get(entry[0], 0) == entry[2]
        ]
