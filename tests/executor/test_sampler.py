"""The sampler on rows of its own, without a model: spec section 8."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trouper.actors.executor.sampling.sampler import (
    BadWords,
    Sampler,
    prompt_logprobs,
    token_logprobs,
)
from trouper.actors.executor.steps.request_slots import PromptSpan, RequestSlots
from trouper.actors.messages.requests import Embeds, SequenceId
from trouper.actors.messages.steps import NewSequence, Sampling
from trouper.kernels.reference.sampling import NOTHING_LEFT

V = 50


class Bench:
    """Rows 0 … n - 1 with a prompt and some outputs each."""

    def __init__(self, *sampling, prompt=(1, 2, 3), outputs=()):
        self.rows = RequestSlots(max(len(sampling), 1), 4096, 16)
        self.sampler = Sampler(self.rows)
        self.end = len(prompt) + len(outputs)
        for row, s in enumerate(sampling):
            tokens = (*prompt, *outputs)
            self.rows.place(NewSequence(row, SequenceId(row), tokens, len(prompt), (1,), s))
            self.sampler.place(row)

    def draw(self, logits, rows=None, end=None):
        rows = range(len(logits)) if rows is None else rows
        return self.sampler.sample(
            logits.clone(), np.array(rows), np.full(len(logits), end or self.end)
        )


def draws(sampling, logits, n, prompt=(1, 2, 3)):
    """Token counts of n draws at different positions; everything else stays the same."""
    bench = Bench(sampling, prompt=prompt)
    ends = list(range(len(prompt), len(prompt) + n))
    tokens = bench.sampler.sample(
        logits.repeat(n, 1), np.zeros(n, dtype=int), np.array(ends)
    ).token_ids
    return torch.bincount(torch.tensor(tokens), minlength=len(logits))


def assert_drawn_from(counts, probabilities):
    """Chi-square within four standard deviations; nothing that is impossible."""
    assert int(counts[probabilities == 0].sum()) == 0
    kept = probabilities > 0
    expected = probabilities[kept] * counts.sum()
    chi_square = float(((counts[kept] - expected) ** 2 / expected).sum())
    freedom = int(kept.sum()) - 1
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5 + 1e-9


def logits_of(n=12, seed=0, scale=1.5):
    return scale * torch.randn(n, generator=torch.Generator().manual_seed(seed))


def test_greedy_row_takes_first_of_largest():
    logits = torch.zeros(2, V)
    logits[0, [7, 9]] = 3.0
    logits[1, 49] = 1.0
    greedy = Sampling(temperature=0.0)
    assert Bench(greedy, greedy).draw(logits).token_ids == [7, 49]


def test_without_truncation_tokens_follow_the_softmax():
    logits = logits_of()
    assert_drawn_from(draws(Sampling(seed=5), logits, 3000), logits.softmax(-1))


def test_temperature_divides_the_logits():
    logits = logits_of()
    counts = draws(Sampling(seed=6, temperature=0.5), logits, 3000)
    assert_drawn_from(counts, (logits / 0.5).softmax(-1))


@pytest.mark.parametrize("top_k", [1, 4, 12, 40])
def test_top_k_keeps_the_k_best(top_k):
    logits = logits_of()
    kept = logits.argsort(descending=True)[:top_k]
    expected = torch.zeros(12).index_copy_(0, kept, logits[kept].softmax(-1))
    assert_drawn_from(draws(Sampling(seed=7, top_k=top_k), logits, 2000), expected)


@pytest.mark.parametrize("top_p", [0.01, 0.6, 0.95])
def test_top_p_keeps_smallest_set_that_reaches_mass(top_p):
    logits = logits_of()
    probabilities, order = logits.softmax(-1).sort(descending=True)
    num_kept = 1 + int((probabilities.cumsum(-1) < top_p).sum())
    kept = order[:num_kept]
    expected = torch.zeros(12).index_copy_(0, kept, logits[kept].softmax(-1))
    assert_drawn_from(draws(Sampling(seed=8, top_p=top_p), logits, 2000), expected)


def test_top_p_counts_mass_that_top_k_left():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    counts = draws(Sampling(seed=9, top_k=2, top_p=0.55), logits, 300)
    assert counts.tolist() == [300, 0, 0, 0]  # 0.4 / 0.7 reaches 0.55, 0.4 alone would not


def test_min_p_drops_what_is_improbable_beside_best_after_temperature():
    logits = torch.tensor([0.0, -1.0, -3.0])
    counts = draws(Sampling(seed=1, min_p=0.3), logits, 400)
    assert counts[1] > 0  # e^-1 = 0.37
    assert counts[2] == 0
    hot = draws(Sampling(seed=1, min_p=0.3, temperature=2.0), torch.tensor([0.0, -2.0, -3.0]), 400)
    assert hot[1] > 0
    assert hot[2] == 0


def test_top_p_of_equal_tokens_keeps_first_of_them():
    counts = draws(Sampling(seed=3, top_p=0.9), torch.zeros(3000), 1500)
    assert int((counts > 0).sum()) > 900
    assert int(counts[2700:].sum()) == 0


def test_top_p_of_large_vocabulary_equals_full_sort():
    torch.manual_seed(0)
    logits = 3 * torch.randn(20_000)
    counts = draws(Sampling(seed=4, top_p=0.5), logits, 600)
    probabilities, order = logits.softmax(-1).sort(descending=True)
    allowed = order[: 1 + int((probabilities.cumsum(-1) < 0.5).sum())]
    assert set(counts.nonzero().flatten().tolist()) <= set(allowed.tolist())


MIXED = (
    Sampling(seed=1),
    Sampling(temperature=0.0),
    Sampling(seed=2, top_k=5),
    Sampling(seed=3, top_p=0.8),
    Sampling(seed=2**64 - 1, min_p=0.1, temperature=1.3),
    Sampling(seed=5, top_k=5, top_p=0.5, repetition_penalty=1.3),
    Sampling(seed=-7, top_k=9, frequency_penalty=0.5, logit_bias=((3, 2.0),)),
)


def test_row_draws_same_token_alone_and_in_any_company():
    torch.manual_seed(1)
    logits = torch.randn(len(MIXED), V)
    for end in (3, 4, 100):
        together = Bench(*MIXED).draw(logits, end=end).token_ids
        backwards = Bench(*MIXED[::-1]).draw(logits.flip(0), end=end).token_ids
        alone = [
            Bench(s).draw(row[None], end=end).token_ids[0]
            for s, row in zip(MIXED, logits, strict=True)
        ]
        assert together == alone == backwards[::-1]


def test_seed_and_position_both_matter():
    logits = torch.zeros(1, V)
    by_seed = {Bench(Sampling(seed=s)).draw(logits).token_ids[0] for s in range(40)}
    by_position = {Bench(Sampling(seed=1)).draw(logits, end=e).token_ids[0] for e in range(3, 43)}
    assert len(by_seed) > 15
    assert len(by_position) > 15


def test_only_allowed_ids_are_drawn():
    logits = torch.randn(1, V)
    s = Sampling(seed=1, allowed_token_ids=(4, 8))
    assert {Bench(s).draw(logits, end=e).token_ids[0] for e in range(3, 60)} == {4, 8}


def test_a_row_that_may_draw_nothing_fails_alone():
    nothing = Sampling(temperature=0.0, allowed_token_ids=(2,), min_tokens=1, stop_ids=(2,))
    assert Bench(nothing, Sampling(temperature=0.0)).draw(torch.zeros(2, V)).token_ids == [
        NOTHING_LEFT,
        0,
    ]


def test_row_that_may_draw_nothing_has_no_logprobs():
    nothing = Sampling(allowed_token_ids=(2,), min_tokens=1, stop_ids=(2,), logprobs=1)
    sampled = Bench(nothing, Sampling(logprobs=0)).draw(torch.zeros(2, V))
    assert sampled.token_ids[0] == NOTHING_LEFT
    assert sampled.logprobs[0] is None
    assert sampled.logprobs[1].token_ids == (sampled.token_ids[1],)


def test_bad_words_mask_last_token_once_output_ends_with_others():
    logits = torch.zeros(1, V)
    logits[0, 9] = 5.0
    logits[0, 8] = 4.0
    greedy = Sampling(temperature=0.0, bad_words_ids=((5, 6, 9),))
    assert Bench(greedy, outputs=(5, 6)).draw(logits).token_ids == [8]
    assert Bench(greedy, outputs=(6, 5)).draw(logits).token_ids == [9]
    assert Bench(greedy, outputs=(6,)).draw(logits).token_ids == [9]
    prompt_does_not_count = Bench(greedy, prompt=(1, 5), outputs=(6,))
    assert prompt_does_not_count.draw(logits).token_ids == [9]
    one_token = Sampling(temperature=0.0, bad_words_ids=((9,), (8,)))
    assert Bench(one_token).draw(logits).token_ids == [0]


@given(
    words=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=9),
    outputs=st.lists(st.integers(0, 3), max_size=8),
)
def test_bad_word_is_found_wherever_output_ends_with_its_beginning(words, outputs):
    found = BadWords(words).next_after(np.array(outputs, dtype=np.int64))
    expected = [w[-1] for w in words if len(w) <= len(outputs) + 1 and ends_with(outputs, w[:-1])]
    assert sorted(found) == sorted(expected)


def ends_with(tokens, end):
    return tokens[len(tokens) - len(end) :] == end


def test_bad_words_cost_one_lookup_per_step():
    class Once(dict):
        looks = 0

        def get(self, key):
            Once.looks += 1
            return super().get(key)

    words = BadWords([(first, second, 9) for first in range(16) for second in range(16)])
    words._root.before = Once(words._root.before)
    assert words.next_after(np.array([1, 2, 40])) == []
    assert Once.looks == 1


def test_stop_ids_are_masked_until_min_tokens_outputs_exist():
    logits = torch.zeros(1, V)
    logits[0, 9] = 5.0
    s = Sampling(temperature=0.0, min_tokens=2, stop_ids=(9,))
    assert Bench(s).draw(logits).token_ids == [0]
    assert Bench(s, outputs=(4,)).draw(logits).token_ids == [0]
    assert Bench(s, outputs=(4, 4)).draw(logits).token_ids == [9]


def test_bias_is_added():
    logits = torch.zeros(1, V)
    logits[0, 9] = 5.0
    s = Sampling(temperature=0.0, logit_bias=((9, -100.0), (12, 1.0)))
    assert Bench(s).draw(logits).token_ids == [12]


def test_repetition_counts_prompt_and_others_output_only():
    logits = torch.zeros(1, V)
    logits[0, 1], logits[0, 20], logits[0, 30] = 3.0, 2.9, 2.8
    repetition = Sampling(temperature=0.0, repetition_penalty=1.1)
    assert Bench(repetition).draw(logits).token_ids == [20]  # 1 is in the prompt
    presence = Sampling(temperature=0.0, presence_penalty=0.15)
    assert Bench(presence).draw(logits).token_ids == [1]
    assert Bench(presence, outputs=(1,)).draw(logits).token_ids == [20]
    frequency = Sampling(temperature=0.0, frequency_penalty=0.06)
    assert Bench(frequency, outputs=(1,)).draw(logits).token_ids == [1]
    assert Bench(frequency, outputs=(1, 1, 1)).draw(logits).token_ids == [20]


def test_what_stands_for_embeddings_has_not_occurred():
    logits = torch.zeros(1, V)
    logits[0, 0], logits[0, 1], logits[0, 20] = 3.0, 3.5, 2.9
    bench = Bench(Sampling(temperature=0.0, repetition_penalty=1.25))
    part = Embeds("float32", 2, 1, memoryview(bytes(8)), first=1)
    new = NewSequence(0, SequenceId(0), (1, 0, 0, 3), 4, (1,), bench.rows.sampling[0], (part,))
    bench.rows.place(new)
    bench.sampler.place(0)
    assert bench.draw(logits, end=4).token_ids == [0]


def test_negative_logits_are_multiplied_by_the_repetition_penalty():
    logits = torch.full((1, V), -10.0)
    logits[0, 1], logits[0, 20] = -1.0, -1.5
    assert Bench(Sampling(temperature=0.0, repetition_penalty=2.0)).draw(logits).token_ids == [20]


@pytest.mark.parametrize("others", [{}, {"logit_bias": ((9, 0.5),)}])  # alone, and not
@pytest.mark.parametrize(("penalty", "expected"), [(1e308, 4), (1e-308, 1)])
def test_repetition_penalty_beyond_float32_is_very_large_or_small_one(penalty, expected, others):
    logits = torch.zeros(1, V)
    logits[0, [1, 2, 4]] = torch.tensor([3.0, -3.0, 1.0])
    s = Sampling(temperature=0.0, repetition_penalty=penalty, **others)
    assert Bench(s).draw(logits).token_ids == [expected]
    assert np.isfinite(np.float32([s.repetition, 1 / s.repetition])).all()


def test_drawn_tokens_count_for_the_next_draw():
    logits = torch.zeros(1, V)
    logits[0, 7], logits[0, 8] = 1.0, 0.5
    bench = Bench(Sampling(temperature=0.0, presence_penalty=2.0))
    assert bench.draw(logits, end=3).token_ids == [7]
    assert bench.rows.token_ids[0, 3] == 7
    assert bench.draw(logits, end=4).token_ids == [8]


def test_bias_comes_before_the_penalties():
    """(2 + 4) / 2 = 3 > 2.5; the other order would give 2 / 2 + 4 = 5, so compare with 4."""
    logits = torch.zeros(1, V)
    logits[0, 1], logits[0, 20] = 2.0, 4.0
    s = Sampling(temperature=0.0, repetition_penalty=2.0, logit_bias=((1, 4.0),))
    assert Bench(s).draw(logits).token_ids == [20]


def test_bias_cannot_bring_back_what_is_not_allowed():
    logits = torch.zeros(1, V)
    s = Sampling(temperature=0.0, allowed_token_ids=(4,), logit_bias=((9, 100.0),))
    assert Bench(s).draw(logits).token_ids == [4]


def test_row_given_to_another_sequence_forgets_first():
    logits = torch.zeros(1, V)
    logits[0, 1], logits[0, 20] = 2.0, 1.5
    bench = Bench(Sampling(temperature=0.0, repetition_penalty=2.0))
    assert bench.draw(logits).token_ids == [20]
    bench.rows.place(NewSequence(0, SequenceId(9), (1, 2), 2, (1,), Sampling(temperature=0.0)))
    bench.sampler.place(0)
    assert bench.draw(logits, end=2).token_ids == [1]


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("s", MIXED, ids=range(len(MIXED)))
def test_a_row_that_is_not_finite_fails_alone(poison, s):
    torch.manual_seed(2)
    logits = torch.randn(3, V)
    clean = Bench(s, s, s).draw(logits).token_ids
    logits[1, 5] = poison
    sampled = Bench(s, s, s).draw(logits)
    assert sampled.token_ids == [clean[0], -1, clean[2]]


def test_logprobs_are_raw_and_begin_with_sampled_token():
    logits = torch.randn(2, V)
    s = Sampling(temperature=0.0, logprobs=2, logit_bias=((9, 100.0),))
    first, nothing = Bench(s, Sampling(temperature=0.0)).draw(logits).logprobs
    assert nothing is None
    raw = logits[0].log_softmax(-1)
    best = raw.argsort(descending=True).tolist()
    assert first.token_ids == (9, *[t for t in best[:2] if t != 9])
    assert first.rank == 1 + best.index(9)
    assert first.logprobs == tuple(raw[list(first.token_ids)].tolist())


@pytest.mark.parametrize(("num_top", "length"), [(0, 1), (1, 1), (3, 3), (-1, V), (999, V)])
def test_sampled_token_among_best_is_not_repeated(num_top, length):
    logprobs = torch.randn(V).log_softmax(-1)
    best = int(logprobs.argmax())
    found = token_logprobs(logprobs, best, num_top)
    assert len(found.token_ids) == len(set(found.token_ids)) == length
    assert found.token_ids[0] == best
    assert found.rank == 1
    assert list(found.logprobs) == sorted(found.logprobs, reverse=True)


def test_exactly_wanted_ids_are_reported_and_sampled_one():
    logprobs = torch.randn(V).log_softmax(-1)
    found = token_logprobs(logprobs, 5, 3, (7, 5, 9))
    assert found.token_ids[0] == 5
    assert set(found.token_ids) == {5, 7, 9}
    assert list(found.logprobs[1:]) == sorted(found.logprobs[1:], reverse=True)


def test_ties_are_all_counted_in_the_rank():
    found = token_logprobs(torch.tensor([-1.0, -1.0, -2.0]), 0, 0)
    assert found.rank == 2
    assert np.isclose(found.logprobs[0], -1.0)


def test_rank_without_logits_computes_its_share():
    pieces = {True: [], False: []}
    spans = [PromptSpan(0, 2, np.arange(300) % V, 1), PromptSpan(3, 302, np.arange(5), 0)]
    hidden = torch.randn(310, V)

    def found(keeps):
        def logits(hidden_TE, first_token):
            pieces[keeps].append((hidden_TE.data_ptr(), len(hidden_TE)))
            return hidden_TE.clone()

        return prompt_logprobs(spans, hidden, logits, keeps=keeps)

    assert [(entry, len(positions)) for entry, positions in found(True)] == [(0, 300), (3, 5)]
    assert found(False) == ()
    assert pieces[False] == pieces[True]
    assert [length for _, length in pieces[True]] == [256, 44, 5]
