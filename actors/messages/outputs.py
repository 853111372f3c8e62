"""Outputs on their way to the clients: from the scheduler to the detokenizer or the pooler, and `Stop` back."""

import msgspec
import numpy as np

from trouper.actors.messages.identifiers import SequenceId
from trouper.actors.messages.promise import Promise
from trouper.actors.messages.requests import AdmitPooling
from trouper.actors.messages.results import TokenLogprobs
from trouper.outputs import FinishReason


class SequenceTokens(msgspec.Struct, frozen=True):
    """The new tokens of one sequence in one `StepTokens`, and its end."""

    id: SequenceId
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token when asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int | None = None  # with the first token: prompt tokens found in the cache
    error: str | None = None  # with finish_reason "error"
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
    error: str | None = None  # `code: message`


class Pooled(msgspec.Struct, frozen=True):
    """Scheduler → Pooler: all outputs of one turn of the scheduler, in one message."""

    requests: tuple[PooledRequest, ...]
    answers: tuple[Promise[None], ...] = ()  # to deliver when these outputs have been handed over
