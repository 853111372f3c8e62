"""Run tests of worker processes on trio only, because each test starts processes, which takes time."""

import pytest


@pytest.fixture(params=["trio"])
def anyio_backend(request):
    return request.param
