"""Drafts for sequences with a grammar: the tokens that the grammar forces, and between them what followed in similar places.

In structured output, such as JSON by a schema, a grammar often allows one token only, which needs no model to be drafted.

    outputs      {  \n··"  name  ":  ·"  Maria  ",  \n··"  age  ":  ·  34  ,
    as shapes    {  \n··"  □     ":  ·"  Maria  ",  \n··"  □    ":  ·  34  ,
    draft                                                                      \n··"  email  ":  ·"

A run of forced tokens is one shape, regardless of its tokens, so that what follows one name of a schema also predicts what
follows another.

Laws:
  * A draft changes no token: it is verified like any other.  Tokens that the grammar forbids, and ends, are not drafted.
  * A copy of the matcher follows the draft, so the sequence's own state does not change.
  * The length of a draft maximises the expected saving.  The chance of a guess is how often guesses were right in similar
    places.
"""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from trouper.actors.executor.sampling.grammar import Ahead, GrammarMasks
from trouper.actors.executor.sampling.matching import (
    RecentAnswers,
    Shares,
    best_length,
    positions_after_match,
)
from trouper.actors.executor.steps.request_slots import RequestSlots

FORCED = -2  # a run of tokens that a grammar forced; neither a token nor the separator
# Shapes of recent answers, copied for each sequence with a grammar: 64 KiB.  Searching all of them takes 20 µs.
MOST_SHAPES = 2**14
# Followers are counted at places where this many shapes match.
NUM_MATCHING = 2
# The grammar is asked about this many guesses at one position.
NUM_GUESSES = 3
# The share of similar places counts like this many guesses.
PRIOR_WEIGHT = 4.0
# The value of a saved token, in steps without a draft.  Guesses are rarer than in free text, so the next draft would seldom
# have saved the same token: over 5,500 tokens of records 0.75 costs 1 to 2 % less than 0.5, and 1 no less than 0.75.
WORTH_IN_GRAMMAR = 0.75
# Drafting stops if the chance that the draft is right so far is smaller; a row is never free.
LEAST_CHANCE = 0.05
# Numbers of places above this one are one kind of guess.
MOST_COUNTED = 4


class Guess(NamedTuple):
    """A shape that may come next, with the evidence for it.

    A shape abstracts from values: it is the kind of token at a place of the grammar.
    """

    shape: int
    num_right: int  # number of similar places that it follows
    num_places: int

    @property
    def kind(self) -> tuple[int, bool]:
        """The kind of the guess; guesses of one kind are assumed to be equally likely."""
        return min(self.num_places, MOST_COUNTED), self.num_right == self.num_places

    @property
    def share(self) -> float:
        """The share of similar places that this shape follows.

        One is added to the places, so that few observations give no certainty. It is the prior of its chance.
        """
        return self.num_right / (self.num_places + 1)


class Drafted(NamedTuple):
    """A drafted token with the chance that it is right.

    Drafting stops when the chance of a whole draft is too small to pay for its cost.
    """

    token: int
    # The chance that this token and all before it are right.
    chance: float
    # The grammar forces a token without a guess.
    guess: Guess | None


class History:
    """The shapes of a sequence, after those of recent answers.

    Args:
        before: shapes of recent answers, the oldest first.
    """

    def __init__(self, before: np.ndarray) -> None:
        self._size = len(before)
        self._shapes = np.empty(self._size + 1024, dtype=np.int32)
        self._shapes[: self._size] = before

    def __repr__(self) -> str:
        return f"<History of {self._size} shapes>"

    @property
    def shapes(self) -> np.ndarray:
        return self._shapes[: self._size]

    def extend(self, shapes: np.ndarray) -> None:
        """Append shapes.  A run of forced tokens continues the last one."""
        if (
            len(shapes)
            and shapes[0] == FORCED
            and self._size
            and self._shapes[self._size - 1] == FORCED
        ):
            shapes = shapes[1:]
        end = self._size + len(shapes)
        if end > len(self._shapes):
            self._shapes = np.concatenate((self.shapes, np.empty(end, dtype=np.int32)))
        self._shapes[self._size : end] = shapes
        self._size = end

    def cut(self, size: int) -> None:
        """Remove all shapes except the first `size`."""
        self._size = size


class MatchPositions:
    """The earlier places of a history's last shapes, with what followed there."""

    def __init__(self, shapes: np.ndarray, longest: int) -> None:
        self._shapes = shapes
        self._alike, self._best = matching_positions(shapes, longest)

    def guesses(self) -> Iterator[Guess]:
        """Yield the guesses, the most likely first: the follower of the longest match, then the latest followers."""
        followers = self._shapes[self._alike]
        if self._best < 0:
            return
        first = int(self._shapes[self._best])
        yield Guess(first, max(1, int((followers == first).sum())), max(1, len(followers)))
        rest = followers[followers != first]
        while len(rest):
            shape = int(rest[-1])
            is_it = rest == shape
            yield Guess(shape, int(is_it.sum()), len(followers))
            rest = rest[~is_it]

    def go_past(self, shape: int) -> bool:
        """Advance to the places behind this shape.  Returns False if there are none."""
        size = len(self._shapes)
        went = self._alike[self._shapes[self._alike] == shape] + 1
        is_best = self._best >= 0 and self._shapes[self._best] == shape
        self._best = self._best + 1 if is_best else int(went[-1]) if len(went) else -1
        self._alike = went[went < size]
        if self._best >= size:
            self._best = -1
        return self._best >= 0


def matching_positions(shapes: np.ndarray, longest: int) -> tuple[np.ndarray, int]:
    """Find earlier places of the last shapes.

    Returns:
        The positions behind the last `NUM_MATCHING` shapes, or behind the last shape if those do not occur; and the latest
        position of the longest match, or -1.
    """
    alike = ends = np.zeros(0, dtype=np.int64)
    if len(shapes):
        for num, ends in enumerate(positions_after_match(shapes, shapes, longest), 1):
            if num in (1, NUM_MATCHING):
                alike = ends
            if num >= NUM_MATCHING and len(ends) == 1:
                break
    return alike, int(ends[-1]) if len(ends) else -1


def look_ahead(
    history: History,
    ahead: Ahead,
    room: int,
    longest: int,
    trust: Shares,
    least: float = LEAST_CHANCE,
) -> list[Drafted]:
    """Continue a sequence with the tokens that its grammar forces and with guesses between them.  The history is not changed.

    Args:
        room: the largest number of tokens.
        longest: the largest number of shapes to match.
        trust: how often guesses of each kind were right.
        least: the smallest chance with which a token is drafted.
    """
    found: list[Drafted] = []
    size, chance = len(history.shapes), 1.0
    places: MatchPositions | None = None
    while len(found) < room:
        forced = ahead.forced()[: room - len(found)]
        if forced:
            # The grammar forces an end, which is not drafted.
            if not all(map(ahead.take, forced)):
                break
            shape = FORCED
            found += [Drafted(token, chance, None) for token in forced]
        else:
            if places is None:
                places = MatchPositions(history.shapes, longest)
            guess = next(_that_may_stand(places, ahead), None)
            if guess is None or (chance := chance * trust.chance(guess.kind, guess.share)) < least:
                break
            shape = guess.shape
            found.append(Drafted(shape, chance, guess))
        history.extend(np.array([shape], dtype=np.int32))
        if places is not None and not places.go_past(shape):
            places = None
    history.cut(size)
    return found


def _that_may_stand(places: MatchPositions, ahead: Ahead) -> Iterator[Guess]:
    for guess, _ in zip(places.guesses(), range(NUM_GUESSES), strict=False):
        if guess.shape >= 0 and ahead.take(guess.shape):
            yield guess


class _Drafting(msgspec.Struct):
    """The sequence in a slot."""

    family: str
    history: History | None = None
    end: int = 0  # first position that the history lacks
    draft: list[Drafted] = []
    trust: Shares = msgspec.field(default_factory=lambda: Shares(PRIOR_WEIGHT))


class GrammarDrafts:
    """Drafts for the slots with a grammar.

    Args:
        longest: the largest number of shapes to match.
        most_answers: the number of recent answers to keep; 0 keeps none.
    """

    def __init__(
        self,
        slots: RequestSlots,
        masks: GrammarMasks,
        *,
        longest: int,
        most_answers: int,
    ) -> None:
        self._slots, self._masks, self._longest = slots, masks, longest
        self._sequences: dict[int, _Drafting] = {}  # by slot
        self._recent = RecentAnswers(most_answers, MOST_SHAPES)

    def __repr__(self) -> str:
        return f"<GrammarDrafts of {len(self._sequences)} sequences, {self._recent!r}>"

    def __contains__(self, slot: int) -> bool:
        return slot in self._sequences

    def place(self, slot: int, family: str) -> None:
        """Begin with the sequence that has taken a slot.

        `family` selects the recent answers that guesses are based on.
        """
        self._sequences[slot] = _Drafting(family)

    def leave(self, slot: int, end: int) -> None:
        """Store the answer of a slot's sequence before `end` if it had a grammar, before another sequence takes the slot."""
        sequence = self._sequences.pop(slot, None)
        num_prompt = int(self._slots.num_prompt[slot])
        if sequence is not None and end > num_prompt + 1:
            first = max(0, num_prompt - self._longest)
            self._recent.add(sequence.family, self._shapes(slot, first, end))

    def draft(self, slot: int, end: int, room: int) -> list[int]:
        """Propose at most `room` tokens for position `end` and the following ones.

        Tokens that the grammar forces are free; others are guessed from similar places.
        """
        sequence = self._sequences[slot]
        sequence.draft = []
        ahead = self._masks.ahead(slot, end)
        if ahead is None:
            return []
        history = sequence.history
        if history is None:
            history = sequence.history = History(self._recent.of(sequence.family))
        history.extend(self._shapes(slot, sequence.end, end))
        sequence.end = end
        found = look_ahead(history, ahead, room, self._longest, sequence.trust)
        length = best_length((each.chance for each in found), WORTH_IN_GRAMMAR)
        sequence.draft = found[:length]
        return [each.token for each in sequence.draft]

    def note(self, slot: int, num_right: int) -> None:
        """Record how many tokens of a slot's draft were right.

        The chances of later guesses of the same kind are adjusted. Forced tokens do not count.
        """
        sequence = self._sequences[slot]
        for i, each in enumerate(sequence.draft[: num_right + 1]):
            if each.guess is not None:
                sequence.trust.note(each.guess.kind, was_right=i < num_right)

    def _shapes(self, slot: int, begin: int, end: int) -> np.ndarray:
        """Return the shapes of the tokens between two positions."""
        shapes = self._slots.token_ids[slot, begin:end].astype(np.int32)
        first_output = int(self._slots.num_prompt[slot])
        were_forced = self._masks.were_forced(slot)[max(0, begin - first_output) :]
        own = shapes[max(0, first_output - begin) :][: len(were_forced)]
        own[np.frombuffer(were_forced, np.bool_, len(own))] = FORCED
        is_kept = np.append(True, (shapes[1:] != FORCED) | (shapes[:-1] != FORCED))
        return shapes[is_kept[: len(shapes)]]
