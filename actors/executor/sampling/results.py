"""Make the answer to a plan, a `StepDone`, from the sampled tokens of its step; all runners share this."""

from collections.abc import Sequence
from itertools import takewhile

import msgspec

from trouper.actors.executor.sampling.grammar import GRAMMAR_ERROR
from trouper.actors.messages.requests import GrammarWork
from trouper.actors.messages.steps import EntryFailure, StepDone, StepPlan, TokenLogprobs
from trouper.kernels.cpu.sampling.row_layout import NOT_FINITE, NOTHING_LEFT

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
