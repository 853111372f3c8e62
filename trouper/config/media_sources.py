"""Which URLs of images and sounds the engine may read: hosts, a folder, or only `data:` URLs.  Without torch."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from trouper.config.args import EngineArgs
from trouper.errors import invalid

# A name of at least two labels, optionally with a port.  `*.` in front admits its subdomains.
DOMAIN = re.compile(
    r"(\*\.)?((?!-)[a-z0-9-]{1,63}(?<!-))(\.(?!-)[a-z0-9-]{1,63}(?<!-))*(:[0-9]{1,5})?\Z"
)
ANY = "*"


class MediaSources(msgspec.Struct, frozen=True):
    """The places from which files of requests are read.

    Attributes:
        domains: names of hosts; `*.x` admits the subdomains of x, and `*` every name.  `x:8443` admits only this port.
        folder: `file:` URLs below it are read; empty for none.
        allows_http: `http:` URLs are fetched, too.
        allows_private: the hosts may have addresses of private networks.
    """

    domains: tuple[str, ...] = ()
    folder: str = ""
    allows_http: bool = False
    allows_private: bool = False


def media_sources(args: EngineArgs) -> MediaSources:
    """Read the options about URLs.

    Raises:
        TrouperValidationError: a domain is no name of a host, or the folder does not exist.
    """
    return MediaSources(
        domains=_domains(args.allowed_media_domains),
        folder=_folder(args.allowed_local_media_path),
        allows_http=bool(args.allow_http_media),
        allows_private=bool(args.allow_private_media_hosts),
    )


def _domains(given: Any) -> tuple[str, ...]:
    name = "allowed_media_domains"
    if given is None:
        return ()
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise invalid(name, "must be a list of names of hosts", repr(cast("Any", given)))
    domains: list[str] = []
    for domain in cast("Sequence[Any]", given):
        if not isinstance(domain, str):
            raise invalid(name, "must be a list of names of hosts", repr(domain))
        domain = domain.lower()
        if domain != ANY and not DOMAIN.match(domain):
            rule = "must be a name such as images.example.org, *.example.org, images.example.org:8443 or *"
            raise invalid(name, rule, domain)
        domains.append(domain)
    return tuple(domains)


def _folder(given: Any) -> str:
    name = "allowed_local_media_path"
    if not given:
        return ""
    if not isinstance(given, str | Path):
        raise invalid(name, "must be the path of a folder", given)
    path = Path(given)
    if not path.is_dir():
        raise invalid(name, "must be the path of an existing folder", str(given))
    return str(path.resolve())
