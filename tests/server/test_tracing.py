"""The trace context of a request's headers is the parent of its spans."""

from importlib import import_module

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from trouper import AsyncLLMEngine, EngineArgs
from trouper.frontends.server.asgi.app import create_app

from .client import Client
from .conftest import SMALL

pytestmark = pytest.mark.anyio

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = ("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01")
ASKED = {
    "/v1/completions": {"prompt": ["def f(", "x"], "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
}


@pytest.fixture(scope="module")
async def traced(anyio_backend):
    """A client of an engine that traces, and what is exported."""
    exporter = InMemorySpanExporter()
    with pytest.MonkeyPatch.context() as patch:
        # The module that the engine will import: tests of its absence leave another as the package's attribute.
        tracing = import_module("trouper.actors.observability.tracing")
        patch.setattr(tracing, "otlp_processor", lambda endpoint: SimpleSpanProcessor(exporter))
        args = EngineArgs(**SMALL, otlp_traces_endpoint="http://collector:4318")
        async with AsyncLLMEngine.from_engine_args(args) as engine:
            yield Client(create_app(engine)), exporter


async def spans_of(traced, wait_until, path, headers):
    client, exporter = traced
    exporter.clear()
    assert (await client.post(path, ASKED[path], headers)).status == 200
    num = 2 if path == "/v1/completions" else 1
    await wait_until(lambda: len(exporter.get_finished_spans()) == num)
    return exporter.get_finished_spans()


@pytest.mark.parametrize("path", ASKED)
async def test_a_requests_spans_belong_to_the_callers_trace(traced, wait_until, path):
    for span in await spans_of(traced, wait_until, path, [PARENT, ("tracestate", "a=1")]):
        assert span.context.trace_id == int(TRACE_ID, 16)
        assert span.parent.span_id == int(PARENT_ID, 16)
        assert span.context.trace_state.get("a") == "1"


@pytest.mark.parametrize(
    "headers",
    [[], [("traceparent", "\xff")], [("tracestate", "a=1")], [PARENT, (PARENT[0], PARENT[1])]],
    ids=["none", "malformed", "state alone", "two parents"],
)
async def test_without_one_valid_context_span_begins_trace(traced, wait_until, headers):
    (span,) = await spans_of(traced, wait_until, "/v1/responses", headers)
    assert span.parent is None


async def test_headers_are_dropped_where_nothing_is_traced(client):
    answer = await client.post("/v1/responses", ASKED["/v1/responses"], [PARENT])
    assert answer.status == 200  # a warning would be an error here
