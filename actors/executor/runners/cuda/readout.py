"""Copy the results of a step to the host: its tokens, and the logprobs that requests asked for.

The device computes logprobs if a request wants the best n ≤ 128. If it wants all of them or those of certain tokens, the
host computes them from the whole row of logits.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from trouper.actors.executor.device import PendingResult
from trouper.actors.executor.runners.cuda.machine import Machine
from trouper.actors.executor.sampling.grammar import GRAMMAR_ERROR
from trouper.actors.executor.sampling.sampler import (
    make_step_done,
    token_logprobs,
    with_grammar_work,
)
from trouper.actors.executor.steps.batch import from_numpy
from trouper.actors.messages.requests import GrammarWork
from trouper.actors.messages.steps import Sampling, StepDone, StepPlan, TokenLogprobs
from trouper.kernels.cuda.sampling.logprobs import top_logprobs

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
