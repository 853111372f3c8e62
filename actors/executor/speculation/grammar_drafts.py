"""Drafts inside a grammar: what it forces, and between that what stood in like places before.

    outputs      {  \\n··"  name  ":  ·"  Maria  ",  \\n··"  age  ":  ·  34  ,
    as shapes    {  \\n··"  □     ":  ·"  Maria  ",  \\n··"  □    ":  ·  34  ,
    draft                                                                      \\n··"  email  ":  ·"

A run of tokens that the grammar forced is one shape, whatever they were: behind every name of a schema comes the same.

Laws:
  * A draft changes no token: it is verified as every other.  What the grammar forbids is not drafted, and neither is an end.
  * The matcher that goes along a draft is a copy: what it meets there says nothing of the sequence.
  * As many tokens are drafted as are expected to save the most time; a guess is as likely as it was right in like places.
"""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from trouper.actors.executor.sampling.ahead import Ahead
from trouper.actors.executor.sampling.grammar import GrammarMasks
from trouper.actors.executor.speculation.matching import RecentAnswers, positions_after_match
from trouper.actors.executor.speculation.pace import Shares, best_length
from trouper.actors.executor.steps.request_slots import RequestSlots

FORCED = -2  # a run of tokens that a grammar forced; no token, and not the separator
# Shapes of recent answers, which are copied for each sequence with a grammar: 64 KiB.  To look for places in all takes 20 µs.
MOST_SHAPES = 2**14
NUM_MATCHING = 2  # shapes that agree at the places whose followers are counted
NUM_GUESSES = 3  # that the grammar is asked after, at one position
PRIOR_WEIGHT = 4.0  # guesses, for which the share of like places counts beside how guesses fared
# Of a token saved, in steps without a draft.  Guesses are rarer than in free text, so what is saved would seldom have been
# saved by the next draft: over 5,500 tokens of records 0.75 takes 1 to 2 % off the cost of 0.5, and 1 no more.
WORTH_IN_GRAMMAR = 0.75
LEAST_CHANCE = 0.05  # that a draft is right so far: no row costs less
MOST_COUNTED = 4  # places, in telling kinds of guesses apart


class Guess(NamedTuple):
    """A shape that may come next."""

    shape: int
    num_right: int  # of the places alike, those that it follows
    num_places: int

    @property
    def kind(self) -> tuple[int, bool]:
        """Guesses of a kind are taken to be equally likely."""
        return min(self.num_places, MOST_COUNTED), self.num_right == self.num_places

    @property
    def share(self) -> float:
        """The chance that it is right, as the places alike have it."""
        return self.num_right / (self.num_places + 1)


class Drafted(NamedTuple):
    """A token of a draft."""

    token: int
    chance: float  # that it and all before it are right
    guess: Guess | None  # None: it is forced


class History:
    """The shapes of a sequence, behind those of other answers.

    Args:
        before: shapes of others, the oldest first.
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
        """Append shapes; a run of forced ones goes on."""
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
        """Forget all shapes but the first `size`."""
        self._size = size


class MatchPositions:
    """Remembers where the last shapes of a history stood before, and tells what followed."""

    def __init__(self, shapes: np.ndarray, longest: int) -> None:
        self._shapes = shapes
        self._alike, self._best = matching_positions(shapes, longest)

    def guesses(self) -> Iterator[Guess]:
        """Yield what may come next, the likeliest first: the follower of the longest match, and then the latest ones."""
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
        """Go on to the places behind this shape; False: there is none."""
        size = len(self._shapes)
        went = self._alike[self._shapes[self._alike] == shape] + 1
        is_best = self._best >= 0 and self._shapes[self._best] == shape
        self._best = self._best + 1 if is_best else int(went[-1]) if len(went) else -1
        self._alike = went[went < size]
        if self._best >= size:
            self._best = -1
        return self._best >= 0


def matching_positions(shapes: np.ndarray, longest: int) -> tuple[np.ndarray, int]:
    """Find where the last shapes stood before.

    Returns:
        The positions behind the last `NUM_MATCHING` of them, or behind the last where those never stood; and the latest of
        the positions behind which the most agree, -1 if there is none.
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
    """Go on with a sequence as its grammar forces it to, and else as it went on before; the history stays as it is.

    Args:
        room: the most tokens.
        longest: shapes that are compared.
        least: the chance below which nothing is drafted.
    """
    found: list[Drafted] = []
    size, chance = len(history.shapes), 1.0
    places: MatchPositions | None = None
    while len(found) < room:
        forced = ahead.forced()[: room - len(found)]
        if forced:
            if not all(map(ahead.take, forced)):  # an end
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
    end: int = 0  # the first position that the history lacks
    draft: list[Drafted] = []
    trust: Shares = msgspec.field(default_factory=lambda: Shares(PRIOR_WEIGHT))


class GrammarDrafts:
    """Drafts for the slots whose sequences have a grammar.

    Args:
        longest: shapes that are compared.
        most_answers: others' that are kept; 0 = none.
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
        """Begin with the sequence that has taken the slot."""
        self._sequences[slot] = _Drafting(family)

    def leave(self, slot: int, end: int) -> None:
        """Keep what the slot's sequence has answered before `end`, if it had a grammar; another is about to take the slot."""
        sequence = self._sequences.pop(slot, None)
        num_prompt = int(self._slots.num_prompt[slot])
        if sequence is not None and end > num_prompt + 1:
            first = max(0, num_prompt - self._longest)
            self._recent.add(sequence.family, self._shapes(slot, first, end))

    def draft(self, slot: int, end: int, room: int) -> list[int]:
        """Propose tokens for position `end` and those after it, at most `room`."""
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
        """Take how many tokens of the slot's draft were right."""
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
