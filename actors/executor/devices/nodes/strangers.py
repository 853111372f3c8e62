"""Places for connections that have not proved that they have the key, and what is said of them.  Pure.

Laws:
  * A newcomer always has a place.  Where all are taken, the eldest connection of the address that has most of them makes room: a
    machine of ours answers within a round trip, so the eldest is a stranger's.
  * Connections of an address that has proved itself before make room last.
  * An address that fails again and again is heard no more for a while, unless it has proved itself before.
  * A line of the log is written for an address once in `LOG_S`, with the number of failures since the last.
"""

from collections import Counter, OrderedDict
from collections.abc import Hashable

import msgspec

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


class Strangers:
    """The connections that are heard, in `num_places` places."""

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._heard: dict[Hashable, str] = {}  # connection -> address, the eldest first
        self._known: OrderedDict[str, _Address] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Strangers: {len(self._heard)} heard, {len(self._known)} addresses>"

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
