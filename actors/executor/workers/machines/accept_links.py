"""Accepts the stage links that other machines dial.

The handshakes run concurrently, so a silent or deliberately slow client delays no other. The code is
synchronous because it runs in the thread that connects a group.
"""

import selectors
import socket
from collections.abc import Collection
from time import monotonic

from trouper.actors.executor.workers.machines.authentication import (
    PROOF_S,
    UnprovenConnections,
    WrongKeyError,
    tune,
)
from trouper.actors.executor.workers.machines.channel import (
    ChannelError,
    LinkHello,
    Message,
    first_message,
)

# Seconds for all other machines to dial.
LINKS_S = 2 * PROOF_S
MAX_HEARD = (
    64  # connections that are heard at once, with at most 1 KiB each; beyond it one makes room
)


class LinkAcceptor:
    """Accepts the links of one order that other machines dial.

    Args:
        listener: the listening socket, which the caller closes.
        awaited: the names of the links.
    """

    def __init__(
        self, listener: socket.socket, key: bytes, order: int, awaited: Collection[str]
    ) -> None:
        self._listener, self._key, self._order = listener, key, order
        self._awaited = set(awaited)
        self._heard: dict[socket.socket, PendingHello] = {}
        self._strangers = UnprovenConnections(MAX_HEARD)
        self._found: dict[str, socket.socket] = {}
        self._selector = selectors.DefaultSelector()

    def __repr__(self) -> str:
        return f"<LinkAcceptor: {len(self._heard)} heard, {sorted(self._awaited)} awaited>"

    def accept_all(self) -> dict[str, int]:
        """Wait for all links, for at most `LINKS_S` seconds.

        Returns their descriptors by name.  Each must prove that it has the cluster key.

        Raises:
            OSError: a link was not dialled in time.
        """
        end_s = monotonic() + LINKS_S
        self._listener.setblocking(False)
        try:
            self._selector.register(self._listener, selectors.EVENT_READ)
            while self._awaited:
                if (left_s := end_s - monotonic()) <= 0:
                    names = ", ".join(sorted(self._awaited))
                    raise TimeoutError(f"links not dialled within {LINKS_S:g} s: {names}")
                for ready, _ in self._selector.select(left_s):
                    if ready.data is None:
                        self._accept()
                    elif ready.data.connection in self._heard:
                        self._hear(ready.data)
            return {name: link.detach() for name, link in self._found.items()}
        finally:
            self._selector.close()
            for connection in (*self._heard, *self._found.values()):
                connection.close()

    def _accept(self) -> None:
        try:
            connection, peer = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        try:
            hearing = PendingHello(connection, self._key)
        except OSError:
            connection.close()
            return
        if isinstance(out := self._strangers.enter(connection, peer[0]), socket.socket):
            self._stop_hearing(out).close()
        self._selector.register(connection, selectors.EVENT_READ, hearing)
        self._heard[connection] = hearing

    def _hear(self, hearing: "PendingHello") -> None:
        try:
            hello = hearing.read()
        except BlockingIOError:
            return
        except (OSError, ChannelError, WrongKeyError):
            self._stop_hearing(hearing.connection).close()
            return
        if hello is None:
            return
        link = self._stop_hearing(hearing.connection)
        match hello:
            case LinkHello(self._order, name) if name in self._awaited:
                self._awaited.remove(name)
                self._found[name] = link
            case _:
                link.close()

    def _stop_hearing(self, connection: socket.socket) -> socket.socket:
        del self._heard[connection]
        self._strangers.leave(connection)
        self._selector.unregister(connection)
        return connection


class PendingHello:
    """A connection with an incomplete handshake or first message.

    Several are read at the same time, so a slow client delays no other. It is dropped after a time limit.
    """

    def __init__(self, connection: socket.socket, key: bytes) -> None:
        connection.setblocking(False)
        tune(connection)
        self.connection = connection
        self._talk = first_message(key)
        self._data = b""
        self._num_wanted = self._say(*next(self._talk))

    def __repr__(self) -> str:
        return f"<PendingHello of {len(self._data)} of {self._num_wanted} bytes>"

    def read(self) -> Message | None:
        """Read the received bytes. Returns the first message when it is complete, else None.

        Raises:
            OSError: the other side has hung up.
            WrongKeyError: it has a different key.
            ChannelError: its bytes are not a message.
        """
        more = self.connection.recv(self._num_wanted - len(self._data))
        if not more:
            raise ConnectionError("the other side has hung up")
        self._data += more
        if len(self._data) < self._num_wanted:
            return None
        data, self._data = self._data, b""
        try:
            self._num_wanted = self._say(*self._talk.send(data))
        except StopIteration as end:
            return end.value
        return None

    def _say(self, data: bytes, num_wanted: int) -> int:
        """Send bytes, for which a new connection has room. Returns the number of bytes to read next."""
        if data:
            self.connection.send(data)
        if num_wanted == 0:
            next(self._talk)
        return num_wanted
