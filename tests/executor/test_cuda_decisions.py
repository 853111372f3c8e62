"""What is decided without looking at the device: shapes, inputs, the rows' words, memory.  Pure."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="no Triton")

from trouper.actors.executor.runners.cuda.resident import kv_budget
from trouper.actors.executor.runners.cuda.step_inputs import (
    BatchShape,
    Changes,
    Inputs,
    Layout,
    graph_shapes,
    inputs_of,
    pack,
    padded,
    shape_of,
    views,
)
from trouper.actors.messages.requests import SequenceId
from trouper.actors.messages.steps import NewSequence, Sampling, StepPlan
from trouper.errors import TrouperValidationError
from trouper.kernels.reference.sampling import PARAMETERS

POISON = -(2**30)
M, LONGEST, NUM_BLOCKS, VOCAB = 3, 10, 4, 45

counts = st.lists(st.integers(1, 40), min_size=1, max_size=8)


@st.composite
def plans(draw, max_num_seqs=8):
    found = draw(counts)
    rows = draw(st.permutations(range(max_num_seqs)))[: len(found)]
    starts = draw(st.lists(st.integers(0, 99), min_size=len(found), max_size=len(found)))
    samples = draw(st.lists(st.booleans(), min_size=len(found), max_size=len(found)))
    return StepPlan(1, 0, tuple(rows), tuple(starts), tuple(found), tuple(samples))


@given(plans(), st.one_of(st.none(), st.lists(st.integers(1, 400), max_size=6)))
def test_step_runs_in_least_captured_shape_that_holds_it(plan, sizes):
    captured = graph_shapes(sizes, 8, 256)
    own = shape_of(plan)
    chosen = padded(own, captured)
    assert chosen.num_tokens >= sum(plan.num_scheduled_tokens)
    assert chosen.num_entries >= len(plan.request_slots)
    assert chosen.is_decode == all(count == 1 for count in plan.num_scheduled_tokens)
    smaller = [
        other
        for other in captured
        if other.is_decode == own.is_decode and own.num_tokens <= other.num_tokens
    ]
    if smaller:
        assert chosen == min(smaller)
    else:
        assert chosen == own


def test_steps_with_adapters_have_graphs_of_their_own():
    plain = graph_shapes((1, 4, 16), 4, 32)
    both = graph_shapes((1, 4, 16), 4, 32, has_adapters=True)
    assert {shape._replace(has_adapters=False) for shape in both} == set(plain)
    assert len(both) == 2 * len(plain)
    for has_adapters in (False, True):
        own = BatchShape(3, 3, True, has_adapters)
        assert padded(own, both) == BatchShape(4, 4, True, has_adapters)
    assert padded(BatchShape(3, 3, True, True), plain) == BatchShape(3, 3, True, True)


@given(st.integers(1, 512), st.integers(1, 8192))
def test_decode_and_small_mixed_steps_are_captured(seqs, extra):
    tokens = seqs + extra
    shapes = graph_shapes((), seqs, tokens)
    assert shapes == tuple(sorted(shapes, reverse=True))
    for num in (1, seqs // 2 or 1, seqs):
        assert padded(BatchShape(num, num, True), shapes).num_entries - num < 16
    largest = max((shape.num_tokens for shape in shapes if not shape.is_decode), default=0)
    assert largest == max(
        (s for s in (16, 32, 64, 128, 256, 512, 1024, 2048) if s <= tokens), default=0
    )
    assert graph_shapes(None, seqs, tokens) == ()


@given(plans(), st.integers(0, 3))
def test_inputs_say_what_plan_says_and_padding_is_empty(plan, padding):
    num = len(plan.request_slots) + padding
    array = torch.from_numpy(pack(plan, num + 1))
    found = Inputs(*(x.tolist() for x in inputs_of(array, num)))
    for i, (row, start, count, samples) in enumerate(
        zip(
            plan.request_slots,
            plan.num_computed_tokens,
            plan.num_scheduled_tokens,
            plan.num_sampled_tokens,
            strict=True,
        )
    ):
        assert found.bounds[i] == sum(plan.num_scheduled_tokens[:i])
        assert found.bounds[i + 1] - found.bounds[i] == count
        assert (found.request_slots[i], found.num_computed_tokens[i]) == (row, start)
        assert found.sampled_slots[i] == (row if samples else -1)
        assert found.seq_lens[i] == start + count
        assert found.last_tokens[i] == found.bounds[i + 1] - 1
    for i in range(len(plan.request_slots), num):
        assert found.bounds[i] == found.bounds[i + 1] == sum(plan.num_scheduled_tokens)
        assert found.sampled_slots[i] == -1
        assert 0 <= found.last_tokens[i] < sum(plan.num_scheduled_tokens)
        assert found.request_slots[i] == 0


def test_without_a_plan_every_column_is_padding():
    found = inputs_of(torch.from_numpy(pack(None, 5)), 4)
    assert not found.bounds.any()
    assert (found.sampled_slots == -1).all()


samplings = st.builds(
    Sampling,
    temperature=st.floats(0, 2, width=32),
    top_k=st.integers(-1, 50),
    top_p=st.sampled_from([0.125, 0.5, 1.0]),
    min_p=st.sampled_from([0.0, 0.25, 0.5]),
    seed=st.integers(-(2**63), 2**64 - 1),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    logit_bias=st.lists(
        st.tuples(st.integers(0, 44), st.sampled_from([-1.5, 2.0])), max_size=3
    ).map(tuple),
    allowed_token_ids=st.lists(st.integers(0, 44), max_size=5).map(tuple),
    bad_words_ids=st.lists(
        st.lists(st.integers(0, 44), min_size=1, max_size=17).map(tuple), max_size=3
    ).map(tuple),
    min_tokens=st.integers(0, 2),
    stop_ids=st.lists(st.integers(0, 44), max_size=2).map(tuple),
)


@st.composite
def new_rows(draw, row):
    tokens = draw(st.lists(st.integers(0, 44), min_size=1, max_size=LONGEST + 1))
    blocks = draw(st.lists(st.integers(1, 9), max_size=NUM_BLOCKS))
    num_prompt = draw(st.integers(1, len(tokens)))
    return NewSequence(
        row, SequenceId(row), tuple(tokens), num_prompt, tuple(blocks), draw(samplings)
    )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_placing_a_row_changes_no_other(data):
    layout = Layout(M, LONGEST, NUM_BLOCKS, VOCAB)
    arena = torch.full((layout.num_words,), POISON, dtype=torch.int32)
    row = data.draw(st.integers(0, M - 1))
    new = data.draw(new_rows(row))
    changes = Changes(layout)
    changes.place(new)
    room = NUM_BLOCKS - len(new.block_ids)
    more = data.draw(st.lists(st.integers(1, 9), max_size=room))
    if more:
        changes.put("blocks", row, more, at=len(new.block_ids))
    addresses, words = torch.from_numpy(changes.packed())
    assert len(addresses.unique()) == len(addresses)
    arena.index_copy_(0, addresses, words.int())
    tokens, blocks, s = views(layout, arena, torch.empty(0))
    assert tokens[row, : len(new.token_ids)].tolist() == list(new.token_ids)
    assert blocks[row, : len(new.block_ids) + len(more)].tolist() == [*new.block_ids, *more]
    wish = new.sampling
    numbers = {name: s.numbers(name)[row].tolist() for name in PARAMETERS}
    assert numbers.pop("seed") == np.array([wish.seed % 2**64], np.uint64).view(np.int32).tolist()
    assert numbers.pop("log_min_p") == float(
        torch.tensor(wish.min_p, dtype=torch.float64).log().float()
    )
    assert numbers == {
        "temperature": wish.temperature, "top_k": max(wish.top_k, 0), "top_p": wish.top_p,
        "repetition": wish.repetition_penalty, "frequency": wish.frequency_penalty,
        "presence": wish.presence_penalty,
    }  # fmt: skip
    assert s.num_prompt[row] == new.num_prompt
    if wish.allowed_token_ids:
        bits = (s.mask[row].unsqueeze(1) >> torch.arange(32) & 1).flatten()
        assert bits.nonzero().flatten().tolist() == sorted(set(wish.allowed_token_ids))
    assert bool(s.is_masked[row]) == bool(wish.allowed_token_ids)
    num_stops = len(wish.stop_ids) * bool(wish.min_tokens)
    num = len(wish.logit_bias) + num_stops + len(wish.bad_words_ids)
    assert int(s.num_edits[row]) == num
    is_penalised = wish.presence_penalty or wish.frequency_penalty or wish.repetition_penalty != 1
    assert bool(s.is_edited[row]) == bool(num or wish.allowed_token_ids or is_penalised)
    for i, word in enumerate(wish.bad_words_ids, start=num - len(wish.bad_words_ids)):
        length = int(s.edit_lengths[row, i])
        condition = s.edit_conditions[row, i, :length].tolist()
        assert (*condition, int(s.edit_ids[row, i])) == word
        assert s.edit_values[row, i] == -torch.inf
    for i in range(len(wish.logit_bias), len(wish.logit_bias) + num_stops):
        assert s.edit_untils[row, i] == new.num_prompt + wish.min_tokens
    others = [i for i in range(M) if i != row]
    for table in (tokens, blocks, s.mask, s.edit_ids, s.parameters, s.num_prompt):
        assert (table[others] == POISON).all()


def test_the_tables_do_not_overlap_and_are_aligned():
    layout = Layout(M, LONGEST, NUM_BLOCKS, VOCAB)
    taken = np.zeros(layout.num_words, dtype=int)
    for field in layout.fields.values():
        assert field.first * 4 % field.dtype.itemsize == 0
        taken[field.first : field.first + M * field.slot_words] += 1
    assert (taken == 1).all()


@given(st.integers(0, 100), st.floats(0.01, 1), st.integers(0, 100))
def test_the_cache_gets_what_the_share_leaves(taken, utilization, reserved):
    gib = 2**30
    budget = int(100 * gib * utilization) - (taken + reserved) * gib
    options = {
        "free": (100 - taken) * gib,
        "total": 100 * gib,
        "utilization": utilization,
        "reserved": reserved * gib,
    }
    if budget > 0:
        assert kv_budget(**options) == budget
    else:
        with pytest.raises(TrouperValidationError, match="gpu_memory_utilization"):
            kv_budget(**options)
