"""Measure two engines alternately while both are open, so that a disturbance of the machine affects both."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from statistics import median
from typing import NamedTuple

from trouper.actors.engine.wiring import Engine, open_engine
from trouper.actors.executor.devices.process import ProcessDevice
from trouper.config.engine_config import EngineConfig


class Seconds(NamedTuple):
    """The median seconds of both engines, and the seconds of each of their turns."""

    one: float
    several: float
    turns: list[list[float]]


class InTurn:
    """Two open engines, for example a whole model and a divided one.

    They are measured alternately, so that a slower machine affects both. Only one of them computes at a time.
    """

    def __init__(self, whole: Engine, cut: Engine) -> None:
        self._engines = whole, cut

    async def measure(
        self, name: str, seconds_of: Callable[[Engine, str], Awaitable[float]], num_rounds: int
    ) -> Seconds:
        """Measure each engine this many times, alternately.

        Args:
            name: prefix of the request ids.
            seconds_of: takes an engine and a request id, and returns the measured seconds.
        """
        turns: list[list[float]] = [[], []]
        for turn in range(num_rounds):
            for number, engine in enumerate(self._engines):
                turns[number].append(await seconds_of(engine, f"{name}-{turn}-{number}"))
        one, several = map(median, turns)
        return Seconds(one, several, turns)


@asynccontextmanager
async def in_turn(whole: EngineConfig, cut: EngineConfig) -> AsyncGenerator[InTurn]:
    """Open both engines at the same time, each in its own worker processes.

    Yields them for alternating measurements.
    """
    async with (
        open_engine(whole, ProcessDevice(whole)) as one,
        open_engine(cut, ProcessDevice(cut)) as several,
    ):
        yield InTurn(one, several)
