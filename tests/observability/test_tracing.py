"""One span for each request, only when an endpoint is configured."""

import re
import sys

import msgspec
import pytest
import trio.testing
from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from tests.simulation.simulated_device import Conditions, SimulatedDevice
from tests.support.engines import STEP_S, VOCAB_SIZE, InlineThreads, engine_config
from trouper.actors.engine.wiring import open_engine
from trouper.actors.messages.requests import RequestOptions
from trouper.errors import GenerationError, UnsupportedFeatureError
from trouper.extras import install_hint
from trouper.params import RequestOutputKind, SamplingParams

pytestmark = pytest.mark.trio

PROMPT = [1, 2, 3, 4, 5, 6, 7]
TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"Traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}


def tracing_engine(processor, *, conditions=None, endpoint="http://collector:4318", **config):
    config = msgspec.structs.replace(engine_config(), otlp_traces_endpoint=endpoint, **config)
    device = SimulatedDevice(65, 4, VOCAB_SIZE, 2, conditions or Conditions(STEP_S))
    return open_engine(config, device, InlineThreads(), span_processor=processor)


async def finish(engine, request_id, max_tokens=5, n=1, **options):
    params = SamplingParams(
        n=n, seed=1, max_tokens=max_tokens, top_p=0.5, output_kind=RequestOutputKind.FINAL_ONLY
    )
    return [
        o async for o in engine.generate(PROMPT, params, request_id, RequestOptions(**options))
    ][-1]


async def test_span_tells_requests_parameters_usage_and_times(autojump_clock):
    exporter = InMemorySpanExporter()
    async with tracing_engine(SimpleSpanProcessor(exporter)) as engine:
        output = await finish(engine, "mine", trace_headers=HEADERS)
        await trio.testing.wait_all_tasks_blocked()
    (span,) = exporter.get_finished_spans()
    stats = output.metrics
    assert span.name == "llm_request"
    assert span.kind is SpanKind.SERVER
    assert span.status.status_code is StatusCode.UNSET
    assert span.attributes == {
        "gen_ai.request.id": "mine",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.top_p": 0.5,
        "gen_ai.request.n": 1,
        "gen_ai.response.model": "simulated",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.num_sequences": 1,
        "gen_ai.usage.prompt_tokens": 7,
        "gen_ai.usage.completion_tokens": 5,
        "gen_ai.latency.time_in_queue": stats.queue_s,
        "gen_ai.latency.time_to_first_token": stats.time_to_first_token_s,
        "gen_ai.latency.time_in_model_prefill": stats.prefill_s,
        "gen_ai.latency.time_in_model_decode": stats.decode_s,
        "gen_ai.latency.time_in_model_inference": stats.inference_s,
        "gen_ai.latency.e2e": stats.e2e_s,
    }
    assert span.start_time == pytest.approx(stats.arrival_time * 1e9)
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(5 * STEP_S)


async def test_the_callers_trace_context_is_the_parent(autojump_clock):
    exporter = InMemorySpanExporter()
    async with tracing_engine(SimpleSpanProcessor(exporter)) as engine:
        await finish(engine, "child", trace_headers=HEADERS)
        await finish(
            engine, "not sampled", trace_headers={"traceparent": HEADERS["Traceparent"][:-1] + "0"}
        )
        await finish(engine, "malformed", trace_headers={"traceparent": "00-nonsense"})
        await finish(engine, "root")
        await trio.testing.wait_all_tasks_blocked()
    spans = {s.attributes["gen_ai.request.id"]: s for s in exporter.get_finished_spans()}
    assert spans.keys() == {"child", "malformed", "root"}
    assert spans["child"].context.trace_id == int(TRACE_ID, 16)
    assert spans["child"].parent.span_id == int(PARENT_ID, 16)
    assert spans["malformed"].parent is None
    assert spans["root"].parent is None


async def test_completions_share_one_span(autojump_clock):
    exporter = InMemorySpanExporter()
    async with tracing_engine(SimpleSpanProcessor(exporter)) as engine:
        await finish(engine, "a", n=3)
        await trio.testing.wait_all_tasks_blocked()
    (span,) = exporter.get_finished_spans()
    assert span.attributes["gen_ai.usage.num_sequences"] == 3
    assert span.attributes["gen_ai.usage.completion_tokens"] == 15


class Sick(Conditions):
    def is_finite(self, sequence, position):
        return False


async def test_failed_request_has_span_with_error(autojump_clock):
    exporter = InMemorySpanExporter()
    async with tracing_engine(SimpleSpanProcessor(exporter), conditions=Sick(STEP_S)) as engine:
        with pytest.raises(GenerationError):
            await finish(engine, "a")
        await trio.testing.wait_all_tasks_blocked()
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == "numerical_error"
    assert "gen_ai.latency.time_to_first_token" not in span.attributes


async def test_requests_that_end_of_engine_aborts_have_spans(autojump_clock):
    exporter = InMemorySpanExporter()
    async with tracing_engine(SimpleSpanProcessor(exporter)) as engine:
        stream = engine.generate(PROMPT, SamplingParams(max_tokens=200), "a")
        await anext(stream)
    assert [o async for o in stream][-1].finished
    (span,) = exporter.get_finished_spans()
    assert span.attributes["gen_ai.response.finish_reasons"] == ("abort",)


class Witness(SpanProcessor):
    def __init__(self):
        self.ids, self.is_shut_down = [], False

    def on_end(self, span):
        self.ids.append(span.attributes["gen_ai.request.id"])

    def shutdown(self):
        self.is_shut_down = True


async def test_tracing_works_without_statistics_and_ends_with_engine(autojump_clock):
    witness = Witness()
    async with tracing_engine(witness, log_stats=False) as engine:
        assert (await finish(engine, "a")).metrics is None
        assert not witness.is_shut_down
    assert witness.ids == ["a"]
    assert witness.is_shut_down


async def test_trace_headers_without_tracing_are_ignored_with_one_warning(autojump_clock):
    witness = Witness()
    async with tracing_engine(witness, endpoint=None) as engine:
        await finish(engine, "a", trace_headers={})
        with pytest.warns(UserWarning, match="trace_headers are ignored"):
            await finish(engine, "b", trace_headers=HEADERS)
        await finish(engine, "c", trace_headers=HEADERS)  # a warning here would be an error
    assert witness.ids == []


@pytest.mark.parametrize(
    "missing", ["opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http"]
)
async def test_a_missing_package_names_the_extra(missing, monkeypatch):
    for name in [
        name
        for name in sys.modules
        if name.startswith((missing, "trouper.actors.observability.tracing"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UnsupportedFeatureError, match=re.escape(install_hint("tracing"))):
        async with tracing_engine(None):
            raise AssertionError


async def test_without_an_endpoint_opentelemetry_is_not_even_imported(autojump_clock, monkeypatch):
    for name in [
        name
        for name in sys.modules
        if name.startswith(("opentelemetry", "trouper.actors.observability.tracing"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    async with tracing_engine(None, endpoint=None) as engine:
        await finish(engine, "a")
    assert not [name for name in sys.modules if name.startswith("opentelemetry")]
