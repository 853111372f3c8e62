"""`python -m tests.simulation --seconds 60`: random schedules for so long; the seed of a failure replays it."""

import argparse
import hashlib
import json
import random
import re
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from .bugs import BUGS
from .durable_world import DurableScenario, draw_durable
from .explore import Exploration, cancel_everywhere, num_schedules_until_found
from .pooling.pooling_scenario import PoolingScenario, draw_pooling
from .run import simulate
from .scenario import Scenario, draw
from .worker_group.worker_scenario import WorkerScenario, draw_with_runs, draw_workers


class Kind(NamedTuple):
    scenario: type[Any]
    draw: Callable[[int], Any]


KINDS = {
    "generate": Kind(Scenario, draw),
    "pooling": Kind(PoolingScenario, draw_pooling),
    "workers": Kind(WorkerScenario, draw_workers),
    "runs": Kind(WorkerScenario, draw_with_runs),
    "durable": Kind(DurableScenario, draw_durable),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seconds", type=float, default=10, help="how long to explore")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        "--pooling", dest="kind", action="store_const", const="pooling", help="an engine that pools"
    )
    kinds.add_argument(
        "--workers", dest="kind", action="store_const", const="workers",
        help="an engine whose device is a worker process that may die",
    )  # fmt: skip
    kinds.add_argument(
        "--runs", dest="kind", action="store_const", const="runs",
        help="an engine whose worker dies in steps that accept several drafts",
    )  # fmt: skip
    kinds.add_argument(
        "--durable", dest="kind", action="store_const", const="durable",
        help="a server with a journal, through several lives",
    )  # fmt: skip
    parser.set_defaults(kind="generate")
    parser.add_argument("--seed", type=int, help="the first seed; random by default")
    parser.add_argument("--cancel", action="store_true", help="cancel before every step instead")
    parser.add_argument("--replay", metavar="SEED_OR_FILE", help="play one schedule, print it")
    parser.add_argument("--digest", type=int, metavar="N", help="print the digest of N traces")
    parser.add_argument(
        "--bugs",
        action="store_true",
        help="how fast is each planted bug found? the table of docs/simulation.md",
    )
    options = parser.parse_args()
    if options.replay is not None:
        return replay(options.replay, KINDS[options.kind])
    if options.digest is not None:
        print(digest(options.digest, KINDS[options.kind].draw))
        return 0
    if options.bugs:
        return print_bugs()
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    return explore(seed, options.seconds, options.kind, cancel=options.cancel)


def explore(first_seed: int, seconds: float, kind: str, *, cancel: bool) -> int:
    print(f"first seed {first_seed}")
    num_runs = num_steps = num_failures = 0
    seed, wall, cpu = first_seed, time.monotonic(), time.process_time()
    while time.monotonic() - wall < seconds:
        found = _explore_one(seed, kind, cancel=cancel)
        num_runs += found.num_runs
        num_steps += found.num_steps
        if found.broken is not None:
            num_failures += 1
            print(f"seed {seed}: {found.broken}\n  {found.where}", flush=True)
        seed += 1
    cpu = time.process_time() - cpu
    print(
        f"{num_runs} schedules, {num_runs / cpu:.0f} a CPU second, {num_steps / cpu:.0f} steps a "
        f"CPU second; seeds {first_seed} … {seed - 1}, {num_failures} failed"
    )
    return 1 if num_failures else 0


def _explore_one(seed: int, kind: str, *, cancel: bool) -> Exploration:
    scenario = KINDS[kind].draw(seed)
    if cancel:
        return cancel_everywhere(scenario, seed % len(scenario.clients))
    verdict = simulate(scenario)
    option = "" if kind == "generate" else f" --{kind}"
    again = f"python -m tests.simulation{option} --replay {seed}"
    return Exploration(1, verdict.num_steps, verdict.broken, again)


def replay(which: str, kind: Kind) -> int:
    if which.isdecimal():
        scenario = kind.draw(int(which))
    else:
        with open(which, "rb") as file:
            scenario = msgspec.json.decode(file.read(), type=kind.scenario)
    print(json.dumps(msgspec.to_builtins(scenario), indent=1))
    verdict = simulate(scenario, trace=print)
    print(verdict)
    return 0 if verdict.broken is None else 1


def digest(count: int, draw: Callable[[int], Any]) -> str:
    verdicts = [simulate(draw(seed)) for seed in range(count)]
    return hashlib.sha256(repr(verdicts).encode()).hexdigest()[:16]


def print_bugs() -> int:
    num_blind = 0
    for bug in BUGS:
        count, broken = num_schedules_until_found(bug, 1000)
        num_blind += broken is None
        print(table_row(bug, count, broken), flush=True)
    return 1 if num_blind else 0


def table_row(bug: str, count: int, broken: str | None) -> str:
    """Return the row of a planted bug in docs/simulation.md."""
    law = "NOT FOUND" if broken is None else re.sub(r"^Broken: (<[^>]*>: )?", "", broken)
    law = re.sub(r"^the engine died: Broken\(.", "", law)  # an oracle that looks on from within
    law = "the engine died of it" if law.startswith("the engine died: ") else law.partition(": ")[0]
    return f"| {bug.replace('_', ' ')} | {count} | {law} |"


if __name__ == "__main__":
    sys.exit(main())
