"""The parts of a decode step by kernel."""

import pytest

from trouper.bench.studies.models.step_profile import measure
from trouper.config.model import DEMO_MODEL


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", [0, 4])
def test_every_kernel_of_a_step_is_counted(num_drafts):
    found = measure(str(DEMO_MODEL), num_drafts=num_drafts, dtype="bfloat16", quantization="int4")
    assert ("over_plain" in found) is (num_drafts > 0)
    names = list(found["kernels"])
    assert any("matmul_int4" in name for name in names)
    assert any(name.startswith("sample_rows") for name in names)
    assert found["step_us"] > found["outside_us"] > 0
    assert found["read_gb_s"] > 0
