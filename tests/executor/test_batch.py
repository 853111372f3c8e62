"""Rows of the device: where embeddings stand for tokens, chunk by chunk."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from trouper.actors.executor.steps.batch import SHORT_ENTRY, SHORT_PROMPT, make_batch
from trouper.actors.executor.steps.request_slots import RequestSlots
from trouper.actors.messages.requests import Embeds, SequenceId
from trouper.actors.messages.steps import NewSequence, Sampling, StepPlan
from trouper.kernels.cpu.attention.plan import AttentionPlanner

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


def slots_with(*prompts):
    """Slots whose sequences have prompts of these lengths, and blocks for 64 tokens."""
    rows = RequestSlots(len(prompts), 64, BLOCK_SIZE)
    for slot, length in enumerate(prompts):
        rows.place(NewSequence(slot, slot, (5,) * length, length, tuple(range(16)), Sampling()))
    return rows


def attended(rows, *columns):
    """Return entries as attention takes them, with those of prompts marked, and whether the step can be recorded."""
    chosen, starts, counts = zip(*columns, strict=True)
    plan = StepPlan(1, 0, chosen, starts, counts, (1,) * len(columns))
    batch = make_batch(plan, rows, (None,), plan_attention=lambda _, *columns: columns)
    slots, starts, counts, window, *are_prompts = batch.plans[None]
    assert window is None
    found = slots, starts, counts
    are_prompts = are_prompts[0] if are_prompts else [False] * len(slots)
    marks = ("prompt" if is_prompt else "alone" for is_prompt in are_prompts)
    return [(*map(int, entry), mark) for *entry, mark in zip(*found, marks, strict=True)], (
        batch.can_be_recorded
    )


def test_cuts_do_not_change_kind_of_attention():
    length = SHORT_PROMPT + 4
    rows = slots_with(length, SHORT_PROMPT, 0)
    whole, output = (0, 0, length, "prompt"), (0, length, 1, "alone")
    assert attended(rows, (0, 0, length)) == ([whole], False)
    assert attended(rows, (0, 0, length - 1)) == ([(0, 0, length - 1, "prompt")], False)
    assert attended(rows, (0, length - 1, 1)) == ([(0, length - 1, 1, "prompt")], False)
    assert attended(rows, (0, length, 1)) == ([output], True)
    assert attended(rows, (0, 0, length + 1)) == ([whole, output], False)  # computed again
    assert attended(rows, (2, 4, 2), (0, 3, length - 1), (1, 9, 1)) == (
        [
            *((2, 4, 1, "alone"), (2, 5, 1, "alone"), (0, 3, length - 3, "prompt")),
            *((0, length, 1, "alone"), (0, length + 1, 1, "alone"), (1, 9, 1, "alone")),
        ],
        False,
    )


def test_step_of_short_prompts_and_few_outputs_can_be_recorded():
    rows = slots_with(20, SHORT_PROMPT)
    short = [(1, p, 1, "alone") for p in range(SHORT_PROMPT)]
    assert attended(rows, (1, 0, SHORT_PROMPT)) == (short, True)
    assert attended(rows, (0, 20, SHORT_ENTRY))[1]
    assert not attended(rows, (0, 20, SHORT_ENTRY + 1))[1]


def test_only_sampled_positions_of_prompts_are_read():
    rows = slots_with(5, 9, 32)

    def read(*columns):
        """Entries are (slot, computed, scheduled, sampled): flat tokens, and rows and positions of their attention."""
        plan = StepPlan(1, 0, *zip(*columns, strict=True))
        batch = make_batch(plan, rows, (None,), plan_attention=lambda _, *columns: columns)
        if batch.read is None:
            return None
        own_rows, positions, counts, _, are_prompts = batch.read.plans[None]
        assert counts.tolist() == [1] * len(own_rows)
        assert are_prompts.tolist() == [slot == 2 for slot in own_rows]
        return batch.read.tokens_R.tolist(), own_rows.tolist(), positions.tolist()

    assert read((1, 9, 1, 1), (2, 0, 20, 0), (0, 5, 12, 1)) == ([0, 32], [1, 0], [9, 16])
    assert read((2, 0, 20, 0)) == ([], [], [])
    assert read((2, 20, 12, 1)) == ([11], [2], [31])
    assert read((1, 9, 1, 1), (0, 5, 3, 1)) is None  # a recording has them all
    rows.place(NewSequence(2, SequenceId(0), (1,) * 32, 32, (1,), Sampling(prompt_logprobs=0)))
    assert read((1, 9, 1, 1), (2, 0, 20, 0)) is None


def runs(flags):
    """Begin and end of each run of True."""
    edges = np.flatnonzero(np.diff([0, *map(int, flags), 0]))
    return edges.reshape(-1, 2)


@given(
    prompts=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    generated=st.integers(0, 2),
    window=st.sampled_from([None, 5]),
)
def test_steps_of_single_tokens_are_made_alike(prompts, generated, window):
    """The short way, and the way of all steps, which verifies no drafts here."""
    rows = slots_with(*prompts)
    rows.token_ids[:] = np.arange(rows.token_ids.size).reshape(rows.token_ids.shape)
    count = len(prompts)
    # Some steps compute the last token of a prompt.
    starts = tuple(length - 1 + generated for length in prompts)
    plan = StepPlan(1, 0, tuple(range(count)), starts, (1,) * count, (1,) * count)
    planner = AttentionPlanner(SimpleNamespace(num_q_heads=4, num_kv_heads=2, head_dim=16))
    short, whole = (
        make_batch(plan, rows, (window,), planner.plan, num_drafts)
        for num_drafts in (None, np.zeros(count, np.int64))
    )
    for name in ("request_slots", "first_tokens", "starts", "counts", "settled", "adapters"):
        np.testing.assert_array_equal(getattr(short, name), getattr(whole, name))
    np.testing.assert_array_equal(short.inputs, whole.inputs)
    np.testing.assert_array_equal(short.samples, whole.samples)
    assert short.can_be_recorded == whole.can_be_recorded
    assert (short.read is None) == (whole.read is None)
    found, wanted = (batch.plans[window] for batch in (short, whole))
    for name in ("spans", "merges", "tiles", "heads"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))
    assert found.partials.shape == wanted.partials.shape
