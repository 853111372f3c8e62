"""Tokens drawn in one call: those of a stable sort, whatever the shape, the neighbours and the threads."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trouper.kernels.cpu import sample as drawing
from trouper.kernels.reference.sampling import (
    NEUTRAL,
    NOT_FINITE,
    NOTHING_LEFT,
    ROW,
    apply_repetition_penalty_reference_,
    gumbel,
    sample_reference,
    top_k_top_p_reference,
)

MASS = 1e-5  # of a sum of float32: whoever is so near a limit may be on either side


def drawn(logits, rows, positions, how=drawing.sample):
    """From logits as they are: nothing has occurred, and they may be anything."""
    numbers = np.arange(len(logits))
    nothing = np.zeros((len(logits), 1), dtype=np.int64)
    return how(
        logits,
        numbers,
        np.ascontiguousarray(rows),
        numbers,
        positions,
        nothing,
        no_masks(len(rows)),
    )


def no_masks(num_rows):
    return np.zeros(num_rows, dtype=np.int64)


def rows_of(num_rows, seed=0, /, *, min_p=0.0, **parameters):
    rows = np.repeat(NEUTRAL, num_rows)
    rows["repetition"] = 0
    rows["seed"] = np.random.default_rng(seed).integers(0, 2**64, num_rows, np.uint64)
    rows["temperature"] = rows["top_p"] = 1.0
    for name, value in parameters.items():
        rows[name] = value
    with np.errstate(divide="ignore"):
        rows["log_min_p"] = np.log(np.float32(min_p))
    return rows


def mixed(num_rows, vocab_size, seed=0):
    """Greedy rows, plain ones, and all kinds of truncation."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    rows = rows_of(
        num_rows,
        seed,
        temperature=rng.choice([0.0, 0.4, 1.0, 2.0], num_rows),
        top_k=rng.choice([0, 0, 1, 5, vocab_size], num_rows),
        top_p=rng.choice([1.0, 0.9, 0.5], num_rows),
        min_p=rng.choice([0.0, 0.0, 0.05], num_rows),
    )
    return 4 * torch.randn(num_rows, vocab_size), rows, np.arange(num_rows)


def assert_drawn_right(logits_V, row, position, token):
    """The best of what a sort keeps; rounding may swap near ties, and move what is at a limit."""
    if row["temperature"] == 0:
        assert token == int(logits_V.argmax())
        return
    noise_V = gumbel(row["seed"].reshape(1), np.array([position]), np.arange(len(logits_V)))[0]
    noisy_V = (logits_V.numpy() / row["temperature"]).astype(np.float64) + noise_V.numpy()
    surely, possibly = row.copy(), row.copy()
    surely["log_min_p"] += MASS
    possibly["log_min_p"] -= MASS
    if row["top_p"] < 1:
        surely["top_p"] -= min(MASS, row["top_p"] / 2)
        possibly["top_p"] = min(row["top_p"] + MASS, 1 - 1e-7)
    assert top_k_top_p_reference(logits_V.numpy(), possibly)[token], "it was cut off"
    best = noisy_V[top_k_top_p_reference(logits_V.numpy(), surely)].max(initial=-np.inf)
    assert noisy_V[token] >= best - 4e-6 - 2e-7 * abs(best)


@st.composite
def logits_of_any_shape(draw_from):
    vocab_size = draw_from(st.integers(1, 70) | st.sampled_from([127, 128, 129, 1000, 4099]))
    seed = draw_from(st.integers(0, 2**32 - 1))
    logits = torch.from_numpy(np.random.default_rng(seed).standard_normal(vocab_size))
    logits = draw_from(st.sampled_from([0.0, 0.3, 3.0, 30.0])) * logits
    kind = draw_from(st.sampled_from(["float32", "bfloat16", "whole", "peaky"]))
    if kind == "bfloat16":
        logits = logits.bfloat16()
    if kind == "whole":  # nearly all are equal to others
        logits = logits.round()
    if kind == "peaky":
        logits[seed % vocab_size] += 50
    logits = logits.float()
    for poison in (torch.nan, -torch.inf):
        if draw_from(st.booleans()):
            logits[seed // 7 % vocab_size :: draw_from(st.integers(1, 40))] = poison
    return logits


@settings(max_examples=400, deadline=None)
@given(
    logits_of_any_shape(),
    st.sampled_from([0.0, 0.01, 0.4, 1.0, 1.7, 100.0]),
    st.sampled_from([-1, 0, 1, 2, 7, 50, 4099, 2**31 - 1]),
    st.sampled_from([1.0, 0.999999, 0.95, 0.5, 0.01, 1e-30]),
    st.sampled_from([0.0, 0.0, 1e-6, 0.1, 1.0]),
    st.integers(0, 2**62),
)
def test_the_token_is_that_of_a_stable_sort(logits, temperature, top_k, top_p, min_p, position):
    row = rows_of(1, position, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    (token,) = drawn(logits[None], row, np.array([position]))
    without_nan = logits.nan_to_num(-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    if without_nan.isneginf().all():
        assert token == NOTHING_LEFT
    else:
        assert_drawn_right(without_nan, row[0], position, token)
        assert not logits[token].isnan()


@pytest.mark.parametrize("scale", [0.0, 0.5, 4.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_large_vocabulary(scale, dtype):
    torch.manual_seed(0)
    logits = (scale * torch.randn(151_936)).to(dtype).float()
    for truncation in ({"top_p": 0.9}, {"top_k": 50}, {"top_k": 3000, "top_p": 0.7}, {}):
        row = rows_of(1, **truncation)
        (token,) = drawn(logits[None], row, np.array([5]))
        assert_drawn_right(logits, row[0], 5, token)


@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 31, 32, 100, 4099, 70_000])
def test_mixed_rows_draw_the_formulas_tokens(vocab_size):
    logits, rows, positions = mixed(40, vocab_size)
    found = drawn(logits, rows, positions)
    for i, token in enumerate(found):
        assert_drawn_right(logits[i], rows[i], i, token)
    assert np.mean(found == drawn(logits, rows, positions, sample_reference)) > 0.9


@pytest.mark.parametrize("vocab_size", [50, 20_000])
def test_draw_does_not_depend_on_rows_or_threads(vocab_size):
    logits, rows, positions = mixed(12, vocab_size)
    found = drawn(logits, rows, positions)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        wide = torch.zeros(12, vocab_size + 16)[:, :vocab_size].copy_(logits)
        assert (drawn(wide, rows, positions) == found).all()
        assert (drawn(logits.flip(0), rows[::-1], positions[::-1]) == found[::-1]).all()
    finally:
        torch.set_num_threads(before)
    for i in range(12):
        one = slice(i, i + 1)
        assert drawn(logits[one], rows[one], positions[one]) == found[one]


@pytest.mark.parametrize("truncation", [{}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 0.0}])
def test_excluded_and_nan_tokens_are_never_drawn(truncation):
    rows, positions = rows_of(64, **truncation), np.arange(64)
    logits = torch.full((64, 40), -torch.inf)
    assert (drawn(logits, rows, positions) == NOTHING_LEFT).all()
    logits.fill_(torch.nan)
    assert (drawn(logits, rows, positions) == NOTHING_LEFT).all()
    logits.fill_(-torch.inf)
    logits[:, 7] = -3.0
    logits[:, 9] = torch.nan
    assert (drawn(logits, rows, positions) == 7).all()
    logits[:, 39] = torch.inf  # the row fails later; it must end
    drawn(logits, rows, positions)


def test_the_least_ids_of_equal_logits_are_kept():
    logits = torch.zeros(500, 100)
    logits[:, 3] = -9.0
    for truncation in ({"top_k": 5}, {"top_p": 4.5 / 99}):
        found = drawn(logits, rows_of(500, **truncation), np.arange(500))
        assert sorted(set(found.tolist())) == [0, 1, 2, 4, 5]


@pytest.mark.parametrize(
    ("truncation", "kept"),
    [({}, 5), ({"top_k": 3}, 3), ({"top_p": 0.9}, 3), ({"min_p": 0.2}, 3), ({"top_k": 4, "top_p": 0.8}, 2)],
)  # fmt: skip
def test_the_draws_follow_the_distribution(truncation, kept):
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.04, 0.01] + [0.0] * 15)
    count = 20_000
    rows = rows_of(count, **truncation)
    rows["seed"] = 3
    found = drawn(probabilities.log().repeat(count, 1), rows, np.arange(count))
    probabilities[kept:] = 0
    shares = np.bincount(found, minlength=20) / count
    expected = (probabilities / probabilities.sum()).numpy()
    np.testing.assert_allclose(shares, expected, atol=0.015)
    assert not shares[kept:].any()


def test_greater_temperatures_flatten():
    logits = torch.arange(16.0).repeat(2000, 1)
    rows, positions = rows_of(2000), np.arange(2000)
    rows["seed"], rows["temperature"] = 1, 0.05
    assert (drawn(logits, rows, positions) == 15).all()
    rows["temperature"] = 100.0
    assert len(set(drawn(logits, rows, positions).tolist())) == 16


def test_nearly_equal_tokens_are_all_drawn():
    """What may be passed over without a logarithm is never the best."""
    logits = torch.linspace(0, 1, 4096).repeat(500, 1)
    rows, positions = rows_of(500), np.arange(500)
    assert (
        drawn(logits, rows, positions) == drawn(logits, rows, positions, sample_reference)
    ).all()


def batch(num_rows, vocab_size, length, seed=0):
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.standard_normal((num_rows, vocab_size), dtype=np.float32))
    token_ids = rng.integers(0, vocab_size, (2 * num_rows, length))
    rows, ends = rng.permutation(2 * num_rows)[:num_rows], rng.integers(0, length + 1, num_rows)
    penalties = rng.choice([1, 1.2, 0.7], num_rows).astype(np.float32)
    return logits, token_ids, rows, ends, penalties


def penalised(logits, token_ids, rows, ends, penalties):
    """Who drew something."""
    parameters = np.zeros(len(token_ids), dtype=ROW)
    parameters["repetition"][rows] = penalties
    found = drawing.sample(
        logits, np.arange(len(rows)), parameters, rows, ends, token_ids, no_masks(len(parameters))
    )
    return found != NOT_FINITE


@pytest.mark.parametrize(
    ("num_rows", "vocab_size", "length"), [(1, 3, 9), (7, 100, 30), (300, 60, 400)]
)
def test_each_token_that_has_occurred_counts_once(num_rows, vocab_size, length):
    logits, token_ids, rows, ends, penalties = batch(num_rows, vocab_size, length)
    expected = logits.numpy().copy()
    for i in range(num_rows):
        for token in set(token_ids[rows[i], : ends[i]].tolist()):
            x = expected[i, token]
            expected[i, token] = x / penalties[i] if x > 0 else x * penalties[i]
    alike = logits.clone()
    penalised(logits, token_ids, rows, ends, penalties)
    assert (logits.numpy() == expected).all()
    for i in range(num_rows):
        ids = token_ids[rows[i], : ends[i]]
        apply_repetition_penalty_reference_(alike[i].numpy(), ids, penalties[i])
    assert torch.equal(alike, logits)


def test_rows_may_have_gaps_on_any_threads():
    logits, *others = batch(300, 60, 400)
    wide = torch.zeros(300, 77)[:, :60].copy_(logits)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        penalised(wide, *others)
    finally:
        torch.set_num_threads(before)
    penalised(logits, *others)
    assert torch.equal(wide, logits)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("vocab_size", [1, 15, 64, 65, 200])
def test_one_number_makes_a_row_infinite(vocab_size, poison):
    logits, *others = batch(vocab_size, vocab_size, 2)
    logits.fill_diagonal_(poison)
    logits = torch.cat((logits, torch.full((1, vocab_size), 3e38)))
    nothing = np.zeros(len(logits), dtype=np.int64)
    found = penalised(logits, others[0], nothing, nothing, 1.0)
    assert found.tolist() == [False] * vocab_size + [True]


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_row(poison):
    logits, *others = batch(5, 40, 50)
    poisoned = logits.clone()
    poisoned[2] = poison
    assert penalised(logits, *others).all()
    assert penalised(poisoned, *others).tolist() == [True, True, False, True, True]
    assert not poisoned[2].isfinite().any()
    kept = [0, 1, 3, 4]
    assert torch.equal(poisoned[kept], logits[kept])


def test_rows_draw_from_their_picked_logits():
    logits, rows, positions = mixed(9, 100)
    picked = np.array([7, 2, 3])
    nothing = np.zeros((9, 1), dtype=np.int64)
    found = drawing.sample(
        logits, picked, rows, picked - 1, positions[picked], nothing, no_masks(9)
    )
    assert (found == drawn(logits[picked], rows[picked - 1], positions[picked])).all()


@pytest.mark.parametrize("vocab_size", [16, 45, 1000])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_masked_row_draws_from_its_mask(vocab_size, temperature):
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(rng.standard_normal((6, vocab_size), dtype=np.float32))
    words = rng.integers(-(2**31), 2**31, (6, -(-vocab_size // 32)), dtype=np.int32)
    words[5] = 0
    allowed = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    rows, numbers = rows_of(6, temperature=temperature), np.arange(6)
    masks, nothing = no_masks(6), np.zeros((6, 1), dtype=np.int64)
    masks[[1, 3, 5]] = [words[row].ctypes.data for row in (1, 3, 5)]
    ends = numbers + 7
    free = drawing.sample(logits.clone(), numbers, rows, numbers, ends, nothing, no_masks(6))
    found, reference = (
        how(logits.clone(), numbers, rows, numbers, ends, nothing, masks)
        for how in (drawing.sample, sample_reference)
    )
    assert (found == reference).all()
    assert (found[[0, 2, 4]] == free[[0, 2, 4]]).all()
    assert allowed[1, found[1]]
    assert allowed[3, found[3]]
    assert found[5] == NOTHING_LEFT


def test_a_masked_row_must_be_finite():
    logits = torch.zeros(1, 50)
    logits[0, 7] = torch.nan
    words = np.full(2, -1, dtype=np.int32)
    zero, nothing = np.arange(1), np.zeros((1, 1), dtype=np.int64)
    masks = np.array([words.ctypes.data])
    rows = rows_of(1)
    rows["repetition"] = 1
    assert drawing.sample(logits, zero, rows, zero, zero, nothing, masks)[0] == NOT_FINITE
