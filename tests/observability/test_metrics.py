"""The metrics of spec section 18: names, types, and what they count, in virtual time."""

import msgspec
import pytest
import trio.testing
from prometheus_client.parser import text_string_to_metric_families

from tests.simulation.simulated_device import Conditions
from tests.support.engines import STEP_S, engine_config, simulated_engine
from trouper.actors.engine.admission import (
    TOKENS_PER_IMAGE,
    embeds_bytes,
    estimate_tokens,
    has_images,
)
from trouper.actors.engine.wiring import cache_labels
from trouper.actors.messages.requests import RequestOptions
from trouper.actors.messages.steps import DeviceBack, DeviceLost
from trouper.actors.observability.metrics import Metrics
from trouper.actors.observability.replica_metrics import (
    FINISH_REASONS,
    FIRST_TOKEN_S,
    LATENCY_S,
)
from trouper.errors import MaxQueuedTokensError, QueueOverflowError, TrouperValidationError
from trouper.metrics import Counter, Gauge, Histogram
from trouper.params import RepetitionDetectionParams, RequestOutputKind, SamplingParams

GAUGES = {
    "num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason",
    "step_prompt_budget_seconds", "fluid_lag_tokens",
    "kv_cache_usage_perc", "kv_cache_used_bytes", "engine_sleep_state", "cache_config_info", "worker_up",
    "replica_failed", "state_snapshots", "kv_tier_bytes", "kv_tier_files",
}  # fmt: skip
COUNTERS = {
    "prompt_turns_passed", "prompt_tokens_by_turn", "prefix_cache_state_misses",
    "state_snapshot_saves", "state_snapshot_evictions", "state_snapshot_hits",
    "num_preemptions", "prompt_tokens", "prompt_tokens_by_source", "prompt_tokens_cached",
    "generation_tokens", "request_success", "admission_rejections", "prefix_cache_queries",
    "kv_tier_hit_tokens", "kv_tier_miss_tokens", "kv_tier_stored_tokens", "kv_tier_refused", "kv_tier_skipped",
    "prefix_cache_hits", "external_prefix_cache_queries", "external_prefix_cache_hits",
    "mm_cache_queries", "mm_cache_hits", "corrupted_requests", "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
    "worker_restarts", "recomputed_tokens", "grammar_cache_queries", "grammar_cache_hits",
    "grammar_tokens", "grammar_redrawn_tokens", "grammar_refusals", "grammar_failures",
}  # fmt: skip
HISTOGRAMS = {
    "request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens",
    "request_params_max_tokens", "request_prefill_kv_computed_tokens", "iteration_tokens_total",
    "request_params_n", "request_num_preemptions", "time_to_first_token_seconds",
    "inter_token_latency_seconds", "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds",
    "request_prefill_time_seconds", "request_decode_time_seconds", "worker_pause_seconds",
    "step_time_error_ratio", "first_token_error_ratio",
    "grammar_compile_seconds", "grammar_mask_seconds",
}  # fmt: skip
PROMPT = [1, 2, 3, 4, 5, 6, 7]
FINAL = RequestOutputKind.FINAL_ONLY


def greedy(max_tokens=8, **options):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **options)


async def finish(engine, request_id, params=None, prompt=PROMPT, **options):
    return [
        o
        async for o in engine.generate(
            prompt, params or greedy(), request_id, RequestOptions(**options)
        )
    ][-1]


def families(text):
    return {family.name: family for family in text_string_to_metric_families(text.decode())}


class Reading:
    """All values at one moment, by name and own labels."""

    def __init__(self, metrics):
        self.metrics = {}
        for metric in metrics:
            own = [v for k, v in metric.labels.items() if k not in ("model_name", "engine")]
            self.metrics[(metric.name.removeprefix("trouper:"), *own)] = metric

    def __call__(self, *key):
        metric = self.metrics[key]
        return (metric.count, metric.sum) if isinstance(metric, Histogram) else metric.value


async def read(engine):
    await trio.testing.wait_all_tasks_blocked()
    return Reading(await engine.get_metrics())


def test_the_exposition_has_every_name_and_type():
    found = {name: f.type for name, f in families(Metrics("m", 4096).expose()).items()}
    wanted = dict.fromkeys(GAUGES, "gauge") | dict.fromkeys(COUNTERS, "counter")
    wanted |= dict.fromkeys(HISTOGRAMS, "histogram")
    assert found == {f"trouper:{name}": kind for name, kind in wanted.items()}


def test_the_prefix_can_be_that_of_existing_dashboards():
    text = Metrics("m", 4096, prefix="vllm").expose().decode()
    assert 'vllm:num_requests_running{engine="0",model_name="m"} 0.0' in text
    assert (
        'vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 0.0' in text
    )
    assert "trouper" not in text


def test_every_series_is_labelled_by_model_and_engine_but_admission():
    for family in families(Metrics("m", 4096, cache_config={"block_size": "16"}).expose()).values():
        for sample in family.samples:
            assert sample.labels["model_name"] == "m"
            assert ("engine" in sample.labels) is (family.name != "trouper:admission_rejections")


def test_buckets_are_those_of_the_spec():
    found = {f.name: f for f in Metrics("m", 300).values() if isinstance(f, Histogram)}
    sizes = ["1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0", "200.0", "+Inf"]
    assert list(found["trouper:request_prompt_tokens"].buckets) == sizes
    for name, bounds in (
        ("trouper:time_to_first_token_seconds", FIRST_TOKEN_S),
        ("trouper:e2e_request_latency_seconds", LATENCY_S),
    ):
        assert [float(b) for b in found[name].buckets] == [*bounds, float("inf")]


def test_worker_losses_are_counted_by_cause():
    metrics = Metrics("m", 64, num_workers=2)
    assert [Reading(metrics.values())("worker_up", rank) for rank in "01"] == [1, 1]
    metrics.note_loss(DeviceLost("it died", cause="hang"))
    assert [Reading(metrics.values())("worker_up", rank) for rank in "01"] == [0, 0]
    metrics.note_return(DeviceBack(2.5))
    reading = Reading(metrics.values())
    assert [reading("worker_up", rank) for rank in "01"] == [1, 1]
    assert [reading("worker_restarts", cause) for cause in ("hang", "signal")] == [1, 0]
    assert reading("worker_pause_seconds") == (1, 2.5)


def test_engines_of_one_process_do_not_share_numbers():
    one, other = Metrics("m", 64), Metrics("m", 64)
    one.note_rejection("max_num_queued_reqs")
    assert Reading(one.values())("admission_rejections", "max_num_queued_reqs") == 1
    assert Reading(other.values())("admission_rejections", "max_num_queued_reqs") == 0


in_virtual_time = pytest.mark.trio


@in_virtual_time
async def test_what_is_read_is_what_prometheus_scrapes(autojump_clock):
    async with simulated_engine() as engine:
        await finish(engine, "a")
        reading = await read(engine)
        scraped = families(engine.metrics.expose())
    for (name, *_), metric in reading.metrics.items():
        samples = scraped[f"trouper:{name}"].samples
        mine = {s.name: s.value for s in samples if s.labels == metric.labels}
        match metric:
            case Counter(value=value):
                assert mine == {f"trouper:{name}_total": value}
            case Gauge(value=value):
                assert mine == {f"trouper:{name}": value}
            case Histogram(count=count, sum=total):
                assert mine[f"trouper:{name}_count"] == count
                assert mine[f"trouper:{name}_sum"] == total


@in_virtual_time
async def test_times_of_request_that_waits_for_its_turn(autojump_clock):
    options = {"max_num_active_seqs": 1, "max_steps_in_flight": 1}
    async with simulated_engine(**options) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(finish, engine, "first")
        await trio.testing.wait_all_tasks_blocked()
        second = (await finish(engine, "second", greedy(5))).metrics
        reading = await read(engine)
    # Eight steps for the first, then one of prefill and four of decoding for the second.
    assert second.queue_s == pytest.approx(8 * STEP_S)
    assert second.prefill_s == pytest.approx(STEP_S)
    assert second.decode_s == pytest.approx(4 * STEP_S)
    assert second.inference_s == pytest.approx(5 * STEP_S)
    assert second.e2e_s == pytest.approx(13 * STEP_S)
    assert second.time_per_output_token_s == pytest.approx(STEP_S)
    for name, steps in (
        ("request_queue_time_seconds", 0 + 8),
        ("request_prefill_time_seconds", 1 + 1),
        ("request_decode_time_seconds", 7 + 4),
        ("request_inference_time_seconds", 8 + 5),
        ("e2e_request_latency_seconds", 8 + 13),
        ("time_to_first_token_seconds", 1 + 9),
        ("request_time_per_output_token_seconds", 1 + 1),
    ):
        assert reading(name) == (2, pytest.approx(steps * STEP_S)), name
    assert reading("inter_token_latency_seconds") == (7 + 4, pytest.approx(11 * STEP_S))


@in_virtual_time
async def test_rendering_counts_into_latency_and_not_into_queue(autojump_clock):
    class SlowThreads:
        async def run(self, function, *args):
            await trio.sleep(0.5)
            return function(*args)

    async with simulated_engine(threads=SlowThreads()) as engine:
        stats = (await finish(engine, "a", greedy(1))).metrics
    assert stats.queue_s == pytest.approx(0, abs=1e-6)
    assert stats.time_to_first_token_s == pytest.approx(0.5 + STEP_S)
    assert stats.e2e_s == pytest.approx(0.5 + STEP_S)


@in_virtual_time
async def test_an_arrival_time_given_by_the_caller_counts(autojump_clock, monkeypatch):
    monkeypatch.setattr("trouper.actors.engine.request_table.time.time", lambda: 1000.0)
    async with simulated_engine() as engine:
        stats = (await finish(engine, "a", greedy(1), arrival_time=997.0)).metrics
    assert stats.arrival_time == 997.0
    assert stats.e2e_s == pytest.approx(3 + STEP_S)


@in_virtual_time
async def test_tokens_and_prefix_hits_add_up(autojump_clock):
    async with simulated_engine() as engine:
        await finish(engine, "a")
        await finish(engine, "b")
        reading = await read(engine)
    assert reading("prompt_tokens_cached") == reading("prefix_cache_hits") == 4  # one whole block
    assert reading("prefix_cache_queries") == 14
    assert reading("prompt_tokens_by_source", "local_cache_hit") == 4
    assert reading("prompt_tokens_by_source", "local_compute") == 10
    assert reading("prompt_tokens_by_source", "external_kv_transfer") == 0
    assert reading("prompt_tokens") == 14
    assert reading("generation_tokens") == 16
    assert reading("request_prompt_tokens") == (2, 14)
    assert reading("request_prefill_kv_computed_tokens") == (2, 10)
    assert reading("request_generation_tokens") == (2, 16)
    assert reading("request_params_max_tokens") == (2, 16)
    assert reading("iteration_tokens_total")[1] == 10 + 16


@in_virtual_time
async def test_a_request_with_completions_counts_once(autojump_clock):
    async with simulated_engine() as engine:
        params = SamplingParams(n=3, seed=3, max_tokens=6, output_kind=FINAL)
        stats = (await finish(engine, "a", params)).metrics
        reading = await read(engine)
    assert (stats.num_generation_tokens, stats.max_num_generation_tokens) == (18, 6)
    assert sum(reading("request_success", reason) for reason in FINISH_REASONS) == 1
    assert reading("request_params_n") == (1, 3)
    assert reading("request_max_num_generation_tokens") == (1, 6)
    assert reading("time_to_first_token_seconds")[0] == 1
    assert reading("request_prompt_tokens") == (1, 7)
    assert reading("generation_tokens") == 18


class Sick(Conditions):
    """The logits of one sequence are not finite."""

    def is_finite(self, sequence, position):
        return sequence != 4


@in_virtual_time
async def test_each_end_counts_under_its_reason(autojump_clock):
    model = msgspec.structs.replace(engine_config().model, eos_token_ids=(3,))
    config = msgspec.structs.replace(engine_config(), model=model)
    async with simulated_engine(config=config, conditions=Sick(STEP_S)) as engine:
        await finish(engine, "length", greedy(ignore_eos=True))
        await finish(engine, "stop", greedy(2, allowed_token_ids=[3]))
        rule = RepetitionDetectionParams(max_pattern_size=1, min_count=3)
        params = greedy(9, allowed_token_ids=[5], repetition_detection=rule)
        assert (await finish(engine, "repetition", params)).outputs[0].stop_reason == (
            "repetition_detected"
        )
        stream = engine.generate(PROMPT, greedy(99), "abort")
        await anext(stream)
        engine.abort("abort")
        assert [o async for o in stream][-1].finished
        with pytest.raises(Exception, match="finite"):
            await finish(engine, "error")
        reading = await read(engine)
    assert {r: reading("request_success", r) for r in FINISH_REASONS} == dict.fromkeys(
        FINISH_REASONS, 1
    )
    assert reading("corrupted_requests") == 1


@in_virtual_time
async def test_counters_only_grow_and_gauges_return_to_zero(autojump_clock):
    async with simulated_engine(num_blocks=13, max_num_active_seqs=4) as engine:
        seen = [await read(engine)]
        async with trio.open_nursery() as nursery:
            for n in range(6):
                nursery.start_soon(finish, engine, f"r{n}", greedy(20), [n + 1] * 9)
            for _ in range(12):
                await trio.sleep(2 * STEP_S)
                seen.append(await read(engine))
            async with engine.generate(PROMPT, greedy(), "left early") as stream:
                await anext(stream)
        seen.append(await read(engine))
        await trio.sleep(10 * STEP_S)
        idle = await read(engine)
    for before, after in zip(seen, [*seen[1:], idle], strict=True):
        for key, metric in before.metrics.items():
            if isinstance(metric, Counter):
                assert after(*key) >= metric.value, key
            elif isinstance(metric, Histogram):
                assert after(*key)[0] >= metric.count, key
    assert max(r("num_requests_running") for r in seen) > 0
    assert max(r("num_requests_waiting") for r in seen) > 0
    assert all(
        r("num_requests_waiting")
        == r("num_requests_waiting_by_reason", "capacity")
        + r("num_requests_waiting_by_reason", "deferred")
        for r in seen
    )
    assert idle("num_preemptions") > 0
    assert idle("request_num_preemptions")[1] == idle("num_preemptions")
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert idle(name) == 0, name


@in_virtual_time
async def test_the_sleep_state_follows_sleep_and_wake(autojump_clock):
    async with simulated_engine() as engine:

        async def state():
            reading = await read(engine)
            names = ("awake", "weights_offloaded", "discard_all")
            return [name for name in names if reading("engine_sleep_state", name)]

        assert await state() == ["awake"]
        for level, name in ((1, "weights_offloaded"), (2, "discard_all")):
            await engine.controls.sleep(level)
            assert await state() == [name]
            await engine.controls.wake(["weights"])
            assert await state() == [name]
            await engine.controls.wake()
            assert await state() == ["awake"]
        await engine.controls.sleep(0)
        assert await state() == []
        await engine.controls.wake()
        async with engine.controls.paused():
            assert await state() == []
        assert await state() == ["awake"]


@in_virtual_time
async def test_a_full_engine_refuses_and_counts_every_completion(autojump_clock):
    config = msgspec.structs.replace(engine_config(), max_num_queued_reqs=3)
    async with simulated_engine(config=config) as engine:
        params = SamplingParams(n=2, seed=1, max_tokens=50)
        async with engine.generate(PROMPT, params, "two"):
            with pytest.raises(QueueOverflowError, match="max_num_queued_reqs"):
                await finish(engine, "two more", params)
            await finish(engine, "one more")
            engine.check_admission(1)
            with pytest.raises(QueueOverflowError):
                engine.check_admission(2)
        await finish(engine, "again", SamplingParams(n=3, seed=1))
        reading = await read(engine)
    assert reading("admission_rejections", "max_num_queued_reqs") == 2
    assert reading("admission_rejections", "max_num_queued_tokens") == 0


@in_virtual_time
async def test_prompt_tokens_in_prefill_close_the_door(autojump_clock):
    config = msgspec.structs.replace(engine_config(), max_num_queued_tokens=100)
    async with simulated_engine(config=config) as engine:
        async with engine.generate(
            PROMPT * 20, greedy(), "long"
        ) as stream:  # five steps of prefill
            # A burst does not get in before it is rendered.
            with pytest.raises(MaxQueuedTokensError):
                await finish(engine, "refused at once")
            await trio.sleep(STEP_S / 2)
            with pytest.raises(MaxQueuedTokensError, match="140 prompt tokens"):
                await finish(engine, "refused")
            await anext(stream)
            await finish(engine, "welcome")
        async with engine.generate(PROMPT * 20, greedy(), "aborted while in prefill"):
            await trio.sleep(STEP_S / 2)
        engine.check_admission()
        reading = await read(engine)
    assert reading("admission_rejections", "max_num_queued_tokens") == 2


def test_estimate_uses_ids_or_text_length():
    chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 40}]}] * 3}
    nested = []
    for _ in range(10_000):
        nested = [nested]
    assert estimate_tokens([5] * 7) == estimate_tokens({"prompt_token_ids": (5,) * 7}) == 7
    assert estimate_tokens("x" * 40) == estimate_tokens({"prompt": "x" * 40}) == 10
    assert estimate_tokens(chat) == 30
    parts = [{"type": "prompt_embeds", "data": bytes(3 * 2**13)}, {"text": "x" * 8}]
    mixed = {"messages": [{"content": parts}, {"content": "y" * 4}, {"content": parts[:1]}]}
    assert (estimate_tokens(mixed), embeds_bytes(mixed)) == (9, 6 * 2**13)
    assert embeds_bytes({"prompt_embeds": b"abc"}) == embeds_bytes(b"abc") == 3
    assert [
        embeds_bytes(odd) for odd in (None, [], nested, {"messages": 5}, {"messages": [5]})
    ] == [0] * 5
    image = {"type": "image_url", "image_url": {"url": "data:;base64," + "A" * 10**6}}
    seen = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 40}, image]}]}
    assert (estimate_tokens(seen), has_images(seen)) == (10 + TOKENS_PER_IMAGE, True)
    data = {"prompt": "x" * 40, "multi_modal_data": {"image": [b"", b""]}}
    assert (estimate_tokens(data), has_images(data)) == (10 + 2 * TOKENS_PER_IMAGE, True)
    assert not any(map(has_images, ("x", chat, None, {"multi_modal_data": {"image": []}}, nested)))
    assert [estimate_tokens(odd) for odd in (None, {}, [], nested, {"prompt": 3}, 5)] == [0] * 6


@in_virtual_time
async def test_without_statistics_nothing_is_recorded(autojump_clock):
    config = msgspec.structs.replace(engine_config(), log_stats=False)
    async with simulated_engine(config=config) as engine:
        assert (await finish(engine, "a")).metrics is None
        assert engine.metrics is None
        with pytest.raises(TrouperValidationError, match="disable_log_stats"):
            await engine.get_metrics()
        await engine.log_stats()


@in_virtual_time
async def test_cache_is_described_by_labels_of_vllms_dashboards(autojump_clock):
    async with simulated_engine(num_blocks=33) as engine:
        labels = cache_labels(engine.config, engine.info)
    assert labels["num_gpu_blocks"] == "32"
    assert labels["kv_cache_max_concurrency"] == "0.5"
    assert labels["kv_cache_size_tokens"] == str(32 * 4)
    assert labels["enable_prefix_caching"] in ("True", "False")
    assert labels["prefix_caching_hash_algo"] == "sha256"
