"""The flat batch of one step, for a decoder on the CPU."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from torch import Tensor

from trouper.actors.executor.arrays import from_numpy
from trouper.actors.executor.models.decoder import LogitsIndices
from trouper.actors.executor.request_slots import RequestSlots
from trouper.actors.messages.plans import StepPlan
from trouper.kernels.ops import HostTokens

# A chunk of at most so many tokens is attended token by token, as generated tokens are: such a step can be recorded.
# This does not depend on the other entries of the step, so neither do the keys of a prompt.
SHORT_CHUNK = 8


class Samples(NamedTuple):
    """The S tokens after which one is drawn, in the order of the batch: the last of an entry, and those of its drafts."""

    entries: np.ndarray
    tokens: np.ndarray  # in the flat batch
    slots: np.ndarray
    ends: np.ndarray  # positions of what is drawn


class Batch(msgspec.Struct, frozen=True):
    """One step of C entries and T tokens."""

    request_slots: np.ndarray  # [C]
    first_tokens: np.ndarray  # [C], of the entry in the flat batch
    samples: Samples
    tokens: HostTokens
    adapters: np.ndarray  # [T], slots of the tokens' adapters
    plans: dict[int | None, Any]  # attention, by window, as the decoder's ops make them
    has_long_chunks: bool = True  # else every token is attended alone
    embeds: tuple[tuple[int, Tensor], ...] = ()  # first token in the flat batch, rows from there on
    read: LogitsIndices | None = None  # those of `samples`; None = all tokens


def make_batch(
    plan: StepPlan,
    slots: RequestSlots,
    windows: Sequence[int | None],
    plan_attention: Callable[..., Any],
    num_drafts: np.ndarray | None = None,
    *,
    reads_some: bool = True,
) -> Batch:
    """Gather the tokens of a plan, and plan their attention once for each window.

    Args:
        num_drafts: [C], tokens in the slots behind those of each entry, to be verified; None = no entry has any.
        reads_some: whether only the states of tokens that sample are of use; not to a later stage.
    """
    chosen = np.array(plan.request_slots, dtype=np.int64)
    starts = np.array(plan.num_computed_tokens, dtype=np.int64)
    counts = np.array(plan.num_scheduled_tokens, dtype=np.int64)
    if num_drafts is not None:
        counts += num_drafts
    first_tokens = np.cumsum(counts) - counts
    chosen_T = np.repeat(chosen, counts)
    positions_T = np.arange(counts.sum(), dtype=np.int64) - np.repeat(first_tokens - starts, counts)
    size = slots.block_size
    kv_slots_T = slots.block_ids[chosen_T, positions_T // size] * size + positions_T % size
    samples = _samples(plan, chosen, starts + counts, first_tokens + counts - 1, num_drafts)
    has_long_chunks = bool((counts > SHORT_CHUNK).any())
    read = None
    if reads_some and has_long_chunks and slots.with_prompt_logprobs.isdisjoint(plan.request_slots):
        lone = samples.slots, samples.ends - 1, np.ones_like(samples.ends)
        read = LogitsIndices(
            from_numpy(samples.tokens),
            {window: plan_attention(slots.block_ids, *lone, window) for window in windows},
        )
    attended = _attended(chosen, starts, counts)
    return Batch(
        request_slots=chosen,
        first_tokens=first_tokens,
        samples=samples,
        tokens=HostTokens(
            from_numpy(slots.token_ids[chosen_T, positions_T]),
            from_numpy(positions_T),
            from_numpy(kv_slots_T),
        ),
        plans={window: plan_attention(slots.block_ids, *attended, window) for window in windows},
        has_long_chunks=has_long_chunks,
        embeds=slots.take_embeds(plan, first_tokens),
        read=read,
        adapters=slots.adapters[chosen_T],
    )


def _samples(
    plan: StepPlan,
    chosen: np.ndarray,
    seq_lens: np.ndarray,
    last_tokens: np.ndarray,
    num_drafts: np.ndarray | None,
) -> Samples:
    entries = np.flatnonzero(plan.num_sampled_tokens)
    if num_drafts is None:
        return Samples(entries, last_tokens[entries], chosen[entries], seq_lens[entries])
    times = num_drafts[entries] + 1
    num_samples: list[int] = times.tolist()
    before_last = np.concatenate([np.arange(num, dtype=np.int64)[::-1] for num in num_samples])
    entries = entries.repeat(times)
    return Samples(
        entries,
        last_tokens[entries] - before_last,
        chosen[entries],
        seq_lens[entries] - before_last,
    )


def _attended(
    chosen: np.ndarray, starts: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split short chunks into entries of one token: slots, starts and counts as attention takes them."""
    times = np.where(counts <= SHORT_CHUNK, counts, 1)
    firsts = np.cumsum(times) - times
    offsets = np.arange(times.sum(), dtype=np.int64) - firsts.repeat(times)
    lengths = np.where(counts <= SHORT_CHUNK, 1, counts)
    return chosen.repeat(times), starts.repeat(times) + offsets, lengths.repeat(times)
