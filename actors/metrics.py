"""The engine's Prometheus metrics: vLLM's names under our prefix.  Source: spec section 18.

One registry for each engine, so several live in one process and none outlives its engine.
"""

from collections.abc import Sequence

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from trouper.actors.messages import RequestEnded, SchedulerStats, Stepped, Told

LATENCY_S = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680
)  # fmt: skip
FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
    160, 640, 2560,
)  # fmt: skip
INTER_TOKEN_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80
)  # fmt: skip
ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SMALL_COUNTS = (1, 2, 5, 10, 20)
PREEMPTION_COUNTS = (1, 2, 3, 4, 5, 10, 20)
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")


class Metric(msgspec.Struct, frozen=True):
    """One value of `get_metrics()`: a counter or gauge has `value`, a histogram the other three."""

    kind: str  # counter, gauge or histogram
    name: str
    labels: dict[str, str]
    value: float | None = None
    count: int | None = None
    sum: float | None = None
    buckets: dict[str, int] | None = None  # upper bound -> observations up to it


class Metrics:
    """Every family of one engine."""

    def __init__(self, model_name: str, max_model_len: int, prefix: str = "trouper") -> None:
        self.registry = CollectorRegistry()
        self._prefix = prefix
        self._labels = {"model_name": model_name, "engine": "0"}
        self._running = self._gauge("num_requests_running", "Sequences that hold a device row.")
        self._waiting = self._gauge("num_requests_waiting", "Sequences that wait to run.")
        self._waiting_by = self._gauge(
            "num_requests_waiting_by_reason", "The same, by reason.", ("reason",)
        )
        self._kv_usage = self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0-1.")
        self._sleep_state = self._gauge(
            "engine_sleep_state", "1 for the state the engine is in.", ("sleep_state",)
        )
        self._preemptions = self._counter("num_preemptions", "Preemptions.")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens computed.")
        self._prompt_cached = self._counter(
            "prompt_tokens_cached", "Prompt tokens found in the prefix cache."
        )
        self._generation_tokens = self._counter("generation_tokens", "Tokens sampled.")
        self._success = self._counter(
            "request_success", "Requests ended, by reason.", ("finished_reason",)
        )
        self._rejections = self._counter(
            "admission_rejections", "Requests refused at admission.", ("reason",)
        )
        self._queries = self._counter("prefix_cache_queries", "Tokens looked up in the cache.")
        self._hits = self._counter("prefix_cache_hits", "Tokens found in the cache.")
        sizes = _one_two_five(max_model_len)
        self._iteration_tokens = self._histogram("iteration_tokens_total", ITERATION_TOKENS)
        self._request_prompt = self._histogram("request_prompt_tokens", sizes)
        self._request_generation = self._histogram("request_generation_tokens", sizes)
        self._request_max_tokens = self._histogram("request_params_max_tokens", sizes)
        self._request_n = self._histogram("request_params_n", SMALL_COUNTS)
        self._request_preemptions = self._histogram("request_num_preemptions", PREEMPTION_COUNTS)
        self._first_token = self._histogram("time_to_first_token_seconds", FIRST_TOKEN_S)
        self._inter_token = self._histogram("inter_token_latency_seconds", INTER_TOKEN_S)
        self._per_token = self._histogram("request_time_per_output_token_seconds", INTER_TOKEN_S)
        self._e2e = self._histogram("e2e_request_latency_seconds", LATENCY_S)
        self._queue = self._histogram("request_queue_time_seconds", LATENCY_S)
        self._inference = self._histogram("request_inference_time_seconds", LATENCY_S)
        self._prefill = self._histogram("request_prefill_time_seconds", LATENCY_S)
        self._decode = self._histogram("request_decode_time_seconds", LATENCY_S)
        for reason in FINISH_REASONS:  # so that every series is there from the start
            self._success.labels(finished_reason=reason, **self._labels)
        self._last: SchedulerStats | None = None
        self.set_sleep_level(0, is_sleeping=False)

    def note_step(self, step: Stepped) -> None:
        stats, last, labels = step.stats, self._last, self._labels
        self._running.labels(**labels).set(stats.num_running)
        self._waiting.labels(**labels).set(stats.num_waiting + stats.num_deferred)
        self._waiting_by.labels(reason="capacity", **labels).set(stats.num_waiting)
        self._waiting_by.labels(reason="deferred", **labels).set(stats.num_deferred)
        self._kv_usage.labels(**labels).set(stats.kv_cache_usage)
        num_tokens = 0
        for counter, name in (
            (self._prompt_tokens, "num_prompt_tokens"),
            (self._generation_tokens, "num_generation_tokens"),
            (self._preemptions, "num_preemptions"),
            (self._queries, "prefix_cache_queries"),
            (self._hits, "prefix_cache_hits"),
        ):
            gained = getattr(stats, name) - (getattr(last, name) if last else 0)
            counter.labels(**labels).inc(gained)
            num_tokens += gained if name.endswith("_tokens") else 0
        self._iteration_tokens.labels(**labels).observe(num_tokens)
        self._last = stats

    def note_told(self, told: Told) -> None:
        for seconds in told.first_token_s:
            self._first_token.labels(**self._labels).observe(seconds)
        for seconds in told.inter_token_s:
            self._inter_token.labels(**self._labels).observe(seconds)
        for ended in told.ended:
            self._note_ended(ended)

    def note_rejection(self, reason: str) -> None:
        self._rejections.labels(reason=reason, **self._labels).inc()

    def set_sleep_level(self, level: int, *, is_sleeping: bool) -> None:
        """A level-0 pause is none of the three states."""
        states = {
            "awake": not is_sleeping,
            "weights_offloaded": level == 1,
            "discard_all": level == 2,
        }
        for state, holds in states.items():
            self._sleep_state.labels(sleep_state=state, **self._labels).set(float(holds))

    def expose(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)

    def values(self) -> list[Metric]:
        """All values, for `get_metrics()`."""
        found: list[Metric] = []
        for family in self.registry.collect():
            if family.type == "histogram":
                found.extend(_histograms(family.name, family.samples))
                continue
            found.extend(
                Metric(family.type, family.name, dict(sample.labels), sample.value)
                for sample in family.samples
                if not sample.name.endswith("_created")
            )
        return found

    def _note_ended(self, ended: RequestEnded) -> None:
        labels, stats = self._labels, ended.stats
        self._success.labels(finished_reason=ended.finish_reason, **labels).inc()
        self._prompt_cached.labels(**labels).inc(ended.num_cached_tokens)
        self._request_prompt.labels(**labels).observe(ended.num_prompt_tokens)
        self._request_generation.labels(**labels).observe(stats.num_generation_tokens)
        self._request_max_tokens.labels(**labels).observe(ended.params.max_tokens or 0)
        self._request_n.labels(**labels).observe(ended.params.n)
        self._request_preemptions.labels(**labels).observe(stats.num_preemptions)
        self._e2e.labels(**labels).observe(stats.finished_ts - stats.queued_ts)
        if not stats.scheduled_ts:
            return
        self._queue.labels(**labels).observe(stats.scheduled_ts - stats.queued_ts)
        if not stats.first_token_ts:
            return
        self._prefill.labels(**labels).observe(stats.first_token_ts - stats.scheduled_ts)
        self._inference.labels(**labels).observe(stats.last_token_ts - stats.scheduled_ts)
        decode_s = stats.last_token_ts - stats.first_token_ts
        self._decode.labels(**labels).observe(decode_s)
        if stats.num_generation_tokens > 1:
            self._per_token.labels(**labels).observe(decode_s / (stats.num_generation_tokens - 1))

    def _gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(self._name(name), text, [*self._labels, *labels], registry=self.registry)

    def _counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(self._name(name), text, [*self._labels, *labels], registry=self.registry)

    def _histogram(self, name: str, buckets: Sequence[float]) -> Histogram:
        text = name.replace("_", " ").capitalize() + "."
        return Histogram(
            self._name(name), text, [*self._labels], registry=self.registry, buckets=buckets
        )

    def _name(self, name: str) -> str:
        return f"{self._prefix}:{name}"


def _one_two_five(largest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 … up to `largest`."""
    series = [m * 10**e for e in range(len(str(largest))) for m in (1, 2, 5)]
    return tuple(float(value) for value in series if value <= largest) or (1.0,)


def _histograms(name: str, samples: Sequence[object]) -> list[Metric]:
    by_labels: dict[tuple[tuple[str, str], ...], dict[str, object]] = {}
    for sample in samples:
        labels: dict[str, str] = dict(sample.labels)  # type: ignore[attr-defined]  # prometheus Sample
        bound = labels.pop("le", None)
        found = by_labels.setdefault(tuple(labels.items()), {"buckets": {}})
        value: float = sample.value  # type: ignore[attr-defined]
        kind: str = sample.name.rsplit("_", 1)[1]  # type: ignore[attr-defined]
        if bound is not None:
            found["buckets"][bound] = int(value)  # type: ignore[index]
        else:
            found[kind] = value
    return [
        Metric(
            "histogram", name, dict(labels), count=int(v["count"]), sum=v["sum"], buckets=v["buckets"]  # type: ignore[arg-type, call-overload]
        )
        for labels, v in by_labels.items()
    ]  # fmt: skip
