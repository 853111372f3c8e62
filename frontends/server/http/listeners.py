"""Open listening sockets and limit their connections.

Sockets are bound before the model is loaded, so that a used port fails the start at once.
"""

import ipaddress
import os
import socket
import ssl
import stat
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

import anyio

from trouper.errors import TrouperValidationError

BACKLOG = 1024
# The head of the first or next request must be complete within this time.
KEEP_ALIVE_S = 5
MAX_HEAD_BYTES = (
    256 * 2**10
)  # of the parser; the application refuses a quarter of it with a JSON error
MAX_UNSENT_BYTES = (
    2**14
)  # of a slow client in the kernel, which else takes megabytes; what comes later merges before
# A client that reads nothing of its response for this many seconds is disconnected.
UNREAD_S = 60


@dataclass(frozen=True)
class Listener:
    """A listening socket, with the files of its certificate and key if it serves TLS.

    Connections inherit its options.  It may be a TCP port or a socket file.
    """

    sock: socket.socket
    certfile: str | None = None
    keyfile: str | None = None

    @property
    def address(self) -> str:
        """The URL of the listener, or `unix:` and the path of its file.

        It is shown at start, and clients on the same machine can use it as it is.
        """
        if self.sock.family == socket.AF_UNIX:
            return f"unix:{self.sock.getsockname()}"
        host, port = self.sock.getsockname()[:2]
        scheme = "http" if self.certfile is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    @property
    def is_loopback(self) -> bool:
        """Whether browsers on this machine, and only those, can connect.  They cannot open a socket file."""
        if self.sock.family == socket.AF_UNIX:
            return False
        return ipaddress.ip_address(self.sock.getsockname()[0]).is_loopback

    def tls_context(self) -> ssl.SSLContext | None:
        """Load the certificate and the key.  Returns None without a certificate.

        Raises:
            TrouperValidationError: a file is missing, or key and certificate do not match.
        """
        if self.certfile is None:
            if self.keyfile is None:
                return None
            raise TrouperValidationError(
                "a key needs its certificate, give --ssl-certfile too", parameter="ssl_keyfile"
            )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certfile, self.keyfile)
        except (OSError, ValueError) as error:
            hint = "" if self.keyfile else "; give --ssl-keyfile, or a file that holds both"
            raise TrouperValidationError(
                f"cannot load the certificate and its key: {error}{hint}", parameter="ssl_certfile"
            ) from None
        return context


@dataclass(frozen=True)
class Shutdown:
    """Two events for listeners: `closing` stops accepting, and `aborting` ends the remaining connections.

    Between them, open requests have time to finish.
    """

    closing: anyio.Event = field(default_factory=anyio.Event)
    aborting: anyio.Event = field(default_factory=anyio.Event)


def bind_tcp(host: str, port: int) -> socket.socket:
    """Open a listening TCP socket.  Raises TrouperValidationError if the address cannot be bound.

    A used or forbidden port thus fails before the model is loaded.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TrouperValidationError(
            f"cannot listen on {host}:{port}: {reason}", parameter="port"
        ) from None
    # Accepted sockets inherit both options.
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * UNREAD_S)
    return listener


@contextmanager
def bind_unix(path: str) -> Generator[socket.socket]:
    """Open a socket file that only this user can connect to.  It is removed after the block.

    A file that a dead server has left behind is replaced; that of a living server is an error.
    """
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o177)
    try:
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise TrouperValidationError(
            f"cannot listen on a socket file: {error.strerror or error}",
            parameter="uds",
            value=path,
        ) from None
    finally:
        os.umask(mask)
    try:
        yield listener
    finally:
        listener.close()
        if os.path.exists(path):
            os.unlink(path)


def _remove_stale(path: str) -> None:
    """Remove the socket file of a dead server."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            # bind will fail, because the name is in use.
            return
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(path)
    except FileNotFoundError:
        return
    except ConnectionRefusedError:
        os.unlink(path)
