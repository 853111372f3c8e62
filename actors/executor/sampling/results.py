"""From the sampled tokens of a step to its `StepDone`; shared by all devices that compute."""

from collections.abc import Sequence

from trouper.actors.executor.sampling.grammar import GRAMMAR_ERROR
from trouper.actors.messages.plans import StepPlan
from trouper.actors.messages.results import EntryFailure, StepDone, TokenLogprobs
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
        token_ids = tuple(
            (token,) if num and token >= 0 else ()
            for token, num in zip(sampled, wanted, strict=True)
        )
        failed = tuple(
            (entry, FAILURES[token])
            for entry, (token, num) in enumerate(zip(sampled, wanted, strict=True))
            if num and token < 0
        )
    return StepDone(plan.step, token_ids, tuple(logprobs), prompt_logprobs, failed)
