"""Report the engine's load in a header of an answer, in the ORCA format that load balancers read.  Pure."""

import json

from trouper.actors.messages.stats import SchedulerStats
from trouper.frontends.server.http.context import Headers

REQUEST_HEADER = b"endpoint-load-metrics-format"


def load_report(form: bytes | None, stats: SchedulerStats) -> Headers:
    """Return the header that the value of the request's header asks for, under vLLM's names. Other formats get none."""
    named = {
        "kv_cache_usage_perc": float(stats.kv_cache_usage),
        "num_requests_waiting": float(stats.num_waiting),
    }
    match (form or b"").lower():
        case b"text":
            text = ", ".join(f"named_metrics.{name}={value}" for name, value in named.items())
            report = f"TEXT {text}"
        case b"json":
            report = f"JSON {json.dumps({'named_metrics': named})}"
        case _:
            return ()
    return ((b"endpoint-load-metrics", report.encode()),)
