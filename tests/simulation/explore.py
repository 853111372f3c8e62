"""Ways to walk through the schedules: random seeds, and a cancellation before every step."""

from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import msgspec

from . import durable_bugs, tier_bugs  # noqa: F401  # they add theirs to BUGS
from .bugs import BUGS, planted
from .pooling import pooling_bugs  # noqa: F401  # they add theirs to BUGS
from .run import simulate
from .scenario import draw
from .scheduling import CancelAtStep
from .worker_group import worker_bugs  # noqa: F401  # they add theirs to BUGS


class Exploration(msgspec.Struct):
    """How far it got, and what broke first."""

    num_runs: int = 0
    num_steps: int = 0
    broken: str | None = None
    where: str = ""


def explore_seeds(seeds: Iterable[int], draw: Callable[[int], Any] = draw) -> Exploration:
    """Random schedules until one breaks."""
    found = Exploration()
    for seed in seeds:
        verdict = simulate(draw(seed))
        found.num_runs += 1
        found.num_steps += verdict.num_steps
        if verdict.broken is not None:
            found.broken, found.where = verdict.broken, f"seed {seed}"
            break
    return found


def cancel_everywhere(scenario: Any, client: int | None, stride: int = 1) -> Exploration:
    """Cancel one client (or, with None, the whole program) before its k-th step, for every k."""
    found = Exploration()
    for k in count(1, stride):
        victim = CancelAtStep(k, client)
        verdict = simulate(scenario, victim)
        found.num_runs += 1
        found.num_steps += verdict.num_steps
        if verdict.broken is not None:
            found.broken, found.where = verdict.broken, f"cancelled at step {k} of client {client}"
            break
        if not victim.has_fired:
            break
    return found


def num_schedules_until_found(
    bug: str, limit: int, draw: Callable[[int], Any] | None = None
) -> tuple[int, str | None]:
    """How many schedules it takes to see a planted bug, and what gave it away."""
    with planted(bug):
        found = explore_seeds(range(limit), draw or BUGS[bug].draw)
    return found.num_runs, found.broken
