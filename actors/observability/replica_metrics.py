"""The numbers of one replica: what its scheduler and its workers do, and the requests that it has computed.

Histograms are `Distribution`s, at 0.2 µs an observation.  `prometheus_client`'s own take 2 µs (a lock for each of three
values), which at one observation a token is too much for the event loop.  Here the Observer is the only writer, so that no
lock is needed.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, get_args

from trouper.actors.messages.outputs import (
    GrammarStats,
    OutputStats,
    RequestEnded,
    SchedulerStats,
    StepStats,
)
from trouper.actors.messages.requests import GrammarWork
from trouper.actors.messages.steps import DeviceBack, DeviceLost, LossCause


class Distribution:
    """Counts per bucket; a value equal to a bound counts as up to that bound.

    Each bucket has its own count here; `cumulative` adds them up for Prometheus, a rare operation.
    """

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def __repr__(self) -> str:
        return f"<Distribution of {self.count}>"

    @property
    def count(self) -> int:
        """Observations so far."""
        return sum(self._counts)

    def observe(self, value: float) -> None:
        """Count one observation.

        The bucket is found by bisection, so the cost hardly depends on the number of bounds.
        """
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: Iterable[float]) -> None:
        """Count several observations.

        It is faster than single calls, because names are looked up only once for all values.
        """
        counts, bounds = self._counts, self._bounds
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            self.sum += value

    def cumulative(self) -> list[tuple[float, int]]:
        """Return (upper bound, observations up to it) pairs; the last bound is infinite.

        They are what Prometheus calls `le` buckets, in rising order, and the last count is that of all observations.
        """
        return list(zip((*self._bounds, float("inf")), accumulate(self._counts), strict=True))


def one_two_five(largest: int) -> tuple[float, ...]:
    """Return the bounds 1, 2, 5, 10, 20, 50 … up to `largest`.

    Steps of about a factor of two give the same relative resolution for small and large values.
    """
    series = (m * 10**e for e in range(len(str(largest))) for m in (1, 2, 5))
    return tuple(float(value) for value in series if value <= largest)


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
COMPILE_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
MASK_S = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
PAUSE_S = (0.5, 1, 2, 3, 4, 5, 7.5, 10, 15, 20, 30, 60, 120, 300)
RATIOS = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.05, 1.1, 1.2, 1.3, 1.5, 2, 4)
SMALL_COUNTS = (1, 2, 5, 10, 20)
PREEMPTION_COUNTS = (1, 2, 3, 4, 5, 10, 20)
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
LOSS_CAUSES = get_args(LossCause)
REFUSALS = ("invalid_schema", "invalid_grammar", "schema_too_complex")
GRAMMAR_FAILURES = ("grammar_error", "no_valid_token")
# What each histogram counts, for the scraped text.
HISTOGRAM_TEXTS = {
    "request_prompt_tokens": "Tokens of a request's prompt.",
    "request_prefill_kv_computed_tokens": "Prompt tokens of a request that no cache held.",
    "request_generation_tokens": "Tokens that a request generated, in all completions.",
    "request_max_num_generation_tokens": "Tokens of a request's longest completion.",
    "request_params_max_tokens": "The max_tokens of a request.",
    "iteration_tokens_total": "Tokens that one step computed.",
    "request_params_n": "Completions that a request wanted of its prompt.",
    "request_num_preemptions": "Preemptions of one request.",
    "time_to_first_token_seconds": "Time from a request's arrival to its first token.",
    "inter_token_latency_seconds": "Time between two tokens of a sequence.",
    "request_time_per_output_token_seconds": "Mean time of a request's tokens after the first.",
    "request_queue_time_seconds": "Time until a request had a slot and KV blocks.",
    "request_prefill_time_seconds": "Time from a request's start to its first token.",
    "request_decode_time_seconds": "Time from a request's first token to its last.",
    "request_inference_time_seconds": "Time from a request's start to its last token.",
    "grammar_compile_seconds": "Time to compile a grammar that was not among those compiled last.",
    "grammar_mask_seconds": "Time of one step to follow its grammars and fill their masks.",
    "worker_pause_seconds": "Time from a loss of the workers until they took plans again.",
    "e2e_request_latency_seconds": "Time from a request's arrival to its end.",
    "step_time_error_ratio": "Estimated over measured time of a step with a prompt.",
    "first_token_error_ratio": "Expected over true time from a request's admission to its first token.",
}
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")


class Number(NamedTuple):
    """A counter or gauge: one value for each set of its own labels.

    `values` is keyed by the values of `labels`; a number without labels has the empty tuple as its only key.
    """

    name: str
    text: str
    values: Mapping[tuple[str, ...], float]
    labels: tuple[str, ...] = ()
    is_counter: bool = False
    has_engine: bool = True


class ReplicaMetrics:
    """Every number of one replica.

    An engine without replicas has exactly one of these. Histograms and counters are kept here; gauges are read from
    the scheduler's last snapshot.
    """

    def __init__(
        self, max_model_len: int, cache_config: Mapping[str, str], num_workers: int
    ) -> None:
        self._cache_config = dict(cache_config)
        self._stats = _NOTHING
        self._ended: dict[str, int] = dict.fromkeys(FINISH_REASONS, 0)
        self._num_corrupted = 0
        self._num_grammars = self._num_grammars_found = 0
        self._num_grammar_tokens = self._num_redrawn = 0
        self._refusals: dict[str, int] = dict.fromkeys(REFUSALS, 0)
        self._grammar_failures: dict[str, int] = dict.fromkeys(GRAMMAR_FAILURES, 0)
        self._losses: dict[str, int] = dict.fromkeys(LOSS_CAUSES, 0)
        self._workers_up: dict[str, int] = {str(rank): 1 for rank in range(num_workers)}
        self._sleep_states: dict[str, int] = dict.fromkeys(SLEEP_STATES, 0)
        self.histograms = {
            name: Distribution(bounds) for name, bounds in _histogram_bounds(max_model_len)
        }
        # Images looked up in the cache of processed images, and images found there.
        self.image_counts: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self.set_sleep_level(0, is_sleeping=False)

    @property
    def num_ended(self) -> int:
        """Requests with a counted end."""
        return sum(self._ended.values())

    def note_step(self, stats: StepStats) -> None:
        """Count one iteration of the scheduler.

        A ratio of 1 means that the scheduler predicted the time exactly.
        """
        self._observe("iteration_tokens_total", stats.num_tokens)
        self.histograms["step_time_error_ratio"].observe_all(stats.step_time_ratios)
        self.histograms["first_token_error_ratio"].observe_all(stats.first_token_ratios)

    def note_grammar(self, stats: GrammarStats) -> None:
        """Count a grammar that a request brought.

        It was compiled, found in the cache or refused, and each outcome has its own number. The compile time is a
        histogram.
        """
        self._num_grammars += 1
        if stats.refusal is not None:
            self._refusals[stats.refusal] += 1
        elif stats.compile_s is not None:
            self._observe("grammar_compile_seconds", stats.compile_s)
        else:
            self._num_grammars_found += 1

    def note_grammar_work(self, work: Iterable[GrammarWork]) -> None:
        """Count what steps did for their grammars.

        Each element is the work of one step, so the histogram shows the delay that grammars add to a step.
        """
        for step in work:
            self._observe("grammar_mask_seconds", step.seconds)
            self._num_grammar_tokens += step.num_tokens
            self._num_redrawn += step.num_redrawn

    def note_stats(self, stats: SchedulerStats) -> None:
        """Replace the scheduler's snapshot."""
        self._stats = stats

    def note_output_stats(self, stats: OutputStats) -> None:
        """Count latencies, and the requests that ended."""
        self.histograms["time_to_first_token_seconds"].observe_all(stats.first_token_s)
        self.histograms["inter_token_latency_seconds"].observe_all(stats.inter_token_s)
        for ended in stats.ended:
            self._note_ended(ended)

    def note_loss(self, loss: DeviceLost) -> None:
        """Count a loss of the worker processes: all ranks end together."""
        self._losses[loss.cause] += 1
        self._workers_up = dict.fromkeys(self._workers_up, 0)

    def note_return(self, back: DeviceBack) -> None:
        """Count the pause from a loss until the workers took plans again."""
        self._workers_up = dict.fromkeys(self._workers_up, 1)
        self._observe("worker_pause_seconds", back.pause_s)

    def set_sleep_level(self, level: int, *, is_sleeping: bool) -> None:
        """Set the sleep state; a level-0 pause is none of the three."""
        holds = (not is_sleeping, level == 1, level == 2)
        self._sleep_states = dict(zip(SLEEP_STATES, map(int, holds), strict=True))

    def numbers(self) -> Iterator[Number]:
        """All counters and gauges, always in the same order.

        Prometheus' text keeps this order, so two scrapes can be compared line by line.
        """
        yield from self._gauges()
        yield from self._scheduler_counters()
        yield Number(
            "request_success", "Requests that ended, by reason.", keyed(self._ended),
            ("finished_reason",), is_counter=True,
        )  # fmt: skip
        yield Number(
            "worker_restarts", "Losses of the worker processes, by cause.",
            keyed(self._losses), ("cause",), is_counter=True,
        )  # fmt: skip
        yield Number(
            "grammar_refusals", "Grammars refused before their requests were admitted, by reason.",
            keyed(self._refusals), ("reason",), is_counter=True,
        )  # fmt: skip
        yield Number(
            "grammar_failures", "Requests that ended since nothing fitted their grammars, by reason.",
            keyed(self._grammar_failures), ("reason",), is_counter=True,
        )  # fmt: skip
        num_images, num_images_found = self.image_counts()
        for name, text, value in (
            ("grammar_cache_queries", "Grammars that requests brought.", self._num_grammars),
            (
                "grammar_cache_hits",
                "Grammars found among those compiled last.",
                self._num_grammars_found,
            ),
            ("grammar_tokens", "Tokens sampled by a grammar.", self._num_grammar_tokens),
            (
                "grammar_redrawn_tokens",
                "Tokens sampled again since a grammar refused the first.",
                self._num_redrawn,
            ),
            ("corrupted_requests", "Requests whose logits were not finite.", self._num_corrupted),
            (
                "external_prefix_cache_queries",
                "Tokens looked up in the tier on disk.",
                self._stats.tier_hit_tokens + self._stats.tier_miss_tokens,
            ),
            (
                "external_prefix_cache_hits",
                "Tokens read from the tier on disk.",
                self._stats.tier_hit_tokens,
            ),
            ("mm_cache_queries", "Items looked up in the multimodal cache.", num_images),
            ("mm_cache_hits", "Items found in the multimodal cache.", num_images_found),
        ):
            yield Number(name, text, {(): value}, is_counter=True)

    def _gauges(self) -> Iterator[Number]:
        stats = self._stats
        num_waiting = stats.num_waiting + stats.num_deferred
        waiting_by = {"capacity": stats.num_waiting, "deferred": stats.num_deferred}
        yield Number(
            "num_requests_running", "Sequences that hold a request slot.", {(): stats.num_running}
        )
        yield Number("num_requests_waiting", "Sequences that wait to run.", {(): num_waiting})
        yield Number(
            "num_requests_waiting_by_reason", "Sequences that wait to run, by reason.",
            keyed(waiting_by), ("reason",),
        )  # fmt: skip
        yield Number(
            "step_prompt_budget_seconds",
            "Time of prompt work in the last step with a prompt; 0 where steps have no limit.",
            {(): stats.step_prompt_budget_s},
        )
        yield Number(
            "fluid_lag_tokens",
            "Tokens of prompts that would be finished by now if all were computed at once.",
            {(): stats.num_overdue_tokens},
        )
        yield Number(
            "state_snapshots", "Rows for copies of recurrent states, by use.",
            keyed({
                "offered": stats.num_state_snapshots,
                "pending": stats.num_state_rows_pending,
                "free": stats.num_state_rows_free,
            }), ("state",),
        )  # fmt: skip
        yield Number("kv_tier_bytes", "Bytes of the tier on disk.", {(): stats.tier_bytes})
        yield Number("kv_tier_files", "Files of the tier on disk.", {(): stats.tier_files})
        yield Number("kv_cache_usage_perc", "KV blocks in use, 0 to 1.", {(): stats.kv_cache_usage})
        yield Number(
            "kv_cache_used_bytes",
            "Bytes of KV blocks in use, by kind: of layers that see all tokens, and of layers with a window.",
            keyed({"full": stats.num_full_kv_bytes, "window": stats.num_window_kv_bytes}),
            ("kind",),
        )
        yield Number(
            "engine_sleep_state", "1 for the sleep state of the engine; none is 1 in a mere pause.",
            keyed(self._sleep_states), ("sleep_state",),
        )  # fmt: skip
        yield Number(
            "worker_up", "1 while the worker process of a rank takes plans.",
            keyed(self._workers_up), ("rank",),
        )  # fmt: skip
        yield Number(
            "replica_failed", "1 once the workers of the replica are not started again.",
            {(): int(stats.is_device_failed)},
        )  # fmt: skip
        if (adapters := stats.adapters) is not None:
            lists = ",".join(adapters.waiting), ",".join(adapters.running)
            yield Number(
                "lora_requests_info", "The adapters of running and of waiting sequences.",
                {(str(adapters.max_running), *lists): 1},
                ("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
            )  # fmt: skip
        yield Number(
            "cache_config_info", "How the KV cache is configured.",
            {tuple(self._cache_config.values()): 1}, tuple(self._cache_config),
        )  # fmt: skip

    def _scheduler_counters(self) -> Iterator[Number]:
        stats = self._stats
        by_source = {
            "local_compute": stats.num_prompt_tokens,
            "local_cache_hit": stats.prefix_cache_hits,
            "external_kv_transfer": 0,
        }
        for name, text, value in (
            ("num_preemptions", "Sequences whose blocks others got.", stats.num_preemptions),
            ("prompt_tokens", "Prompt tokens, computed or found.", sum(by_source.values())),
            ("prompt_tokens_cached", "Prompt tokens found in a cache.", stats.prefix_cache_hits),
            (
                "recomputed_tokens",
                "Tokens that were computed a second time because a worker was lost.",
                stats.num_lost_tokens,
            ),
            ("generation_tokens", "Tokens sampled.", stats.num_generation_tokens),
            (
                "prompt_turns_passed",
                "Starts before a request whose turn it was, and that found no room.",
                stats.num_turns_passed,
            ),
            (
                "prefix_cache_queries",
                "Tokens looked up in the KV cache.",
                stats.prefix_cache_queries,
            ),
            ("prefix_cache_hits", "Tokens found in the KV cache.", stats.prefix_cache_hits),
            (
                "prefix_cache_state_misses",
                "Tokens found in the KV cache, but computed again for lack of a recurrent state.",
                stats.num_state_misses,
            ),
            ("kv_tier_hit_tokens", "Tokens read from the tier on disk.", stats.tier_hit_tokens),
            (
                "kv_tier_miss_tokens",
                "Tokens of full blocks that neither memory nor the tier had.",
                stats.tier_miss_tokens,
            ),
            (
                "kv_tier_stored_tokens",
                "Tokens written to the tier on disk.",
                stats.tier_stored_tokens,
            ),
            ("state_snapshot_saves", "Recurrent states copied.", stats.num_state_saves),
            (
                "state_snapshot_evictions",
                "Copies of recurrent states that made room for others.",
                stats.num_state_evictions,
            ),
            (
                "state_snapshot_hits",
                "Sequences that began with a copy of a recurrent state.",
                stats.num_state_hits,
            ),
            ("spec_decode_num_drafts", "Runs of drafted tokens verified.", stats.num_drafts),
            ("spec_decode_num_draft_tokens", "Drafted tokens verified.", stats.num_draft_tokens),
            (
                "spec_decode_num_accepted_tokens",
                "Drafted tokens that were right.",
                stats.num_accepted_tokens,
            ),
        ):
            yield Number(name, text, {(): value}, is_counter=True)
        yield Number(
            "kv_tier_refused", "Blocks of the tier on disk that were not used or not written.",
            keyed(dict(stats.tier_refused)), ("reason",), is_counter=True,
        )  # fmt: skip
        yield Number(
            "kv_tier_skipped", "Blocks not stored, or sequences that did not wait for the disk.",
            keyed(dict(stats.tier_skipped)), ("reason",), is_counter=True,
        )  # fmt: skip
        by_turn = {"first": stats.num_first_turn_tokens, "other": stats.num_other_turn_tokens}
        yield Number(
            "prompt_tokens_by_turn", "Prompt tokens, by the turn of their request in a step.",
            keyed(by_turn), ("turn",), is_counter=True,
        )  # fmt: skip
        yield Number(
            "prompt_tokens_by_source", "Prompt tokens, by source.", keyed(by_source), ("source",),
            is_counter=True,
        )  # fmt: skip

    def _note_ended(self, ended: RequestEnded) -> None:
        stats, observe = ended.stats, self._observe
        self._ended[ended.finish_reason] += 1
        self._num_corrupted += ended.error_code == "numerical_error"
        if ended.error_code in self._grammar_failures:
            self._grammar_failures[ended.error_code] += 1
        num_computed = ended.num_prompt_tokens - ended.num_cached_tokens
        observe("request_prompt_tokens", ended.num_prompt_tokens)
        observe("request_prefill_kv_computed_tokens", num_computed)
        observe("request_generation_tokens", stats.num_generation_tokens)
        observe("request_max_num_generation_tokens", stats.max_num_generation_tokens)
        observe("request_params_max_tokens", ended.params.max_tokens)
        observe("request_params_n", ended.params.n)
        observe("request_num_preemptions", stats.num_preemptions)
        observe("e2e_request_latency_seconds", stats.e2e_s)
        observe("request_queue_time_seconds", stats.queue_s)
        observe("request_prefill_time_seconds", stats.prefill_s)
        observe("request_decode_time_seconds", stats.decode_s)
        observe("request_inference_time_seconds", stats.inference_s)
        observe("request_time_per_output_token_seconds", stats.time_per_output_token_s)

    def _observe(self, name: str, value: float | None) -> None:
        """Count an observation, unless it is None: the request did not get that far."""
        if value is not None:
            self.histograms[name].observe(value)


def keyed(values: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    return {(key,): value for key, value in values.items()}


def _histogram_bounds(max_model_len: int) -> Iterator[tuple[str, tuple[float, ...]]]:
    for name in (
        "request_prompt_tokens",
        "request_prefill_kv_computed_tokens",
        "request_generation_tokens",
        "request_max_num_generation_tokens",
        "request_params_max_tokens",
    ):
        yield name, one_two_five(max_model_len)
    yield "iteration_tokens_total", ITERATION_TOKENS
    yield "request_params_n", SMALL_COUNTS
    yield "request_num_preemptions", PREEMPTION_COUNTS
    yield "time_to_first_token_seconds", FIRST_TOKEN_S
    yield "inter_token_latency_seconds", INTER_TOKEN_S
    yield "request_time_per_output_token_seconds", INTER_TOKEN_S
    for name in ("queue", "prefill", "decode", "inference"):
        yield f"request_{name}_time_seconds", LATENCY_S
    yield "e2e_request_latency_seconds", LATENCY_S
    yield "worker_pause_seconds", PAUSE_S
    yield "step_time_error_ratio", RATIOS
    yield "first_token_error_ratio", RATIOS
    yield "grammar_compile_seconds", COMPILE_S
    yield "grammar_mask_seconds", MASK_S


_NOTHING = SchedulerStats(
    num_running=0, num_waiting=0, num_deferred=0, num_steps_in_flight=0, num_blocks_free=0,
    num_blocks_total=0, kv_cache_usage=0.0, num_steps=0, num_preemptions=0, num_prompt_tokens=0,
    num_generation_tokens=0, prefix_cache_queries=0, prefix_cache_hits=0, recompute_cache_queries=0,
    recompute_cache_hits=0,
)  # fmt: skip
