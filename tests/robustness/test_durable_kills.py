"""A server that is killed at drawn moments loses no background response, and repeats none."""

import pytest

from tests.robustness.durable_kills import run


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_server_goes_on_with_every_response():
    assert run(num_kills=2, num_clients=4, seed=5) == 2
