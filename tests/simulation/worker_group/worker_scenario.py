"""What is drawn for an engine whose device is a worker process: how each incarnation of the worker ends."""

import random
from typing import Literal

import msgspec

from tests.simulation.scenario import (
    DRAFTERS,
    STEP_S,
    Dice,
    Operation,
    Scenario,
    draw_with,
    streams_of,
)

SIGKILL, SIGSEGV = -9, -11
End = Literal[
    "never", "byte", "step", "time", "call", "close",
    "hang", "garbage", "doubled", "broken", "memory", "run",
]  # fmt: skip

ENDS: tuple[End, ...] = (  # as often as they are drawn
    "never", "byte", "byte", "byte", "step", "step", "step", "time", "time", "call",
    "close", "hang", "garbage", "doubled", "broken", "memory",
)  # fmt: skip


class Fate(msgspec.Struct, kw_only=True):
    """What becomes of one incarnation.  `at` counts what `end` names: bytes written, plans, seconds, calls.

    "run" counts the answers in which some sequence takes several tokens; it dies before it writes such a one, after some
    of its bytes, or when the last is written.
    """

    end: End = "never"
    at: float = 0
    place: Literal["before", "within", "behind"] = "before"  # of a run
    status: int = SIGSEGV
    is_out_of_memory: bool = False
    load_s: float = 0.0
    rank: int = 0  # from the end: 0 is the worker that answers; of a smaller workers it is that one


class Killer(msgspec.Struct, kw_only=True):
    """A client whose request kills the worker in each step that computes its position `after` past the prompt."""

    client: int
    after: int | None  # None: in each of its steps


class WorkerScenario(Scenario, kw_only=True):
    """A scenario whose device is a `ProcessDevice`."""

    num_ranks: int = (
        1  # workers of an incarnation, which all are given every frame; the last one answers plans
    )
    fates: tuple[Fate, ...] = ()  # of the first incarnations; all later ones live
    killers: tuple[Killer, ...] = ()
    cut_rate: float = 0.0  # of frames that come in pieces, the second one later
    max_inline: int = 2**15
    max_restarts: int = 3
    window_s: float = 300.0
    step_timeout_s: float | None = None


def draw_workers(seed: int) -> WorkerScenario:
    """The scenario that a seed stands for."""
    return draw_workers_with(streams_of(seed), seed=seed)


def draw_with_killer(seed: int) -> WorkerScenario:
    """One in which some client's request kills the worker, and nothing else does."""
    scenario = draw_workers(seed)
    scenario.fates = ()
    if not scenario.killers:
        scenario.killers = draw_killers(random.Random(seed), len(scenario.clients))
    scenario.max_restarts = max(2, scenario.max_restarts)
    return scenario


def draw_with_runs(seed: int) -> WorkerScenario:
    """One whose steps verify drafts, and whose workers die in steps that yield several tokens of a sequence."""
    scenario, dice = draw_workers(seed), random.Random(f"{seed}:runs")
    scenario.num_drafts = scenario.num_drafts or dice.choice((1, 3, 7))
    scenario.drafters = dice.choice(DRAFTERS)
    scenario.max_num_seqs = min(scenario.max_num_seqs, 4)  # of eight, few steps verify any
    scenario.token_budget = max(scenario.token_budget, 2 * scenario.max_num_seqs)
    scenario.fates = tuple(
        Fate(
            end="run",
            at=dice.choice((0, 0, 1, 2, dice.randrange(6))),
            place=dice.choice(("before", "within", "behind")),
            status=dice.choice((SIGKILL, SIGSEGV, 1)),
            load_s=dice.choice((0.0, 0.0, STEP_S)),
        )
        for _ in range(dice.choice((1, 2, 3, 3)))
    )
    scenario.max_restarts = max(3, scenario.max_restarts)
    if dice.random() < 0.7:
        scenario.killers = ()
    return scenario


def draw_slow_steps(seed: int) -> WorkerScenario:
    """One whose steps take almost as long as they may."""
    scenario = draw_workers(seed)
    scenario.weather.slow_step_rate = 0.5
    scenario.step_timeout_s = 0.12
    scenario.steps_in_flight = 3
    return scenario


def draw_workers_with(dice: Dice, *, seed: int) -> WorkerScenario:
    plain = draw_with(dice, seed=seed)
    plain.weather.crash_at_step = None
    plain.coefficients = None  # a step that takes longer than `step_timeout_s` is a hang
    faults, sizes = dice("fates"), dice("crew")
    kind = faults.random()
    fates, killers = (), ()
    if kind < 0.7:
        fates = tuple(draw_fate(faults) for _ in range(faults.choice((1, 1, 2, 2, 3, 5))))
    if kind > 0.5:
        killers = draw_killers(faults, len(plain.clients))
    if faults.random() < 0.5:
        plain.weather.step_error_rate = 0.0
        plain.weather.poison = ()
    if any(fate.end in ("call", "time") for fate in fates) and faults.random() < 0.7:
        plain.operations = (draw_sleep(faults), *plain.operations)
    ranks = dice("ranks")
    for fate in fates:
        fate.rank = ranks.choice((0, 0, 1, 2))
    return WorkerScenario(
        **{name: getattr(plain, name) for name in plain.__struct_fields__},
        fates=fates,
        killers=killers,
        cut_rate=sizes.choice((0.0, 0.2, 0.7)),
        max_inline=sizes.choice((2**15, 2**15, 60)),
        max_restarts=sizes.choice((0, 1, 2, 3, 3, 20)),
        window_s=sizes.choice((300.0, 300.0, 0.5)),
        step_timeout_s=sizes.choice((None, 0.12, 0.12, 2.0)),
        num_ranks=ranks.choice((1, 1, 2, 3)),
    )


def draw_sleep(dice: random.Random) -> Operation:
    """A sleep in which the worker may end."""
    return Operation(
        kind="sleep",
        after_s=dice.uniform(0, 10 * STEP_S),
        hold_s=dice.choice((0.5, 8, 40)) * STEP_S,
        mode=dice.choice(("abort", "wait", "keep")),
        level=dice.choice((1, 2)),
        tags=dice.choice((None, ("weights",), ("kv_cache",))),
    )


def draw_fate(dice: random.Random) -> Fate:
    fate = Fate(
        end=dice.choice(ENDS),
        status=dice.choice((SIGKILL, SIGSEGV, SIGSEGV, 1, 0)),
        is_out_of_memory=dice.random() < 0.1,
        load_s=dice.choice((0.0, 0.0, STEP_S, 20 * STEP_S)),
    )
    match fate.end:
        case "byte":
            fate.at = dice.choice((dice.randrange(120), dice.randrange(600), dice.randrange(3000)))
        case "time":
            fate.at = dice.choice((0.0, fate.load_s / 2, dice.uniform(0, 30 * STEP_S)))
        case "call":
            fate.at = dice.randrange(3)
        case "memory":
            fate.at = dice.choice((1, -1))
        case _:
            fate.at = dice.choice((0, 1, 2, dice.randrange(12)))
    return fate


def draw_killers(dice: random.Random, num_clients: int) -> tuple[Killer, ...]:
    clients = dice.sample(range(num_clients), min(num_clients, dice.choice((1, 1, 1, 2))))
    return tuple(Killer(client=c, after=dice.choice((None, None, 0, 1, 3))) for c in clients)
