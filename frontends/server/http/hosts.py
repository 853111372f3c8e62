"""Check the names by which a browser has reached the server.  Pure.

A page of a foreign site may resolve its own name to 127.0.0.1 (DNS rebinding).  The browser then takes this server for a part of
that site, and sends it requests whose answers the site may read.  Such requests carry the site's name in `Host`, so a server that
knows its names can refuse them.  An address in `Host` is no such trick, because addresses are not resolved.
"""

import ipaddress
from collections.abc import Iterable

import msgspec

from trouper.frontends.server.http.context import RequestContext
from trouper.frontends.server.shared.errors import HTTPError

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
