"""Read and write headers with a meaning of their own.  Pure.

CORS headers let browsers decide which pages of other origins may read a response (Fetch standard, section 3.2).  Trace context
(W3C) names the caller's span.  The load report (ORCA) informs load balancers.  vLLM's headers for replica and session choose
where a request runs.
"""

import json
from collections.abc import Iterable
from typing import NamedTuple

from trouper.actors.messages.outputs import SchedulerStats
from trouper.errors import invalid
from trouper.frontends.server.http.context import RequestContext
from trouper.frontends.server.shared.errors import Headers
from trouper.frontends.server.shared.settings import ServerSettings

MAX_AGE_S = b"600"


def cors_headers(context: RequestContext, settings: ServerSettings) -> Headers:
    """Make the CORS headers of a response.  Returns none without an origin, or for an origin that is not allowed.

    With credentials the response names the origin, because browsers refuse `*` then.
    """
    origin = context.header(b"origin")
    if origin is None or not settings.allowed_origins:
        return ()
    is_open = "*" in settings.allowed_origins
    if not is_open and origin.decode("latin-1") not in settings.allowed_origins:
        return ((b"vary", b"origin"),)
    is_named = not is_open or settings.allow_credentials
    headers = [(b"access-control-allow-origin", origin if is_named else b"*")]
    if is_named:
        headers.append((b"vary", b"origin"))
    if settings.allow_credentials:
        headers.append((b"access-control-allow-credentials", b"true"))
    if context.method == "OPTIONS":
        wanted_method = context.header(b"access-control-request-method") or b"*"
        wanted_headers = context.header(b"access-control-request-headers") or b"*"
        headers += [
            (b"access-control-allow-methods", _listed(settings.allowed_methods, wanted_method)),
            (b"access-control-allow-headers", _listed(settings.allowed_headers, wanted_headers)),
            (b"access-control-max-age", MAX_AGE_S),
        ]
    return tuple(headers)


def _listed(allowed: tuple[str, ...], wanted: bytes) -> bytes:
    """List the allowed values.  For `*`, repeat the requested ones, because browsers refuse `*` with credentials."""
    return wanted if "*" in allowed else ", ".join(allowed).encode()


TRACEPARENT, TRACESTATE = b"traceparent", b"tracestate"


def trace_headers(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str] | None:
    """Return the headers that name the caller's span, or None unless they name exactly one.

    By the standard, several parents count as none, and several states form one list.
    """
    found = [
        (name, value.decode("latin-1")) for name, value in headers if name.startswith(b"trace")
    ]
    parents = [value for name, value in found if name == TRACEPARENT]
    if len(parents) != 1:
        return None
    states = [value for name, value in found if name == TRACESTATE]
    return {"traceparent": parents[0], **({"tracestate": ",".join(states)} if states else {})}


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


RANK, SESSION = b"x-data-parallel-rank", b"x-session-id"


class ReplicaWish(NamedTuple):
    """The replica and the session that a request names.

    None means no wish: the scheduler then chooses.  Requests of one session go to the same replica, for its prefix
    cache.
    """

    data_parallel_rank: int | None
    session_id: str | None


def read_placement(
    context: RequestContext, data_parallel_rank: int | None = None, session_id: str | None = None
) -> ReplicaWish:
    """Read both; a header goes before the field of the body, given here.

    Raises:
        TrouperValidationError: the rank is no number.

    Proxies set headers more easily than they change bodies.
    """
    rank, session = context.header(RANK), context.header(SESSION)
    if rank is not None and not (rank.isdigit() and len(rank) < 10):
        raise invalid("X-data-parallel-rank", "must be a number", rank.decode(errors="replace"))
    return ReplicaWish(
        data_parallel_rank if rank is None else int(rank),
        session_id if session is None else session.decode("latin-1"),
    )
