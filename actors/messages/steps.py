"""Steps of the device: plans from the scheduler to the executor, and their results on the way back.

A plan names everything by number (request slots, KV blocks, positions), so it is small and can cross to another process.
Every plan gets exactly one answer, in the order of the plans, unless the device is lost: then `DeviceLost` answers all of them.
"""

from typing import Literal

import msgspec
import numpy as np

from trouper.actors.messages.media import MediaItem
from trouper.actors.messages.requests import Embeds, Grammar, GrammarReady, GrammarWork, SequenceId
from trouper.sampling_fields import DeviceFields

# Larger repetition penalties are clamped to this, because they would not change any sample.
MAX_REPETITION = 1e30
# A position beyond all tokens.
NEVER = 2**31


class Sampling(DeviceFields, frozen=True, kw_only=True):  # pyright: ignore[reportGeneralTypeIssues]  # msgspec allows it
    """The sampling parameters of one sequence that the device applies.  Stop strings, for example, are not among them."""

    # 0 is greedy.
    temperature: float = 1.0
    # 64 bits, never None: the noise is a function of (seed, position, token).
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    # Empty allows all tokens.
    allowed_token_ids: tuple[int, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    # Masked until the output has `min_tokens` tokens.
    stop_ids: tuple[int, ...] = ()
    logprob_token_ids: tuple[int, ...] = ()

    @property
    def repetition(self) -> float:
        """Return the repetition penalty, clamped to a range of float32 in which logits stay finite.

        A factor of 0 or infinity would turn logits into NaN.
        """
        return min(max(self.repetition_penalty, 1 / MAX_REPETITION), MAX_REPETITION)


class NewSequence(msgspec.Struct, frozen=True):
    """A sequence that takes a request slot: for the first time, or again after a preemption.

    The device stores it under its request slot, so later plans contain only numbers.
    """

    request_slot: int
    sequence: SequenceId
    # The prompt, then the output so far.
    token_ids: tuple[int, ...]
    num_prompt: int
    block_ids: tuple[int, ...]
    sampling: Sampling
    embeds: tuple[Embeds, ...] = ()
    # Images with unread rows.
    media: tuple[MediaItem, ...] = ()
    # For models with three-dimensional positions: of each image the position of its first row, its time, height and width.
    grids: tuple[tuple[int, int, int, int], ...] = ()
    # Ranges (begin, end) of prompt tokens with bidirectional attention.  One plan always computes a range as a whole.
    spans: tuple[tuple[int, int], ...] = ()
    grammar: Grammar | None = None
    # 0 means no adapter.
    adapter_slot: int = 0
    # Drafts may be copied from the answers of sequences with the same value.
    family: str = ""
    # The row whose recurrent state is restored to the slot first.  -1 restores nothing: at position 0 the old state of the slot is
    # ignored, and at other positions the slot already contains the sequence's state.
    state_row: int = -1


class StepPlan(msgspec.Struct, frozen=True):
    """Scheduler → Executor: the work of one forward pass.

    Entry i of the four tuples is one sequence: the sequence in `request_slots[i]` has `num_computed_tokens[i]` positions in
    the KV cache, the step computes the next `num_scheduled_tokens[i]`, and then samples `num_sampled_tokens[i]` tokens.
    Plans run in order, so a plan may reuse a slot or a KV block that the plan before it has freed.  The scheduler does not know
    a token id that a step in flight samples; the device finds it in the slot.
    """

    step: int
    # Counts failures.  After a failure the device refuses plans of the old epoch.
    epoch: int
    request_slots: tuple[int, ...]
    num_computed_tokens: tuple[int, ...]
    num_scheduled_tokens: tuple[int, ...]
    # 0 for a chunk that ends before the last token of its prompt.
    num_sampled_tokens: tuple[int, ...]
    new_sequences: tuple[NewSequence, ...] = ()
    # Slots, and the block ids appended to their block tables.
    new_blocks: tuple[tuple[int, tuple[int, ...]], ...] = ()
    # Copies from block to block, made before anything is computed.
    copies: tuple[tuple[int, int], ...] = ()
    # The newest step with samples that this step reads.  0 if the scheduler knows all inputs.
    reads: int = 0
    # Maximum drafts to verify after each entry.  Their KV blocks are allocated.  Each draft that equals the token sampled at its
    # position yields one more token.  Empty means no drafts.
    num_lookahead_tokens: tuple[int, ...] = ()
    # Maximum tokens by which accepted drafts in flight may advance each entry beyond `num_computed_tokens`.  Only the device knows the
    # exact number, from which it continues.  Their KV blocks are allocated.  Empty means no drafts in flight.
    num_unknown_tokens: tuple[int, ...] = ()
    # Snapshots of recurrent states to save: the slot to copy from, the row to copy to, and the position, which is inside the tokens of
    # this step or at their end.
    saves: tuple[tuple[int, int, int], ...] = ()
    # Slots whose images are encoded before this step, in order, and the time limit for this.  These slots need no entry in the step.
    encodes: tuple[int, ...] = ()
    encode_s: float = 0.0


class PoolEntry(msgspec.Struct, frozen=True):
    """One whole prompt of a `PoolPlan`.

    Pooling has no KV cache, so one step computes the whole prompt.
    """

    token_ids: tuple[int, ...]
    token_type_ids: tuple[int, ...] | None
    task: str
    num_keys: int | None = None
    # Images, whose rows replace the embeddings of tokens.
    media: tuple[MediaItem, ...] = ()


class PoolPlan(msgspec.Struct, frozen=True):
    """Scheduler → Executor: whole prompts for one forward pass without a cache, the shortest first.

    Sorting by length lets the device split the batch into groups of similar length, which need less padding.
    """

    step: int
    epoch: int
    entries: tuple[PoolEntry, ...]


class TokenLogprobs(msgspec.Struct, frozen=True):
    """The candidates at one position: the sampled (or prompt) token first, then the others by falling logprob.

    Logprobs are those of the model, before temperature and truncation.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    # The number of tokens at least as probable as the first candidate: ≥ 1.
    rank: int


# The logits are not finite; the request forbids every token; the grammar is too complex to follow.
EntryFailure = Literal["not_finite", "no_valid_token", "grammar_error"]


class StepDone(msgspec.Struct, frozen=True):
    """Executor → Scheduler: the results of a plan, entry by entry.

    `token_ids[i]` are the tokens sampled for entry i.  They are empty if the plan asks for none or the entry failed; each accepted
    draft adds one.  The sequences of `failed` entries end, and no other sequence is affected.
    """

    step: int
    token_ids: tuple[tuple[int, ...], ...]
    # For each sampled token.  Empty if no entry asks for logprobs.
    logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    # Entries and their prompt positions.
    prompt_logprobs: tuple[tuple[int, tuple[TokenLogprobs, ...]], ...] = ()
    # Entries and the reasons of their failure.
    failed: tuple[tuple[int, EntryFailure], ...] = ()
    # Drafts verified for each entry.  Empty without drafts.
    num_draft_tokens: tuple[int, ...] = ()
    # None if no entry has a grammar.
    grammar: GrammarWork | None = None
    # The time from when this became the oldest unanswered plan to its answer.  0 if the device does not measure it.
    seconds: float = 0.0
    # For each of the plan's `encodes`: the position of the first image row that is not encoded yet.  Steps may be planned up to it.
    encoded: tuple[int, ...] = ()


class PoolDone(msgspec.Struct, frozen=True):
    """Executor → Scheduler: the raw results of a `PoolPlan`, entry by entry, in float32.

    Shapes: an embedding is [size], logits are [labels], and token tasks have one row for each token.
    """

    step: int
    arrays: tuple[np.ndarray, ...]
    # As in `StepDone`.
    seconds: float = 0.0


class StepFailed(msgspec.Struct, frozen=True):
    """Executor → Scheduler: this plan raised, or was refused because an earlier plan raised.  It has no results.

    The scheduler rolls back its sequences, and searches for the one that causes the failure.
    """

    step: int
    message: str
    # Whether the device ran out of memory, so that a smaller step may succeed.
    is_out_of_memory: bool = False


# In this order: a step missed its deadline; the kernel's OOM killer; another signal; an exit; an error that the process reported before
# it ended; a closed connection.
LossCause = Literal["hang", "out_of_memory", "signal", "exit", "error", "closed"]


class DeviceLost(msgspec.Struct, frozen=True):
    """Executor → Scheduler → Observer: the device died.  All unanswered plans are lost.

    The executor restarts it.  The scheduler must not send a plan before `DeviceBack`.
    """

    # The cause in one line.
    message: str
    # The oldest unanswered plan.  None if the device was idle.
    step: int | None = None
    # Whether no request can be the cause, for example if an operator killed the process.
    is_from_outside: bool = False
    cause: LossCause = "error"


class ReplicaEvent(msgspec.Struct, frozen=True):
    """Executor → Scheduler → Observer: an event of one device, labelled with its replica.  Used if there are several replicas."""

    replica: int
    event: "StepDone | PoolDone | StepFailed | GrammarReady | TierAnswer | DeviceLost | DeviceBack | DeviceFailed"


# The last byte of the name of a recurrent state.  The bytes before it are the name of the block after which the state was saved.
STATE_KIND = b"\xff"


def state_of(name: bytes) -> bytes:
    """Return the name of the recurrent state after a block."""
    return name + STATE_KIND


def is_state(name: bytes) -> bool:
    """Whether this is the name of a recurrent state instead of a block."""
    return len(name) > 32 and name.endswith(STATE_KIND)


class TierOrder(msgspec.Struct, frozen=True):
    """Scheduler → Executor: an order to the KV tier on disk, executed after the plans already sent.

    A thread of the device executes the orders in sequence, while later plans run, and answers each one.  An order may also concern
    one recurrent state (`is_state`).  Then its only block is a row of the state pool.
    With pipeline stages or ranks, each worker executes the order for its part of the block, and their answers are merged.

    Kinds:
        store: write a block to disk.  No plan changes the block until the answer.
        fetch: read these blocks, in order, up to the first missing one.  No plan uses their memory until the answer.
        touch: note a use of the last block of a chain, so that the chain is evicted later than others.
        remove: remove the file of a state from which a step started that failed.
        cancel: drop all earlier orders at once.  From then on they neither read nor write the memory of a block.
        clear: drop all earlier orders, and remove the files of this model.
    """

    number: int
    kind: Literal["store", "fetch", "touch", "remove", "cancel", "clear"]
    blocks: tuple[int, ...] = ()
    names: tuple[bytes, ...] = ()
    # The name of the block before a stored one, or of the block of a stored state.  Empty for the first block of a sequence.
    parent: bytes = b""
    # Counts losses of the device.  After a loss the device refuses orders of the old epoch, because their blocks may have been reused.
    epoch: int = 0


class TierAnswer(msgspec.Struct, frozen=True):
    """Executor → Scheduler: the answer to an order, and what has changed on the disk since the last answer.

    An answer with the number 0 has only changes.  The names are a hint: a file may vanish at any time.
    """

    number: int
    # How many of the order's blocks were stored or fetched, from the first on.
    num_done: int = 0
    # The time that the order took, without its wait behind other orders.
    seconds: float = 0.0
    # Whether everything known before is void: the tier was opened, or its files were removed.
    is_anew: bool = False
    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    # Of the whole folder.
    num_bytes: int = 0
    num_files: int = 0
    # Blocks that were not used or not written, by reason.
    refused: tuple[tuple[str, int], ...] = ()


class DeviceBack(msgspec.Struct, frozen=True):
    """Executor → Scheduler → Observer: the device is loaded again and takes plans.

    All running sequences begin again.  With `keeps_memory` the KV of all answered steps is still there, so they
    find it as cached prefixes; otherwise the memory is empty.
    """

    # Seconds since the loss.
    pause_s: float
    keeps_memory: bool = False


class DeviceFailed(msgspec.Struct, frozen=True):
    """Executor → Scheduler: the lost device of one of several replicas will not be started again.

    Its requests move to the other replicas, except for those suspected of having caused the loss.
    """

    # The cause in one line.
    message: str
