"""Measure the seconds of steps, from which the scheduler learns how long the next ones take.

The device's own thread measures them.  The event loop would not do: it may receive two answers in one turn, so the second step seems to
have taken no time, and uvloop's clock counts whole milliseconds.  Steps of small models take less than one.
"""

from collections import deque
from time import perf_counter

from trouper.actors.executor.device import StepResult, timed


class StepTimer:
    """Time each plan while it is the oldest without a result.  Results come in the order of the plans."""

    def __init__(self) -> None:
        # One for each plan that runs: at most those in flight.
        self._begun_s: deque[float] = deque()
        self._ended_s = 0.0

    def __repr__(self) -> str:
        return f"<StepTimer: {len(self._begun_s)} plans run>"

    def start(self) -> None:
        """Note that a plan begins."""
        self._begun_s.append(perf_counter())

    def stop(self, result: StepResult | None) -> StepResult | None:
        """Note that the oldest plan has ended.  Returns its result with the seconds; None if another worker answers."""
        now = perf_counter()
        seconds = now - max(self._begun_s.popleft(), self._ended_s)
        self._ended_s = now
        return None if result is None else timed(result, seconds)
