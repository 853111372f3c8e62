"""A killed server loses no durable answer and repeats none, and goes on with many in their order."""

import pytest

from tests.robustness import recovery
from tests.robustness.durable_kills import run


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_server_goes_on_with_every_response():
    assert run(num_kills=2, num_clients=4, seed=5) == 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_many_answers_go_on_in_order():
    found = recovery.run(40, 40)
    assert found["streams"] == 40
