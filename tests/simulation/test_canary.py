"""One seed is one run, in every process: else no failure could be replayed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .__main__ import digest
from .pooling.pooling_scenario import draw_pooling
from .run import simulate
from .scenario import draw

ROOT = Path(__file__).parents[2]
# The other process plays both kinds, because its imports take longer than the traces.
DIGESTS = """
from tests.simulation.__main__ import digest
from tests.simulation.pooling.pooling_scenario import draw_pooling
from tests.simulation.scenario import draw
print(digest(40, draw), digest(40, draw_pooling))
"""


@pytest.mark.parametrize("draw", [draw, draw_pooling])
def test_the_same_seed_plays_the_same_run_again(draw):
    assert [simulate(draw(seed)) for seed in range(10)] == [
        simulate(draw(seed)) for seed in range(10)
    ]


def test_another_seed_of_the_schedule_plays_another_run():
    scenario = draw(4)
    digests = set()
    for seed in range(8):
        scenario.seed = seed
        digests.add(simulate(scenario).digest)
    assert len(digests) > 1


def test_two_processes_with_different_hash_seeds_agree():
    other_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        [sys.executable, "-c", DIGESTS], cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": other_seed},
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    digests = [digest(40, draw), digest(40, draw_pooling)]
    assert done.stdout.split() == digests
    assert [len(each) for each in digests] == [16, 16]
