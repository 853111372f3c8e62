"""Proof of both sides of a connection that they have the same key, before any other byte is read.

    listener -> dialler   MAGIC, challenge             40 bytes
    dialler -> listener   challenge, proof             64 bytes
    listener -> dialler   verdict (1: yes), proof      33 bytes

A proof is the HMAC-SHA256 of the side's name and both challenges, so one side's cannot be sent back as the other's, nor
an old one again. All sizes are fixed: a stranger can make neither side keep more than these bytes. What follows is neither
encrypted nor signed.
"""

import hmac
import secrets
import socket
from time import monotonic

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


class Listening:
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
