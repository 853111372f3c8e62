"""Outputs on their way to the clients: from the scheduler to the detokenizer or the pooler, and `Stop` back.

Numbers for the observer, and for whatever asks how the engine does.  All but snapshots may be dropped.
"""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from trouper.actors.messages.requests import AdmitPooling, GrammarWork, SequenceId
from trouper.actors.messages.sinks import Promise
from trouper.actors.messages.steps import TokenLogprobs
from trouper.outputs import FinishReason, RequestError, RequestStateStats
from trouper.params import SamplingParams


class SequenceTokens(msgspec.Struct, frozen=True):
    """The new tokens of one sequence in one `StepTokens`, and its end."""

    id: SequenceId
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token when asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int | None = None  # with the first token: prompt tokens found in the cache
    error: RequestError | None = None  # with finish_reason "error"
    num_preemptions: int = 0  # so far
    replica: int = 0  # that has computed them


class Expected(msgspec.Struct, frozen=True):
    """The time that a request will have its first token, as foretold when the scheduler took it in."""

    id: SequenceId  # of its first sequence
    seconds: float
    is_least: bool = False  # a lower bound: what comes later may go first
    error: float | None = None  # relative, that nine of ten are within; None: not known yet


class StepTokens(msgspec.Struct, frozen=True):
    """Scheduler → Detokenizer: all outputs of one turn of the scheduler, in one message."""

    sequences: tuple[SequenceTokens, ...]
    started: tuple[SequenceId, ...] = ()  # sequences that took a device row, for their statistics
    answers: tuple[Promise[None], ...] = ()  # to deliver when these outputs have been handed over
    expected: tuple[Expected, ...] = ()  # of requests that were taken in


class Stop(msgspec.Struct, frozen=True):
    """Detokenizer → Scheduler: stop strings ended these sequences; they yield no further output."""

    ids: tuple[SequenceId, ...]


class PooledRequest(msgspec.Struct, frozen=True):
    """The end of one pooling request: its raw result, or why there is none."""

    admit: AdmitPooling
    array: np.ndarray | None = None
    error: RequestError | None = None


class Pooled(msgspec.Struct, frozen=True):
    """Scheduler → Pooler: all outputs of one turn of the scheduler, in one message."""

    requests: tuple[PooledRequest, ...]
    answers: tuple[Promise[None], ...] = ()  # to deliver when these outputs have been handed over


class AdapterStats(msgspec.Struct, frozen=True):
    """The adapters of the scheduler's sequences, by name."""

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
    # Without the null block.
    num_blocks_total: int = 0
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
    # None if the engine takes no adapters.
    adapters: AdapterStats | None = None
    # A lost device is being started again, or has failed.  A failed one is not started again.
    is_device_lost: bool = False
    is_device_failed: bool = False
    # Whether it takes new requests: the device is loaded, and no search for a culprit goes first.
    is_available: bool = True


def total(parts: Sequence[SchedulerStats]) -> SchedulerStats:
    """Add up the replicas' numbers; the device counts as lost, or as failed, where all are."""
    if len(parts) == 1:
        return parts[0]
    sums = {
        name: sum(getattr(part, name) for part in parts)
        for name in SchedulerStats.__struct_fields__
        if name.startswith(("num_", "prefix_", "recompute_"))
    }
    adapters = [part.adapters for part in parts if part.adapters is not None]
    return SchedulerStats(
        **sums,
        kv_cache_usage=sum(part.kv_cache_usage for part in parts) / len(parts),
        adapters=_all_adapters(adapters) if adapters else None,
        step_prompt_budget_s=max(part.step_prompt_budget_s for part in parts),
        is_device_lost=all(part.is_device_lost for part in parts),
        is_device_failed=all(part.is_device_failed for part in parts),
        is_available=any(part.is_available for part in parts),
    )


def _all_adapters(parts: Sequence[AdapterStats]) -> AdapterStats:
    running = sorted({name for part in parts for name in part.running})
    waiting = sorted({name for part in parts for name in part.waiting})
    return AdapterStats(tuple(running), tuple(waiting), parts[0].max_running)


class StepStats(msgspec.Struct, frozen=True):
    """Scheduler → Observer: the number of tokens computed or sampled since the last `StepStats`, and its grammars' work."""

    num_tokens: int
    replica: int = 0
    grammar: tuple[GrammarWork, ...] = ()  # of each step with one, at most `max_steps_in_flight`
    step_time_ratios: tuple[float, ...] = ()  # estimated to measured, of each step with a prompt
    first_token_ratios: tuple[float, ...] = ()  # foretold to true, of each that has come


class GrammarStats(msgspec.Struct, frozen=True):
    """Renderer → Observer: what became of the grammar that one request brought."""

    compile_s: float | None = None  # None: it was among those compiled last, or is refused
    refusal: str | None = None  # the code of the error


class RequestEnded(msgspec.Struct, frozen=True):
    """One request as it ended; part of `OutputStats`."""

    request_id: str
    stats: RequestStateStats
    finish_reason: FinishReason  # "error" if any of its sequences had one, else that of the last
    num_prompt_tokens: int
    num_cached_tokens: int
    params: SamplingParams
    trace_headers: Mapping[str, str] | None
    error_code: str | None = None


class OutputStats(msgspec.Struct, frozen=True):
    """Detokenizer → Observer: latencies and ends that the clients saw with one `StepTokens`."""

    first_token_s: tuple[float, ...]  # since arrival, for each request that got its first token
    inter_token_s: tuple[float, ...]  # since the token before, for each sequence that got another
    ended: tuple[RequestEnded, ...]
    replica: int = 0
