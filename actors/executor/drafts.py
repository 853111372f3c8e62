"""Drafts of the tokens that come next, taken from where the text went on alike before or from a second model, and what became of them.

    known tokens  … 5 8 2 7 9 | 5 8 2          the last three stood before,
    drafts                            7 9      so what followed is verified: one step samples up to three tokens

Laws:
  * A draft changes no token.  Each is sampled from the logits behind the tokens before it, with the noise of its own
    position, as if it had been alone in its step; what a wrong draft led to is dropped.
  * A draft is a function of the tokens in the slot, of how the drafts of the slot fared since it was given away, and of what
    sequences of the same cache salt and adapter have answered.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import numpy as np

from trouper.actors.executor.recent_answers import SEPARATOR, RecentAnswers
from trouper.actors.executor.request_slots import RequestSlots
from trouper.actors.executor.sampling.results import PromptLogprobs, entry_failures
from trouper.actors.executor.sampling.sampler import Sampled
from trouper.actors.messages.plans import StepPlan
from trouper.actors.messages.results import StepDone, TokenLogprobs
from trouper.config.speculation import SpeculativeConfig

RUNS = 16  # after which a slot's drafts must have earned what they cost
# In plain steps: a step with drafts takes 1.2 times as long as one without, and each drafted token adds a twentieth.
STEP_COST, TOKEN_COST = 0.2, 0.05
PAUSE, LONGEST_PAUSE = (
    32,
    512,
)  # tokens without a draft where they have not; twice as many each time in a row
FIRST_LENGTH = 3
LEAST_OF_OTHERS = 3  # tokens that must agree with another's answer: fewer say little of this one


class Pace(msgspec.Struct):
    """How many tokens are drafted for one slot: the more the further the last draft was right."""

    most: int
    length: int = FIRST_LENGTH
    pause: int = 0
    next_pause: int = PAUSE
    num_runs: int = 0
    earned: float = 0.0  # plain steps saved by the runs so far

    def next_length(self) -> int:
        """Return how long the draft of this step may be."""
        if self.pause:
            self.pause -= 1
            return 0
        return min(self.length, self.most)

    def note(self, num_drafted: int, num_accepted: int) -> None:
        """Take what became of a draft."""
        was_right = num_accepted == num_drafted
        self.length = num_accepted + (FIRST_LENGTH if was_right else 1)
        self.num_runs += 1
        self.earned += num_accepted - STEP_COST - TOKEN_COST * num_drafted
        if self.num_runs == RUNS:
            if self.earned < 0:
                self.pause = self.next_pause
                self.next_pause = min(2 * self.next_pause, LONGEST_PAUSE)
            else:
                self.next_pause = PAUSE
            self.num_runs, self.earned = 0, 0.0


Forced = Callable[[int, int], list[int]]


class SecondModel(Protocol):
    """A model of its own that proposes drafts; `cpu/draft_model.py` is one."""

    def place(self, slot: int, *, has_drafts: bool) -> None: ...

    def propose(self, plan: StepPlan, lengths: Sequence[int]) -> list[list[int]]: ...

    def keep(self, slot: int, end: int, num_right: int) -> None: ...


class Drafter:
    """Drafts for the sequences in the slots, one step after the other.

    Args:
        forced: the tokens that the grammar of a slot forces behind those before a position: drafts that are right.
        model: proposes them; None: the text does.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        slots: RequestSlots,
        forced: Forced,
        model: SecondModel | None = None,
    ) -> None:
        self._config, self._forced, self._model = config, forced, model
        self._slots = slots
        self._paces: dict[int, Pace] = {}  # by slot; those with a grammar have none
        self._drafts: list[list[int]] = []  # of each entry of the step that runs
        most = config.suffix_decoding_max_cached_requests if config.method == "suffix" else 0
        self._recent = RecentAnswers(most) if most else None
        self._families: dict[int, str] = {}  # by slot
        self._ends: dict[int, int] = {}  # by slot: the first position whose token is not known

    def leave(self, slot: int) -> None:
        """Keep what the slot's sequence has answered; another is about to take the slot."""
        end, num_prompt = self._ends.pop(slot, 0), int(self._slots.num_prompt[slot])
        if self._recent is not None and end > num_prompt + 1:
            # with the end of the prompt, behind which the same answer may begin
            first = max(0, num_prompt - self._config.suffix_decoding_max_tree_depth)
            token_ids = self._slots.token_ids[slot, first:end]
            self._recent.add(self._families[slot], token_ids)

    def place(self, slot: int, family: str = "", *, has_grammar: bool) -> None:
        """Forget how the drafts of the slot fared: another sequence has taken it."""
        self._families[slot] = family
        self._paces.pop(slot, None)
        if not has_grammar:  # whose drafts are always right; others would need a mask each
            self._paces[slot] = Pace(self._config.num_speculative_tokens)
        if self._model is not None:
            self._model.place(slot, has_drafts=not has_grammar)

    def propose(self, plan: StepPlan) -> np.ndarray | None:
        """Write drafts into the slots, behind the tokens that the plan computes.

        Returns:
            How many for each entry [C]; None if there are none.
        """
        if self._model is not None:
            rooms = plan.num_lookahead_tokens or (0,) * len(plan.request_slots)
            lengths = [
                self._length(*entry) for entry in zip(plan.request_slots, rooms, strict=True)
            ]
            self._drafts = self._model.propose(plan, lengths)
            for i, (slot, room) in enumerate(zip(plan.request_slots, rooms, strict=True)):
                if room and slot not in self._paces:
                    self._drafts[i] = self._force(slot, plan.num_computed_tokens[i] + 1, room)
            return self._counts()
        if self._recent is not None:
            ends = zip(plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True)
            self._ends.update(zip(plan.request_slots, (sum(both) for both in ends), strict=True))
        if not plan.num_lookahead_tokens:
            return None
        entries = plan.request_slots, plan.num_computed_tokens, plan.num_lookahead_tokens
        self._drafts = [
            self._draft(slot, start + 1, room) if room else []
            for slot, start, room in zip(*entries, strict=True)
        ]
        return self._counts()

    def _counts(self) -> np.ndarray | None:
        return np.array([len(draft) for draft in self._drafts]) if any(self._drafts) else None

    def _length(self, slot: int, room: int) -> int:
        pace = self._paces.get(slot)
        return min(room, pace.next_length()) if pace is not None and room else 0

    def _force(self, slot: int, end: int, room: int) -> list[int]:
        draft = self._forced(slot, end)[:room]
        self._slots.token_ids[slot, end : end + len(draft)] = draft
        return draft

    def _draft(self, slot: int, end: int, room: int) -> list[int]:
        if slot not in self._paces:
            return self._force(slot, end, room)
        length = self._length(slot, room)
        if length == 0:
            return []
        token_L = self._slots.token_ids[slot]
        recent = None if self._recent is None else self._recent.of(self._families[slot])
        draft = propose(token_L[:end], length, self._config, recent)
        token_L[end : end + len(draft)] = draft
        return draft.tolist()

    def verify(self, plan: StepPlan, sampled: Sampled, prompt_logprobs: PromptLogprobs) -> StepDone:
        """Answer the plan with the tokens up to the first that its draft did not foresee."""
        tokens, logprobs = iter(sampled.token_ids), iter(sampled.logprobs)
        token_ids: list[tuple[int, ...]] = []
        found: list[tuple[TokenLogprobs, ...]] = []
        for i, (slot, draft, is_sampled) in enumerate(
            zip(plan.request_slots, self._drafts, plan.num_sampled_tokens, strict=True)
        ):
            drawn = [next(tokens) for _ in range(len(draft) + 1)] if is_sampled else []
            num_right = num_equal(draft, drawn)
            if draft and slot in self._paces:
                self._paces[slot].note(len(draft), num_right)
                if self._model is not None:
                    end = plan.num_computed_tokens[i] + plan.num_scheduled_tokens[i]
                    self._model.keep(slot, end, num_right)
            token_ids.append(tuple(drawn[: num_right + 1]))
            if sampled.logprobs:
                own = [next(logprobs) for _ in drawn][: num_right + 1]
                found.append(tuple(each for each in own if each is not None))
        kept, failed = entry_failures(token_ids)
        num_drafts = tuple(map(len, self._drafts))
        return StepDone(plan.step, kept, tuple(found), prompt_logprobs, failed, num_drafts)


def propose(
    token_L: np.ndarray, length: int, config: SpeculativeConfig, recent: np.ndarray | None = None
) -> np.ndarray:
    """Continue known tokens [L] as they went on before, or as others did; up to `length` of them, none where they end in something new.

    Args:
        recent: answers of others, with separators: they serve where more tokens agree than in the text itself.
    """
    if config.method == "ngram":
        longest, shortest = config.prompt_lookup_max, config.prompt_lookup_min
    else:
        longest, shortest = config.suffix_decoding_max_tree_depth, 1
    behind, num_alike = last_match(token_L, token_L, longest)
    theirs = None
    if recent is not None and len(recent):
        place, most = last_match(recent, token_L, longest)
        if most > num_alike and most >= LEAST_OF_OTHERS:
            theirs, num_alike = recent[place:], most
    if num_alike < shortest:
        return token_L[:0]
    if config.method == "suffix":
        length = min(length, max(1, int(num_alike * config.suffix_decoding_max_spec_factor)))
    if theirs is not None:
        ends = np.flatnonzero(theirs[:length] == SEPARATOR)
        return theirs[: ends[0] if len(ends) else length]
    # What repeats itself goes on to do so: past its end the continuation begins again.
    return np.resize(token_L[behind:], length)


def last_match(text_M: np.ndarray, token_L: np.ndarray, longest: int) -> tuple[int, int]:
    """Find the latest place in a text, and not its end, where the most of the last tokens stand, at most `longest`.

    Returns:
        The position behind it, and how many tokens agree; 0 if the last token does not stand there.
    """
    ends = np.flatnonzero(text_M[:-1] == token_L[-1])
    num_alike = int(len(ends) > 0)
    while len(ends) and num_alike < min(longest, len(token_L)):
        longer = ends[ends >= num_alike]
        longer = longer[text_M[longer - num_alike] == token_L[-1 - num_alike]]
        if not len(longer):
            break
        ends, num_alike = longer, num_alike + 1
    return (int(ends[-1]) + 1, num_alike) if num_alike else (len(text_M), 0)


def num_equal(draft: Sequence[int], drawn: Sequence[int]) -> int:
    """Count the tokens of a draft that are the ones drawn in their places, up to the first that is not."""
    for i, (guess, token) in enumerate(zip(draft, drawn, strict=False)):
        if guess != token:
            return i
    return min(len(draft), len(drawn))
