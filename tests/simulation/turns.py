"""Worlds without an event loop: their parts take turns in an order that a seed draws.

`TurnsWorld` is the base of the worlds of stages, ranks and replicas.  Schedules run one after another, seed by seed, until a time
is over or one shows a fault.
"""

import argparse
import random
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

MAX_TURNS = 20_000  # of one schedule; the longest that ends takes a tenth of them


class SimulationFault(Exception):
    """A world did what it must not: the schedule that shows it is reproduced by its seed."""


class SmallWorld(Protocol):
    def run(self) -> None:
        """Run a schedule to its end; raise where something is wrong."""


World = TypeVar("World", bound=SmallWorld)


class TurnsWorld(ABC):
    """Runs a scenario to its end, and compares what each client gets with what its request has alone.

    Args:
        scenario: has the drawn requests, and the dice of the schedule.
    """

    def __init__(self, scenario: Any) -> None:
        self._scenario = scenario
        self._dice: random.Random = scenario.dice
        self._to_admit = deque(scenario.requests)
        # What clients got so far, by sequence.
        self._outputs: dict[int, Any] = {}
        self._ends: dict[int, str] = {}
        self._errors: dict[int, str] = {}

    @abstractmethod
    def take_turns(self) -> bool:
        """Let the parts act in a drawn order.  Returns whether any of them had something to do."""

    @property
    @abstractmethod
    def subject(self) -> Any:
        """The real code under test: a policy, or replicas of one."""

    @abstractmethod
    def check_end(self) -> None:
        """Raise SimulationFault if a request has another end than it must have, or something is left."""

    def run(self) -> None:
        for _ in range(MAX_TURNS):
            if not self.take_turns():
                break
        else:
            raise SimulationFault(f"no end in {MAX_TURNS} turns: {self.subject}")
        self.check_end()

    def take_outputs(self) -> None:
        """Hand the outputs that the subject has now to the clients."""
        news = self.subject.take_outputs()
        for entry in news.sequences if news else ():
            self.check_open(entry.id)
            self._outputs.setdefault(entry.id, []).extend(entry.token_ids)
            if entry.finish_reason is not None:
                self._ends[entry.id] = entry.finish_reason
                self._errors[entry.id] = str(entry.error or "")

    def check_open(self, id: int) -> None:
        if id in self._ends:
            raise SimulationFault(f"an output of {id} after its end")

    def check_tokens(self, id: int, wanted: list[int], *, is_whole: bool) -> None:
        """Compare a sequence's tokens with those that it has alone; one that ended early has the first of them."""
        found = self._outputs.get(id, [])
        if found != (wanted if is_whole else wanted[: len(found)]):
            raise SimulationFault(f"sequence {id} got {found}, not {wanted}")


def draw_prompt(dice: random.Random, vocabulary: int) -> tuple[int, ...]:
    """Draw a short prompt; some share their beginning."""
    shared = [dice.randrange(3)] * dice.choice((0, 0, 6))
    return (*shared, *(dice.randrange(vocabulary) for _ in range(dice.randint(1, 12))))


def played(make_world: Callable[[int], World], seeds: Iterable[int]) -> list[World]:
    """Run the schedules of these seeds, none of which may show a fault.  Returns their worlds."""
    worlds = [make_world(seed) for seed in seeds]
    for world in worlds:
        world.run()
    return worlds


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
