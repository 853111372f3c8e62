"""What the tests of products have in common."""

import pytest

from trouper.kernels.codegen import launch


@pytest.fixture(scope="module", params=["dots", "tiles"])
def unit(request):
    """Each of the instructions that multiply bfloat16, where this machine has both.

    Weights of few bits are decoded here also where that is too slow to be chosen.
    """
    if launch.is_available():
        from trouper.kernels.codegen.compiler import has_tiles

        if request.param == "tiles" and not has_tiles():
            pytest.skip("needs AMX")
    elif request.param == "tiles":
        pytest.skip("there are no native kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "bf16_unit", lambda: request.param)
        patch.setattr(launch, "can_decode", launch.is_available)
        yield request.param
