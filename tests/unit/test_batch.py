"""Rows of the device: where embeddings stand for tokens, chunk by chunk."""

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from trouper.actors.executor.batch import SHORT_CHUNK, make_batch
from trouper.actors.executor.request_slots import RequestSlots
from trouper.actors.messages.embeds import Embeds
from trouper.actors.messages.identifiers import SequenceId
from trouper.actors.messages.plans import NewSequence, Sampling, StepPlan

LENGTH, BLOCK_SIZE = 24, 4


@given(
    is_embedded=st.lists(st.booleans(), min_size=1, max_size=LENGTH),
    cuts=st.sets(st.integers(1, LENGTH - 1)),
    before=st.integers(1, 3),
)
def test_each_chunk_has_the_embeddings_of_its_positions(is_embedded, cuts, before):
    """`before`: tokens of another row that stand first in the flat batch."""
    length = len(is_embedded)
    rows = RequestSlots(2, 2 * LENGTH, BLOCK_SIZE)
    rows.place(NewSequence(1, 1, (5,) * LENGTH, LENGTH, tuple(range(12)), Sampling()))
    numbers = np.arange(length, dtype=np.float32)  # the row of position p holds p
    parts = tuple(
        Embeds("float32", int(last - first), 1, numbers[first:last].data.cast("B"), int(first))
        for first, last in runs(is_embedded)
    )
    rows.place(NewSequence(0, 0, (7,) * length, length, tuple(range(12)), Sampling(), parts))
    spans = list(rows.token_spans(0))
    spelled = [p for begin, end in spans for p in range(begin, end)]
    assert spelled == [p for p in range(length) if not is_embedded[p]]
    edges = [0, *sorted(cut for cut in cuts if cut < length), length]
    for step, (start, end) in enumerate(pairwise(edges)):
        chosen, starts, counts = (1, 0), (0, start), (before, end - start)
        plan = StepPlan(step, 0, chosen, starts, counts, (0,) * len(chosen))
        batch = make_batch(plan, rows, (), plan_attention=lambda *_: None)
        seen = torch.full((before + end - start,), -1.0)
        for at, matrix in batch.embeds:
            seen[at : at + len(matrix)] = matrix[:, 0]
        want = [-1.0] * before + [p if is_embedded[p] else -1.0 for p in range(start, end)]
        assert seen.tolist() == want
    assert not rows.has_embeds(0)


def test_a_short_chunk_is_attended_token_by_token_whatever_its_company():
    rows = RequestSlots(3, 64, BLOCK_SIZE)
    long = SHORT_CHUNK + 1

    def attended(*columns):
        chosen, starts, counts = zip(*columns, strict=True)
        plan = StepPlan(1, 0, chosen, starts, counts, (1,) * len(columns))
        batch = make_batch(plan, rows, (None,), plan_attention=lambda _, *columns: columns)
        *found, window = batch.plans[None]
        assert window is None
        return list(zip(*found[:3], strict=True)), batch.has_long_chunks

    assert attended((0, 9, 1), (2, 4, 3)) == ([(0, 9, 1), (2, 4, 1), (2, 5, 1), (2, 6, 1)], False)
    assert attended((2, 4, 2), (1, 0, long)) == ([(2, 4, 1), (2, 5, 1), (1, 0, long)], True)
    assert len(attended((1, 0, SHORT_CHUNK))[0]) == SHORT_CHUNK


def test_only_the_last_tokens_of_columns_that_sample_are_read_of_prompts():
    rows = RequestSlots(3, 64, BLOCK_SIZE)

    def read(*columns):
        """Entries are (slot, computed, scheduled, sampled): flat tokens, and rows and positions of their attention."""
        plan = StepPlan(1, 0, *zip(*columns, strict=True))
        batch = make_batch(plan, rows, (None,), plan_attention=lambda _, *columns: columns)
        if batch.read is None:
            return None
        own_rows, positions, counts, _ = batch.read.plans[None]
        assert counts.tolist() == [1] * len(own_rows)
        return batch.read.tokens_R.tolist(), own_rows.tolist(), positions.tolist()

    assert read((1, 9, 1, 1), (2, 0, 20, 0), (0, 4, 12, 1)) == ([0, 32], [1, 0], [9, 15])
    assert read((2, 0, 20, 0)) == ([], [], [])
    assert read((1, 9, 1, 1), (2, 4, 3, 1)) is None  # a recording has them all
    rows.place(NewSequence(2, SequenceId(0), (1,), 1, (1,), Sampling(prompt_logprobs=0)))
    assert read((1, 9, 1, 1), (2, 0, 20, 0)) is None


def runs(flags):
    """Begin and end of each run of True."""
    edges = np.flatnonzero(np.diff([0, *map(int, flags), 0]))
    return edges.reshape(-1, 2)
