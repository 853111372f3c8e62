"""Does the device still answer?  Pure."""

from trouper.actors.messages import SchedulerStats


class StepClock:
    """Sees a step end when the scheduler's counters have moved between two looks."""

    def __init__(self) -> None:
        self._seen: tuple[int, int, int] = (0, 0, 0)
        self._moved_at: float | None = None

    def age_s(self, stats: SchedulerStats, now: float) -> float:
        """Seconds since the last step that was seen to end; at most the time since the last look.

        Nothing in flight is as good as a step: there is nothing to wait for.
        """
        seen = (stats.num_prompt_tokens, stats.num_generation_tokens, stats.num_preemptions)
        if self._moved_at is None or seen != self._seen or not stats.num_steps_in_flight:
            self._seen, self._moved_at = seen, now
        return now - self._moved_at
