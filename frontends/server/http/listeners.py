"""Listening sockets, bound before the model is loaded: a taken port is an error of the first second."""

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from trouper.errors import TrouperValidationError

BACKLOG = 1024
# A client that leaves what was sent to it unread for so long has its connection reset by the kernel, which
# is its disconnect, and that aborts its request.  (Writes of the HTTP server cannot be cancelled.)
UNREAD_MS = 60_000


def bind_tcp(host: str, port: int) -> socket.socket:
    """Raises TrouperValidationError when that is not possible."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TrouperValidationError(
            f"cannot listen on {host}:{port}: {reason}", parameter="port"
        ) from None
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; accepted sockets inherit it
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MS)
    return listener


@contextmanager
def bind_unix(path: str) -> Iterator[socket.socket]:
    """A socket file that only this user can open; gone after the block."""
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


def address(listener: socket.socket) -> str:
    """What a client would call it."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _remove_stale(path: str) -> None:
    """A file that a server before us has left, and at which nobody answers."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return  # bind will say that the name is taken
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(path)
    except FileNotFoundError:
        return
    except ConnectionRefusedError:
        os.unlink(path)
