"""One OpenTelemetry span for each request.

OpenTelemetry is in an extra, so this module is imported only when `otlp_traces_endpoint` is set.  A span is made when its
request has ended, from the times noted on the way; nothing is traced while the request runs.  If the caller sent a W3C
trace context, it is the span's parent, and its "not sampled" is honoured.
"""

from collections.abc import Mapping
from importlib import import_module

from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from trouper.actors.messages.outputs import RequestEnded

# Each of the few batches that are left at the end may take this long.
EXPORT_TIMEOUT_S = 5
NANOSECONDS = 10**9


class Tracer:
    """Creates one span for each finished request, in an OpenTelemetry provider of its own.

    Nothing is registered globally, so a program that embeds the engine keeps its own tracing.
    """

    def __init__(self, model_name: str, processor: SpanProcessor) -> None:
        self._model_name = model_name
        self._provider = TracerProvider(
            resource=Resource.create({SERVICE_NAME: "trouper"}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("trouper")

    def note(self, ended: RequestEnded) -> None:
        """Create the span of a finished request, and queue it for export.

        Its times are those of the request's statistics, so nothing happens while the request runs.
        """
        stats = ended.stats
        start_ns = int(stats.arrival_time * NANOSECONDS)
        span = self._tracer.start_span(
            "llm_request",
            context=_context(ended.trace_headers),
            kind=SpanKind.SERVER,
            attributes=self._attributes(ended),
            start_time=start_ns,
        )
        if ended.finish_reason == "error":
            span.set_status(StatusCode.ERROR, ended.error_code)
        span.end(start_ns + int((stats.e2e_s or 0.0) * NANOSECONDS))

    def close(self) -> None:
        """Export the remaining spans, and stop the exporter's thread.

        It blocks until they are sent, at most for the timeout of the export. Later spans are dropped.
        """
        self._provider.shutdown()

    def _attributes(self, ended: RequestEnded) -> dict[str, str | int | float | tuple[str, ...]]:
        params, stats = ended.params, ended.stats
        found = {
            "gen_ai.request.id": ended.request_id,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.n": params.n,
            "gen_ai.response.model": self._model_name,
            "gen_ai.response.finish_reasons": (ended.finish_reason,),
            "gen_ai.usage.num_sequences": params.n,
            "gen_ai.usage.prompt_tokens": ended.num_prompt_tokens,
            "gen_ai.usage.completion_tokens": stats.num_generation_tokens,
            "gen_ai.latency.time_in_queue": stats.queue_s,
            "gen_ai.latency.time_to_first_token": stats.time_to_first_token_s,
            "gen_ai.latency.time_in_model_prefill": stats.prefill_s,
            "gen_ai.latency.time_in_model_decode": stats.decode_s,
            "gen_ai.latency.time_in_model_inference": stats.inference_s,
            "gen_ai.latency.e2e": stats.e2e_s,
        }
        return {name: value for name, value in found.items() if value is not None}


def otlp_processor(endpoint: str) -> SpanProcessor:
    """Send spans to a collector over HTTP, in batches, from a thread of its own.

    Raises:
        ImportError: the exporter is not installed.
    """
    # By name, because types are checked without the extra too.
    http = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    return BatchSpanProcessor(http.OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S))


def _context(headers: Mapping[str, str] | None) -> Context:
    carrier = {name.lower(): value for name, value in (headers or {}).items()}
    return TraceContextTextMapPropagator().extract(carrier, Context())
