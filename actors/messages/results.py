"""What plans yielded: from the executor to the scheduler."""

import msgspec
import numpy as np


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Candidates of one position: the sampled (or prompt) token first, then by falling logprob."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int  # of the first: the number of tokens at least as probable, ≥ 1


NO_VALID_TOKEN = -2


class StepDone(msgspec.Struct, frozen=True):
    """Executor → Scheduler: what a plan yielded, column by column.

    `token_ids[i]` is -1 where the plan needed no sample or the row failed, NO_VALID_TOKEN where every token
    is forbidden.  `failed` names columns without a token: these sequences end, nobody else notices.
    """

    step: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()  # per column; empty when nobody asked
    prompt_logprobs: tuple[tuple[int, tuple[TokenLogprobs, ...]], ...] = ()  # (column, positions)
    failed: tuple[int, ...] = ()


class PoolDone(msgspec.Struct, frozen=True):
    """Executor → Scheduler: the raw results of a `PoolPlan`, entry by entry, in float32.

    An embedding is [size], logits are [labels]; token tasks have one row for each token.
    """

    step: int
    arrays: tuple[np.ndarray, ...]


class StepFailed(msgspec.Struct, frozen=True):
    """Executor → Scheduler: this plan raised, or followed one that did; none of its results count."""

    step: int
    message: str
    is_out_of_memory: bool = False  # a smaller step may pass
