"""The numbers of a step that its kernels read, as one array of a fixed place on the device.

    bounds [C + 1]            first token of each entry, then the number of tokens
    request_slots [C]
    num_computed_tokens [C]   which is the position of the entry's first token
    sampled_slots [C]         the slot again where its entry samples, else -1
    seq_lens [C]              after the step: the position of the sampled token
    last_tokens [C]           the token whose hidden state the sample comes from

Entries beyond the plan's are padding: empty, and without a sample.
"""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from trouper.actors.messages.plans import StepPlan


class Inputs(NamedTuple):
    """int32; views of the array on the device, cut to the entries of a batch."""

    bounds: Tensor
    request_slots: Tensor
    num_computed_tokens: Tensor
    sampled_slots: Tensor
    seq_lens: Tensor
    last_tokens: Tensor


def inputs_of(array: Tensor, num_entries: int) -> Inputs:
    bounds, *others = array.unbind(0)
    return Inputs(
        bounds.narrow(0, 0, num_entries + 1), *(x.narrow(0, 0, num_entries) for x in others)
    )


def pack(plan: StepPlan | None, width: int) -> np.ndarray:
    """Pack a plan as [6, width] int32, for at most width - 1 entries; without a plan all of it is padding."""
    packed = np.zeros((len(Inputs._fields), width), dtype=np.int32)
    bounds, slots, starts, sampled, seq_lens, last_tokens = packed
    sampled[:] = -1
    if plan is None:
        return packed
    entries = slice(len(plan.request_slots))
    counts = np.array(plan.num_scheduled_tokens)
    bounds[1 : len(counts) + 1] = counts.cumsum()
    bounds[len(counts) + 1 :] = counts.sum()
    slots[entries] = plan.request_slots
    starts[entries] = plan.num_computed_tokens
    sampled[entries] = np.where(plan.num_sampled_tokens, plan.request_slots, -1)
    seq_lens[entries] = starts[entries] + counts
    last_tokens[entries] = bounds[1 : len(counts) + 1] - 1
    return packed
