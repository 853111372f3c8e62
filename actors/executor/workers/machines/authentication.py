"""Proof of both sides of a connection that they have the same key, before any other byte is read.

    listener -> dialler   MAGIC, challenge             40 bytes
    dialler -> listener   challenge, proof             64 bytes
    listener -> dialler   verdict (1: yes), proof      33 bytes

A proof is the HMAC-SHA256 of the side's name and both challenges, so one side's cannot be sent back as the other's, nor
an old one again. All sizes are fixed: a stranger can make neither side keep more than these bytes. What follows is neither
encrypted nor signed.

MatchPositions for connections that have not proved that they have the key, and what is said of them.  Pure.

Laws:
  * A newcomer always has a place.  Where all are taken, the eldest connection of the address that has most of them makes room: a
    machine of ours answers within a round trip, so the eldest is a stranger's.
  * Connections of an address that has proved itself before make room last.
  * An address that fails again and again is heard no more for a while, unless it has proved itself before.
  * A line of the log is written for an address once in `LOG_S`, with the number of failures since the last.
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
PROOF_S = 5.0  # in which the other side must have proved itself
KEEP_ALIVE_S = 5  # between two signs of life on an idle connection
VANISHED_S = 10  # without an answer, after which the other machine is gone


class WrongKeyError(TrouperError):
    """The other side has another key, or none."""


class ListenerProof:
    """The side of a proof that was connected to.  Pure: bytes in, bytes out."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._challenge = secrets.token_bytes(CHALLENGE_BYTES)

    @property
    def greeting(self) -> bytes:
        """The first bytes of the connection."""
        return MAGIC + self._challenge

    def judge(self, answer: bytes) -> tuple[bool, bytes]:
        """Check the dialler's answer; returns whether it is right, and what is to be sent."""
        theirs, proof = answer[:CHALLENGE_BYTES], answer[CHALLENGE_BYTES:]
        if not hmac.compare_digest(proof, _proof(self._key, b"dialler", self._challenge, theirs)):
            return False, bytes(VERDICT_BYTES)
        return True, b"\1" + _proof(self._key, b"listener", self._challenge, theirs)


def answer(key: bytes, greeting: bytes) -> tuple[bytes, bytes]:
    """Answer a listener's greeting; returns what is to be sent, and the verdict that must come.

    Raises:
        ConnectionError: it is the greeting of something else.
    """
    if not greeting.startswith(MAGIC):
        raise ConnectionError("what listens there is not trouper")
    theirs, ours = greeting[len(MAGIC) :], secrets.token_bytes(CHALLENGE_BYTES)
    return (
        ours + _proof(key, b"dialler", theirs, ours),
        b"\1" + _proof(key, b"listener", theirs, ours),
    )


def dial(address: tuple[str, int], key: bytes) -> socket.socket:
    """Connect, and have both sides prove themselves; blocks, for at most `PROOF_S` a step.

    Raises:
        OSError: nothing listens there, or it does not answer as it should.
        WrongKeyError: it has another key.
    """
    connection = socket.create_connection(address, timeout=PROOF_S)
    try:
        tune(connection)
        sent, wanted = answer(key, receive_exactly(connection, GREETING_BYTES))
        connection.sendall(sent)
        if not hmac.compare_digest(receive_exactly(connection, VERDICT_BYTES), wanted):
            raise WrongKeyError(f"{address[0]}:{address[1]} has another key")
    except BaseException:
        connection.close()
        raise
    return connection


def serve_at(address: tuple[str, int], backlog: int) -> socket.socket:
    """Listen at an address of this machine, and at no other.

    Raises:
        OSError: it cannot be bound.
    """
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    return socket.create_server(address, family=family, backlog=backlog)


def receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """Read so many bytes, and none behind them; blocks, for at most `PROOF_S` however slowly they come.

    Raises:
        OSError: they do not come.
    """
    end_s = monotonic() + PROOF_S
    data = b""
    while len(data) < num_bytes:
        if (left_s := end_s - monotonic()) <= 0:
            raise TimeoutError("the other side is too slow")
        connection.settimeout(left_s)
        more = connection.recv(num_bytes - len(data))
        if not more:
            raise ConnectionError("the other side has hung up")
        data += more
    connection.settimeout(PROOF_S)  # of what comes next
    return data


def tune(connection: socket.socket) -> None:
    """Send small messages at once, and have the system find out when the other machine has vanished."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEP_ALIVE_S),
        ("TCP_KEEPINTVL", KEEP_ALIVE_S),
        ("TCP_KEEPCNT", VANISHED_S // KEEP_ALIVE_S),
        ("TCP_USER_TIMEOUT", VANISHED_S * 1000),
    ):
        if hasattr(socket, name):  # not every system has all
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _proof(key: bytes, side: bytes, listeners: bytes, diallers: bytes) -> bytes:
    return hmac.digest(key, side + listeners + diallers, "sha256")


WINDOW_S = 10.0
MAX_FAILURES = 64  # of one address in the window
LOG_S = 60.0
MAX_ADDRESSES = 1024  # that are remembered, the last heard of


class _Address(msgspec.Struct):
    """Memory of one address."""

    has_proved: bool = False
    window_s: float = 0.0  # when it began
    num_failures: int = 0  # in the window
    num_unlogged: int = 0
    logged_s: float | None = None


class UnprovenConnections:
    """The connections that are heard, in `num_places` places."""

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._heard: dict[Hashable, str] = {}  # connection -> address, the eldest first
        self._known: OrderedDict[str, _Address] = OrderedDict()

    def __repr__(self) -> str:
        return f"<UnprovenConnections: {len(self._heard)} heard, {len(self._known)} addresses>"

    def __len__(self) -> int:
        return len(self._heard)

    def is_welcome(self, address: str, now: float) -> bool:
        """Whether a connection of this address is heard at all."""
        known = self._of(address)
        if now >= known.window_s + WINDOW_S:
            known.window_s, known.num_failures = now, 0
        return known.has_proved or known.num_failures < MAX_FAILURES

    def enter(self, connection: Hashable, address: str) -> Hashable | None:
        """Take a connection in; returns the one that must make room, if all places are taken."""
        out: Hashable | None = None
        if len(self._heard) >= self._num_places:
            counts = Counter(self._heard.values())
            worst = max(counts, key=lambda each: (not self._of(each).has_proved, counts[each]))
            out = next(each for each, its in self._heard.items() if its == worst)
            del self._heard[out]
        self._heard[connection] = address
        return out

    def leave(self, connection: Hashable) -> None:
        """Give a place back.  Idempotent."""
        self._heard.pop(connection, None)

    def note_proof(self, address: str) -> None:
        """An address has proved itself."""
        self._of(address).has_proved = True

    def note_failure(self, address: str, now: float) -> int | None:
        """Count a failure; returns how many there have been since the last line of the log, or None: no line now."""
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
