"""Mutual proof that both sides of a connection have the cluster key, and limits on connections that have not
proved it.

    listener -> dialler   MAGIC, challenge             40 bytes
    dialler -> listener   challenge, proof             64 bytes
    listener -> dialler   verdict (1: yes), proof      33 bytes

A proof is the HMAC-SHA256 of the side's name and both challenges, so a proof cannot be reflected or replayed.
All sizes are fixed, so an unauthenticated client can make neither side store more than these bytes. The
traffic that follows is neither encrypted nor signed.

The port is open to the whole network, so `UnprovenConnections` bounds what clients without the key can
occupy. It is pure. Laws:
  * A new connection is always accepted. When all slots are taken, the oldest connection of the address with
    the most connections makes room: our own machines answer within a round trip, so the oldest belongs to a
    client without the key.
  * Connections of an address with an earlier proof make room last.
  * An address that fails repeatedly is refused for a while, unless it has proved itself before.
  * Failures of an address are logged once in `LOG_S`, with their number since the last log line.
"""

import hmac
import secrets
import socket
from collections import Counter, OrderedDict
from collections.abc import Hashable
from time import monotonic

import msgspec

from trouper.errors import TrouperError

MAGIC = b"trouper1"
CHALLENGE_BYTES = PROOF_BYTES = 32
GREETING_BYTES = len(MAGIC) + CHALLENGE_BYTES
ANSWER_BYTES = CHALLENGE_BYTES + PROOF_BYTES
VERDICT_BYTES = 1 + PROOF_BYTES
# Seconds in which the other side must prove itself.
PROOF_S = 5.0
# Seconds between keep-alive probes on an idle connection.
KEEP_ALIVE_S = 5
# Seconds without an answer after which the other machine counts as lost.
VANISHED_S = 10


class WrongKeyError(TrouperError):
    """The other side has a different cluster key, or none.

    Trying again is useless until an operator corrects the key.
    """


class ListenerProof:
    """The listener's side of the mutual proof.

    Pure: it takes and returns bytes, so it can be tested without a network. The dialler has a corresponding class.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._challenge = secrets.token_bytes(CHALLENGE_BYTES)

    @property
    def greeting(self) -> bytes:
        """The first bytes of the connection: a magic number and a random challenge.

        The challenge makes recorded proofs useless.
        """
        return MAGIC + self._challenge

    def judge(self, answer: bytes) -> tuple[bool, bytes]:
        """Check the dialler's answer. Returns whether it is correct, and the bytes to send."""
        theirs, proof = answer[:CHALLENGE_BYTES], answer[CHALLENGE_BYTES:]
        if not hmac.compare_digest(proof, _proof(self._key, b"dialler", self._challenge, theirs)):
            return False, bytes(VERDICT_BYTES)
        return True, b"\1" + _proof(self._key, b"listener", self._challenge, theirs)


def answer(key: bytes, greeting: bytes) -> tuple[bytes, bytes]:
    """Answer a listener's greeting. Returns the bytes to send, and the verdict that the listener must send back.

    Raises:
        ConnectionError: the greeting is not from trouper.
    """
    if not greeting.startswith(MAGIC):
        raise ConnectionError("the server at this address is not trouper")
    theirs, ours = greeting[len(MAGIC) :], secrets.token_bytes(CHALLENGE_BYTES)
    return (
        ours + _proof(key, b"dialler", theirs, ours),
        b"\1" + _proof(key, b"listener", theirs, ours),
    )


def dial(address: tuple[str, int], key: bytes) -> socket.socket:
    """Connect to an address and perform the mutual proof. Blocks for at most `PROOF_S` seconds in each step.

    Raises:
        OSError: nothing listens at the address, or it does not answer as expected.
        WrongKeyError: it has a different key.
    """
    connection = socket.create_connection(address, timeout=PROOF_S)
    try:
        tune(connection)
        sent, wanted = answer(key, receive_exactly(connection, GREETING_BYTES))
        connection.sendall(sent)
        if not hmac.compare_digest(receive_exactly(connection, VERDICT_BYTES), wanted):
            raise WrongKeyError(f"{address[0]}:{address[1]} has a different key")
    except BaseException:
        connection.close()
        raise
    return connection


def serve_at(address: tuple[str, int], backlog: int) -> socket.socket:
    """Listen at this address only, not on all interfaces.

    Port 0 chooses a free one.

    Raises:

        OSError: the address cannot be bound, for example because it is in use.
    """
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    return socket.create_server(address, family=family, backlog=backlog)


def receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """Read exactly `num_bytes` bytes. Blocks for at most `PROOF_S` seconds in all, however slowly they arrive.

    Raises:
        OSError: the bytes do not arrive in time, or the connection ends.
    """
    end_s = monotonic() + PROOF_S
    data = b""
    while len(data) < num_bytes:
        if (left_s := end_s - monotonic()) <= 0:
            raise TimeoutError("the other side answers too slowly")
        connection.settimeout(left_s)
        more = connection.recv(num_bytes - len(data))
        if not more:
            raise ConnectionError("the other side has hung up")
        data += more
    connection.settimeout(PROOF_S)
    return data


def tune(connection: socket.socket) -> None:
    """Disable buffering of small messages, and let the system detect a lost machine within `VANISHED_S` seconds."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEP_ALIVE_S),
        ("TCP_KEEPINTVL", KEEP_ALIVE_S),
        ("TCP_KEEPCNT", VANISHED_S // KEEP_ALIVE_S),
        ("TCP_USER_TIMEOUT", VANISHED_S * 1000),
    ):
        # Some systems lack some of these options.
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _proof(key: bytes, side: bytes, listeners: bytes, diallers: bytes) -> bytes:
    return hmac.digest(key, side + listeners + diallers, "sha256")


WINDOW_S = 10.0
# Failures of one address in the window.
MAX_FAILURES = 64
LOG_S = 60.0
# Addresses remembered, the most recent ones.
MAX_ADDRESSES = 1024


class _Address(msgspec.Struct):
    """Memory of one address, with a window of failures that begins at `window_s`."""

    has_proved: bool = False
    window_s: float = 0.0
    num_failures: int = 0
    num_unlogged: int = 0
    logged_s: float | None = None


class UnprovenConnections:
    """Connections with an unfinished proof, at most `max_connections` at a time.

    It limits what strangers can occupy: slots, time and log lines.
    """

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        # Address by connection, the oldest connection first.
        self._heard: dict[Hashable, str] = {}
        self._known: OrderedDict[str, _Address] = OrderedDict()

    def __repr__(self) -> str:
        return f"<UnprovenConnections: {len(self._heard)} heard, {len(self._known)} addresses>"

    def __len__(self) -> int:
        return len(self._heard)

    def is_welcome(self, address: str, now: float) -> bool:
        """Whether a connection from this address is accepted now.

        Addresses with many recent failures must wait, unless they have proved themselves before. The limit slows down
        guessing.
        """
        known = self._of(address)
        if now >= known.window_s + WINDOW_S:
            known.window_s, known.num_failures = now, 0
        return known.has_proved or known.num_failures < MAX_FAILURES

    def enter(self, connection: Hashable, address: str) -> Hashable | None:
        """Add a connection. Returns the connection that must be closed to make room, if all slots are taken."""
        out: Hashable | None = None
        if len(self._heard) >= self._max_connections:
            counts = Counter(self._heard.values())
            worst = max(counts, key=lambda each: (not self._of(each).has_proved, counts[each]))
            out = next(each for each, its in self._heard.items() if its == worst)
            del self._heard[out]
        self._heard[connection] = address
        return out

    def leave(self, connection: Hashable) -> None:
        """Remove a connection. Idempotent."""
        self._heard.pop(connection, None)

    def note_proof(self, address: str) -> None:
        """Record that an address has proved itself. Failures from this address no longer lead to refusals."""
        self._of(address).has_proved = True

    def note_failure(self, address: str, now: float) -> int | None:
        """Count a failure. Returns the number of failures since the last log line, or None if no line is due."""
        known = self._of(address)
        known.num_failures += 1
        known.num_unlogged += 1
        if known.logged_s is not None and now < known.logged_s + LOG_S:
            return None
        known.logged_s, num_failures = now, known.num_unlogged
        known.num_unlogged = 0
        return num_failures

    def _of(self, address: str) -> _Address:
        known = self._known.setdefault(address, _Address())
        self._known.move_to_end(address)
        if len(self._known) > MAX_ADDRESSES:
            strangers = (each for each, its in self._known.items() if not its.has_proved)
            del self._known[next(strangers, next(iter(self._known)))]
        return known
