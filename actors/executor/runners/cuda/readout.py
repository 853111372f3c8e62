"""Fill the masks of grammars before a GPU step samples, and copy its tokens and logprobs to the host afterwards.

A mask depends on the token before, which a step in flight may still be sampling. A step with such a request is therefore
launched only after the tokens of earlier steps have arrived on the host. Other steps do not wait.

The device computes logprobs if a request wants the best n ≤ 128. If it wants all of them or those of certain tokens, the
host computes them from the whole row of logits.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from trouper.actors.executor.device import PendingResult
from trouper.actors.executor.runners.cuda.machine import Machine
from trouper.actors.executor.runners.cuda.step_inputs import Changes, Layout, allowed_bits
from trouper.actors.executor.sampling.grammar import GRAMMAR_ERROR, GrammarMasks
from trouper.actors.executor.sampling.sampler import (
    make_step_done,
    token_logprobs,
    with_grammar_work,
)
from trouper.actors.executor.steps.batch import from_numpy
from trouper.actors.executor.steps.request_slots import RequestSlots
from trouper.actors.messages.requests import GrammarWork
from trouper.actors.messages.steps import NewSequence, Sampling, StepDone, StepPlan, TokenLogprobs
from trouper.kernels.cuda.sample import top_logprobs

# The most logprobs that the kernel returns.
MAX_TOP = 128

# Everything that a step copied to the host, its tokens first.
Arrays = list[np.ndarray]
Reader = Callable[[Arrays], TokenLogprobs]


class Readout:
    """Collects the results of one step; `download` begins to copy them to the host.

    The next step overwrites the tensors of a captured step, so results are copied on the device first.
    """

    def __init__(
        self,
        plan: StepPlan,
        sampled_C: Tensor,
        broken: tuple[int, ...] = (),
        grammar: GrammarWork | None = None,
    ) -> None:
        self._plan = plan
        self._grammar = grammar
        # The entries with a failed grammar.
        self._broken = list(broken)
        self._sampled_C = sampled_C
        self._tensors: list[Tensor] = [sampled_C.clone()]
        # By entry.
        self._samples: dict[int, Reader] = {}
        self._prompts: dict[int, list[Reader]] = {}

    def add_samples(self, logits_CV: Tensor, wishes: Sequence[Sampling]) -> None:
        """Add the logprobs that sampling entries asked for. `wishes` contains the parameters of all entries."""
        wanted = {
            entry: s
            for entry, (s, samples) in enumerate(
                zip(wishes, self._plan.num_sampled_tokens, strict=True)
            )
            if samples and (s.logprobs is not None or s.logprob_token_ids)
        }
        best = {c: s.logprobs or 0 for c, s in wanted.items() if not s.logprob_token_ids}
        best = {entry: num_top for entry, num_top in best.items() if 0 <= num_top <= MAX_TOP}
        first = 0
        if best:
            first = self._add_best(logits_CV, self._sampled_C, max(best.values()))
        for entry, s in wanted.items():
            if entry in best:
                self._samples[entry] = _best_reader(first, entry, best[entry])
            else:
                at = self._add(logits_CV[entry].to(torch.float32, copy=True))
                self._samples[entry] = _sample_reader(at, entry, s)

    def add_prompt(
        self,
        entry: int,
        logits_RV: Tensor,
        following: np.ndarray,
        following_R: Tensor,
        num_top: int,
    ) -> None:
        """Add the logprobs of R prompt tokens of an entry, given their ids on the host and on the device."""
        readers = self._prompts.setdefault(entry, [])
        if 0 <= num_top <= MAX_TOP:
            first = self._add_best(logits_RV, following_R, num_top)
            readers += [_best_reader(first, row, num_top) for row in range(len(following))]
        else:
            first = self._add(logits_RV.float())
            readers += [
                _prompt_reader(first, row, int(token), num_top)
                for row, token in enumerate(following)
            ]

    def download(self, machine: Machine) -> PendingResult[StepDone]:
        """Begin to copy all added results to the host. The result is the answer to the plan."""
        copies = machine.download(self._tensors)
        return PendingResult(copies.is_ready, lambda: self._done(copies.finish()))

    def _add(self, *tensors: Tensor) -> int:
        self._tensors += tensors
        return len(self._tensors) - len(tensors)

    def _add_best(self, logits_RV: Tensor, ids_R: Tensor, num_top: int) -> int:
        return self._add(*top_logprobs(logits_RV, ids_R, min(num_top, logits_RV.shape[1])))

    def _done(self, arrays: Arrays) -> StepDone:
        plan = self._plan
        token_ids = arrays[0][: len(plan.request_slots)]
        if self._broken:
            token_ids = token_ids.copy()
            token_ids[self._broken] = GRAMMAR_ERROR
        logprobs: list[tuple[TokenLogprobs, ...]] = []
        if self._samples:
            logprobs = [()] * len(plan.request_slots)
        for entry, read in self._samples.items():
            if token_ids[entry] >= 0:
                logprobs[entry] = (read(arrays),)
        prompt_logprobs = tuple(
            (entry, tuple(read(arrays) for read in readers))
            for entry, readers in self._prompts.items()
        )
        done = make_step_done(plan, token_ids.tolist(), logprobs, prompt_logprobs)
        return with_grammar_work(done, self._grammar)


def _best_reader(first: int, row: int, num_top: int) -> Reader:
    """Read the logprobs of a token and of the best others from the three arrays of `top_logprobs`."""

    def read(arrays: Arrays) -> TokenLogprobs:
        ids, logprobs = (a[row][: 1 + num_top].tolist() for a in arrays[first : first + 2])
        kept = [0, *(i for i in range(1, len(ids)) if ids[i] != ids[0])]
        rank = int(arrays[first + 2][row])
        return TokenLogprobs(tuple(ids[i] for i in kept), tuple(logprobs[i] for i in kept), rank)

    return read


def _sample_reader(at: int, entry: int, s: Sampling) -> Reader:
    def read(arrays: Arrays) -> TokenLogprobs:
        logprobs_V = from_numpy(arrays[at]).log_softmax(-1)
        token = int(arrays[0][entry])
        return token_logprobs(logprobs_V, token, s.logprobs or 0, s.logprob_token_ids)

    return read


def _prompt_reader(at: int, row: int, token: int, num_top: int) -> Reader:
    def read(arrays: Arrays) -> TokenLogprobs:
        return token_logprobs(from_numpy(arrays[at][row]).log_softmax(-1), token, num_top)

    return read


class DeviceMasks:
    """Follows the outputs of slots with a grammar, and writes the masks of their next tokens."""

    def __init__(self, slots: RequestSlots, layout: Layout) -> None:
        self._slots, self._layout = slots, layout
        self._masks = GrammarMasks(slots)
        # Launched steps that sample for a grammar and have unread tokens. There are at most max_steps_in_flight of them,
        # because the next such step reads them all.
        self._unread: deque[tuple[StepPlan, Callable[[], StepDone]]] = deque()

    def place(self, new: NewSequence) -> None:
        """Store the grammar of the sequence that took its slot.

        A sequence without a grammar removes that of its predecessor.
        """
        self._masks.place(new.request_slot, new.grammar)

    def clear(self) -> None:
        """Forget all matchers and all unread steps.

        The scheduler sends the sequences again, so their matchers are made anew.
        """
        self._masks.clear()
        self._unread.clear()

    def catch_up(self, plan: StepPlan) -> None:
        """Read the tokens of earlier steps if this plan needs them.

        Must be called before its new sequences take their slots. A matcher must have all tokens before the next mask.
        """
        if plan.new_sequences or self.any_in(plan):
            self._read()

    def any_in(self, plan: StepPlan) -> bool:
        """Whether a sequence of the plan has a grammar."""
        return self._masks.any_in(plan.request_slots)

    def take_work(self) -> GrammarWork | None:
        """Return the work that `changes` did since the last call, or None if there was none."""
        return self._masks.take_work()

    def changes(self, plan: StepPlan) -> tuple[Changes, tuple[int, ...]]:
        """Fill the masks for a step. The tokens of earlier steps must have been read.

        Returns:
            The changes to write after those of the plan's new sequences, and the entries with a failed grammar.
        """
        changes = Changes(self._layout)
        entries = [
            entry
            for entry, (slot, num) in enumerate(
                zip(plan.request_slots, plan.num_sampled_tokens, strict=True)
            )
            if num and self._masks.any_in((slot,))
        ]
        slots = [plan.request_slots[entry] for entry in entries]
        ends = [plan.num_computed_tokens[e] + plan.num_scheduled_tokens[e] for e in entries]
        broken = self._masks.fill(np.array(slots, dtype=np.int64), np.array(ends, dtype=np.int64))
        num_words = -(-self._layout.vocab_size // 32)
        for slot in slots:
            words, s = self._masks.words(slot)[:num_words], self._slots.sampling[slot]
            if s.allowed_token_ids:
                words = words & allowed_bits(s.allowed_token_ids, self._layout.vocab_size)
            changes.put("mask", slot, words.copy())
            if self._masks.can_only_end(slot):
                changes.lift_min_tokens(slot, s, int(self._slots.num_prompt[slot]))
        return changes, tuple(entries[i] for i in broken)

    def follow(self, plan: StepPlan, result: PendingResult[StepDone]) -> PendingResult[StepDone]:
        """Remember a launched step that sampled for a grammar. Its result is read from the device only once."""
        finish = cache(result.finish)
        self._unread.append((plan, finish))
        return result._replace(finish=finish)

    def _read(self) -> None:
        while self._unread:
            plan, finish = self._unread.popleft()
            for entry, tokens in enumerate(finish().token_ids):
                if tokens:
                    end = plan.num_computed_tokens[entry] + plan.num_scheduled_tokens[entry]
                    self._slots.token_ids[plan.request_slots[entry], end] = tokens[0]
