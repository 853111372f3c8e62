"""The vocabulary of the troupe: every type that crosses a channel between actors, and nothing else.

    frontends -Render-> Renderer -Track-> Detokenizer
                        Renderer -Admit-> Scheduler -StepPlan-> Executor -StepDone | StepFailed-> Scheduler
                                          Scheduler -StepTokens-> Detokenizer -Stop-> Scheduler
    or, in an engine that pools:
                        Renderer -AdmitPooling-> Scheduler -PoolPlan-> Executor -PoolDone | StepFailed-> Scheduler
                                          Scheduler -Pooled-> Pooler
    frontends -Abort | SetPause | ResetPrefixCache | Step | Probe-> Scheduler
    frontends, Scheduler -DeviceCall-> Executor

A *request* is what the user sent; a *sequence* is one list of tokens being grown for it.  A request
with `n` completions has the `n` sequences `id, id + 1, … id + n - 1`, so one integer names both.
"""

from collections.abc import Mapping
from typing import Any, Literal, NewType

import msgspec
import numpy as np

from trouper.actors.pause import Pause
from trouper.actors.replies.pooling_slot import PoolingSlot
from trouper.actors.replies.reply_slot import ReplySlot
from trouper.actors.replies.slot import Slot
from trouper.actors.runtime.future import Answer
from trouper.inputs import PoolingPrompt
from trouper.outputs import FinishReason, RequestStateStats
from trouper.params import SamplingParams
from trouper.pooling import PoolingParams

RequestId = NewType("RequestId", int)
SequenceId = NewType("SequenceId", int)


EmbedsDtype = Literal["float32", "float16", "bfloat16", "float64"]


class Embeds(msgspec.Struct, frozen=True):
    """A dense matrix [rows, columns] that stands for the embeddings of tokens: row major, little endian."""

    dtype: EmbedsDtype
    num_rows: int
    num_columns: int
    data: memoryview  # its bytes
    first: int = 0  # position in the prompt of the first row


class Render(msgspec.Struct, frozen=True):
    """Frontend -> Renderer: a prompt as the caller wrote it, and the slot that takes the answer.

    The slot carries the cancel scope of the rendering stage: closing the slot ends the work.
    """

    id: RequestId
    prompt: PoolingPrompt
    params: SamplingParams | PoolingParams  # the engine's own copy
    slot: Slot[Any]  # of the kind that goes with the parameters
    priority: int
    arrival_time: float  # wall clock, seconds
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None  # left keeps the end; None: the tokenizer's
    add_special_tokens: bool | None = None  # None: True for text, False for chat
    mm_processor_kwargs: Mapping[str, Any] | None = None  # concerns multimodal items only
    trace_headers: Mapping[str, str] | None = None  # W3C, for the request's span


class Track(msgspec.Struct, frozen=True):
    """Renderer -> Detokenizer: expect tokens for these sequences.  Sent before `Admit`."""

    id: RequestId
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams  # resolved: max_tokens is a number
    slot: ReplySlot
    prompt: str | None = None  # the text, where there is one
    trace_headers: Mapping[str, str] | None = None


class Admit(msgspec.Struct, frozen=True, kw_only=True):
    """Renderer -> Scheduler: a rendered, validated request."""

    id: RequestId
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams  # resolved: max_tokens is a number
    eos_token_id: int | None  # the primary one; None with ignore_eos
    stop_token_ids: tuple[int, ...]  # the caller's, then the model's secondary EOS ids
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    arrival_time: float = 0.0
    cache_salt: str | None = None
    embeds: tuple[Embeds, ...] = ()  # what stands for tokens, in order; their ids are zeros
    embeds_digests: tuple[bytes, ...] = ()  # by block; empty where it has none


class AdmitPooling(msgspec.Struct, frozen=True, kw_only=True):
    """Renderer -> Scheduler: a rendered, validated pooling request.  It carries all that it will need."""

    id: RequestId
    prompt_token_ids: tuple[int, ...]
    params: PoolingParams  # resolved: every field is decided
    slot: PoolingSlot
    token_type_ids: tuple[int, ...] | None = None  # None: all are 0
    num_keys: int | None = None  # tokens that the others see, from the first on; None: all
    skipped_rows: tuple[int, ...] = ()  # of a document: they take no part in late interaction
    priority: int = 0
    arrival_time: float = 0.0


class Abort(msgspec.Struct, frozen=True):
    """Frontend -> Scheduler: end the request, in whatever stage it is.  Legal at any time."""

    id: RequestId


class Stop(msgspec.Struct, frozen=True):
    """Detokenizer -> Scheduler: stop strings ended these sequences; they yield no further output."""

    ids: tuple[SequenceId, ...]


class SetPause(msgspec.Struct, frozen=True):
    """Frontend -> Scheduler: plan everything, only what has run before, or nothing.

    Answered when that has taken full effect: no step in flight, with `Pause.NEW` nothing left that may
    still run, and all news of it handed over.
    """

    pause: Pause
    answer: Answer[None]


class ResetPrefixCache(msgspec.Struct, frozen=True):
    """Frontend -> Scheduler: forget all prefixes.  Answered with False while a block is held.

    `preempt` frees the blocks first: `"recompute"` keeps results in flight, `"resample"` drops them.
    """

    preempt: Literal["no", "recompute", "resample"]
    answer: Answer[bool]


class Step(msgspec.Struct, frozen=True):
    """Frontend -> Scheduler: one iteration, for an engine that is stepped by hand.

    Answered when its news are in the reply slots.
    """

    answer: Answer[None]


class Probe(msgspec.Struct, frozen=True):
    """Frontend -> Scheduler: go to the device and back.  Passed on as a `DeviceCall`."""

    answer: Answer[object]


class DeviceCall(msgspec.Struct, frozen=True):
    """Frontend, Scheduler -> Executor: anything but a step, after the plans already sent.

    An error goes to who asked; the engine lives.
    """

    method: Literal["sleep", "wake", "start_profile", "stop_profile", "probe"]
    args: tuple[object, ...]
    answer: Answer[object]


MAX_REPETITION = 1e30  # what is beyond can be told from this by no draw


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """The device's share of the sampling parameters of one sequence; spec section 8."""

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


class NewRow(msgspec.Struct, frozen=True):
    """A sequence takes a device row: for the first time, or again after a preemption."""

    row: int
    sequence: SequenceId
    token_ids: tuple[int, ...]  # prompt, then what has been generated so far
    num_prompt: int
    block_ids: tuple[int, ...]
    sampling: Sampling
    embeds: tuple[Embeds, ...] = ()  # as in `Admit`


class StepPlan(msgspec.Struct, frozen=True):
    """Scheduler -> Executor: the work of one forward pass.

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
    new_rows: tuple[NewRow, ...] = ()
    new_blocks: tuple[
        tuple[int, tuple[int, ...]], ...
    ] = ()  # (row, ids appended to its block table)
    copies: tuple[tuple[int, int], ...] = ()  # (from block, to block), before anything is computed


class PoolColumn(msgspec.Struct, frozen=True):
    """One whole prompt of a `PoolPlan`."""

    token_ids: tuple[int, ...]
    token_type_ids: tuple[int, ...] | None
    task: str
    num_keys: int | None = None  # as in `AdmitPooling`


class PoolPlan(msgspec.Struct, frozen=True):
    """Scheduler -> Executor: whole prompts for one forward pass without a cache, the shortest first."""

    step: int
    epoch: int
    columns: tuple[PoolColumn, ...]


class PoolDone(msgspec.Struct, frozen=True):
    """Executor -> Scheduler: the raw results, column by column, in float32.

    An embedding is [size], logits are [labels]; token tasks have one row for each token.
    """

    step: int
    arrays: tuple[np.ndarray, ...]


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Candidates of one position: the sampled (or prompt) token first, then by falling logprob."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int  # of the first: the number of tokens at least as probable, ≥ 1


NO_VALID_TOKEN = -2


class StepDone(msgspec.Struct, frozen=True):
    """Executor -> Scheduler: what a plan yielded, column by column.

    `token_ids[i]` is -1 where the plan needed no sample or the row failed, NO_VALID_TOKEN where every token
    is forbidden.  `failed` names columns without a token: these sequences end, nobody else notices.
    """

    step: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()  # per column; empty when nobody asked
    prompt_logprobs: tuple[tuple[int, tuple[TokenLogprobs, ...]], ...] = ()  # (column, positions)
    failed: tuple[int, ...] = ()


class StepFailed(msgspec.Struct, frozen=True):
    """Executor -> Scheduler: this plan raised, or followed one that did; none of its results count."""

    step: int
    message: str
    is_out_of_memory: bool = False  # a smaller step may pass


class SequenceTokens(msgspec.Struct, frozen=True):
    """The news of one sequence in one `StepTokens`."""

    id: SequenceId
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token when asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int | None = None  # with the first token: prompt tokens found in the cache
    error: str | None = None  # with finish_reason "error"
    num_preemptions: int = 0  # so far


class StepTokens(msgspec.Struct, frozen=True):
    """Scheduler -> Detokenizer: all that one turn of the scheduler has to tell, in one message."""

    sequences: tuple[SequenceTokens, ...]
    started: tuple[SequenceId, ...] = ()  # sequences that took a device row, for their statistics
    answers: tuple[Answer[None], ...] = ()  # whoever waits until these news are handed over


class PooledRequest(msgspec.Struct, frozen=True):
    """The end of one pooling request: its raw result, or why there is none."""

    admit: AdmitPooling
    array: np.ndarray | None = None
    error: str | None = None  # `code: message`


class Pooled(msgspec.Struct, frozen=True):
    """Scheduler -> Pooler: all that one turn of the scheduler has to tell, in one message."""

    requests: tuple[PooledRequest, ...]
    answers: tuple[Answer[None], ...] = ()  # whoever waits until these news are handed over


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """The scheduler's state in numbers; the counters only grow."""

    num_running: int
    num_waiting: int  # for a seat, for blocks, or for a result in flight
    num_deferred: int  # siblings that wait for their leader's prompt
    num_steps_in_flight: int
    num_blocks_free: int
    num_blocks_total: int  # the null block not counted
    kv_cache_usage: float  # 0 … 1
    num_steps: int  # made so far
    num_preemptions: int
    num_prompt_tokens: int  # prompt positions computed
    num_generation_tokens: int  # tokens sampled
    prefix_cache_queries: int  # tokens; each sequence counts once
    prefix_cache_hits: int
    recompute_cache_queries: int  # the same after preemptions
    recompute_cache_hits: int


class Stepped(msgspec.Struct, frozen=True):
    """Scheduler -> Observer: so many tokens were computed or sampled since the last.  A fact: it may be dropped."""

    num_tokens: int


class RequestEnded(msgspec.Struct, frozen=True):
    """One request as it ended; part of `Told`."""

    request_id: str
    stats: RequestStateStats
    finish_reason: FinishReason  # "error" if any of its sequences had one, else that of the last
    num_prompt_tokens: int
    num_cached_tokens: int
    params: SamplingParams
    trace_headers: Mapping[str, str] | None
    error_code: str | None = None


class Told(msgspec.Struct, frozen=True):
    """Detokenizer -> Observer: what one `StepTokens` meant for readers.  A fact: it may be dropped."""

    first_token_s: tuple[float, ...]  # since arrival, for each request that got its first token
    inter_token_s: tuple[float, ...]  # since the token before, for each sequence that got another
    ended: tuple[RequestEnded, ...]


class Flush(msgspec.Struct, frozen=True):
    """Frontend -> Observer: answered when everything reported before this has been counted."""

    answer: Answer[None]


RendererInbox = Render
SchedulerInbox = (
    Admit | AdmitPooling | Abort | Stop | StepDone | PoolDone | StepFailed
    | SetPause | ResetPrefixCache | Step | Probe
)  # fmt: skip
ExecutorInbox = StepPlan | PoolPlan | DeviceCall
DetokenizerInbox = Track | StepTokens
PoolerInbox = Pooled
ObserverInbox = Stepped | Told | Flush
