"""The statistics of requests as their outputs pass the detokenizer: one `OutputStats` for each of its turns.

Laws.  With statistics off nothing is recorded.  A request counts once however many completions it has: its
first token is that of the first completion to have one, its end that of the last.
"""

import msgspec

from trouper.actors.messages.outputs import OutputStats, RequestEnded
from trouper.actors.runtime.reporter import Reporter
from trouper.outputs import RequestStateStats


class SequenceTimes(msgspec.Struct):
    """Counts and times of one completion.

    They are kept per completion, because the latency between tokens concerns one stream of tokens. A request has one
    of them for each completion.
    """

    num_preemptions: int = 0
    num_tokens: int = 0
    last_token_s: float = 0.0  # of no meaning before the first


class OutputStatsCollector:
    """Collects latencies and ends of requests until `send`, separately for each replica.

    Each method does nothing if statistics are off, so callers need no conditions.
    """

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter
        self._first_token_s: list[float] = []
        self._inter_token_s: list[float] = []
        self._ended: list[RequestEnded] = []
        self._replica = 0  # that the lists are of
        self._others: list[OutputStats] = []  # of this turn

    def choose(self, replica: int) -> None:
        """Select the replica for which the following calls count.

        Numbers for the earlier replica are kept until `send`.
        """
        if replica != self._replica:
            self._others += self._take()
            self._replica = replica

    def note_queued(self, stats: RequestStateStats, now: float) -> None:
        """Note that a request has been rendered and waits to run."""
        if self.reporter.is_on:
            stats.queued_ts = now

    def note_start(self, stats: RequestStateStats, now: float) -> None:
        """Note that one of a request's sequences takes a request slot.

        Only the first of its sequences determines the time in the queue. Later starts follow preemptions.
        """
        if self.reporter.is_on and stats.scheduled_ts is None:
            stats.scheduled_ts = now

    def note_preemptions(
        self, stats: RequestStateStats, times: SequenceTimes, num_preemptions: int
    ) -> None:
        """Note how often a sequence has been preempted so far.

        The scheduler reports a total, and only the difference to the last report is added.
        """
        stats.num_preemptions += num_preemptions - times.num_preemptions
        times.num_preemptions = num_preemptions

    def note_tokens(
        self, stats: RequestStateStats, times: SequenceTimes, num_tokens: int, now: float
    ) -> None:
        """Record the arrival of tokens of a sequence.

        The first tokens of a request give its time to first token, and later ones the latency between tokens.
        """
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
        """Note that a request has ended.

        Its final numbers go to the observer with the next `send`.
        """
        if self.reporter.is_on:
            ended.stats.finished_ts = now
            self._ended.append(ended)

    def send(self) -> None:
        """Report the collected numbers, if there are any, in one message for each replica.

        If the observer's inbox is full, they are dropped instead of delaying outputs.
        """
        for stats in (*self._others, *self._take()):
            self.reporter.report(stats)
        self._others.clear()

    def _take(self) -> list[OutputStats]:
        if not (self._first_token_s or self._inter_token_s or self._ended):
            return []
        stats = OutputStats(
            tuple(self._first_token_s),
            tuple(self._inter_token_s),
            tuple(self._ended),
            self._replica,
        )
        self._first_token_s.clear()
        self._inter_token_s.clear()
        self._ended.clear()
        return [stats]
