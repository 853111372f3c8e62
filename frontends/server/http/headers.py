"""Read and write headers with a meaning of their own.  Pure.

`Host` protects the server from browsers.  A page of a foreign site may resolve its own name to 127.0.0.1 (DNS rebinding).  The
browser then takes this server for a part of that site, and sends it requests whose answers the site may read.  Such requests carry
the site's name in `Host`, so a server that knows its names (`HostNames`) can refuse them.  An address in `Host` is no such trick,
because addresses are not resolved.

CORS headers let browsers decide which pages of other origins may read a response (Fetch standard, section 3.2).  Trace context
(W3C) names the caller's span.  The load report (ORCA) informs load balancers.  vLLM's headers for replica and session choose
where a request runs.
"""

import ipaddress
import json
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from trouper.actors.messages.outputs import SchedulerStats
from trouper.errors import invalid
from trouper.frontends.server.http.context import RequestContext
from trouper.frontends.server.shared.errors import Headers, HTTPError
from trouper.frontends.server.shared.settings import ServerSettings

LOCALHOST = "localhost"


class HostNames(msgspec.Struct, frozen=True):
    """The names under which one listener may be opened by a browser.

    Attributes:
        names: host names in lower case, without ports.
        is_loopback: only clients on this machine can connect, so no address but that of the loopback is accepted.
    """

    names: frozenset[str]
    is_loopback: bool

    @classmethod
    def of(cls, names: Iterable[str], *, is_loopback: bool) -> "HostNames":
        """Accept these names, and `localhost`."""
        given = (name.lower().rstrip(".") for name in names)
        return cls(frozenset((LOCALHOST, *given)), is_loopback)

    def accept(self, host: str) -> bool:
        """Return whether a `Host` header, with or without a port, names this listener."""
        name = _without_port(host.lower())
        if name in self.names:
            return True
        try:
            is_bracketed = name.startswith("[") and name.endswith("]")
            address = ipaddress.ip_address(name[1:-1] if is_bracketed else name)
        except ValueError:
            return False
        return address.is_loopback or not self.is_loopback

    def check(self, context: RequestContext) -> None:
        """Raise HTTPError (403) for a foreign host, and for a page of another origin.

        Only browsers can be misled, and they send `Host` always, so a request without it passes.
        """
        host = (context.header(b"host") or b"").decode("latin-1")
        if host and not self.accept(host):
            text = "this host name is not served; give it to --ui-host if it is yours"
            raise HTTPError(403, "forbidden_host", text, param="Host")
        origin = context.header(b"origin")
        is_foreign = origin is not None and _host_of(origin.decode("latin-1")) != host.lower()
        if is_foreign or context.header(b"sec-fetch-site") == b"cross-site":
            text = "pages of other origins may not use this route"
            raise HTTPError(403, "forbidden_origin", text, param="Origin")


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    has_port = colon and port.isdigit() and (name.endswith("]") or ":" not in name)
    return (name if has_port else host).rstrip(".")


def _host_of(origin: str) -> str:
    return origin.lower().partition("://")[2]


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
