"""The engine under drawn schedules, drawn faults, and a cancellation before every step."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .durable_world import DurableScenario
from .explore import cancel_everywhere, explore_seeds
from .pooling.pooling_scenario import PoolingScenario, draw_pooling, draw_pooling_with
from .run import simulate
from .scenario import Scenario, draw, draw_with
from .worker_group.worker_scenario import WorkerScenario

CORPUS = sorted((Path(__file__).parent / "corpus").glob("**/*.json"))
SEEDS_A_TEST = 150
# A search finds every planted bug within these seeds (docs/simulation.md).
NUM_SEEDS = 600


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, SEEDS_A_TEST))
@pytest.mark.parametrize("draw", [draw, draw_pooling])
def test_every_oracle_holds_under_drawn_schedules(draw, first):
    found = explore_seeds(range(first, first + SEEDS_A_TEST), draw)
    assert found.broken is None, f"{found.where}: {found.broken}"


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_what_broke_once_holds_now(path):
    kinds = {
        "corpus": Scenario, "pooling": PoolingScenario, "workers": WorkerScenario, "durable": DurableScenario,
    }  # fmt: skip
    kind = kinds[path.parent.name]
    verdict = simulate(msgspec.json.decode(path.read_bytes(), type=kind))
    assert verdict.broken is None


@pytest.mark.parametrize(
    ("draw", "seed"), [(draw, 4), (draw, 12), (draw, 39), *((draw_pooling, s) for s in range(8))]
)
def test_client_may_be_cancelled_before_any_of_its_steps(draw, seed):
    scenario, num_runs = draw(seed), 0
    for client in range(len(scenario.clients)):
        found = cancel_everywhere(scenario, client)
        assert found.broken is None, f"seed {seed}, {found.where}: {found.broken}"
        num_runs += found.num_runs
    assert num_runs > 2 * len(scenario.clients)


# 202: while the operator waits for the device to wake up; 219: on the way out of a pause.
@pytest.mark.parametrize(
    ("draw", "seed"), [(draw, 4), (draw, 202), (draw, 219), *((draw_pooling, s) for s in range(6))]
)
def test_whole_program_may_be_cancelled_before_any_step(draw, seed):
    found = cancel_everywhere(draw(seed), None, stride=7)
    assert found.broken is None, f"seed {seed}, {found.where}: {found.broken}"
    assert found.num_runs > 4


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 160, 10))
@pytest.mark.parametrize("draw", [draw, draw_pooling])
def test_cancelled_before_every_step_of_many_scenarios(draw, first):
    for seed in range(first, first + 10):
        scenario = draw(seed)
        for client in range(len(scenario.clients)):
            found = cancel_everywhere(scenario, client)
            assert found.broken is None, f"seed {seed}, {found.where}: {found.broken}"


@settings(max_examples=50, deadline=None, database=None)
@pytest.mark.parametrize("draw_with", [draw_with, draw_pooling_with])
@given(seed=st.integers(0, 2**32), dice=st.randoms(use_true_random=False))
def test_every_oracle_holds_for_scenarios_that_hypothesis_draws(draw_with, seed, dice):
    # Hypothesis shrinks the scenario; the seed of the schedule is drawn too, or it would try one only.
    verdict = simulate(draw_with(lambda port: dice, seed=seed))
    assert verdict.broken is None
