"""Results of plans, which the executor sends to the scheduler."""

from typing import Literal

import msgspec
import numpy as np

from trouper.actors.messages.grammar import GrammarReady, GrammarWork


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Candidates of one position: the sampled (or prompt) token first, then by falling logprob."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int  # of the first: the number of tokens at least as probable, ≥ 1


# Logits; a request that forbids every token; a grammar that is too complex to follow.
EntryFailure = Literal["not_finite", "no_valid_token", "grammar_error"]


class StepDone(msgspec.Struct, frozen=True):
    """Executor → Scheduler: what a plan yielded, entry by entry.

    `token_ids[i]` are the tokens sampled for entry i: none where the plan wanted none or the entry failed, and one more
    for each of its drafts that was right.
    The sequences of `failed` entries end; the others do not notice.
    """

    step: int
    token_ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()  # of each token; empty: no entry wants any
    prompt_logprobs: tuple[tuple[int, tuple[TokenLogprobs, ...]], ...] = ()  # (entry, positions)
    failed: tuple[tuple[int, EntryFailure], ...] = ()  # (entry, reason)
    num_draft_tokens: tuple[int, ...] = ()  # verified for each entry; empty: none
    grammar: GrammarWork | None = None  # None: no entry has a grammar
    seconds: float = 0.0  # from when it was the eldest plan to its answer; 0: not measured


class PoolDone(msgspec.Struct, frozen=True):
    """Executor → Scheduler: the raw results of a `PoolPlan`, entry by entry, in float32.

    An embedding is [size], logits are [labels]; token tasks have one row for each token.
    """

    step: int
    arrays: tuple[np.ndarray, ...]
    seconds: float = 0.0  # as of a `StepDone`


class StepFailed(msgspec.Struct, frozen=True):
    """Executor → Scheduler: this plan raised, or followed one that did; none of its results count."""

    step: int
    message: str
    is_out_of_memory: bool = False  # a smaller step may pass


# A step past its deadline; the kernel's kill for memory; a signal; an exit; its own last message; a closed connection.
LossCause = Literal["hang", "out_of_memory", "signal", "exit", "error", "closed"]


class DeviceLost(msgspec.Struct, frozen=True):
    """Executor → Scheduler → Observer: the device died with all plans that were not answered, and with its KV cache.

    It is being started again; until `DeviceBack` no plan may be sent.
    """

    message: str  # the cause, in one line
    step: int | None = None  # the eldest plan without an answer; None: there was none
    is_from_outside: bool = False  # no request can have caused it
    cause: LossCause = "error"


class ReplicaEvent(msgspec.Struct, frozen=True):
    """Executor → Scheduler → Observer: what the device of one of several replicas says."""

    replica: int
    event: (
        "StepDone | PoolDone | StepFailed | GrammarReady | DeviceLost | DeviceBack | DeviceFailed"
    )


class DeviceBack(msgspec.Struct, frozen=True):
    """Executor → Scheduler → Observer: the device has been loaded again and takes plans."""

    pause_s: float  # since it was lost


class DeviceFailed(msgspec.Struct, frozen=True):
    """Executor → Scheduler: the device of one of several replicas, lost before, is not started again."""

    message: str  # the cause, in one line
