"""Export the metrics of a server with several models: those of all engines, merged by family, and the models' states."""

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from trouper.actors.observability.replica_metrics import Distribution
from trouper.frontends.server.models.policy import ModelState
from trouper.frontends.server.models.residency import Residency


class Merged(Collector):
    """Merge metric families of the same name, because Prometheus accepts each family once.  The label `model_name` distinguishes them."""

    def __init__(self, collectors: Sequence[Collector]) -> None:
        self._collectors = collectors

    def collect(self) -> Iterable[Family]:
        merged: dict[str, Family] = {}
        for collector in self._collectors:
            for family in collector.collect():
                known = merged.setdefault(family.name, family)
                if known is not family:
                    known.samples.extend(family.samples)
        return merged.values()


class ResidencyMetrics(Collector):
    """Export states, memory and transitions.  Labels are configured model names, so requests cannot create new series."""

    def __init__(self, residency: Residency, prefix: str) -> None:
        self._residency = residency
        # Empty until the first engine is open.
        self._prefix = prefix or "trouper"

    def collect(self) -> Iterable[Family]:
        residency, prefix = self._residency, self._prefix
        state = GaugeMetricFamily(
            f"{prefix}:model_state",
            "1 for the state of each model.",
            labels=("model_name", "state"),
        )
        held = GaugeMetricFamily(
            f"{prefix}:model_bytes",
            "Estimated memory of each model by kind; now: what counts in its state.",
            labels=("model_name", "kind"),
        )
        for model in residency.table:
            for each in ModelState:
                is_it = float(model.record.state is each)
                state.add_metric((model.name, each.value), is_it)
            for kind, num_bytes in model.record.memory._asdict().items():
                held.add_metric((model.name, kind), num_bytes)
            held.add_metric((model.name, "now"), model.record.bytes)
        yield state
        yield held
        yield GaugeMetricFamily(
            f"{prefix}:memory_budget_bytes", "Memory for all models.", value=residency.limits.budget
        )
        moves = CounterMetricFamily(
            f"{prefix}:model_transitions",
            "Changes of models to a state.",
            labels=("model_name", "to"),
        )
        for (name, to), count in residency.num_transitions.items():
            moves.add_metric((name, to), count)
        yield moves
        yield _histogram(
            f"{prefix}:model_transition_seconds", "Time of a change.", residency.transition_s
        )
        yield _histogram(
            f"{prefix}:model_wait_seconds",
            "Time that requests waited for a model.",
            residency.wait_s,
        )


def _histogram(name: str, text: str, observed: Distribution) -> Family:
    buckets = [(str(bound), count) for bound, count in observed.cumulative()[:-1]]
    return HistogramMetricFamily(name, text, [*buckets, ("+Inf", observed.count)], observed.sum)
