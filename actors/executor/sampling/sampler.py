"""From logits to tokens, and the logprobs that were asked for.

    R  requests that sample in this step     V  vocabulary

Laws:
  * A request's token is a function of its own logits, parameters, seed and position alone.
  * The drafts of a slot with a grammar are tokens that it forces, so its mask concerns the last of the slot's rows.
  * A grammar's mask comes after every other edit, in the call that draws; it touches no other request.  What is drawn
    before its grammar is asked may be drawn once more, with the same noise.
  * A step is one call, whatever the number of requests, but for those that are edited or want logprobs: each
    call lets go of the interpreter's lock, and a busy event loop takes it.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import msgspec
import numpy as np
import torch
from torch import Tensor

from trouper.actors.executor.models.decoder import LOGITS_AT_ONCE
from trouper.actors.executor.request_slots import PromptSpan, RequestSlots
from trouper.actors.executor.sampling.grammar import GRAMMAR_ERROR, GrammarMasks
from trouper.actors.executor.sampling.penalties import Penalties
from trouper.actors.messages.grammar import Grammar, GrammarWork
from trouper.actors.messages.plans import Sampling
from trouper.actors.messages.results import TokenLogprobs
from trouper.kernels.cpu.sampling.row_layout import NOT_FINITE, ROW
from trouper.kernels.cpu.sampling.sample import sample

NO_TOP_K = 2**31 - 1  # more than any vocabulary


class Sampled(msgspec.Struct, frozen=True):
    """The tokens of the slots that sampled."""

    token_ids: list[int]  # or NOT_FINITE, NOTHING_LEFT, GRAMMAR_ERROR
    logprobs: list[TokenLogprobs | None]  # empty when no slot wants any

    def by_entry(
        self, entries: np.ndarray, num_entries: int
    ) -> tuple[list[int], list[tuple[TokenLogprobs, ...]]]:
        """Return the token of each entry of a plan, and its logprobs; those are empty if no entry wants any.

        Args:
            entries: the entry of each token, at most one of each; the others have -1.
        """
        token_ids = np.full(num_entries, -1)
        token_ids[entries] = self.token_ids
        if not self.logprobs:
            return token_ids.tolist(), []
        logprobs: list[tuple[TokenLogprobs, ...]] = [()] * num_entries
        for entry, found in zip(entries, self.logprobs, strict=True):
            if found is not None:
                logprobs[entry] = (found,)
        return token_ids.tolist(), logprobs


class Sampler:
    """Draws tokens, with the parameters that each slot keeps from step to step."""

    def __init__(self, slots: RequestSlots) -> None:
        self._slots = slots
        self._grammars = GrammarMasks(slots)
        self._penalties = Penalties(slots, self._grammars)
        self._parameters = np.zeros(len(slots.sampling), dtype=ROW)
        self._wishes: dict[int, Sampling] = {}  # of slots that want logprobs

    def place(self, slot: int, grammar: Grammar | None = None) -> None:
        """Take the parameters of the sequence that took the slot."""
        repetition = self._penalties.place(slot)
        s = self._slots.sampling[slot]
        is_free = s.temperature == 0 or (s.top_k <= 0 and s.top_p == 1 and not s.min_p)
        self._grammars.place(slot, grammar, is_plain=is_free and repetition == 1)
        log_min_p = math.log(s.min_p) if s.min_p else -math.inf
        top_k = min(s.top_k, NO_TOP_K)
        seed = s.seed % 2**64
        self._parameters[slot] = (seed, s.temperature, s.top_p, log_min_p, top_k, repetition)
        self._wishes.pop(slot, None)
        if s.logprobs is not None or s.logprob_token_ids:
            self._wishes[slot] = s

    def take_grammar_work(self) -> GrammarWork | None:
        """Return what has been done for grammars since the last time; None: nothing."""
        return self._grammars.take_work()

    def clear(self) -> None:
        """Forget the matchers of the grammars; their sequences will be given again."""
        self._grammars.clear()

    def is_plain(self, slots: Sequence[int]) -> bool:
        """Whether `prepare`, `draw` and `settled` are all that these slots need."""
        return self._penalties.leave_alone(slots) and self._wishes.keys().isdisjoint(slots)

    def prepare(self, slots_R: np.ndarray, ends_R: np.ndarray) -> None:
        """Fill the masks that these slots need, before their tokens are drawn."""
        last = _last_rows(slots_R)
        self._grammars.prepare(slots_R[last], ends_R[last])

    def forced(self, slot: int, end: int) -> list[int]:
        """Return tokens that a grammar forces at position `end` and those after it, if no other edit has a say."""
        is_alone = self._penalties.leave_alone((slot,))
        return self._grammars.forced(slot, end) if is_alone else []

    def draw(
        self,
        logits_TV: Tensor,
        picked_R: np.ndarray,
        slots_R: np.ndarray,
        ends_R: np.ndarray,
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """Draw with the parameters and tokens of these slots; the call can be recorded."""
        tokens_SL = self._slots.token_ids
        masks_S = self._grammars.addresses
        return sample(
            logits_TV, picked_R, self._parameters, slots_R, ends_R, tokens_SL, masks_S, out
        )

    def settled(
        self,
        logits_TV: Tensor,
        picked_R: np.ndarray,
        slots_R: np.ndarray,
        ends_R: np.ndarray,
        token_R: np.ndarray,
    ) -> list[int]:
        """Draw again what a grammar refuses, write each token into its slot, if it is one, and return all as a list."""
        last = _last_rows(slots_R)
        refused, failed = (last[i] for i in self._grammars.refused(slots_R[last], token_R[last]))
        if len(last) < len(token_R):
            self._force(slots_R, ends_R, token_R, last)
        if len(refused):
            token_R[refused] = self.draw(
                logits_TV, picked_R[refused], slots_R[refused], ends_R[refused]
            )
        token_R[failed] = GRAMMAR_ERROR
        is_drawn_R = token_R >= 0
        self._slots.token_ids[slots_R[is_drawn_R], ends_R[is_drawn_R]] = token_R[is_drawn_R]
        return token_R.tolist()

    def _force(
        self, slots_R: np.ndarray, ends_R: np.ndarray, token_R: np.ndarray, last: np.ndarray
    ) -> None:
        """Take the drafts of slots with a grammar for drawn: all of them are forced."""
        for i in np.setdiff1d(np.arange(len(token_R)), last).tolist():
            slot = int(slots_R[i])
            if token_R[i] != NOT_FINITE and self._grammars.any_in((slot,)):
                token_R[i] = self._slots.token_ids[slot, ends_R[i]]

    def sample(
        self,
        logits_TV: Tensor,
        slots_R: np.ndarray,
        ends_R: np.ndarray,
        picked_R: np.ndarray | None = None,
    ) -> Sampled:
        """Draw one token for each slot and write it there, at its end; the logits are overwritten.

        Args:
            logits_TV: raw logits, float32.
            slots_R: the request slots.
            ends_R: position of the token to be drawn, = number of tokens before it.
            picked_R: the row of logits of each slot; None = the row of the same number.
        """
        if picked_R is None:
            picked_R = np.arange(len(slots_R))
        raw: dict[int, Tensor] = {}
        if self._wishes:
            pairs: list[tuple[int, int]] = np.stack((slots_R, picked_R), 1).tolist()
            for i, (slot, picked) in enumerate(pairs):
                if slot in self._wishes:
                    raw[i] = logits_TV[picked].log_softmax(-1)
        self.prepare(slots_R, ends_R)
        spoiled = self._penalties.apply(logits_TV, slots_R, ends_R, picked_R)
        token_R = self.draw(logits_TV, picked_R, slots_R, ends_R)
        token_R[spoiled] = NOT_FINITE
        token_ids = self.settled(logits_TV, picked_R, slots_R, ends_R, token_R)
        logprobs: list[TokenLogprobs | None] = [None] * len(token_ids) if raw else []
        for i, raw_V in raw.items():
            s = self._wishes[int(slots_R[i])]
            if token_ids[i] >= 0:
                logprobs[i] = token_logprobs(
                    raw_V, token_ids[i], s.logprobs or 0, s.logprob_token_ids
                )
        return Sampled(token_ids, logprobs)


def _last_rows(slots_R: np.ndarray) -> np.ndarray:
    """Return the indices of the rows that are the last of their slots; those before them verify drafts."""
    return np.flatnonzero(np.append(slots_R[1:] != slots_R[:-1], [True] * (len(slots_R) > 0)))


def token_logprobs(
    logprobs_V: Tensor, token_id: int, num_top: int, token_ids: Sequence[int] = ()
) -> TokenLogprobs:
    """List the token first, then the `num_top` best (-1 = all) by falling logprob, or exactly `token_ids`."""
    own = logprobs_V[token_id]
    rank = int((logprobs_V >= own).sum())
    if token_ids:
        ids = torch.tensor(token_ids)
        order = logprobs_V[ids].argsort(descending=True, stable=True)
        ids = ids[order]
    elif num_top < 0:
        ids = logprobs_V.argsort(descending=True, stable=True)
    else:
        ids = logprobs_V.topk(min(num_top, logprobs_V.numel())).indices
    ids = torch.cat((torch.tensor([token_id]), ids[ids != token_id]))
    found: list[int] = cast("Any", ids).tolist()
    logprobs: list[float] = cast("Any", logprobs_V[ids]).tolist()
    return TokenLogprobs(tuple(found), tuple(logprobs), rank)


def prompt_logprobs(
    spans: Iterable[PromptSpan], hidden_TE: Tensor, logits: Callable[[Tensor], Tensor]
) -> tuple[tuple[int, tuple[TokenLogprobs, ...]], ...]:
    """Compute the logprobs of prompt tokens that follow the positions of a step, as (entry, positions).

    Args:
        spans: where they are asked for.
        hidden_TE: of all tokens of the step.
        logits: from hidden states to logits in float32.
    """
    found: list[tuple[int, tuple[TokenLogprobs, ...]]] = []
    for span in spans:
        hidden = hidden_TE.narrow(0, span.first_token, len(span.token_ids))
        following = iter(span.token_ids.tolist())
        logprobs = [
            token_logprobs(logprobs_V, next(following), span.num_top)
            for first in range(0, len(hidden), LOGITS_AT_ONCE)
            for logprobs_V in logits(hidden[first : first + LOGITS_AT_ONCE]).log_softmax(-1)
        ]
        found.append((span.entry, tuple(logprobs)))
    return tuple(found)
