"""Open listening sockets and limit their connections.

Sockets are bound before the model is loaded, so that a port in use fails the start at once.
"""

import ipaddress
import os
import socket
import ssl
import stat
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import anyio

from trouper.errors import TrouperValidationError
from trouper.frontends.server.shared.settings import ServeSettings

BACKLOG = 1024
LOOPBACK = "127.0.0.1"
OLLAMA_PORT = 11434
# The head of the next request on a connection must be complete within this many seconds.
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
    """Hold a listening socket, which is a TCP port or a socket file, with the files of its certificate and key if it serves TLS.

    Connections inherit the options of the socket.  `option` is the name of the server option with its address.
    """

    sock: socket.socket
    certfile: str | None = None
    keyfile: str | None = None
    option: str = "port"

    @property
    def address(self) -> str:
        """The URL of the listener, or `unix:` and the path of its socket file, as shown at the start."""
        if self.sock.family == socket.AF_UNIX:
            return f"unix:{self.sock.getsockname()}"
        host, port = self.sock.getsockname()[:2]
        scheme = "http" if self.certfile is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only browsers on this machine can connect.  False for a socket file, to which no browser can connect."""
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
                "a key requires its certificate; give --ssl-certfile, too", parameter="ssl_keyfile"
            )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certfile, self.keyfile)
        except (OSError, ValueError) as error:
            hint = "" if self.keyfile else "; give --ssl-keyfile, or a file that contains both"
            raise TrouperValidationError(
                f"cannot load the certificate and its key: {error}{hint}", parameter="ssl_certfile"
            ) from None
        return context


@dataclass(frozen=True)
class Shutdown:
    """Hold three events for listeners: `leaving` stops accepting, `closing` also closes idle connections, `aborting` closes all others.

    After `leaving`, clients may still use their open connections, while a successor accepts at the same sockets.  Between `closing` and
    `aborting`, open requests have time to finish.
    """

    leaving: anyio.Event = field(default_factory=anyio.Event)
    closing: anyio.Event = field(default_factory=anyio.Event)
    aborting: anyio.Event = field(default_factory=anyio.Event)


class OpenListeners:
    """The listeners of a server, as a context manager: its end closes them and removes their files.

    Args:
        taken: sockets of a running server, by their options.  The others are bound.

    Attributes:
        owns_files: whether the socket files are removed at the end.  They belong to the server that accepts.
    """

    def __init__(self, taken: Mapping[str, socket.socket]) -> None:
        self.public: list[Listener] = []
        self.admin: list[Listener] = []
        self.owns_files = not taken
        self._taken = taken
        self._resources = ExitStack()
        for sock in taken.values():
            self._resources.callback(sock.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    @property
    def all(self) -> list[Listener]:
        return [*self.public, *self.admin]

    def open(self, settings: ServeSettings) -> None:
        """Open all listeners.  A used port or an invalid certificate thus fails before the model is loaded.

        Raises:
            TrouperValidationError: an address cannot be bound, or the certificate cannot be loaded.
        """
        tls = settings.ssl_certfile, settings.ssl_keyfile
        if settings.uds is not None:
            self.public.append(Listener(self.socket_file("uds", settings.uds), *tls, option="uds"))
        else:
            self.public.append(Listener(self._port("port", settings.host, settings.port), *tls))
        self.public[0].tls_context()
        if settings.ollama:
            self.public.append(Listener(self._ollama(), option="ollama"))
        if settings.admin_uds is not None:
            sock = self.socket_file("admin_uds", settings.admin_uds)
            self.admin.append(Listener(sock, option="admin_uds"))
        if settings.admin_port is not None:
            sock = self._port("admin_port", LOOPBACK, settings.admin_port)
            self.admin.append(Listener(sock, option="admin_port"))

    def socket_file(self, option: str, path: str) -> socket.socket:
        """Return the listening socket of a file that only this user can connect to."""
        sock = self._taken.get(option) or bind_unix(path, option)
        self._resources.callback(self._remove, path)
        self._resources.callback(sock.close)
        return sock

    def _port(self, option: str, host: str, port: int) -> socket.socket:
        sock = self._taken.get(option) or bind_tcp(host, port, option)
        self._resources.callback(sock.close)
        return sock

    def _ollama(self) -> socket.socket:
        try:
            return self._port("ollama", LOOPBACK, OLLAMA_PORT)
        except TrouperValidationError as error:
            text = f"{error.message}; perhaps Ollama itself is running"
            raise TrouperValidationError(text, parameter="ollama") from None

    def _remove(self, path: str) -> None:
        if self.owns_files:
            Path(path).unlink(missing_ok=True)


def bind_tcp(host: str, port: int, option: str = "port") -> socket.socket:
    """Open a listening TCP socket.  Raises TrouperValidationError if the address cannot be bound.

    A used or forbidden port thus fails before the model is loaded.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TrouperValidationError(
            f"cannot listen on {host}:{port}: {reason}", parameter=option
        ) from None
    # Accepted sockets inherit both options.
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * UNREAD_S)
    return listener


def bind_unix(path: str, option: str = "uds") -> socket.socket:
    """Open a socket file that only this user can connect to.

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
            parameter=option,
            value=path,
        ) from None
    finally:
        os.umask(mask)
    return listener


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
