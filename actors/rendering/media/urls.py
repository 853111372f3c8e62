"""Decide which media URLs are read: `data:` URLs, `https:` URLs of allowed hosts, and `file:` URLs inside one allowed folder.

A server that fetches its clients' URLs can be abused to read its internal network or its disk (SSRF).  So by default only
`data:` URLs are read.  An `https:` URL is fetched only if `allowed_media_domains` contains its host, and if every address
of the host is public.  A `file:` URL is read only inside the one folder that the operator allows.

Laws.
1. A URL is parsed once, and a host is resolved once, so the connection goes to an address that was checked.
2. A redirect is checked like a new URL, and must lead to the same host.
3. A path is opened folder by folder from a descriptor, without following links.  So no path leads out of the allowed folder, even if
   the folder changes at the same time.
4. Errors contain no address, no path and no message of a library, because they could reveal the system to a client.
"""

import binascii
import errno
import ipaddress
import os
import re
import stat
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import unquote, urljoin, urlsplit

from trouper.actors.rendering.media.files import (
    INVALID_IMAGE,
    MAX_FILE_BYTES,
    RefusedFileError,
    check_bytes,
)
from trouper.config.media import ANY, MediaSources

# A media type, parameters and `;base64`.  The type is ignored, because the format is detected from the file.
DATA_HEAD = re.compile(rb"data:[^,]{0,256}?;base64,", re.IGNORECASE)
MAX_HEAD = 512
MAX_URL = 8192
SCHEME = re.compile(rb"[a-z][a-z0-9+.-]*:", re.IGNORECASE)
ADVICE = "send the file itself as a URL such as data:image/png;base64,… or data:audio/wav;base64,…"
BLOCKED = "media_url_blocked"
PORTS = {"https": 443, "http": 80}
# A host name.  One label, such as `localhost`, is allowed only if the list contains it.
HOST = re.compile(r"(?!-)[a-z0-9-]{1,63}(?<!-)(\.(?!-)[a-z0-9-]{1,63}(?<!-))*\Z")
# If the last label is a number, the host is an IP address in some notation.
NUMBER = re.compile(r"([0-9]+|0x[0-9a-f]*)\Z")
NOT_IN_URLS = re.compile(r"[^\x21-\x7e]|\\")
# Networks that embed an IPv4 address (NAT64, 6to4, Teredo) and could reach private hosts.  No public server needs them.
TUNNELS = tuple(
    map(ipaddress.ip_network, ("64:ff9b::/96", "64:ff9b:1::/48", "::/96", "2002::/16", "2001::/32"))
)
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Target(NamedTuple):
    """The components of a URL that may be fetched."""

    scheme: str
    host: str
    port: int
    # Includes the query.
    path: str


def read_url(url: str | memoryview) -> bytes:
    """Return the file in a `data:` URL.

    Args:
        url: the URL, as a string or as a slice of the request's body.

    Raises:
        RefusedFileError: `media_url_blocked` for any other URL, `invalid_value` if it is not a URL, `invalid_image` for
            invalid base64, `media_too_large` for too large a file.
    """
    head = _head(url)
    if (found := DATA_HEAD.match(head)) is not None:
        return decode_base64(url[found.end() :])
    if head[:5].lower() == b"data:":
        raise RefusedFileError(INVALID_IMAGE, f"must be base64; {ADVICE}")
    if SCHEME.match(head) is None:
        raise RefusedFileError("invalid_value", f"is not a URL; {ADVICE}")
    rule = "is a URL that this server may not read (see --allowed-media-domains and --allowed-local-media-path)"
    raise RefusedFileError(BLOCKED, f"{rule}; {ADVICE}")


def decode_base64(text: str | memoryview) -> bytes:
    """Decode base64 strictly: no whitespace, no other characters, and correct padding.

    Raises:
        RefusedFileError: `invalid_image` or `media_too_large`.
    """
    # Check the length before allocating the bytes.
    if len(text) // 4 * 3 > MAX_FILE_BYTES + 3:
        rule = f"is larger than the maximum of {MAX_FILE_BYTES} bytes; send a smaller file"
        raise RefusedFileError("media_too_large", rule)
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except (binascii.Error, ValueError):
        rule = "is not valid base64 (A-Z, a-z, 0-9, + and / with padding, no whitespace)"
        raise RefusedFileError(INVALID_IMAGE, rule) from None


def is_remote(url: object) -> bool:
    """Return whether a value is an `https:` or `http:` URL."""
    return isinstance(url, str) and url[:8].lower().startswith(("https:", "http:"))


def admit(url: str, sources: MediaSources) -> Target:
    """Check a URL as far as possible without network access, and return its components.

    Raises:
        RefusedFileError: `media_url_blocked` for a URL that is not allowed, `invalid_value` for one that is malformed.
    """
    _check_text(url)
    try:
        parts = urlsplit(url)
        host, given_port = (parts.hostname or "").lower(), parts.port
    except ValueError:
        raise RefusedFileError("invalid_value", "is not a URL") from None
    scheme = parts.scheme.lower()
    if scheme != "https" and not (scheme == "http" and sources.allows_http):
        raise _blocked(
            "may not be fetched: only https: is allowed (http: needs --allow-http-media)"
        )
    if "@" in parts.netloc:
        raise _blocked("contains a user name or password, which this server never sends")
    if not HOST.match(host) or len(host) > 253 or NUMBER.match(host.rpartition(".")[2]):
        raise _blocked("must contain a domain name, not an IP address")
    port = PORTS[scheme] if given_port is None else given_port
    if not any(_allows(entry, host, port, scheme) for entry in sources.domains):
        raise _blocked("has a host or a port that is not in --allowed-media-domains")
    query = f"?{parts.query}" if parts.query else ""
    return Target(scheme, host, port, (parts.path or "/") + query)


def redirected(target: Target, location: str, sources: MediaSources) -> Target:
    """Return the target of a redirect, which must stay on the same host and not change from https to http.

    Raises:
        RefusedFileError: `media_url_blocked`.
    """
    try:
        # Check before `urljoin`, which silently removes some forbidden characters.
        _check_text(location)
        start = f"{target.scheme}://{target.host}:{target.port}{target.path}"
        found = admit(urljoin(start, location), sources)
    except (RefusedFileError, ValueError) as error:
        rule = error.refusal.rule if isinstance(error, RefusedFileError) else "is not a URL"
        raise RefusedFileError(
            BLOCKED, f"is redirected by its host, and the new URL {rule}"
        ) from None
    if found.host != target.host or (target.scheme == "https" and found.scheme != "https"):
        raise _blocked("is redirected to another host or scheme; send the final URL")
    return found


def checked_addresses(texts: Iterable[str], sources: MediaSources) -> tuple[Address, ...]:
    """Return the addresses of a host, if connecting to every one of them is allowed.

    A single private address blocks the host, because a host with both kinds may be an attempt to reach the internal network.

    Raises:
        RefusedFileError: `media_url_blocked`.
    """
    # Remove the scope, such as `%eth0`, of link-local addresses.
    found = tuple(dict.fromkeys(ipaddress.ip_address(text.partition("%")[0]) for text in texts))
    if not all(_may_connect(address, sources.allows_private) for address in found):
        rule = "has a host with an address that is not public (see --allow-private-media-hosts)"
        raise _blocked(rule)
    return found


def _check_text(url: str) -> None:
    if len(url) > MAX_URL:
        raise RefusedFileError("invalid_value", f"has more than {MAX_URL} characters")
    if NOT_IN_URLS.search(url):
        raise RefusedFileError(
            "invalid_value", "contains characters that are not allowed in URLs; percent-encode them"
        )


def _may_connect(address: Address, allows_private: bool) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return False
        is_loopback = address.is_loopback
        if not is_loopback and any(address in network for network in TUNNELS):
            return False
    if address.is_multicast or address.is_unspecified or address.is_link_local:
        return False
    if address.is_loopback or (address.is_private and not address.is_reserved):
        return allows_private
    return address.is_global and not address.is_reserved


def _allows(entry: str, host: str, port: int, scheme: str) -> bool:
    name, _, own_port = entry.partition(":")
    if port != (int(own_port) if own_port else PORTS[scheme]):
        return False
    if name == ANY:
        return "." in host
    return host == name or (name.startswith("*.") and host.endswith(name[1:]))


def _blocked(rule: str) -> RefusedFileError:
    return RefusedFileError(BLOCKED, f"{rule}; or {ADVICE}")


def _head(url: str | memoryview) -> bytes:
    start = url[:MAX_HEAD]
    return start.encode("ascii", "replace") if isinstance(start, str) else bytes(start)


UNAVAILABLE = "media_unavailable"
# Errors if a path component is a link, or is a file instead of a folder.
NOT_BENEATH = (errno.ELOOP, errno.ENOTDIR)


def is_local(url: object) -> bool:
    """Return whether a value is a `file:` URL."""
    return isinstance(url, str) and url[:5].lower() == "file:"


def read_local(url: str, folder: str) -> bytes:
    """Return the bytes of a file inside `folder`.

    Raises:
        RefusedFileError: `media_url_blocked` for a file elsewhere, `media_unavailable` for an unreadable one,
            `media_too_large` for too large a one.
    """
    names = _names_below(url, folder)
    try:
        return _read_beneath(folder, names)
    except OSError as error:
        if error.errno in NOT_BENEATH:
            raise _elsewhere() from None
        rule = "is the URL of a file that does not exist or cannot be read"
        raise RefusedFileError(UNAVAILABLE, rule) from None


def _names_below(url: str, folder: str) -> list[str]:
    """Return the components of the URL's path relative to `folder`."""
    if len(url) > MAX_URL:
        raise RefusedFileError("invalid_value", f"has more than {MAX_URL} characters")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise RefusedFileError("invalid_value", "is not a URL") from None
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
        raise RefusedFileError("invalid_value", "must be a URL such as file:///folder/image.png")
    path = unquote(parts.path)
    base = folder.rstrip("/") + "/"
    if "\0" in path or not path.startswith(base):
        raise _elsewhere()
    names = path[len(base) :].split("/")
    if any(name in ("", ".", "..") for name in names):
        raise _elsewhere()
    return names


def _read_beneath(folder: str, names: list[str]) -> bytes:
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in names[:-1]:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            inner = os.open(name, flags, dir_fd=at)
            os.close(at)
            at = inner
        # Without O_NONBLOCK, opening a named pipe would block until a writer opens it.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(names[-1], flags, dir_fd=at), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise RefusedFileError(
                    UNAVAILABLE, "is the URL of something other than a regular file"
                )
            check_bytes(found.st_size)
            data = file.read(found.st_size + 1)
            check_bytes(len(data))
            return data
    finally:
        os.close(at)


def _elsewhere() -> RefusedFileError:
    rule = "is the URL of a file outside the folder of --allowed-local-media-path"
    return RefusedFileError(BLOCKED, f"{rule}; {ADVICE}")
