"""From a scenario to a verdict."""

import gc
import sys
import warnings
from collections.abc import Callable

import msgspec

import trouper.actors.engine.wiring as engine_module

from .durable_world import DurableScenario, DurableWorld
from .expected import TOKENIZER
from .pooling.pooling_scenario import PoolingScenario
from .pooling.pooling_world import PoolingWorld
from .scenario import Scenario
from .scheduling import CancelAtStep, run_deterministically
from .worker_group.worker_scenario import WorkerScenario
from .worker_group.worker_world import WorkerWorld
from .world import World


class Verdict(msgspec.Struct, frozen=True):
    """What one run showed; `broken` is None when every oracle held."""

    digest: str
    num_steps: int
    broken: str | None


class _Simulated:
    """Stands for the Tokenizer class in the wiring: no files."""

    load = staticmethod(lambda folder: TOKENIZER)


def simulate(
    scenario: Scenario | PoolingScenario | DurableScenario,
    victim: CancelAtStep | None = None,
    trace: Callable[..., None] | None = None,
) -> Verdict:
    """Play one scenario.  The same scenario gives the same verdict.

    No garbage is collected before the end, so a finaliser cannot depend on how full the heap is.
    """
    complaints: list[str] = []
    hook, sys.unraisablehook = (
        sys.unraisablehook,
        lambda args: complaints.append(repr(args.exc_value)),
    )
    tokenizer, engine_module.Tokenizer = engine_module.Tokenizer, _Simulated  # type: ignore
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            verdict = _simulate(scenario, victim, trace)
            gc.collect(0)
    finally:
        gc.enable()
        sys.unraisablehook = hook
        engine_module.Tokenizer = tokenizer  # type: ignore[misc]
    if verdict.broken is None and complaints:
        verdict = msgspec.structs.replace(verdict, broken=f"in a finaliser: {complaints[0]}")
    return verdict


def _simulate(
    scenario: Scenario | PoolingScenario | DurableScenario,
    victim: CancelAtStep | None,
    trace: Callable[..., None] | None,
) -> Verdict:
    if victim is None and scenario.cancelled_at_step is not None:
        victim = CancelAtStep(scenario.cancelled_at_step, None)
    world = make_world(scenario, victim, trace)
    broken: str | None = None
    try:
        run_deterministically(
            world.run,
            seed=scenario.seed,
            priorities=scenario.has_priorities,
            on_quiet=world.at_rest,
            instruments=() if victim is None else (victim,),
        )
    except Exception as error:
        broken = _describe(world.broken or error)
    return Verdict(world.digest, world.num_steps, broken)


def make_world(
    scenario: Scenario | PoolingScenario | DurableScenario,
    victim: CancelAtStep | None,
    trace: Callable[..., None] | None,
) -> World | DurableWorld:
    if isinstance(scenario, DurableScenario):
        return DurableWorld(scenario, trace)
    if isinstance(scenario, PoolingScenario):
        return PoolingWorld(scenario, victim, trace)
    kind = WorkerWorld if isinstance(scenario, WorkerScenario) else World
    return kind(scenario, victim, trace)


def _describe(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    cause = f" from {error.__cause__!r}" if error.__cause__ is not None else ""
    return f"{type(error).__name__}: {error}{cause}"
