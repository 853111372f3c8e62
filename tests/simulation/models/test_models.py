"""The laws of the policy for several models, in drawn schedules; and each planted fault is found."""

import pytest

from .world import PLANTED, Broken, play


def test_laws_hold():
    assert sum(play(seed) for seed in range(20)) > 200


@pytest.mark.parametrize("bug", PLANTED)
def test_fault_is_found(bug):
    for seed in range(100):
        try:
            play(seed, {bug})
        except Broken:
            return
    pytest.fail(f"no schedule finds: {bug}")


@pytest.mark.slow
def test_laws_hold_for_long():
    for seed in range(40, 500):
        play(seed)
