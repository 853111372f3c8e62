"""Servers that take over from each other refuse no client and lose no answer."""

import pytest

from tests.robustness.take_over import run


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_upgrades_lose_no_answer():
    problems, num_answers = run(num_upgrades=1, num_streams=6, loop="asyncio")
    assert problems == []
    assert num_answers > 0
