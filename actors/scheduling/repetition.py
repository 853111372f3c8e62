"""Detection of an output that repeats itself.  Pure."""

from collections.abc import Sequence

from trouper.params import RepetitionDetectionParams


def is_repeating(tokens: Sequence[int], rule: RepetitionDetectionParams) -> bool:
    """Whether the tail is one pattern of `min_pattern_size` … `max_pattern_size` tokens, `min_count` times.

    Called after every token.  A tail has a period when it equals itself shifted by that period, so the last
    token decides most sizes at once; the others cost two slices.
    """
    num_tokens = len(tokens)
    for size in range(max(1, rule.min_pattern_size), rule.max_pattern_size + 1):
        begin = num_tokens - size * rule.min_count
        if begin < 0:
            return False  # longer patterns need even more tokens
        if tokens[-1] == tokens[-1 - size] and tokens[begin:-size] == tokens[begin + size :]:
            return True
    return False
