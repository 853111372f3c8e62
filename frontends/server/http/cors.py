"""CORS headers: they tell browsers which pages of other origins may read the answers.  Pure.

Source: the Fetch standard, section 3.2.
"""

from trouper.frontends.server.errors import Headers
from trouper.frontends.server.http.context import RequestContext
from trouper.frontends.server.settings import ServerSettings

MAX_AGE_S = b"600"


def cors_headers(context: RequestContext, settings: ServerSettings) -> Headers:
    """Make the headers of an answer; none for requests without an origin or with one that is not allowed.

    With credentials the origin is named, because browsers take no `*` then.
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
    """List what is allowed; `*` repeats what is wanted, because with credentials browsers take no other form."""
    return wanted if "*" in allowed else ", ".join(allowed).encode()
