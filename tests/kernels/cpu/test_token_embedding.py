import pytest
import torch

from trouper.kernels.codegen import units
from trouper.kernels.cpu.fused.token_embedding import TokenEmbedding

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


def test_it_is_torchs_where_rows_are_no_whole_registers():
    embedding = TokenEmbedding(torch.ones(5, 20))
    zeros = torch.zeros(3, dtype=torch.int64)
    assert "torch" in repr(embedding)
    assert torch.equal(embedding(zeros, zeros, zeros), torch.ones(3, 20))


def test_tables_that_the_kernel_would_misread_are_a_defect():
    words = torch.randn(50, 32)
    for wrong in (words[:, :16], torch.randn(32, 50).T, words.bfloat16()):
        with pytest.raises(AssertionError):
            TokenEmbedding(words, wrong)
