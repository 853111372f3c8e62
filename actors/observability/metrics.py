"""The engine's metrics: plain numbers that the Observer writes, and two ways to read them.

`expose` is the text that Prometheus scrapes, `values` the list behind `get_metrics()`.  Names are vLLM's
under our prefix.  One registry for each engine, so several live in one process and none outlives its
engine.  What trouper has no source for yet (KV connectors, multimodal caches) stays 0.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from trouper.actors.messages.outputs import GrammarStats, OutputStats, SchedulerStats, StepStats
from trouper.actors.messages.requests import GrammarWork
from trouper.actors.messages.steps import DeviceBack, DeviceLost
from trouper.actors.observability.replica_metrics import (
    HISTOGRAM_TEXTS,
    Distribution,
    Number,
    ReplicaMetrics,
    keyed,
)
from trouper.metrics import Counter, Gauge, Histogram, Metric

LIMITS = ("max_num_queued_reqs", "max_num_queued_tokens")


class Metrics(Collector):
    """Every metric of one engine, with a label `engine` for the number of the replica.

    Only the observer's task changes the numbers; frontends read them in the same event loop, so there are no locks.
    """

    def __init__(
        self,
        model_name: str,
        max_model_len: int,
        prefix: str = "trouper",
        cache_config: Mapping[str, str] | None = None,
        num_workers: int = 0,
        num_replicas: int = 1,
    ) -> None:
        self._prefix = prefix
        self._model_name = model_name
        self._replicas = [
            ReplicaMetrics(max_model_len, cache_config or {}, num_workers)
            for _ in range(num_replicas)
        ]
        self._rejections: dict[str, int] = dict.fromkeys(LIMITS, 0)
        self.registry = CollectorRegistry()
        self.registry.register(self)

    @property
    def num_ended(self) -> int:
        """Requests with a counted end.

        Tests wait for this number, because statistics arrive after the client has read its output.
        """
        return sum(replica.num_ended for replica in self._replicas)

    def note_step(self, stats: StepStats) -> None:
        """Count one iteration of a replica's scheduler.

        The numbers are its tokens and the errors of its predicted times.
        """
        self._replicas[stats.replica].note_step(stats)

    def note_grammar(self, stats: GrammarStats) -> None:
        """Count a grammar that a request brought.

        Grammars are compiled before a replica is chosen, so all of them are counted for the first replica.
        """
        self._replicas[0].note_grammar(stats)

    def cumulative(self, name: str) -> list[tuple[float, int]]:
        """Return the buckets of a histogram, all replicas together: (upper bound, observations up to it)."""
        parts = [replica.histograms[name].cumulative() for replica in self._replicas]
        return [(pairs[0][0], sum(n for _, n in pairs)) for pairs in zip(*parts, strict=True)]

    def read_images(self, counts: Callable[[], tuple[int, int]]) -> None:
        """Read the lookups of processed images from `counts` at each scrape, and the images that were found.

        Images are processed before a replica is chosen, so all of them are counted for the first replica.
        """
        self._replicas[0].image_counts = counts

    def note_grammar_work(self, work: Iterable[GrammarWork], replica: int = 0) -> None:
        """Count what steps of a replica did for their grammars.

        The work is the time for masks, the tokens under a grammar and the tokens drawn again.
        """
        self._replicas[replica].note_grammar_work(work)

    def note_stats(self, stats: Sequence[SchedulerStats]) -> None:
        """Replace the schedulers' snapshots, one for each replica.

        Gauges, and counters that the schedulers keep themselves, are read from these snapshots.
        """
        for replica, mine in zip(self._replicas, stats, strict=True):
            replica.note_stats(mine)

    def note_output_stats(self, stats: OutputStats) -> None:
        """Count latencies, and the requests that ended.

        Latencies are those that clients see: they include the time in queues and in rendering. They are recorded per
        replica.
        """
        self._replicas[stats.replica].note_output_stats(stats)

    def note_loss(self, loss: DeviceLost, replica: int = 0) -> None:
        """Count a loss of a replica's worker processes, by its cause.

        All ranks of the replica end together, so all of its workers are shown as down until they return.
        """
        self._replicas[replica].note_loss(loss)

    def note_return(self, back: DeviceBack, replica: int = 0) -> None:
        """Record the seconds from a loss until the workers accepted plans again.

        The replica's workers are shown as up from now on.
        """
        self._replicas[replica].note_return(back)

    def note_rejection(self, limit: str) -> None:
        """Count a request that admission refused because of `limit`.

        The names of the limits are a fixed set, so clients cannot create new labels.
        """
        self._rejections[limit] += 1

    def set_sleep_level(self, level: int, *, is_sleeping: bool) -> None:
        """Set the sleep state of all replicas.

        A pause at level 0 releases no memory, so the replicas are then neither awake nor in one of the two sleep
        levels.
        """
        for replica in self._replicas:
            replica.set_sleep_level(level, is_sleeping=is_sleeping)

    def expose(self) -> bytes:
        """Return all metrics in Prometheus' text format, for a scrape.

        Producing the text takes some milliseconds, so frontends call it for scrapes only. Values are read at one
        moment.
        """
        return generate_latest(self.registry)

    def values(self) -> list[Metric]:
        """Return all values, for `get_metrics()`.

        They are the same numbers as in `expose`, as objects of the Python interface.
        """
        found: list[Metric] = []
        for engine, number in self._numbers():
            name = self._name(number)
            for own, value in number.values.items():
                labels = dict(zip(*self._labels(engine, number, own), strict=True))
                if number.is_counter:
                    found.append(Counter(name, labels, int(value)))
                else:
                    found.append(Gauge(name, labels, value))
        for engine, replica in enumerate(self._replicas):
            labels = {"model_name": self._model_name, "engine": str(engine)}
            for name, observed in replica.histograms.items():
                name, buckets = f"{self._prefix}:{name}", dict(_buckets(observed))
                found.append(Histogram(name, labels, observed.count, observed.sum, buckets))
        return found

    def collect(self) -> Iterable[Family]:
        """Return all families, for the registry.

        prometheus_client calls it for each scrape, so no number is kept twice.
        """
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for engine, number in self._numbers():
            family = families.get(number.name)
            if family is None:
                kind = CounterMetricFamily if number.is_counter else GaugeMetricFamily
                names, _ = self._labels(engine, number, number.labels)
                family = kind(self._name(number), number.text, labels=names)
                families[number.name] = family
            for own, value in number.values.items():
                family.add_metric(self._labels(engine, number, own)[1], value)
        yield from families.values()
        for name in self._replicas[0].histograms:
            family = HistogramMetricFamily(
                f"{self._prefix}:{name}",
                HISTOGRAM_TEXTS[name],
                labels=("model_name", "engine"),
            )
            for engine, replica in enumerate(self._replicas):
                observed = replica.histograms[name]
                labels = (self._model_name, str(engine))
                family.add_metric(labels, _buckets(observed), observed.sum)
            yield family

    def _name(self, number: Number) -> str:
        return f"{self._prefix}:{number.name}"

    def _labels(
        self, engine: int, number: Number, own: tuple[str, ...]
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names and the values of all its labels."""
        if not number.has_engine:
            return ("model_name", *number.labels), (self._model_name, *own)
        return ("model_name", "engine", *number.labels), (self._model_name, str(engine), *own)

    def _numbers(self) -> Iterator[tuple[int, Number]]:
        for engine, replica in enumerate(self._replicas):
            for number in replica.numbers():
                yield engine, number
        yield 0, Number(
            "admission_rejections", "Requests refused at admission, by limit.",
            keyed(self._rejections), ("reason",), is_counter=True, has_engine=False,
        )  # fmt: skip


def _buckets(observed: Distribution) -> list[tuple[str, int]]:
    return [
        ("+Inf" if bound == math.inf else str(float(bound)), count)
        for bound, count in observed.cumulative()
    ]
