import pytest
import torch

from trouper.kernels.codegen import units
from trouper.kernels.cpu.attention.varlen import Group
from trouper.kernels.cpu.encoder_ops import (
    LayerNorm,
    RowPooling,
    TokenEmbedding,
    gelu,
    layer_norm_reference,
)

TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 40])
@pytest.mark.parametrize("has_types", [False, True])
@pytest.mark.parametrize("has_positions", [False, True])
def test_a_token_is_the_sum_of_its_rows(native, dtype, num_tokens, has_types, has_positions):
    if native and units.kind_of(dtype) is None:
        pytest.skip("this machine's kernels do not compute with it")
    torch.manual_seed(0)
    words, types, positions = (torch.randn(n, 48).to(dtype) for n in (50, 2, 64))
    given = types if has_types else None, positions if has_positions else None
    embedding = TokenEmbedding(words, *given, native=native)
    ids, type_ids, places = (torch.randint(0, n, (num_tokens,)) for n in (50, 2, 64))
    wanted = words.double()[ids]
    if has_types:
        wanted += types.double()[type_ids]
    if has_positions:
        wanted += positions.double()[places]
    found = embedding(ids, type_ids, places)
    assert found.dtype == dtype
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=tolerance)


def test_embedding_by_torch_for_odd_widths():
    embedding = TokenEmbedding(torch.ones(5, 20))
    zeros = torch.zeros(3, dtype=torch.int64)
    assert "torch" in repr(embedding)
    assert torch.equal(embedding(zeros, zeros, zeros), torch.ones(3, 20))


def test_mismatched_tables_are_refused():
    words = torch.randn(50, 32)
    for wrong in (words[:, :16], torch.randn(32, 50).T, words.bfloat16()):
        with pytest.raises(AssertionError):
            TokenEmbedding(words, wrong)


@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 16), (3, 48), (40, 384)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=str
)
def test_it_equals_the_reference(num_rows, width, has_bias, dtype, tolerance, native):
    if native and units.kind_of(dtype) is None:
        pytest.skip("this machine's kernels do not compute with it")
    torch.manual_seed(0)
    x = (torch.randn(num_rows, width) * 3 + 5).to(dtype)  # far from 0: mean before variance
    weight, bias = torch.randn(width).to(dtype), torch.randn(width).to(dtype)
    bias = bias if has_bias else None
    norm = LayerNorm(weight, bias, 1e-5, native=native)
    want = layer_norm_reference(x, weight, bias, 1e-5)
    torch.testing.assert_close(norm(x), want, atol=tolerance, rtol=tolerance)
    residual = torch.randn(num_rows, width).to(dtype)
    want = layer_norm_reference(x.double() + residual.double(), weight, bias, 1e-5).to(dtype)
    torch.testing.assert_close(norm(x, residual), want, atol=2 * tolerance, rtol=2 * tolerance)


def test_layer_norm_by_torch_for_odd_widths():
    x = torch.randn(5, 20)
    norm = LayerNorm(torch.ones(20), None, 1e-5)
    assert "torch" in repr(norm)
    torch.testing.assert_close(norm(x).mean(1), torch.zeros(5), atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize("kind", ["MEAN", "CLS", "LAST"])
def test_pooled_text_does_not_depend_on_its_batch(kind, dtype, native):
    if native and units.kind_of(dtype) is None:
        pytest.skip("this machine's kernels do not compute with it")
    rng = torch.Generator().manual_seed(1)
    groups = [Group(0, 1, 1), Group(1, 2, 7), Group(15, 1, 100)]
    # rows apart from each other, as a decoder's are
    hidden = (3 * torch.randn((115, 80), generator=rng)).to(dtype).narrow(1, 0, 48)
    pool = RowPooling(kind, dtype, 48, native=native)
    together = pool(hidden, groups)
    bounds = [(0, 1), (1, 8), (8, 15), (15, 115)]
    alone = [pool(hidden[a:b].clone(), [Group(0, 1, b - a)]) for a, b in bounds]
    assert torch.equal(together, torch.cat(alone))
    reduce = {"MEAN": lambda x: x.mean(0), "CLS": lambda x: x[0], "LAST": lambda x: x[-1]}[kind]
    wanted = torch.stack([reduce(hidden[a:b].double()) for a, b in bounds])
    torch.testing.assert_close(together.double(), wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("width", [4, 16], ids=["torch", "native"])
@pytest.mark.parametrize("kind", ["MEAN", "CLS", "LAST"])
def test_pooled_rows_survive_the_next_pass(kind, width):
    hidden = torch.ones((3, width))
    pooled = RowPooling(kind, torch.float32, width)(hidden, [Group(0, 1, 3)])
    hidden.zero_()
    assert torch.equal(pooled, torch.ones((1, width)))


@pytest.mark.parametrize("has_tanh", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5, 48), (2, 7), (0, 16)])
def test_gelu_equals_torch_for_any_shape(has_tanh, dtype, shape):
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype) * 4
    approximate = "tanh" if has_tanh else "none"
    wanted = torch.nn.functional.gelu(x.double(), approximate=approximate)
    for given, expected in ((x, wanted), (x.transpose(0, 1), wanted.transpose(0, 1))):
        found = gelu(given, has_tanh=has_tanh)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, atol=2e-2, rtol=TOLERANCES[dtype] * 10)
