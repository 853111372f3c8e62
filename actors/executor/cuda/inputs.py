"""What a step tells the kernels: who computes what, as one array of a fixed place on the device.

    bounds [C + 1]      first token of each column, then the number of tokens
    rows, starts [C]    device row, and position of the first token
    sampled [C]         the row again where its column samples, else -1
    ends, last [C]      position of the sampled token, and which token's hidden state it comes from

Columns beyond the plan's are padding: empty, and without a sample.
"""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from trouper.actors.messages.plans import StepPlan


class Inputs(NamedTuple):
    """int32; views of the array on the device, cut to the columns of a batch."""

    bounds: Tensor
    rows: Tensor
    starts: Tensor
    sampled: Tensor
    ends: Tensor
    last: Tensor


def inputs_of(array: Tensor, num_columns: int) -> Inputs:
    bounds, *others = array.unbind(0)
    return Inputs(
        bounds.narrow(0, 0, num_columns + 1), *(x.narrow(0, 0, num_columns) for x in others)
    )


def pack(plan: StepPlan | None, width: int) -> np.ndarray:
    """[6, width] int32 for at most width - 1 columns; without a plan all of it is padding."""
    packed = np.zeros((len(Inputs._fields), width), dtype=np.int32)
    bounds, rows, starts, sampled, ends, last = packed
    sampled[:] = -1
    if plan is None:
        return packed
    columns = slice(len(plan.request_slots))
    counts = np.array(plan.num_scheduled_tokens)
    bounds[1 : len(counts) + 1] = counts.cumsum()
    bounds[len(counts) + 1 :] = counts.sum()
    rows[columns] = plan.request_slots
    starts[columns] = plan.num_computed_tokens
    sampled[columns] = np.where(plan.num_sampled_tokens, plan.request_slots, -1)
    ends[columns] = starts[columns] + counts
    last[columns] = bounds[1 : len(counts) + 1] - 1
    return packed
