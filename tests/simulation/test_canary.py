"""One seed is one run, in every process: else no failure could be replayed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .pooling.pooling_scenario import draw_pooling
from .run import simulate
from .scenario import draw

ROOT = Path(__file__).parents[2]
# One process plays both kinds, because its imports take longer than the traces.
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
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", DIGESTS], cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE, text=True,
        )
        for seed in ("1", "2")
    ]  # fmt: skip
    digests = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert digests[0] == digests[1]
    assert [len(each) for each in digests[0].split()] == [16, 16]
