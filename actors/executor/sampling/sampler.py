"""Sample tokens from logits: edit them, draw, collect the requested logprobs, and make the answer to the plan, a `StepDone`.

    R  requests that sample in this step     V  vocabulary

The edits are allowed and forbidden tokens, bias and penalties. Their static parts (allowed ids, bias, stop ids) are prepared
once, when a sequence takes its slot. Slots without edits are absent from the table and cost nothing. Generated tokens are read
from the request slots. If a repetition penalty is the only edit, as in many models' own generation configs, the sampling
kernel applies it.

Laws:
  * A request's token depends only on its own logits, parameters, seed and position.
  * A slot with drafts has a row for each draft and one behind them. If it has a grammar too, its rows are sampled one after
    another while the drafts are right, each with the mask behind the tokens before it: `GrammarMasks.follow`.
  * A grammar's mask is applied after all other edits, by the sampling kernel, and affects no other request. A token that was
    sampled before its grammar was asked may be sampled once more, with the same noise.
  * A step is one call of the kernel for all requests, except for edits and logprobs. Each call releases the GIL, and a busy
    event loop then takes it.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise, takewhile
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import torch
from torch import Tensor

from trouper.actors.executor.models.decoder import LOGITS_AT_ONCE
from trouper.actors.executor.sampling.grammar import GRAMMAR_ERROR, GrammarMasks
from trouper.actors.executor.steps.request_slots import PromptSpan, RequestSlots
from trouper.actors.messages.requests import Grammar, GrammarWork
from trouper.actors.messages.steps import EntryFailure, Sampling, StepDone, StepPlan, TokenLogprobs
from trouper.kernels.cpu.sample import sample
from trouper.kernels.reference.sampling import (
    NOT_FINITE,
    NOTHING_LEFT,
    ROW,
    allows_all,
    apply_repetition_penalty_reference_,
    row_of,
)

FAILURES: dict[int, EntryFailure] = {
    NOT_FINITE: "not_finite",
    NOTHING_LEFT: "no_valid_token",
    GRAMMAR_ERROR: "grammar_error",
}
# (entry, logprobs of its positions) pairs.
PromptLogprobs = tuple[tuple[int, tuple[TokenLogprobs, ...]], ...]


def make_step_done(
    plan: StepPlan,
    sampled: list[int],
    logprobs: Sequence[tuple[TokenLogprobs, ...]] = (),
    prompt_logprobs: PromptLogprobs = (),
) -> StepDone:
    """Make the answer to `plan`.

    Args:
        sampled: for each entry its token, or NOT_FINITE, NOTHING_LEFT or GRAMMAR_ERROR. Ignored for entries that do not
            sample.
        logprobs: for each entry; empty if no request asked for any.
        prompt_logprobs: for the entries that asked for them.
    """
    wanted = plan.num_sampled_tokens
    failed: tuple[tuple[int, EntryFailure], ...] = ()
    # In most steps every entry has its token, and zip makes the tuples of one token without a loop in Python.
    if 0 not in wanted and min(sampled) >= 0:
        token_ids = tuple(zip(sampled))
    else:
        runs = [(token,) if num else () for token, num in zip(sampled, wanted, strict=True)]
        token_ids, failed = entry_failures(runs)
    return StepDone(plan.step, token_ids, tuple(logprobs), prompt_logprobs, failed)


def with_grammar_work(done: StepDone, work: GrammarWork | None) -> StepDone:
    """Add the work that the step did for grammars to its answer, if it did any."""
    return done if work is None else msgspec.structs.replace(done, grammar=work)


def entry_failures(
    runs: Sequence[tuple[int, ...]],
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, EntryFailure], ...]]:
    """Return the tokens of each entry, and the entries that failed at their first token.

    An entry that fails at a later token keeps the tokens before it, and the next step meets the failure again.
    """
    failed: tuple[tuple[int, EntryFailure], ...] = tuple(
        (entry, FAILURES[run[0]]) for entry, run in enumerate(runs) if run and run[0] < 0
    )
    return tuple(run if not run or min(run) >= 0 else _until_failure(run) for run in runs), failed


def _until_failure(run: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(takewhile(lambda token: token >= 0, run))


class _Node:
    """One token in the tree of `BadWords`, reached by the tokens behind it.

    `before` contains the next nodes by the preceding token, and `last` the tokens that are forbidden at this point.
    """

    __slots__ = ("before", "last")

    def __init__(self) -> None:
        self.before: dict[int, _Node] = {}
        self.last: list[int] = []


class BadWords:
    """The token sequences that one request forbids, as a tree over all but their last tokens, from right to left.

    The cost of a lookup does not grow with the number of sequences. A step walks backwards from the newest token while some
    sequence agrees with the output: one node in nearly all steps, and at most the length of the longest sequence.
    """

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self._root = _Node()
        self._longest = max(map(len, sequences)) - 1
        for *beginning, last in sequences:
            node = self._root
            for token in reversed(beginning):
                node = node.before.setdefault(token, _Node())
            node.last.append(last)

    def next_after(self, outputs: np.ndarray) -> list[int]:
        """List the tokens that would complete a forbidden sequence after `outputs`.

        Forbidden words of one token are always included.
        """
        node = self._root
        found = [*node.last]
        for token in reversed(outputs[max(0, len(outputs) - self._longest) :].tolist()):
            if (node := node.before.get(token)) is None:
                break
            found += node.last
        return found


class _Edits(msgspec.Struct):
    """The edits of one slot. A field is None if the request does not use it."""

    sampling: Sampling
    allowed: Tensor | None
    stop_ids: Tensor | None
    bias: tuple[Tensor, Tensor] | None  # ids, values
    # The distinct tokens of the prompt, for a repetition penalty.
    prompt_ids: np.ndarray | None
    bad_words: BadWords | None


class Penalties:
    """The edits of all slots.

    It edits logits in place, one row after another, and only the rows of slots with edits. They are stored by slot
    between steps.
    """

    def __init__(self, slots: RequestSlots, grammars: GrammarMasks) -> None:
        self._slots = slots
        self._grammars = grammars
        self._in_use: dict[int, _Edits] = {}

    def place(self, slot: int) -> float:
        """Prepare the edits of the sequence that took the slot.

        Returns:
            The repetition penalty that the sampling kernel must apply: 1 means none, 0 that the slot is edited here.
        """
        s = self._slots.sampling[slot]
        self._in_use.pop(slot, None)
        is_counted = s.frequency_penalty or s.presence_penalty
        is_edited = s.allowed_token_ids or s.bad_words_ids or s.min_tokens or s.logit_bias
        is_mixed = self._slots.has_embeds(slot) and s.repetition != 1
        if not (is_counted or is_edited or is_mixed):
            return s.repetition
        prompt_ids = None
        if s.repetition != 1:
            tokens, spans = self._slots.token_ids[slot], self._slots.token_spans(slot)
            prompt_ids = np.unique(np.concatenate([tokens[begin:end] for begin, end in spans]))
        self._in_use[slot] = _Edits(
            sampling=s,
            allowed=_ids(s.allowed_token_ids),
            stop_ids=_ids(s.stop_ids) if s.min_tokens else None,
            bias=None,
            prompt_ids=prompt_ids,
            bad_words=BadWords(s.bad_words_ids) if s.bad_words_ids else None,
        )
        if s.logit_bias:
            ids, values = zip(*s.logit_bias, strict=True)
            self._in_use[slot].bias = (torch.tensor(ids), torch.tensor(values))
        return 0.0

    def leave_alone(self, slots: Sequence[int]) -> bool:
        """Whether none of these slots has edits.

        The logits can then be sampled as they are.  This is the most frequent case.
        """
        return self._in_use.keys().isdisjoint(slots)

    def apply(
        self, logits_TV: Tensor, slots_R: np.ndarray, ends_R: np.ndarray, picked_R: np.ndarray
    ) -> list[int]:
        """Edit the logits of these slots in place.

        Args:
            ends_R: the position of each token to be sampled.
            picked_R: the row of logits of each slot.

        Returns:
            The indices of slots with infinite logits or NaN. These rows are not edited.
        """
        spoiled: list[int] = []
        if not self._in_use:
            return spoiled
        entries = zip(slots_R.tolist(), ends_R.tolist(), picked_R.tolist(), strict=True)
        for i, (slot, end, picked) in enumerate(entries):
            edits = self._in_use.get(slot)
            if edits is None:
                continue
            logits_V = logits_TV[picked]
            if not np.isfinite(logits_V.numpy()).all():
                spoiled.append(i)
                continue
            outputs = self._slots.outputs_of(slot, end)
            _edit(logits_V, edits, outputs, can_only_end=self._grammars.can_only_end(slot))
            _penalise(logits_V.numpy(), edits, outputs)
        return spoiled


def _edit(logits_V: Tensor, edits: _Edits, outputs: np.ndarray, can_only_end: bool) -> None:
    s = edits.sampling
    if edits.allowed is not None:
        allowed = logits_V[edits.allowed]
        logits_V.fill_(-torch.inf)
        logits_V[edits.allowed] = allowed
    if edits.bad_words is not None:
        logits_V[edits.bad_words.next_after(outputs)] = -torch.inf
    if edits.stop_ids is not None and len(outputs) < s.min_tokens and not can_only_end:
        logits_V[edits.stop_ids] = -torch.inf
    if edits.bias is not None:
        ids, values = edits.bias
        logits_V.index_add_(0, ids, values)


def _penalise(logits_V: np.ndarray, edits: _Edits, outputs: np.ndarray) -> None:
    s = edits.sampling
    if edits.prompt_ids is not None:
        ids = np.concatenate([edits.prompt_ids, outputs])
        apply_repetition_penalty_reference_(logits_V, ids, np.float32(s.repetition))
    if s.frequency_penalty or s.presence_penalty:
        ids, counts = np.unique(outputs, return_counts=True)
        penalty = counts * s.frequency_penalty + s.presence_penalty
        # A row with infinite numbers or NaN fails later, without any effect on others.
        with np.errstate(all="ignore"):
            logits_V[ids] -= penalty.astype(np.float32)


def _ids(token_ids: Sequence[int]) -> Tensor | None:
    return torch.tensor(token_ids) if token_ids else None


class Sampled(msgspec.Struct, frozen=True):
    """The tokens of the slots that sampled.

    `token_ids` may contain NOT_FINITE, NOTHING_LEFT or GRAMMAR_ERROR. `logprobs` is empty if no slot asked for any.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]

    def by_entry(
        self, entries: np.ndarray, num_entries: int
    ) -> tuple[list[int], list[tuple[TokenLogprobs, ...]]]:
        """Return the token of each entry of a plan, and its logprobs, which are empty if no request asked for any.

        Args:
            entries: the entry of each token. An entry has at most one token; entries without a token get -1.
        """
        if len(entries) == num_entries and not self.logprobs:
            return self.token_ids, []
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
    """Samples tokens with the parameters that each request slot keeps between steps.

    Results depend only on the logits, the seed and the position, never on other requests of the batch.
    """

    def __init__(self, slots: RequestSlots) -> None:
        self._slots = slots
        self.grammars = GrammarMasks(slots)
        self._penalties = Penalties(slots, self.grammars)
        self._parameters = np.zeros(len(slots.sampling), dtype=ROW)
        # The parameters of slots that asked for logprobs.
        self._wishes: dict[int, Sampling] = {}

    def place(self, slot: int, grammar: Grammar | None = None) -> None:
        """Store the sampling parameters of the sequence that took the slot.

        They are prepared once, so that a step only reads numbers. They remain until the next sequence takes it.
        """
        repetition = self._penalties.place(slot)
        s = self._slots.sampling[slot]
        self.grammars.place(slot, grammar, is_plain=allows_all(s) and repetition == 1)
        self._parameters[slot] = row_of(s)
        self._parameters["repetition"][slot] = repetition
        self._wishes.pop(slot, None)
        if s.logprobs is not None or s.logprob_token_ids:
            self._wishes[slot] = s

    def take_grammar_work(self) -> GrammarWork | None:
        """Return the work done for grammars since the last call, or None if there was none."""
        return self.grammars.take_work()

    def clear(self) -> None:
        """Forget the matchers of grammars.

        The scheduler must send their sequences again before they can be sampled.
        """
        self.grammars.clear()

    def is_plain(self, slots: Sequence[int], slots_R: np.ndarray) -> bool:
        """Whether these slots need nothing beyond `prepare`, `draw` and `settled`: no edits and no logprobs.

        Args:
            slots_R: the slot of each sampled row.
        """
        if not (self._penalties.leave_alone(slots) and self._wishes.keys().isdisjoint(slots)):
            return False
        return all(self.grammars.is_plain(run.slot) for run in self._runs(slots_R))

    def prepare(self, slots_R: np.ndarray, ends_R: np.ndarray) -> None:
        """Fill the grammar masks that these slots need before they sample.

        It can run while the model computes, because masks depend on earlier tokens only.
        """
        if not self.grammars.any_in_use:
            return
        runs = self._runs(slots_R)
        for run in runs:
            self.grammars.allow_all(run.slot)
        rows = _rows_without(runs, len(slots_R))
        self.grammars.prepare(slots_R[rows], ends_R[rows])

    def _runs(self, slots_R: np.ndarray) -> list["_Run"]:
        """List the slots with a grammar and several rows."""
        if not self.grammars.any_in_use:
            return []
        bounds = [0, *(np.flatnonzero(slots_R[1:] != slots_R[:-1]) + 1).tolist(), len(slots_R)]
        if len(bounds) > len(slots_R):
            return []
        runs = [_Run(int(slots_R[i]), i, j) for i, j in pairwise(bounds) if j > i + 1]
        return [run for run in runs if self.grammars.any_in((run.slot,))]

    def draw(
        self,
        logits_TV: Tensor,
        picked_R: np.ndarray,
        slots_R: np.ndarray,
        ends_R: np.ndarray,
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """Sample a token for each of these slots. The call can be recorded.

        Args:
            picked_R: the row of logits of each slot.
            ends_R: the position of each sampled token.
            out: [R], receives the tokens; a new array is returned without it.
        """
        tokens_SL = self._slots.token_ids
        masks_S = self.grammars.addresses
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
        """Sample tokens again that a grammar refuses, and write all tokens into their slots. Returns them as a list."""
        if self.grammars.any_in_use:
            self._correct(logits_TV, picked_R, slots_R, ends_R, token_R)
        tokens: list[int] = token_R.tolist()
        if min(tokens, default=0) < 0:
            is_drawn_R = token_R >= 0
            slots_R, ends_R, token_R = slots_R[is_drawn_R], ends_R[is_drawn_R], token_R[is_drawn_R]
        self._slots.token_ids[slots_R, ends_R] = token_R
        return tokens

    def _correct(
        self,
        logits_TV: Tensor,
        picked_R: np.ndarray,
        slots_R: np.ndarray,
        ends_R: np.ndarray,
        token_R: np.ndarray,
    ) -> None:
        """Replace tokens that a grammar refuses, and follow the others in their grammars."""
        runs = self._runs(slots_R)
        alone = _rows_without(runs, len(slots_R))
        both = self.grammars.refused(slots_R[alone], token_R[alone])
        refused, failed = (alone[i] for i in both)
        if len(refused):
            token_R[refused] = self.draw(
                logits_TV, picked_R[refused], slots_R[refused], ends_R[refused]
            )
        token_R[failed] = GRAMMAR_ERROR
        for slot, begin, end in runs:
            rows = picked_R[begin:end], slots_R[begin:end], ends_R[begin:end]
            draw = partial(self._draw_one, logits_TV, *rows, self.grammars.is_plain(slot))
            self.grammars.follow(slot, int(ends_R[begin]), token_R[begin:end], draw)

    def _draw_one(
        self,
        logits_TV: Tensor,
        picked_K: np.ndarray,
        slots_K: np.ndarray,
        ends_K: np.ndarray,
        is_plain: bool,
        index: int,
    ) -> int:
        """Sample one row with its slot's grammar mask."""
        row = picked_K[index : index + 1], slots_K[index : index + 1], ends_K[index : index + 1]
        picked, slots, ends = row
        if not is_plain and self._penalties.apply(logits_TV, slots, ends, picked):
            return NOT_FINITE
        return int(self.draw(logits_TV, picked, slots, ends)[0])

    def sample(
        self,
        logits_TV: Tensor,
        slots_R: np.ndarray,
        ends_R: np.ndarray,
        picked_R: np.ndarray | None = None,
    ) -> Sampled:
        """Sample one token for each slot and write it into the slot. The logits are overwritten.

        Args:
            logits_TV: raw logits, float32.
            slots_R: the request slots.
            ends_R: the position of each token to be sampled: the number of tokens before it.
            picked_R: the row of logits of each slot; by default row r for the r-th slot.
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
        later = [run for run in self._runs(slots_R) if not self.grammars.is_plain(run.slot)]
        # The rows in `later` are edited and sampled one after another.
        rows = _rows_without(later, len(slots_R))
        now = slots_R[rows], ends_R[rows], picked_R[rows]
        spoiled = self._penalties.apply(logits_TV, *now)
        token_R = np.full(len(slots_R), NOTHING_LEFT)
        token_R[rows] = self.draw(logits_TV, picked_R[rows], slots_R[rows], ends_R[rows])
        token_R[rows[spoiled]] = NOT_FINITE
        token_ids = self.settled(logits_TV, picked_R, slots_R, ends_R, token_R)
        logprobs: list[TokenLogprobs | None] = [None] * len(token_ids) if raw else []
        for i, raw_V in raw.items():
            s = self._wishes[int(slots_R[i])]
            if token_ids[i] >= 0:
                logprobs[i] = token_logprobs(
                    raw_V, token_ids[i], s.logprobs or 0, s.logprob_token_ids
                )
        return Sampled(token_ids, logprobs)


class _Run(NamedTuple):
    """The rows of a slot with drafts and a grammar."""

    slot: int
    begin: int
    end: int


def _rows_without(runs: Sequence[_Run], num_rows: int) -> np.ndarray:
    """Return the indices of all rows outside of the runs."""
    rows = np.arange(num_rows)
    return np.delete(rows, [i for run in runs for i in range(run.begin, run.end)]) if runs else rows


def token_logprobs(
    logprobs_V: Tensor, token_id: int, num_top: int, token_ids: Sequence[int] = ()
) -> TokenLogprobs:
    """Return the logprobs of a token and of alternatives: the token first, the others by falling logprob.

    Args:
        num_top: how many of the most likely tokens to include, or -1 for all.
        token_ids: if given, exactly these tokens are included instead.
    """
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
    spans: Iterable[PromptSpan],
    hidden_TE: Tensor,
    logits: Callable[[Tensor, int], Tensor],
    *,
    keeps: bool = True,
) -> tuple[tuple[int, tuple[TokenLogprobs, ...]], ...]:
    """Compute the logprobs of the prompt tokens that follow the positions of a step, as (entry, positions).

    Args:
        spans: prompt tokens with requested logprobs.
        hidden_TE: the hidden states of all tokens of the step.
        logits: computes logits in float32 from hidden states and the index of the sequence's first token in the step.
        keeps: whether this rank samples. Other ranks only compute their part of the logits, and get an empty result.
    """
    found: list[tuple[int, tuple[TokenLogprobs, ...]]] = []
    for span in spans:
        hidden = hidden_TE.narrow(0, span.first_token, len(span.token_ids))
        following = iter(span.token_ids.tolist())
        logprobs: list[TokenLogprobs] = []
        for first in range(0, len(hidden), LOGITS_AT_ONCE):
            logits_TV = logits(hidden[first : first + LOGITS_AT_ONCE], span.first_token)
            if keeps:
                logprobs += [
                    token_logprobs(logprobs_V, next(following), span.num_top)
                    for logprobs_V in logits_TV.log_softmax(-1)
                ]
        if keeps:
            found.append((span.entry, tuple(logprobs)))
    return tuple(found)
