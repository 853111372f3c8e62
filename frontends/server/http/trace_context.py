"""Read the W3C trace context of a request's headers."""

from collections.abc import Iterable

TRACEPARENT, TRACESTATE = b"traceparent", b"tracestate"


def trace_headers(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str] | None:
    """The headers that name the caller's span; None unless exactly one span is named.

    The standard says that several parents are none, and that several states are one list.
    """
    found = [
        (name, value.decode("latin-1")) for name, value in headers if name.startswith(b"trace")
    ]
    parents = [value for name, value in found if name == TRACEPARENT]
    if len(parents) != 1:
        return None
    states = [value for name, value in found if name == TRACESTATE]
    return {"traceparent": parents[0], **({"tracestate": ",".join(states)} if states else {})}
