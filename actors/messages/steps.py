"""Work for the device: from the scheduler to the executor.

Results of plans, which the executor sends to the scheduler.
"""

from typing import Literal

import msgspec
import numpy as np

from trouper.actors.messages.requests import Embeds, Grammar, GrammarReady, GrammarWork, SequenceId

MAX_REPETITION = 1e30  # what is beyond can be told from this by no draw


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """The device's share of the sampling parameters of one sequence."""

    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # ≤ 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # 64 bits, never None: the noise is a function of (seed, position, token)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()  # empty = all
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()  # masked until min_tokens outputs exist
    logprobs: int | None = None  # -1 = whole vocabulary
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()

    @property
    def repetition(self) -> float:
        """The repetition penalty, within what float32 holds and leaves logits finite."""
        return min(max(self.repetition_penalty, 1 / MAX_REPETITION), MAX_REPETITION)


class NewSequence(msgspec.Struct, frozen=True):
    """A sequence that takes a request slot: for the first time, or again after a preemption."""

    request_slot: int
    sequence: SequenceId
    token_ids: tuple[int, ...]  # prompt, then what has been generated so far
    num_prompt: int
    block_ids: tuple[int, ...]
    sampling: Sampling
    embeds: tuple[Embeds, ...] = ()  # as in `Admit`
    grammar: Grammar | None = None
    adapter_slot: int = 0  # on the device; 0 = none
    family: str = ""  # of those that may see each other's answers in their drafts


class StepPlan(msgspec.Struct, frozen=True):
    """Scheduler → Executor: the work of one forward pass.

    Entry i of the four tuples is one sequence: the sequence in `request_slots[i]` has
    `num_computed_tokens[i]` positions in the KV cache, the next `num_scheduled_tokens[i]` are computed,
    and then `num_sampled_tokens[i]` are sampled.  Plans run in order, so a slot or block that one plan
    frees may be given away by the next: the earlier step's writes come first.  A token id that the
    scheduler does not know yet, because a step in flight samples it, is in the slot on the device already.
    """

    step: int
    epoch: int  # counts failed steps: after a failure, plans of the old epoch are refused unrun
    request_slots: tuple[int, ...]
    num_computed_tokens: tuple[int, ...]
    num_scheduled_tokens: tuple[int, ...]
    num_sampled_tokens: tuple[int, ...]  # 0: a chunk of a prompt, which ends before the last token
    new_sequences: tuple[NewSequence, ...] = ()
    new_blocks: tuple[tuple[int, tuple[int, ...]], ...] = ()  # (slot, ids appended to its table)
    copies: tuple[tuple[int, int], ...] = ()  # (from block, to block), before anything is computed
    reads: int = 0  # the newest step whose samples are inputs of this one; 0: all are known
    # Drafts that the device may compute behind entry i, for which there are blocks; a draft that is what is sampled in its
    # place makes for one token more.  Empty: none.
    num_lookahead_tokens: tuple[int, ...] = ()
    # Tokens by which drafts of steps in flight may take entry i further than `num_computed_tokens` says: the device knows by how
    # many they do, and begins there.  There are blocks for all of them.  Empty: none.
    num_unknown_tokens: tuple[int, ...] = ()


class PoolEntry(msgspec.Struct, frozen=True):
    """One whole prompt of a `PoolPlan`."""

    token_ids: tuple[int, ...]
    token_type_ids: tuple[int, ...] | None
    task: str
    num_keys: int | None = None  # as in `AdmitPooling`


class PoolPlan(msgspec.Struct, frozen=True):
    """Scheduler → Executor: whole prompts for one forward pass without a cache, the shortest first."""

    step: int
    epoch: int
    entries: tuple[PoolEntry, ...]


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
