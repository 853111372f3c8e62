"""Runs schedules of a small world one after another, seed by seed: until a time is over, or one shows a fault."""

import argparse
import time
from collections.abc import Callable, Iterable
from typing import Protocol


class SimulationFault(Exception):
    """A world did what it must not: the schedule that shows it is reproduced by its seed."""


class SmallWorld(Protocol):
    def run(self) -> None:
        """Run a schedule to its end; raise where something is wrong."""


def first_found(
    make_world: Callable[[int], SmallWorld], seeds: Iterable[int], *faults: type[Exception]
) -> int | None:
    """Find the first schedule that shows a fault, or an error of the kinds that a planted bug leads to.

    Any other error comes out: a bug that does not fit what it is planted in any more is not found by a `TypeError`.
    """
    for seed in seeds:
        is_found = False
        try:
            make_world(seed).run()
        except* (SimulationFault, *faults):
            is_found = True
        if is_found:
            return seed
    return None


def run_for_seconds(make_world: Callable[[int], SmallWorld], page: str | None) -> None:
    """Take the options of the command, and print how many schedules have run, or the seed of the first fault."""
    parser = argparse.ArgumentParser(description=(page or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    args = parser.parse_args()
    started, seed = time.perf_counter(), args.seed
    while time.perf_counter() < started + args.seconds:
        try:
            make_world(seed).run()
        except Exception as error:
            raise SystemExit(f"seed {seed}: {type(error).__name__}: {error}") from error
        seed += 1
    took = time.perf_counter() - started
    print(f"{seed - args.seed} schedules, {(seed - args.seed) / took:.0f} a second, no fault")
