"""Work for the device: from the scheduler to the executor."""

import msgspec

from trouper.actors.messages.embeds import Embeds
from trouper.actors.messages.identifiers import SequenceId

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
    """A sequence takes a device row: for the first time, or again after a preemption."""

    row: int
    sequence: SequenceId
    token_ids: tuple[int, ...]  # prompt, then what has been generated so far
    num_prompt: int
    block_ids: tuple[int, ...]
    sampling: Sampling
    embeds: tuple[Embeds, ...] = ()  # as in `Admit`


class StepPlan(msgspec.Struct, frozen=True):
    """Scheduler → Executor: the work of one forward pass.

    Plans run in order, so a row or block that one plan frees may be given away by the next: the
    earlier step's writes land first.  Column i of `rows`, `starts`, `counts` and `needs_sample` is one
    sequence: positions starts[i] … starts[i] + counts[i] - 1 are computed.  A token id that the plan's
    maker does not know yet (a step in flight samples it) is already in the row on the device.
    """

    step: int
    epoch: int  # counts failed steps: after a failure, plans of the old epoch are refused unrun
    rows: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    needs_sample: tuple[bool, ...]  # False: a chunk whose sample nobody needs
    new_rows: tuple[NewSequence, ...] = ()
    new_blocks: tuple[
        tuple[int, tuple[int, ...]], ...
    ] = ()  # (row, ids appended to its block table)
    copies: tuple[tuple[int, int], ...] = ()  # (from block, to block), before anything is computed


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
    columns: tuple[PoolEntry, ...]
