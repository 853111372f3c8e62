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
NUM_TRACES = 40


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


@pytest.mark.parametrize("kind", [[], ["--pooling"]], ids=["generate", "pool"])
def test_two_processes_with_different_hash_seeds_agree(kind):
    command = [sys.executable, "-m", "tests.simulation", *kind, "--digest", str(NUM_TRACES)]
    processes = [
        subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE, text=True,
        )
        for seed in ("1", "2")
    ]  # fmt: skip
    digests = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert digests[0] == digests[1]
    assert len(digests[0].strip()) == 16
