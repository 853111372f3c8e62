"""Logits, thresholds, the draw and logprobs: each against its reference, all together against the CPU path."""

import msgspec
import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from trouper.actors.executor.sampling.sampler import Sampler
from trouper.actors.executor.steps.request_slots import RequestSlots
from trouper.actors.messages.requests import SequenceId
from trouper.actors.messages.steps import NewSequence, Sampling
from trouper.kernels.cuda.sample import (
    TopLogprobs,
    gumbel,
    log,
    put_tokens_,
    row_keys,
    sample,
    top_logprobs,
    top_logprobs_reference,
)
from trouper.kernels.cuda.sampling_rows import (
    NEVER,
    SamplingRows,
    apply_penalties,
    apply_penalties_reference,
    make_sampling_rows,
)
from trouper.kernels.cuda.top_k_top_p import top_k_top_p
from trouper.kernels.reference.sampling import PARAMETERS, ROW, row_of, top_k_top_p_reference
from trouper.kernels.reference.sampling import gumbel as gumbel_of_the_cpu_path
from trouper.kernels.reference.sampling import row_keys as row_keys_of_the_cpu_path


@triton.jit
def noise_kernel(seeds_ptr, positions_ptr, keys_ptr, out_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    token = tl.arange(0, BLOCK)
    low, high = tl.load(seeds_ptr + 2 * row), tl.load(seeds_ptr + 2 * row + 1)
    key0, key1 = row_keys(low.to(tl.uint32), high.to(tl.uint32), tl.load(positions_ptr + row))
    tl.store(keys_ptr + row * 2, key0.to(tl.int32, bitcast=True))
    tl.store(keys_ptr + row * 2 + 1, key1.to(tl.int32, bitcast=True))
    tl.store(out_ptr + row * N + token, gumbel(key0, key1, token), mask=token < N)


@triton.jit
def log_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, log(tl.load(x_ptr + at)))


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 + 12345, 2**64 - 1])
def test_noise_equals_the_cpu_path_within_rounding(device, seed):
    positions = np.array([0, 1, 4095, 2**31 - 1])
    seeds = np.full(4, seed, dtype=np.uint64)
    num = 5000
    keys = torch.empty(4, 2, dtype=torch.int32, device=device)
    out = torch.full((4, num), torch.nan, device=device)
    noise_kernel[(4,)](
        torch.from_numpy(seeds.view(np.int32)).to(device),
        torch.from_numpy(positions.astype(np.int32)).to(device),
        keys,
        out,
        num,
        BLOCK=8192,
    )
    expected = np.stack(row_keys_of_the_cpu_path(seeds, positions), 1)
    assert keys.cpu().numpy().view(np.uint32).tolist() == expected.tolist()
    noise = gumbel_of_the_cpu_path(seeds, positions, np.arange(num))
    torch.testing.assert_close(out.cpu(), noise, atol=1e-6, rtol=5e-7)


def test_the_logarithm_is_exact_near_one(device):
    """The arguments that noise uses: (k + ½) / 2²³, and -log of those."""
    k = torch.arange(0.5, 2048)
    u = torch.cat((k, 2**23 - k, torch.linspace(0.5, 2**23 - 0.5, 4096).round() + 0.5))[:8191]
    u = torch.cat((u * 2.0**-23, torch.ones(1)))
    for x in (u, torch.where(u < 1, -u.log(), u)):
        out = torch.full_like(x, torch.nan, device=device)
        log_kernel[(1,)](x.to(device), out, BLOCK=len(x))
        torch.testing.assert_close(out.cpu().double(), x.double().log(), atol=0, rtol=2.5e-7)


V = 4500  # two blocks, the second ragged
RAISED = ((5, 300.0), (9, 200.0), (4, 100.0))
FEATURES = {
    "greedy": Sampling(temperature=0),
    "plain": Sampling(seed=1),
    "hot": Sampling(temperature=3.0, seed=2**64 - 1),
    "top-k": Sampling(temperature=0.7, top_k=40, seed=2),
    "top-k of one": Sampling(top_k=1, seed=3),
    "top-k of all but one": Sampling(temperature=2.0, top_k=V - 1, seed=4),
    "top-p": Sampling(temperature=0.8, top_p=0.9, seed=5),
    "top-p of almost nothing": Sampling(top_p=1e-6, seed=6),
    "top-p of almost all": Sampling(temperature=4.0, top_p=0.999, seed=7),
    "min-p": Sampling(temperature=1.5, min_p=0.02, seed=8),
    "all three": Sampling(temperature=1.3, top_k=100, top_p=0.7, min_p=1e-3, seed=9),
    "bias": Sampling(temperature=0, logit_bias=((7, 100.0), (4499, 99.0)), seed=10),
    "penalties": Sampling(
        repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=-0.2, top_k=5, seed=11
    ),
    "allowed": Sampling(allowed_token_ids=(3, 4400, 31, 32), top_p=0.8, seed=12),
    "min tokens": Sampling(temperature=0, min_tokens=7, stop_ids=(9, 5), logit_bias=RAISED),
    "enough tokens": Sampling(temperature=0, min_tokens=6, stop_ids=(9, 5), logit_bias=RAISED),
    "bad words": Sampling(
        temperature=0, bad_words_ids=((7, 8, 5), (9,), (8, 8, 4)), logit_bias=RAISED
    ),
    "bad words that do not match": Sampling(
        temperature=0, bad_words_ids=((2, 1, 5, 9, 5, 7, 8, 5), (7, 5)), logit_bias=RAISED
    ),
}


class Batch:
    """Rows placed on the CPU path and on the device; row i of the batch is device row 2 i + 1."""

    def __init__(self, samplings, *, device, vocab_size=V, dtype=torch.float32, scale=4.0):
        torch.manual_seed(0)
        num = len(samplings)
        self.samplings, self.vocab_size = samplings, vocab_size
        self.rows = [2 * i + 1 for i in range(num)]
        self.ends = [10] * num
        self.logits = (scale * torch.randn(num, vocab_size)).to(dtype)
        prompt, outputs = (3, 1, 4, 2), (1, 5, 9, 5, 7, 8)
        self.cpu_rows = RequestSlots(2 * num, 20, 4)
        self.cpu = Sampler(self.cpu_rows)
        on_device = make_sampling_rows(2 * num, vocab_size, max_edits=8, max_condition=7)
        tokens = torch.full((2 * num, 21), -5, dtype=torch.int32)
        for row, s in zip(self.rows, samplings, strict=True):
            new = NewSequence(row, SequenceId(row), prompt + outputs, len(prompt), (), s)
            self.cpu_rows.place(new)
            self.cpu.place(row)
            tokens[row, :10] = torch.tensor(new.token_ids)
            place(on_device, row, s, prompt, outputs)
        self.host = on_device
        self.sampling = SamplingRows(*(x.to(device, copy=True) for x in on_device))
        self.tokens = tokens.to(device)
        rows = [-1, *self.rows, -1]  # padding on both sides
        self.device_rows = torch.tensor(rows, dtype=torch.int32, device=device)
        self.device_ends = torch.tensor([0, *self.ends, 0], dtype=torch.int32, device=device)
        padding = torch.full((1, vocab_size), torch.nan, dtype=dtype)
        self.raw = torch.cat((padding, self.logits, padding)).to(device)
        self.edited = torch.full_like(self.raw, torch.nan, dtype=torch.float32)

    def edit(self):
        apply_penalties(
            self.raw,
            self.device_rows,
            self.device_ends,
            self.tokens,
            self.sampling,
            out=self.edited,
        )

    def truncate(self):
        return top_k_top_p(self.raw, self.edited, self.device_rows, self.sampling)

    def drawn_on_cpu(self):
        return self.cpu.sample(self.logits.clone(), np.array(self.rows), np.array(self.ends))

    def draw(self):
        self.edit()
        rows = self.device_rows, self.device_ends
        kept = self.truncate()
        return sample(self.raw, self.edited, *rows, *kept, self.tokens, self.sampling).cpu()


def place(rows, row, s, prompt, outputs):
    """What placing a row writes; the device's own tables are filled by the same rules."""
    rows.parameters.numpy().view(ROW)[row] = row_of(s)
    rows.num_prompt[row] = len(prompt)
    for token in prompt:
        rows.history[row, token] |= 1
    for token in outputs:
        rows.history[row, token] += 2
    if s.allowed_token_ids:
        rows.is_masked[row] = 1
        bits = np.zeros(rows.mask.shape[1] * 32, dtype=np.uint8)
        bits[list(s.allowed_token_ids)] = 1
        words = np.packbits(bits, bitorder="little").view(np.int32)
        rows.mask[row] = torch.from_numpy(words)
    edits = [(token, value, NEVER, ()) for token, value in s.logit_bias]
    if s.min_tokens:
        edits += [(token, -torch.inf, len(prompt) + s.min_tokens, ()) for token in s.stop_ids]
    edits += [(word[-1], -torch.inf, NEVER, word[:-1]) for word in s.bad_words_ids]
    rows.num_edits[row] = len(edits)
    for i, (token, value, until, condition) in enumerate(edits):
        rows.edit_ids[row, i], rows.edit_values[row, i] = token, value
        rows.edit_untils[row, i], rows.edit_lengths[row, i] = until, len(condition)
        rows.edit_conditions[row, i, : len(condition)] = torch.tensor(condition)
    is_penalised = s.repetition_penalty != 1 or s.frequency_penalty or s.presence_penalty
    rows.is_edited[row] = bool(edits or s.allowed_token_ids or is_penalised)


def kept_of(scaled_V, s):
    """The tokens that may be drawn, of logits already divided by the temperature."""
    # Numbers of Python, because a top-p rounded to float32 may be on the other side of a sum of equal logits.
    row = dict(zip(PARAMETERS, row_of(msgspec.structs.replace(s, temperature=1.0)), strict=True))
    return torch.from_numpy(top_k_top_p_reference(scaled_V.numpy(), row))


@pytest.mark.parametrize("vocab_size", [V, pytest.param(151_936, marks=pytest.mark.gpu)])
def test_the_device_draws_the_cpu_paths_tokens(device, vocab_size):
    batch = Batch(list(FEATURES.values()), device=device, vocab_size=vocab_size)
    found = batch.draw()
    expected = batch.drawn_on_cpu().token_ids
    assert found.tolist() == [-1, *expected, -1]
    drawn = dict(zip(FEATURES, expected, strict=True))
    assert drawn["min tokens"] == 4
    assert drawn["enough tokens"] == drawn["bad words that do not match"] == 5
    assert drawn["bad words"] == 4
    assert drawn["allowed"] in FEATURES["allowed"].allowed_token_ids
    tokens = batch.tokens.cpu()
    assert tokens[batch.rows, 10].tolist() == expected
    assert (tokens[:, 11:] == -5).all()
    assert (tokens[::2] == -5).all()
    assert int((batch.sampling.history.cpu() - batch.host.history).sum()) == 2 * len(expected)


def test_the_references_together_are_the_cpu_path():
    batch = Batch(list(FEATURES.values()), device=torch.device("cpu"))
    expected = batch.drawn_on_cpu().token_ids
    tokens = batch.host.history.new_tensor(batch.cpu_rows.token_ids)
    for i, (row, s) in enumerate(zip(batch.rows, batch.samplings, strict=True)):
        x = apply_penalties_reference(batch.logits[i], row, 10, tokens, batch.host)
        noise = None
        if s.temperature:
            x = x / s.temperature
            seed = np.array([s.seed], dtype=np.uint64)
            noise = gumbel_of_the_cpu_path(seed, np.array([10]), np.arange(V))[0]
        drawn = x if noise is None else (x + noise).masked_fill(~kept_of(x, s), -torch.inf)
        assert int(drawn.argmax()) == expected[i], s


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [V, pytest.param(151_936, marks=pytest.mark.gpu)])
def test_edited_logits_equal_the_reference(device, dtype, vocab_size):
    batch = Batch(list(FEATURES.values()), device=device, vocab_size=vocab_size, dtype=dtype)
    batch.edit()
    edited = batch.edited.cpu()
    assert edited[0].isnan().all()
    assert edited[-1].isnan().all()
    tokens = batch.tokens.cpu()
    for i, row in enumerate(batch.rows):
        found = edited[1 + i]
        if not batch.host.is_edited[row]:
            assert found.isnan().all()
            continue
        expected = apply_penalties_reference(batch.logits[i], row, 10, tokens, batch.host)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "vocab_size", "scale"),
    [
        (torch.float32, 10, 8.0),
        (torch.bfloat16, 63, 0.0),
        (torch.bfloat16, 4097, 0.5),
        pytest.param(torch.bfloat16, 151_936, 4.0, marks=pytest.mark.gpu),
        *(
            pytest.param(dtype, vocab_size, scale, marks=pytest.mark.slow)
            for dtype in (torch.float32, torch.bfloat16)
            for vocab_size in (10, 63, 4097, 9001)  # none at which p · V is whole
            for scale in (0.0, 0.5, 8.0)
        ),
    ],
    ids=str,
)
def test_kept_tokens_equal_a_stable_sort(device, dtype, vocab_size, scale):
    """In bfloat16, and with a scale of zero, most values are equal."""
    samplings = [
        Sampling(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
        for top_k, top_p, min_p, temperature in [
            (1, 1, 0, 1), (40, 1, 0, 0.7), (999, 1, 0, 0.1), (5000, 1, 0, 1), (0, 0.5, 0, 1),
            (0, 0.97, 0, 0.3), (0, 1e-9, 0, 1), (30, 0.79, 0, 2), (500, 0.99, 0.01, 0.5),
            (0, 1, 0.1, 1), (3, 0.9, 0.5, 1), (0, 1, 1, 1),
        ]
    ]  # fmt: skip
    batch = Batch(samplings, device=device, vocab_size=vocab_size, dtype=dtype, scale=scale)
    threshold, last_tie = (x.cpu() for x in batch.truncate())
    assert threshold[[0, -1]].tolist() == [-torch.inf] * 2  # padding
    for i, s in enumerate(samplings):
        x = batch.logits[i].float() / s.temperature
        is_tie = (x == threshold[1 + i]) & (torch.arange(vocab_size) <= last_tie[1 + i])
        kept = (x > threshold[1 + i]) | is_tie
        expected = kept_of(x, s)
        can_be_drawn = x > x.max() - 19.46
        assert torch.equal(kept & can_be_drawn, expected & can_be_drawn), s


@pytest.mark.parametrize("top_k", [0, 3000])
def test_tokens_out_of_reach_still_count_as_mass(device, top_k):
    """The best has 0.99999 of the mass, because 4000 tokens beyond the noise's reach have the rest."""
    batch = Batch([Sampling(top_k=top_k, top_p=0.999995)], device=device)
    batch.raw[1] = -torch.inf
    batch.raw[1, :4000] = -19.6
    batch.raw[1, 7], batch.raw[1, 9] = 0, -19.0
    threshold, _ = batch.truncate()
    assert threshold[1] <= -19.0
    batch.raw[1, :4000] = torch.where(batch.raw[1, :4000] == -19.6, -40.0, batch.raw[1, :4000])
    threshold, _ = batch.truncate()
    assert threshold[1] == 0


def test_of_equal_logits_the_first_are_kept(device):
    samplings = [Sampling(top_k=1), Sampling(top_k=3, seed=1), Sampling(top_p=0.001, seed=2)]
    batch = Batch(samplings, device=device, scale=0.0, dtype=torch.bfloat16)
    found = batch.draw()[1:-1].tolist()
    assert found[0] == 0
    for token, s, num_kept in zip(found, samplings, (1, 3, 5), strict=True):
        seed = np.array([s.seed], dtype=np.uint64)
        assert token == int(
            gumbel_of_the_cpu_path(seed, np.array([10]), np.arange(num_kept)).argmax()
        )


@pytest.mark.parametrize(("bad", "where"), [(torch.nan, 0), (torch.inf, V - 1), (-torch.inf, 9)])
def test_a_row_that_is_not_finite_fails_alone(device, bad, where):
    names = ["greedy", "hot", "min-p", "penalties", "bias", "greedy"]
    clean = Batch([FEATURES[name] for name in names], device=device)
    expected = clean.draw().tolist()
    batch = Batch(clean.samplings, device=device)
    batch.raw[1:-1:2, where] = bad
    history = batch.sampling.history.clone()
    assert batch.draw().tolist() == [-1, -1, expected[2], -1, expected[4], -1, expected[6], -1]
    failed = batch.rows[::2]
    assert torch.equal(batch.sampling.history[failed], history[failed])
    assert (batch.tokens[failed, 10] == -5).all()


def test_another_devices_tokens_go_to_their_rows(device):
    tokens = torch.arange(24, dtype=torch.int32, device=device).view(3, 8)
    sampled, rows, ends = (
        torch.tensor(x, dtype=torch.int32, device=device)
        for x in ([70, -1, 71, 72], [2, 1, -1, 0], [7, 3, 0, 1])
    )
    expected = tokens.clone()
    expected[2, 7], expected[0, 1] = 70, 72
    put_tokens_(sampled, rows, ends, tokens)
    assert torch.equal(tokens, expected)


def test_a_row_whose_mask_leaves_nothing_fails(device):
    batch = Batch([FEATURES["allowed"]], device=device)
    batch.sampling.mask.zero_()
    assert batch.draw().tolist() == [-1, -1, -1]


def test_a_token_does_not_depend_on_its_neighbours(device):
    together = Batch(list(FEATURES.values()), device=device)
    expected = together.draw()[1:-1].tolist()
    for i in (1, 4, 14):
        alone = Batch(together.samplings[i : i + 1], device=device)
        alone.raw[1] = together.raw[1 + i]
        assert alone.draw()[1] == expected[i]


@pytest.mark.parametrize(
    "num_draws",
    [pytest.param(400, marks=pytest.mark.slow), pytest.param(1_000_000, marks=pytest.mark.gpu)],
)
def test_frequencies_are_those_of_the_softmax(device, num_draws):
    """Chi-square over the tokens of one row, drawn at many positions."""
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 1.5, 0.5, -0.5, 0.1])
    sampling = make_sampling_rows(1, len(logits), device=device)
    sampling.numbers("temperature").fill_(1.0)
    sampling.numbers("seed").copy_(torch.tensor([1234, 0]))
    rows = torch.zeros(num_draws, dtype=torch.int32, device=device)
    ends = torch.arange(num_draws, dtype=torch.int32, device=device)
    tokens = torch.full((1, num_draws), -1, dtype=torch.int32, device=device)
    raw = logits.to(device).expand(num_draws, -1).contiguous()
    threshold, last_tie = torch.full((num_draws,), -torch.inf, device=device), rows + len(logits)
    found = sample(raw, raw, rows, ends, threshold, last_tie, tokens, sampling)
    assert torch.equal(found, tokens[0])
    counts = torch.bincount(found.cpu(), minlength=len(logits))
    assert torch.equal(sampling.history[0].cpu(), 2 * counts.int())
    expected = num_draws * logits.softmax(0)
    assert float(((counts - expected) ** 2 / expected).sum()) < 24.3  # 7 degrees of freedom, 0.1 %


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("vocab_size", "num_top"),
    [
        (1, 1),
        pytest.param(2100, 0, marks=pytest.mark.slow),
        pytest.param(5000, 20, marks=pytest.mark.slow),
        pytest.param(151_936, 20, marks=pytest.mark.gpu),
    ],
)
def test_logprobs_equal_the_reference(device, dtype, vocab_size, num_top):
    torch.manual_seed(0)
    logits = (3 * torch.randn(4, vocab_size)).to(dtype)
    sampled = torch.tensor([0, -1, vocab_size - 1, vocab_size // 2], dtype=torch.int32)
    logits[3] = 0
    out = TopLogprobs(
        torch.full((4, 1 + num_top), -5, dtype=torch.int32, device=device),
        torch.full((4, 1 + num_top), torch.nan, device=device),
        torch.full((4,), -5, dtype=torch.int32, device=device),
    )
    found = top_logprobs(logits.to(device), sampled.to(device), num_top, out=out)
    ids, logprobs, ranks = (x.cpu() for x in found)
    assert logprobs[1].isnan().all()
    for i in (0, 2, 3):
        expected = top_logprobs_reference(logits[i], int(sampled[i]), num_top)
        assert ids[i].tolist() == expected.ids.tolist()
        assert int(ranks[i]) == int(expected.ranks)
        torch.testing.assert_close(logprobs[i], expected.logprobs, atol=1e-5, rtol=1e-6)


def test_logprobs_are_those_of_the_cpu_path(device):
    batch = Batch([Sampling(temperature=0, logprobs=5)], device=device, vocab_size=2100)
    sampled = batch.draw()
    found = top_logprobs(batch.raw, sampled.to(device), 5)
    (expected,) = batch.drawn_on_cpu().logprobs
    assert expected.token_ids == tuple(found.ids[1, 1:].tolist())  # the best is the token
    assert expected.rank == int(found.ranks[1])
    torch.testing.assert_close(torch.tensor(expected.logprobs), found.logprobs[1, 1:].cpu())
