"""Outputs on their way to the clients, and numbers about them on their way to the observer.

Outputs go from the scheduler to the detokenizer or to the pooler; `Stop` goes back.  They are never dropped.
Numbers may be dropped when the observer is slow, because no client waits for them.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from trouper.actors.messages.requests import AdmitPooling, GrammarWork, SequenceId
from trouper.actors.messages.sinks import Promise
from trouper.actors.messages.steps import TokenLogprobs
from trouper.outputs import FinishReason, RequestError, RequestStateStats
from trouper.params import SamplingParams


class SequenceTokens(msgspec.Struct, frozen=True):
    """The new tokens of one sequence, and its end if it has ended.

    Several tokens are possible: from drafts, or because the detokenizer was slower than the scheduler.
    """

    id: SequenceId
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    # One for each token if the request asks for them.
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    # Prompt tokens found in the prefix cache.  It comes with the first token.
    num_cached_tokens: int | None = None
    # With the finish reason `error`.
    error: RequestError | None = None
    num_preemptions: int = 0
    # The replica that computed the tokens.
    replica: int = 0


class Expected(msgspec.Struct, frozen=True):
    """The predicted time to the first token of a request, made when the scheduler admits it."""

    # The first sequence of the request.
    id: SequenceId
    seconds: float
    # A lower bound, because later requests may go first.
    is_least: bool = False
    # Nine of ten predictions are within this relative error.  None until it is known.
    error: float | None = None


class StepTokens(msgspec.Struct, frozen=True):
    """Scheduler → Detokenizer: all outputs of one turn of the scheduler, in one message.

    One message for each turn keeps the cost of sending independent of the number of sequences.
    """

    sequences: tuple[SequenceTokens, ...]
    # Sequences that took a request slot, for their statistics.
    started: tuple[SequenceId, ...] = ()
    # Delivered after these outputs have been handed over.
    answers: tuple[Promise[None], ...] = ()
    # Predictions for the requests admitted in this turn.
    expected: tuple[Expected, ...] = ()


class Stop(msgspec.Struct, frozen=True):
    """Detokenizer → Scheduler: stop strings have ended these sequences.  They have no further output.

    The scheduler may already have planned further tokens for them, which are dropped.
    """

    ids: tuple[SequenceId, ...]


class PooledRequest(msgspec.Struct, frozen=True):
    """The end of one pooling request: its raw result or its error.

    The request comes with it, because the pooler keeps no table of requests.
    """

    admit: AdmitPooling
    array: np.ndarray | None = None
    error: RequestError | None = None


class Pooled(msgspec.Struct, frozen=True):
    """Scheduler → Pooler: all outputs of one turn of the scheduler, in one message.

    One message for each turn keeps the cost of sending independent of the number of requests.
    """

    requests: tuple[PooledRequest, ...]
    # Delivered after these outputs have been handed over.
    answers: tuple[Promise[None], ...] = ()


class AdapterStats(msgspec.Struct, frozen=True):
    """The names of the adapters that the scheduler's sequences use.

    Dashboards for vLLM show them as labels of `lora_requests_info`.
    """

    running: tuple[str, ...]
    waiting: tuple[str, ...]
    max_running: int


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of the scheduler in numbers.  Counts of events only grow.  What a pooling engine does not have stays 0."""

    # Sequences now.
    num_running: int
    # Queued for a request slot, for KV blocks, or for a result in flight.
    num_waiting: int
    # Siblings that wait until the prompt of their leader is computed.
    num_deferred: int = 0
    num_steps_in_flight: int
    num_blocks_free: int = 0
    # Free blocks that still contain a cached prefix.
    num_blocks_cached: int = 0
    # Without the null block.
    num_blocks_total: int = 0
    # The bytes of the held blocks: of layers that see all tokens, and of layers with a window.  0 if the device does not know them.
    num_full_kv_bytes: int = 0
    num_window_kv_bytes: int = 0
    # Snapshots of recurrent states: those that prompts may begin with, rows that steps in flight write or siblings wait for, and
    # free rows.
    num_state_snapshots: int = 0
    num_state_rows_pending: int = 0
    num_state_rows_free: int = 0
    # How many were saved and evicted so far, and how many sequences began with one.
    num_state_saves: int = 0
    num_state_evictions: int = 0
    num_state_hits: int = 0
    # Tokens whose KV was cached, but which were computed again for lack of a state.
    num_state_misses: int = 0
    # A share: 0 … 1.
    kv_cache_usage: float = 0.0

    # Counts of events.
    num_steps: int
    num_preemptions: int = 0
    # Prompt positions computed, and tokens sampled.
    num_prompt_tokens: int
    num_generation_tokens: int = 0
    # Tokens looked up in the prefix cache and found there, once for each sequence.
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    # The same for lookups after a preemption.
    recompute_cache_queries: int = 0
    recompute_cache_hits: int = 0
    # Speculation: runs of drafted tokens that a step verified, their tokens, and the accepted tokens.
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    # Computed, lost with the memory of the device, and computed again.
    num_lost_tokens: int = 0
    # Sequences that started before the first in the order, which found no room.
    num_turns_passed: int = 0
    # Prompt tokens of the first prompt in the order of each step, and of all others.
    num_first_turn_tokens: int = 0
    num_other_turn_tokens: int = 0

    # Seconds of prompt work in the last step with prompts.  0 without a budget.
    step_prompt_budget_s: float = 0.0
    # Prompt tokens that would be computed by now if all prompts were computed at the same time.
    num_overdue_tokens: int = 0
    # The tier on disk: bytes and files of its folder; tokens found there, not found, and stored.
    tier_bytes: int = 0
    tier_files: int = 0
    tier_hit_tokens: int = 0
    tier_miss_tokens: int = 0
    tier_stored_tokens: int = 0
    # Blocks not used or not written, and fetches not made, by reason.
    tier_refused: tuple[tuple[str, int], ...] = ()
    tier_skipped: tuple[tuple[str, int], ...] = ()
    # None if the engine takes no adapters.
    adapters: AdapterStats | None = None
    # A lost device is being started again, or has failed.  A failed one is not started again.
    is_device_lost: bool = False
    is_device_failed: bool = False
    # Whether it takes new requests: the device is loaded, and no search for a culprit goes first.
    is_available: bool = True


def total(parts: Sequence[SchedulerStats]) -> SchedulerStats:
    """Add up the numbers of several replicas.

    Shares are averaged, because their sum would have no meaning.  The device counts as lost, or as failed, only if all
    devices are.
    """
    if len(parts) == 1:
        return parts[0]
    sums = {
        name: sum(getattr(part, name) for part in parts)
        for name in SchedulerStats.__struct_fields__
        if name.startswith(("num_", "prefix_", "recompute_")) or name.endswith("_tokens")
    }
    adapters = [part.adapters for part in parts if part.adapters is not None]
    return SchedulerStats(
        **sums,
        kv_cache_usage=sum(part.kv_cache_usage for part in parts) / len(parts),
        # All replicas share one folder.
        tier_bytes=max(part.tier_bytes for part in parts),
        tier_files=max(part.tier_files for part in parts),
        tier_refused=_added(part.tier_refused for part in parts),
        tier_skipped=_added(part.tier_skipped for part in parts),
        adapters=_all_adapters(adapters) if adapters else None,
        step_prompt_budget_s=max(part.step_prompt_budget_s for part in parts),
        is_device_lost=all(part.is_device_lost for part in parts),
        is_device_failed=all(part.is_device_failed for part in parts),
        is_available=any(part.is_available for part in parts),
    )


def _added(parts: Iterable[tuple[tuple[str, int], ...]]) -> tuple[tuple[str, int], ...]:
    counts = Counter[str]()
    for part in parts:
        counts.update(dict(part))
    return tuple(sorted(counts.items()))


def _all_adapters(parts: Sequence[AdapterStats]) -> AdapterStats:
    running = sorted({name for part in parts for name in part.running})
    waiting = sorted({name for part in parts for name in part.waiting})
    return AdapterStats(tuple(running), tuple(waiting), parts[0].max_running)


class StepStats(msgspec.Struct, frozen=True):
    """Scheduler → Observer: the work of one replica since the last `StepStats`.

    It is sent once for each turn of the scheduler, and dropped if the observer is too slow.
    """

    # Prompt tokens computed and tokens sampled.
    num_tokens: int
    replica: int = 0
    # One for each step with a grammar: at most `max_steps_in_flight`.
    grammar: tuple[GrammarWork, ...] = ()
    # Estimated over measured time of each step with a prompt.
    step_time_ratios: tuple[float, ...] = ()
    # Predicted over real time of each first token.
    first_token_ratios: tuple[float, ...] = ()
    # Preempted sequences: their blocks were given to others.  Losses of the device do not count.
    num_preemptions: int = 0
    # Tokens that were computed before a loss of the device, and that sequences which begin again must compute once more.
    num_lost_tokens: int = 0


class GrammarStats(msgspec.Struct, frozen=True):
    """Renderer → Observer: the outcome of the grammar of one request.

    Exactly one of three outcomes is counted: compiled, found in the cache, or refused.
    """

    # None if the grammar was compiled before, or is refused.
    compile_s: float | None = None
    # The code of the error.
    refusal: str | None = None


class RequestEnded(msgspec.Struct, frozen=True):
    """The final numbers of one request.

    They are used for the histograms of requests and for their traces.
    """

    request_id: str
    stats: RequestStateStats
    # `error` if any of its sequences failed, else the reason of the last one.
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    params: SamplingParams
    trace_headers: Mapping[str, str] | None
    error_code: str | None = None


class OutputStats(msgspec.Struct, frozen=True):
    """Detokenizer → Observer: the latencies that clients saw with one `StepTokens`, and the requests that ended."""

    # Seconds since arrival, for each request with its first token.
    first_token_s: tuple[float, ...]
    # Seconds since the token before, for each sequence with another token.
    inter_token_s: tuple[float, ...]
    ended: tuple[RequestEnded, ...]
    replica: int = 0
