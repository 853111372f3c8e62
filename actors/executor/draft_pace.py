"""How long a draft is worth its rows: the chance that each token is right against what a row more costs a step.

    the last three tokens stood before     chance of the first to be right 0.7, of the second 0.7 · 0.8, …
    three drafts                           1.7 tokens saved, of half a step each, for 0.11 of a step more

Law: a length is a function of the number of tokens that agree and of how the slot's own drafts fared.
"""

import msgspec

# Of a step with so many drafts, in steps without.  Two cores, integers of four bits: four rows are bound by memory as one
# is, and what is beyond them by the products.
STEP_COSTS = (1.0, 1.05, 1.11, 1.12, 1.3, 1.42, 1.49, 1.51)
# Of a token saved, in steps without drafts: where drafts are right, a step makes two tokens anyway.
TOKEN_WORTH = 0.5
# That the next token is right where so many agree: of a small model that edits functions, over 6,500 tokens.
CHANCES = (0.0, 0.25, 0.55, 0.73, 0.82, *[0.85] * 2, *[0.91] * 3, *[0.93] * 6, *[0.96] * 8, 0.98)
OF_MODEL = 0  # in place of a number of tokens: a draft of a second model
CHANCE_OF_MODEL = 0.7
WEIGHT = 6.0  # drafts of a slot's own that count as much as the table does
FADING = 0.97  # of what a draft says, with each that follows
RUNS = 16  # after which a slot's drafts must have earned what they cost
PAUSE, LONGEST_PAUSE = (
    32,
    512,
)  # tokens without a draft where they have not; twice as many each time in a row


class Pace(msgspec.Struct):
    """The lengths of the drafts of one slot, and what became of them."""

    most: int
    draft_cost: float = 0.0  # of making a drafted token, in steps without drafts
    pause: int = 0
    next_pause: int = PAUSE
    num_runs: int = 0
    earned: float = 0.0  # steps saved by the runs so far
    right: dict[float, tuple[float, float]] = {}  # by chance of the table: right ones, and all

    def rests(self) -> bool:
        """Tell whether this step has no draft, and count the pause down."""
        if not self.pause:
            return False
        self.pause -= 1
        return True

    def length(self, num_alike: int, room: int) -> int:
        """Return how long a draft behind `num_alike` tokens that agree is worth it, at most `room`."""
        best, length, chance, saved = 0.0, 0, 1.0, 0.0
        for count in range(1, min(room, self.most) + 1):
            chance *= self.chance(_following(num_alike, count - 1))
            saved += chance
            gain = TOKEN_WORTH * saved - self._cost(count)
            if gain > best:
                best, length = gain, count
        if num_alike == OF_MODEL:
            return max(length, min(room, 1))  # what it says next is known only if it is asked
        return length

    def _cost(self, num_drafted: int) -> float:
        return STEP_COSTS[num_drafted] - 1 + self.draft_cost * num_drafted

    def chance(self, num_alike: int) -> float:
        """Return the chance of a token behind so many that agree."""
        of_all = _chance(num_alike)
        right, tried = self.right.get(of_all, (0.0, 0.0))
        return (WEIGHT * of_all + right) / (WEIGHT + tried)

    def note(self, num_alike: int, num_drafted: int, num_right: int) -> None:
        """Take what became of a draft."""
        for i in range(min(num_right + 1, num_drafted)):
            key = _chance(_following(num_alike, i))
            right, tried = self.right.get(key, (0.0, 0.0))
            self.right[key] = FADING * right + (i < num_right), FADING * tried + 1
        self.num_runs += 1
        self.earned += num_right - self._cost(num_drafted)
        if self.num_runs == RUNS:
            if self.earned < 0:
                self.pause = self.next_pause
                self.next_pause = min(2 * self.next_pause, LONGEST_PAUSE)
            else:
                self.next_pause = PAUSE
            self.num_runs, self.earned = 0, 0.0


def _following(num_alike: int, num_right: int) -> int:
    return OF_MODEL if num_alike == OF_MODEL else num_alike + num_right


def _chance(num_alike: int) -> float:
    return CHANCE_OF_MODEL if num_alike == OF_MODEL else CHANCES[min(num_alike, len(CHANCES) - 1)]
