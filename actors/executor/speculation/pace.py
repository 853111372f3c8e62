"""How long a draft is worth its rows: the chance that each token is right against what a row more costs a step.

    the last three tokens stood before     chance of the first to be right 0.73, of the second 0.73 · 0.82, …
    three drafts                           1.84 tokens saved, of half a step each, for 0.12 of a step more

Law: a length is a function of the number of tokens that agree and of how the slot's own drafts fared.
"""

from collections.abc import Hashable, Iterable
from itertools import accumulate
from operator import mul

import msgspec

# Of a step with so many drafts, in steps without.  Two cores, integers of four bits: four rows are bound by memory as one
# is, and what is beyond them by the products.
STEP_COSTS = (1.0, 1.05, 1.11, 1.12, 1.3, 1.42, 1.49, 1.51)
# Of a token saved, in steps without drafts: where drafts are right, a step makes two tokens anyway.
WORTH_IN_TEXT = 0.5
# That the next token is right where so many agree: of a small model that edits functions, over 6,500 tokens.
CHANCES = (0.0, 0.25, 0.55, 0.73, 0.82, *[0.85] * 2, *[0.91] * 3, *[0.93] * 6, *[0.96] * 8, 0.98)
CHANCES_OF_MODEL = (0.7,)  # that a second model is right: no tokens agree that would say more
WEIGHT = 6.0  # drafts of a slot's own that count as much as the table does
FADING = 0.97  # of what a draft says, with each that follows
RUNS = 16  # after which a slot's drafts must have earned what they cost
# Tokens without a draft where they have not; twice as many each time in a row.
PAUSE, LONGEST_PAUSE = 32, 512


class Shares:
    """How much of each kind comes true: what was thought before, and what was seen since.

    Args:
        weight: of what was thought, in cases seen.
        fading: of a case, with each of its kind that follows.
    """

    def __init__(self, weight: float, fading: float = 1.0) -> None:
        self._weight, self._fading = weight, fading
        self._seen: dict[Hashable, tuple[float, float]] = {}  # by kind: came true, all

    def __repr__(self) -> str:
        return f"<Shares {self._seen}>"

    def chance(self, kind: Hashable, prior: float) -> float:
        """Estimate how likely a case of this kind comes true, which is thought to be `prior`."""
        right, tried = self._seen.get(kind, (0.0, 0.0))
        return (self._weight * prior + right) / (self._weight + tried)

    def note(self, kind: Hashable, *, was_right: bool) -> None:
        """Take whether a case came true."""
        right, tried = self._seen.get(kind, (0.0, 0.0))
        self._seen[kind] = self._fading * right + was_right, self._fading * tried + 1


def best_length(chances: Iterable[float], worth: float, draft_cost: float = 0.0) -> int:
    """Return how many tokens of a draft are expected to save the most; 0: none saves what its row costs.

    Args:
        chances: that the draft is right up to each of its tokens.
        worth: of a token saved, in steps without drafts.
        draft_cost: of making a token, in the same.
    """
    gains = [
        worth * saved - _cost(count, draft_cost)
        for count, saved in enumerate(accumulate(chances, initial=0.0))
    ]
    return gains.index(max(gains))


def _cost(num_drafted: int, draft_cost: float) -> float:
    return STEP_COSTS[num_drafted] - 1 + draft_cost * num_drafted


class Pace(msgspec.Struct):
    """The lengths of the drafts of one slot, and what became of them."""

    most: int
    draft_cost: float = 0.0  # of making a drafted token, in steps without drafts
    chances: tuple[float, ...] = (
        CHANCES  # by the number of tokens that agree; the last: so many or more
    )
    least: int = 0  # tokens of a draft that is not worth it: what would come is known only if it is asked for
    pause: int = 0
    next_pause: int = PAUSE
    num_runs: int = 0
    earned: float = 0.0  # steps saved by the runs so far
    shares: Shares = msgspec.field(default_factory=lambda: Shares(WEIGHT, FADING))

    def rests(self) -> bool:
        """Tell whether this step has no draft, and count the pause down."""
        if not self.pause:
            return False
        self.pause -= 1
        return True

    def length(self, num_matching: int, room: int) -> int:
        """Return how long a draft behind `num_matching` tokens that agree is worth it, at most `room`."""
        room = min(room, self.most)
        each = (self.chance(num_matching + i) for i in range(room))
        length = best_length(accumulate(each, mul), WORTH_IN_TEXT, self.draft_cost)
        return max(length, min(room, self.least))

    def chance(self, num_matching: int) -> float:
        """Return the chance of a token behind so many that agree."""
        prior = self._prior(num_matching)
        return self.shares.chance(prior, prior)

    def note(self, num_matching: int, num_drafted: int, num_right: int) -> None:
        """Take what became of a draft."""
        for i in range(min(num_right + 1, num_drafted)):
            self.shares.note(self._prior(num_matching + i), was_right=i < num_right)
        self.num_runs += 1
        self.earned += num_right - _cost(num_drafted, self.draft_cost)
        if self.num_runs == RUNS:
            if self.earned < 0:
                self.pause = self.next_pause
                self.next_pause = min(2 * self.next_pause, LONGEST_PAUSE)
            else:
                self.next_pause = PAUSE
            self.num_runs, self.earned = 0, 0.0

    def _prior(self, num_matching: int) -> float:
        return self.chances[min(num_matching, len(self.chances) - 1)]
