"""From the sampled tokens of a step to its `StepDone`; shared by all devices that compute."""

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
PromptLogprobs = tuple[tuple[int, tuple[TokenLogprobs, ...]], ...]  # (entry, positions)


def make_step_done(
    plan: StepPlan,
    sampled: list[int],
    logprobs: Sequence[tuple[TokenLogprobs, ...]] = (),
    prompt_logprobs: PromptLogprobs = (),
) -> StepDone:
    """Make the answer to `plan`.

    Args:
        sampled: one number per entry: the token, NOT_FINITE, NOTHING_LEFT or GRAMMAR_ERROR; without meaning where the
            plan samples none.
        logprobs: per entry; empty when no entry wants any.
    """
    wanted = plan.num_sampled_tokens
    failed: tuple[tuple[int, EntryFailure], ...] = ()
    if 0 not in wanted and min(sampled) >= 0:  # most steps: every entry has its token
        token_ids = tuple(zip(sampled))  # tuples of one, made without a loop
    else:
        runs = [(token,) if num else () for token, num in zip(sampled, wanted, strict=True)]
        token_ids, failed = entry_failures(runs)
    return StepDone(plan.step, token_ids, tuple(logprobs), prompt_logprobs, failed)


def with_grammar_work(done: StepDone, work: GrammarWork | None) -> StepDone:
    """Add what the step did for its grammars, if it had any."""
    return done if work is None else msgspec.structs.replace(done, grammar=work)


def entry_failures(
    runs: Sequence[tuple[int, ...]],
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, EntryFailure], ...]]:
    """Split what was drawn into the tokens of each entry, and the entries that failed at their first.

    One that fails at a later token keeps those before it: the next step meets the failure again.
    """
    failed: tuple[tuple[int, EntryFailure], ...] = tuple(
        (entry, FAILURES[run[0]]) for entry, run in enumerate(runs) if run and run[0] < 0
    )
    return tuple(run if not run or min(run) >= 0 else _until_failure(run) for run in runs), failed


def _until_failure(run: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(takewhile(lambda token: token >= 0, run))
