"""Decide what a pipeline stage holds, sends and awaits.  Pure: the front, every stage and the model check use it.

A model's layers are cut into stages, one process each.  Plans run in order on every stage; hidden states go
from a stage to the next, sampled tokens from the last stage back to the first.

Rules:
P1. Tokens of a step are sent if any entry of its plan wants a token.  A step of unfinished chunks sends none.
P2. The first stage takes what has come at every plan, and waits only while a token that this plan reads is
    still to come.  No stage waits for a token that is discarded.
P3. Rows, block tables and lengths follow the plan on every stage, whatever is sent.
P4. A token is written to its row only if the row has not been given to another sequence since.
P5. Each ring has room for `num_ring_entries` steps, which is more than may be under way: sending a token never waits.
P6. At most `max_steps_in_flight` steps are under way.

A ring of tokens that is read only when a token is needed would fill up with those that no stage needs, and one
with fewer entries than steps in flight can stop all stages: `tests/simulation/stage_protocol.py` finds both.
"""

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from trouper.errors import TrouperValidationError

PARTITION = "TROUPER_PP_LAYER_PARTITION"  # numbers of layers by stage, as "10,18"
MIN_CHUNKS_PER_STAGE = 4  # of a prompt that is alone: n chunks keep s stages n / (n + s - 1) busy
MIN_CHUNK = 128  # tokens; below, a step's fixed costs outweigh the overlap


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


# Steps under way


def max_steps_in_flight(num_stages: int, *, plans_ahead: bool) -> int:
    """Steps under way at once: one a stage, and with planning ahead one that waits for the first stage."""
    return num_stages + plans_ahead


def num_ring_entries(num_stages: int) -> int:
    """Steps that a ring between two stages holds: all that may be under way (rule P5)."""
    return num_stages + 1


def decode_quota(num_decoding: int, num_stages: int) -> int:
    """Rows past their prompt that one plan may take, so that each stage has some while the others have theirs."""
    return -(-num_decoding // num_stages)


def is_due(num_plans_since: int, num_stages: int) -> bool:
    """Whether a sequence with a sample in flight may decode again: its token comes before the plan is run.

    Args:
        num_plans_since: plans made since the one that samples.
    """
    return num_plans_since >= num_stages - 1


def max_chunk(num_prompt_tokens: int, num_stages: int, budget: int) -> int:
    """Tokens of one chunk of a prompt that runs alone: small enough to keep all stages busy."""
    if num_stages == 1:
        return budget
    share = -(-num_prompt_tokens // (MIN_CHUNKS_PER_STAGE * num_stages))
    return min(budget, max(share, MIN_CHUNK))


# Messages


def sends_tokens(num_wanted: Iterable[int]) -> bool:
    """Whether the last stage sends its tokens of a step to the first (rule P1).

    Args:
        num_wanted: tokens wanted of each entry of the plan.
    """
    return any(num_wanted)


class TokenWrite(msgspec.Struct, frozen=True):
    """A sampled token that belongs into a row of the first stage: `position` counts from the prompt's start."""

    row: int
    position: int
    token_id: int


class Feedback:
    """Record, on the first stage, of the tokens that the last has sampled or is going to sample.

    Its owner calls `note_plan` for each plan before running it, `take` for each message of tokens, and `must_wait`
    to learn whether a token that the plan reads is still to come.
    """

    def __init__(self) -> None:
        self._generations: dict[int, int] = {}  # of rows; a new sequence in a row starts another
        # (step, (row, position, generation) of each entry that samples); at most the steps in flight
        self._expected: deque[tuple[int, tuple[tuple[int, int, int] | None, ...]]] = deque()

    def __repr__(self) -> str:
        return f"<Feedback: waits for steps {[step for step, _ in self._expected]}>"

    def note_plan(
        self,
        step: int,
        *,
        new_rows: Iterable[int],
        rows: Sequence[int],
        ends: Sequence[int],
        num_wanted: Sequence[int],
    ) -> None:
        """Follow a plan: its new rows start over, and its samples are expected.

        Args:
            new_rows: rows that a sequence takes with this plan.
            rows: the row of each entry.
            ends: the position behind the last that an entry computes; there its token belongs.
            num_wanted: tokens wanted of each entry.
        """
        for row in new_rows:
            self._generations[row] = self._generations.get(row, 0) + 1
        if sends_tokens(num_wanted):
            entries = tuple(
                (row, end, self._generations.get(row, 0)) if wanted else None
                for row, end, wanted in zip(rows, ends, num_wanted, strict=True)
            )
            self._expected.append((step, entries))

    def must_wait(self, reads: int) -> bool:
        """Whether a token of step `reads` or of one before is still to come (rule P2); 0 = nothing is read."""
        return bool(self._expected) and self._expected[0][0] <= reads

    def take(self, step: int, token_ids: Sequence[int]) -> list[TokenWrite]:
        """Take the tokens of a step and say which rows they belong to (rule P4).

        Raises:
            RuntimeError: these are not the tokens that come next.
        """
        if not self._expected or self._expected[0][0] != step:
            raise RuntimeError(f"tokens of step {step}, but {self!r}")
        _, entries = self._expected.popleft()
        return [
            TokenWrite(entry[0], entry[1], token_id)
            for entry, token_id in zip(entries, token_ids, strict=True)
            if entry is not None
            and token_id >= 0
            and self._generations.get(entry[0], 0) == entry[2]
        ]
