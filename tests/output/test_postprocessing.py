"""What becomes of raw results, against torch."""

import numpy as np
import pytest
import torch

from trouper.actors.output.postprocessing import cosines, finish, max_sim, normalized
from trouper.config.checkpoint.pooler import PoolerSpec
from trouper.errors import GenerationError
from trouper.frontends.server.apis.pooling.formats import to_bytes
from trouper.pooling import PoolingParams

RANDOM = np.random.default_rng(0)


def spec(**fields):
    defaults = {
        "tasks": ("embed",), "task": "embed", "engine_task": "embed", "seq_pooling_type": "CLS",
        "tok_pooling_type": "ALL", "embedding_size": 8, "normalizes": True, "use_activation": True,
        "activation": "softmax",
    }  # fmt: skip
    return PoolerSpec(**(defaults | fields))


def numbers(*shape):
    return RANDOM.normal(size=shape).astype(np.float32)


def test_an_embedding_is_shortened_and_then_normalised():
    raw = numbers(8)
    made = finish(raw, PoolingParams(task="embed", dimensions=3, use_activation=True), spec())
    want = torch.nn.functional.normalize(torch.from_numpy(raw[:3]), dim=0)
    np.testing.assert_allclose(made, want.numpy(), rtol=1e-6)
    plain = finish(raw, PoolingParams(task="embed", use_activation=False), spec())
    assert (plain == raw).all()
    assert not np.shares_memory(plain, raw)  # the step's other results are free to go


def test_document_is_scored_without_rows_that_are_skipped():
    query, document = numbers(3, 8), numbers(5, 8)
    params = PoolingParams(task="token_embed", use_activation=False)
    score = finish(document, params, spec(), query=query, skipped_rows=(1, 4))
    assert score == pytest.approx(max_sim(query, document[[0, 2, 3]]))
    assert finish(document, params, spec(), query=query) == pytest.approx(max_sim(query, document))


def test_token_embeddings_are_normalised_one_by_one():
    made = finish(numbers(5, 8), PoolingParams(task="token_embed", use_activation=True), spec())
    np.testing.assert_allclose(np.linalg.norm(made, axis=1), 1, rtol=1e-6)


@pytest.mark.parametrize(
    ("activation", "want"),
    [("softmax", lambda x: x.softmax(-1)), ("sigmoid", torch.sigmoid), ("identity", lambda x: x)],
)
def test_logits_are_calibrated_and_activated(activation, want):
    raw = numbers(4)
    own = spec(activation=activation, logit_mean=0.5, logit_sigma=2.0)
    made = finish(raw, PoolingParams(task="classify", use_activation=True), own)
    np.testing.assert_allclose(made, want((torch.from_numpy(raw) - 0.5) / 2).numpy(), rtol=1e-5)


def test_step_pooling_keeps_step_tokens_and_asked_columns():
    raw = numbers(4, 6)
    params = PoolingParams(
        task="token_classify", use_activation=False, step_tag_id=7, returned_token_ids=[1, 4]
    )
    made = finish(raw, params, spec(tok_pooling_type="STEP"), (5, 7, 6, 7))
    assert (made == raw[[1, 3]][:, [1, 4]]).all()


def test_max_sim_and_cosine_are_what_they_say():
    query, document = numbers(3, 8), numbers(5, 8)
    want = (torch.from_numpy(query) @ torch.from_numpy(document).T).max(1).values.sum().item()
    assert max_sim(query, document) == pytest.approx(want, rel=1e-5)
    assert cosines(query, query * 3) == pytest.approx(np.ones(len(query)), rel=1e-6)


@pytest.mark.parametrize("wrong", [[np.nan], [np.inf], [np.inf, -np.inf], [-np.inf, 1e30]])
@pytest.mark.parametrize("shape", [(8,), (3, 8)])
def test_what_is_not_finite_is_an_error(wrong, shape):
    raw = numbers(*shape)
    raw.flat[3 : 3 + len(wrong)] = wrong
    with pytest.raises(GenerationError) as raised:
        finish(raw, PoolingParams(task="embed", use_activation=True), spec())
    assert raised.value.code == "numerical_error"


def test_what_is_large_is_finite_nonetheless():
    raw = np.float32([1e30, -2e30, 1.0])  # the sum of their squares is not
    made = finish(raw, PoolingParams(task="embed", use_activation=False), spec())
    assert (made == raw).all()


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e15, 1e-30, 0.0])
def test_embedding_alone_is_normalised_to_bits_it_has_among_others(scale):
    raw = np.float32(scale) * numbers(50, 384)
    assert (normalized(raw) == [normalized(row) for row in raw]).all()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("float32", torch.float32), ("float16", torch.float16), ("bfloat16", torch.bfloat16),
        ("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2),
    ],
)  # fmt: skip
def test_every_dtype_is_rounded_as_torch_rounds_it(name, dtype):
    ties = np.arange(4000, dtype=np.float32) / 2048
    extremes = np.float32([0, -0.0, 448, 464, 465, 480, 57344, 61440, 1e9, -1e9, 1e-9])
    values = np.concatenate([numbers(20_000), ties, -ties, extremes])
    want = torch.from_numpy(values).to(dtype)
    assert to_bytes(values, name) == want.view(torch.uint8).numpy().tobytes()


def test_big_endian_swaps_every_number():
    assert to_bytes(np.float32([1.0]), "float32", "big") == b"\x3f\x80\x00\x00"
