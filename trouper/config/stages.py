"""The stages of a pipeline: how many steps they work on, and which layers each has.  Pure.

A model's layers are cut into stages, one process each; `actors/stages.py` has the rules that they work by.
"""

from collections.abc import Sequence

import msgspec

from trouper.errors import TrouperValidationError

PARTITION = "TROUPER_PP_LAYER_PARTITION"  # numbers of layers by stage, as "10,18"


class Stage(msgspec.Struct, frozen=True):
    """One stage of a pipeline: its number, how many there are, and its layers `first` … `last - 1`."""

    index: int
    num_stages: int
    first: int
    last: int

    @property
    def is_first(self) -> bool:
        """Embeds the token ids."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Has the final norm and the head, and samples."""
        return self.index == self.num_stages - 1


def split_layers(
    layer_costs: Sequence[float],
    num_stages: int,
    *,
    head_cost: float = 0.0,
    partition: Sequence[int] | None = None,
) -> tuple[Stage, ...]:
    """Cut the layers into contiguous stages whose dearest is as cheap as possible.

    Args:
        layer_costs: what a layer costs, in any unit: bytes of weights will do.
        head_cost: what the last stage has to do besides, in the same unit.
        partition: the numbers of layers by stage, instead of a search.

    Raises:
        TrouperValidationError: more stages than layers, or a partition that does not fit.
    """
    num_layers = len(layer_costs)
    if not 1 <= num_stages <= num_layers:
        raise TrouperValidationError(
            f"{num_layers} layers, {num_stages} stages: each stage needs a layer",
            parameter="pipeline_parallel_size",
            value=num_stages,
        )
    if partition is None:
        partition = _cheapest_partition(layer_costs, num_stages, head_cost)
    elif len(partition) != num_stages or sum(partition) != num_layers or min(partition) < 1:
        raise TrouperValidationError(
            f"must be {num_stages} positive numbers whose sum is {num_layers}",
            parameter=PARTITION,
            value=",".join(map(str, partition)),
        )
    stages: list[Stage] = []
    first = 0
    for index, count in enumerate(partition):
        stages.append(Stage(index, num_stages, first, first + count))
        first += count
    return tuple(stages)


def read_partition(text: str) -> tuple[int, ...]:
    """Read the numbers of layers by stage, as in "10,18".

    Raises:
        TrouperValidationError: it is something else.
    """
    parts = text.split(",")
    if not all(part.strip().isdecimal() and len(part) < 10 for part in parts):
        raise TrouperValidationError(
            'must be numbers of layers by stage, as in "10,18"', parameter=PARTITION, value=text
        )
    return tuple(int(part) for part in parts)


def _cheapest_partition(
    costs: Sequence[float], num_stages: int, head_cost: float
) -> tuple[int, ...]:
    """Search by dynamic programming over (stages, layers): the least of the largest stage's cost.

    Ties go to the smaller sum of squares, so that no stage is left with less than its share for nothing.
    """
    num_layers = len(costs)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[n]: (largest cost, sum of squares, partition) of the first n layers in the stages so far
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(num_stages):
        is_last = stage == num_stages - 1
        longer: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for start, (largest, squares, partition) in best.items():
            ends = (num_layers,) if is_last else range(start + 1, num_layers)
            for end in ends:
                if end == start:
                    continue
                cost = sums[end] - sums[start] + (head_cost if is_last else 0.0)
                found = max(largest, cost), squares + cost * cost, (*partition, end - start)
                if end not in longer or found < longer[end]:
                    longer[end] = found
        best = longer
    return best[num_layers][2]


def max_steps_in_flight(num_stages: int, *, plans_ahead: bool) -> int:
    """Steps under way at once: one a stage, and with planning ahead one that waits for the first stage."""
    return num_stages + plans_ahead
