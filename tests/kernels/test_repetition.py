"""The repetition penalty of many rows in one call."""

import numpy as np
import pytest
import torch

from trouper.kernels.repetition import penalise_repetition_, penalise_repetition_reference_


def batch(num_rows, vocab_size, length, seed=0):
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.standard_normal((num_rows, vocab_size), dtype=np.float32))
    token_ids = rng.integers(0, vocab_size, (2 * num_rows, length))
    rows, ends = rng.permutation(2 * num_rows)[:num_rows], rng.integers(0, length + 1, num_rows)
    return logits, token_ids, rows, ends, rng.choice([1, 1.2, 0.7], num_rows).astype(np.float32)


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
    penalise_repetition_(logits, token_ids, rows, ends, penalties)
    assert (logits.numpy() == expected).all()
    for i in range(num_rows):
        ids = token_ids[rows[i], : ends[i]]
        penalise_repetition_reference_(alike[i].numpy(), ids, penalties[i])
    assert torch.equal(alike, logits)


def test_on_any_number_of_threads_and_with_gaps_between_rows():
    logits, *others = batch(300, 60, 400)
    wide = torch.zeros(300, 77)[:, :60].copy_(logits)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        penalise_repetition_(wide, *others)
    finally:
        torch.set_num_threads(before)
    penalise_repetition_(logits, *others)
    assert torch.equal(wide, logits)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("vocab_size", [1, 15, 64, 65, 200])
def test_one_number_makes_a_row_infinite(vocab_size, poison):
    logits, *others = batch(vocab_size, vocab_size, 2)
    logits.fill_diagonal_(poison)
    logits = torch.cat((logits, torch.full((1, vocab_size), 3e38)))
    rows, ends, penalties = np.zeros((3, len(logits)), dtype=np.int64)
    found = penalise_repetition_(logits, others[0], rows, ends, penalties + np.float32(1))
    assert found.tolist() == [False] * vocab_size + [True]


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_row(poison):
    logits, *others = batch(5, 40, 50)
    poisoned = logits.clone()
    poisoned[2] = poison
    assert penalise_repetition_(logits, *others).all()
    assert penalise_repetition_(poisoned, *others).tolist() == [True, True, False, True, True]
    assert not poisoned[2].isfinite().any()
    kept = [0, 1, 3, 4]
    assert torch.equal(poisoned[kept], logits[kept])
