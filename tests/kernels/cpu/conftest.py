"""What the tests of products have in common."""

import pytest

from trouper.kernels.codegen import units


@pytest.fixture(scope="module", params=["dots", "tiles"])
def unit(request):
    """Run with each unit that multiplies bfloat16 on this machine.

    Weights of few bits are decoded here also where that is too slow to be chosen.
    """
    if units.is_available():
        from trouper.kernels.codegen.features import has_tiles

        if request.param == "tiles" and not has_tiles():
            pytest.skip("needs AMX")
    elif request.param == "tiles":
        pytest.skip("there are no native kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(units, "bf16_unit", lambda: request.param)
        patch.setattr(units, "can_decode", units.is_available)
        yield request.param
