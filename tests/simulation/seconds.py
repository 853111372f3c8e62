"""Runs schedules of a small world one after another, seed by seed, until a time is over: the command of each."""

import argparse
import time
from collections.abc import Callable
from typing import Protocol


class SmallWorld(Protocol):
    def run(self) -> None:
        """Run a schedule to its end; raise where something is wrong."""


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
