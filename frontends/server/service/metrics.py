"""Metrics of the server itself, in addition to the engine's.  Label sets are fixed: no input of a client becomes a label."""

from collections import Counter, deque
from collections.abc import Iterable

import anyio
import anyio.lowlevel
import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from trouper.actors.observability.replica_metrics import Distribution
from trouper.frontends.server.admission.overload import Level
from trouper.frontends.server.durable.journal import Journal

GAP_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class _Alone(msgspec.Struct):
    """Present one family of metrics as a registry, which `generate_latest` expects."""

    family: Family

    def collect(self) -> Iterable[Family]:
        return (self.family,)


async def expose(collectors: Iterable[Collector]) -> bytes:
    """Write all metrics in Prometheus' text format.

    A checkpoint after each family lets other tasks run, because writing all of them takes ten milliseconds.
    """
    pieces: list[bytes] = []
    for collector in collectors:
        for family in collector.collect():
            pieces.append(generate_latest(_Alone(family)))
            await anyio.lowlevel.checkpoint()
    return b"".join(pieces)


class ServerMetrics(Collector):
    """Count refusals, responses and tool calls, and measure the lag of the event loop.

    Only the event loop changes the numbers, so they need no locks.
    """

    def __init__(self) -> None:
        self.level = Level.CALM
        self.gaps = Distribution(GAP_S)
        self.max_gap_s = 0.0
        # The longest gap in each quarter of the last second.
        self.last_gaps_s: deque[float] = deque((0.0,), maxlen=4)
        self._rejections: Counter[str] = Counter()
        self._answers: Counter[tuple[str, int]] = Counter()
        self._tool_calls: Counter[tuple[str, str]] = Counter()
        self.prefix = ""  # of the metrics' names
        # None without `--journal`.
        self.journal: Journal | None = None

    def note_rejection(self, reason: str) -> None:
        self._rejections[reason] += 1

    @property
    def num_rejections(self) -> int:
        """The number of refused requests so far, for any reason."""
        return sum(self._rejections.values())

    def note_answer(self, route: str, status: int) -> None:
        """Count a response.  Status 0 means that the client disconnected before the response.

        `route` is a path of the table of routes; all unknown paths are counted together.
        """
        self._answers[route, status] += 1

    def note_tool_calls(self, dialect: str, outcome: str, num: int) -> None:
        """Count tool calls.  The outcome `content` means that a call's marks were not followed by a valid call."""
        if num:
            self._tool_calls[dialect, outcome] += num

    def note_gap(self, gap_s: float) -> None:
        """Record how late the event loop resumed a task, in seconds.

        A long gap means that some code blocked the loop, and that all streams paused for that time.
        """
        self.gaps.observe(gap_s)
        self.max_gap_s = max(self.max_gap_s, gap_s)

    def collect(self) -> Iterable[Family]:
        rejected = CounterMetricFamily(
            f"{self.prefix}:rejected",
            "Requests refused before they were admitted.",
            labels=("reason",),
        )
        for reason, count in self._rejections.items():
            rejected.add_metric((reason,), count)
        yield rejected
        answers = CounterMetricFamily(
            f"{self.prefix}:http_requests",
            "Responses by status; 0: the client had left.",
            labels=("handler", "status"),
        )
        for (route, status), count in self._answers.items():
            answers.add_metric((route, str(status)), count)
        yield answers
        calls = CounterMetricFamily(
            f"{self.prefix}:tool_calls",
            "Tool calls of answers: with marks (ok), without them (bare), marks without a call (content).",
            labels=("dialect", "outcome"),
        )
        for (dialect, outcome), count in self._tool_calls.items():
            calls.add_metric((dialect, outcome), count)
        yield calls
        if self.journal is not None:
            yield from self._of_journal(self.journal)
        yield GaugeMetricFamily(
            f"{self.prefix}:overload_level", "Overload: 0 calm … 4 aborting.", value=self.level
        )
        yield GaugeMetricFamily(
            f"{self.prefix}:event_loop_gap_max_seconds",
            "The latest that the event loop ever resumed a task.",
            value=self.max_gap_s,
        )
        yield GaugeMetricFamily(
            f"{self.prefix}:event_loop_tasks",
            "Tasks of the server and the engine.",
            value=len(anyio.get_running_tasks()),
        )
        yield HistogramMetricFamily(
            f"{self.prefix}:event_loop_gap_seconds",
            "How late the event loop resumed a task.",
            [(str(bound), count) for bound, count in self.gaps.cumulative()[:-1]]
            + [("+Inf", self.gaps.count)],
            self.gaps.sum,
        )

    def _of_journal(self, journal: Journal) -> Iterable[Family]:
        name, streams = f"{self.prefix}:journal", journal.streams
        gauges = (
            ("bytes", "Bytes of the journal's current file.", journal.num_bytes),
            ("kept_bytes", "Bytes of all kept requests and tokens.", journal.kept_bytes),
            ("working", "1 while records reach the folder.", int(journal.is_working)),
            ("behind_seconds", "Age of the oldest unwritten record.", journal.behind_s()),
        )
        for what, text, value in gauges:
            yield GaugeMetricFamily(f"{name}_{what}", text, value=value)
        errors = CounterMetricFamily(
            f"{name}_errors", "Errors of the journal's disk.", labels=("op", "errno")
        )
        for (op, number), count in list(journal.errors.items()):
            errors.add_metric((op, number), count)
        yield errors
        kept = GaugeMetricFamily(
            f"{self.prefix}:durable_streams", "Durable answers by state.", labels=("state",)
        )
        for state, count in streams.count().items():
            kept.add_metric((state,), count)
        yield kept
        yield CounterMetricFamily(
            f"{self.prefix}:streams_resumed",
            "Answers of an earlier server that were resumed.",
            value=streams.num_resumed,
        )
        lost = CounterMetricFamily(
            f"{self.prefix}:streams_lost",
            "Answers of an earlier server that could not be resumed.",
            labels=("reason",),
        )
        for reason, count in streams.num_lost.items():
            lost.add_metric((reason,), count)
        yield lost
