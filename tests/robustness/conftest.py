"""What tests of worker processes share: each starts some, which takes its time, so they run on trio alone."""

import pytest


@pytest.fixture(params=["trio"])
def anyio_backend(request):
    return request.param
