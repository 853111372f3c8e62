"""What the Detokenizer has for the Observer: times of requests, one fact for each of its turns.

Laws.  With statistics off nothing is recorded.  A request counts once however many completions it has: its
first token is that of the first completion to have one, its end that of the last.  Source: spec section 18.
"""

import msgspec

from trouper.actors.messages.stats import OutputStats, RequestEnded
from trouper.actors.observability.reporter import Reporter
from trouper.outputs import RequestStateStats


class SequenceTimes(msgspec.Struct):
    """One completion's share."""

    num_preemptions: int = 0
    num_tokens: int = 0
    last_token_s: float = 0.0  # of no meaning before the first


class Facts:
    """Owns the reporter; collects until `send`."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter
        self._first_token_s: list[float] = []
        self._inter_token_s: list[float] = []
        self._ended: list[RequestEnded] = []

    def note_queued(self, stats: RequestStateStats, now: float) -> None:
        if self.reporter.is_on:
            stats.queued_ts = now

    def note_start(self, stats: RequestStateStats, now: float) -> None:
        """One of its sequences takes a device row."""
        if self.reporter.is_on and stats.scheduled_ts is None:
            stats.scheduled_ts = now

    def note_preemptions(
        self, stats: RequestStateStats, times: SequenceTimes, num_preemptions: int
    ) -> None:
        """So many in all."""
        stats.num_preemptions += num_preemptions - times.num_preemptions
        times.num_preemptions = num_preemptions

    def note_tokens(
        self, stats: RequestStateStats, times: SequenceTimes, num_tokens: int, now: float
    ) -> None:
        if not self.reporter.is_on:
            return
        if times.num_tokens:
            self._inter_token_s.append(now - times.last_token_s)
        elif stats.first_token_ts is None:
            stats.first_token_ts = now
            self._first_token_s.append(now - stats.arrival_ts)
        times.last_token_s = stats.last_token_ts = now
        times.num_tokens += num_tokens
        stats.num_generation_tokens += num_tokens
        if times.num_tokens > stats.max_num_generation_tokens:
            stats.max_num_generation_tokens = times.num_tokens

    def note_end(self, ended: RequestEnded, now: float) -> None:
        if self.reporter.is_on:
            ended.stats.finished_ts = now
            self._ended.append(ended)

    def send(self) -> None:
        """Tell the Observer, if there is anything to tell."""
        if self._first_token_s or self._inter_token_s or self._ended:
            self.reporter.report(
                OutputStats(
                    tuple(self._first_token_s), tuple(self._inter_token_s), tuple(self._ended)
                )
            )
            self._first_token_s.clear()
            self._inter_token_s.clear()
            self._ended.clear()
