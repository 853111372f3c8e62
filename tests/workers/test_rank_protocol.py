"""The exchange of ranks over all interleavings; `tests/simulation/rank_protocol.py` has the moves."""

import pytest

from tests.simulation import rank_protocol


def test_in_no_interleaving_of_three_ranks_is_a_part_read_that_is_written():
    """And ranks that do different things find out, whichever of them leaves something out or does more."""
    num_runs, num_states = rank_protocol.check_all(max_ranks=3, num_exchanges=4)
    assert num_runs > 40
    assert num_states > 10_000


@pytest.mark.parametrize("name", rank_protocol.FAULTS)
def test_the_model_check_of_ranks_finds_known_mistakes(name):
    assert rank_protocol.find(name)
