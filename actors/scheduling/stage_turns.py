"""Decide which running sequences a plan for a pipeline of stages may take.

All rows in one step would keep one stage busy and leave the others idle.  So each plan takes its share of the
sequences that decode, those first that have sampled longest ago, and one with a sample in flight only when its token
will have come by the time that the plan is run.  Prompts are not held back: no token of theirs is waited for.
"""

from trouper.actors.scheduling.sequences import Sequence
from trouper.actors.stages import decode_quota, is_due

MAX_EARLY = 2  # samples in flight of a sequence that decodes before its token is due


def take_turns(
    sequences: list[Sequence], step: int, num_stages: int, *, is_early: bool = False
) -> list[Sequence]:
    """Return those that step `step` may take, in their order.

    Args:
        is_early: whether nothing else is runnable, so a sequence may be planned once before its token is due.
    """
    decoding = [s for s in sequences if _decodes(s)]
    due = [
        s
        for s in decoding
        if s.num_in_flight == 0
        or is_due(step - 1 - s.sampling_step, num_stages)
        or (is_early and s.num_in_flight < MAX_EARLY)
    ]
    due.sort(key=lambda s: s.sampling_step)
    chosen = {s.id for s in due[: decode_quota(len(decoding), num_stages)]}
    return [s for s in sequences if s.id in chosen or s.num_computed < s.num_prompt]


def _decodes(sequence: Sequence) -> bool:
    """Whether it is past its prompt and does not end with what is in flight."""
    known = sequence.num_tokens + sequence.num_in_flight
    return sequence.num_computed >= sequence.num_prompt and known < sequence.limit
