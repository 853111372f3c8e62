"""The flat batch of one step, for a decoder on the CPU."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from torch import Tensor

from trouper.actors.executor.models.decoder import LogitsIndices
from trouper.actors.executor.steps.arrays import from_numpy
from trouper.actors.executor.steps.request_slots import RequestSlots
from trouper.actors.messages.steps import StepPlan
from trouper.kernels.ops import HostTokens

# A prompt of at most so many tokens is attended token by token, as generated tokens are: such a step can be recorded.
# Law: how a position is attended depends on the prompt's length alone, so its keys and its logits have the same bits
# however the prompt is cut, found in the cache or forked, and whether an output is generated or computed again.
SHORT_PROMPT = 8
SHORT_ENTRY = 8  # tokens of one, of a step that can be recorded: a token with its drafts, but no output that is computed again


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
    can_be_recorded: bool = False  # every token is attended alone
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
    prompt_ends = np.where(slots.num_prompt > SHORT_PROMPT, slots.num_prompt, 0)  # by slot
    *attended, are_prompts = _attended(chosen, starts, counts, prompt_ends[chosen])
    can_be_recorded = not (are_prompts.any() or (counts > SHORT_ENTRY).any())
    with_prompt_logprobs = not slots.with_prompt_logprobs.isdisjoint(plan.request_slots)
    read = None
    if reads_some and not (can_be_recorded or with_prompt_logprobs):
        read_from = samples.ends - 1
        lone = samples.slots, read_from, np.ones_like(read_from)
        are_of_prompts = read_from < prompt_ends[samples.slots]
        read = LogitsIndices(
            from_numpy(samples.tokens),
            {
                window: plan_attention(slots.block_ids, *lone, window, are_of_prompts)
                for window in windows
            },
        )
    return Batch(
        request_slots=chosen,
        first_tokens=first_tokens,
        samples=samples,
        tokens=HostTokens(
            from_numpy(slots.token_ids[chosen_T, positions_T]),
            from_numpy(positions_T),
            from_numpy(kv_slots_T),
        ),
        plans={
            window: plan_attention(slots.block_ids, *attended, window, are_prompts)
            for window in windows
        },
        can_be_recorded=can_be_recorded,
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
    chosen: np.ndarray, starts: np.ndarray, counts: np.ndarray, prompt_ends: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cut entries as attention takes them: what lies before `prompt_ends` together, and the rest token by token.

    Returns:
        Slots, starts and counts, and which are of prompts.
    """
    together = np.clip(prompt_ends - starts, 0, counts)
    has_prompt = (together > 0).astype(np.int64)
    times = has_prompt + counts - together
    offsets = np.arange(times.sum(), dtype=np.int64) - (np.cumsum(times) - times).repeat(times)
    are_prompts = offsets < has_prompt.repeat(times)
    # the i-th of an entry with a stretch of a prompt is the (i - 1)-th behind it
    skipped = np.where(are_prompts, 0, (together - has_prompt).repeat(times))
    lengths = np.where(are_prompts, together.repeat(times), 1)
    return chosen.repeat(times), starts.repeat(times) + offsets + skipped, lengths, are_prompts
