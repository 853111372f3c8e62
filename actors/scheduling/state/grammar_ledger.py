"""The grammars that a device has compiled, and those that it shall compile next.  Pure.

A device compiles while it computes: a sequence starts when its grammar is ready, and no step waits for one.

Laws:
1. One grammar is being prepared at a time, the smallest first: what is dear holds up only what is dearer.
2. What requests use, and what is kept because it was used, take `MAX_GRAMMAR_BYTES` together at most.
3. Of what is in use, the requests of one key take half of that at most.  A single grammar always has room, so each is prepared
   when those that are in use have ended.
4. One in whose preparation the device has died is prepared again while nothing else runs.  If the device dies once more, it is
   not prepared a third time.
"""

from bisect import insort
from collections.abc import Collection

import msgspec

from trouper.actors.messages.requests import Admit, Grammar, GrammarReady, PrepareGrammar

MAX_GRAMMAR_BYTES = 512 * 2**20  # in each process that follows grammars
# What a matcher learns of its grammar on its way.  It is at most 50,000 states, and rarely a hundred.
GROWTH_BYTES = 2**20
MAX_DEATHS = 2  # of the device, in the preparation of one grammar


class _Source(msgspec.Struct, eq=False):
    """Entry for all requests with one source."""

    grammar: Grammar
    owner: str  # of the first request that brought it
    number: int
    num_users: int = 0
    is_ready: bool = False
    is_suspect: bool = False  # the device has died while it was prepared

    @property
    def num_bytes(self) -> int:
        return self.grammar.rules.num_bytes + GROWTH_BYTES

    @property
    def place(self) -> tuple[int, int]:
        """The place among those that are wanted."""
        return self.num_bytes, self.number


class GrammarLedger:
    """Owns the account of one device's grammars."""

    def __init__(self, max_bytes: int = MAX_GRAMMAR_BYTES) -> None:
        self._max_bytes = max_bytes
        self._sources: dict[bytes, _Source] = {}  # by key; those that were used last at the end
        self._wanted: list[_Source] = []  # used and not ready, the smallest first
        self._preparing: bytes | None = None
        self._num_made = 0
        self._has_suspects = False  # or had
        self._may_fit = False  # something has changed since nothing that is wanted had room

    def __repr__(self) -> str:
        return f"<GrammarLedger: {len(self._sources)} grammars, {len(self._wanted)} wanted>"

    @property
    def num_bytes(self) -> int:
        """Bytes of those that the device has, or is preparing."""
        return sum(source.num_bytes for key, source in self._sources.items() if self._is_on(key))

    def use(self, admit: Admit) -> None:
        """Note that a request needs its grammar from now on."""
        if admit.grammar is None or not (key := admit.grammar.key):
            return
        source = self._sources.pop(key, None)
        if source is None:
            self._num_made += 1
            source = _Source(admit.grammar, admit.options.key, self._num_made)
        self._sources[key] = source
        source.num_users += 1
        if source.num_users == 1:
            source.owner = admit.options.key
            if not self._is_on(key):
                insort(self._wanted, source, key=lambda wanted: wanted.place)
            self._may_fit = True

    def leave(self, admit: Admit) -> None:
        """Note that a request needs its grammar no more; it is kept as long as there is room."""
        if admit.grammar is None or not (key := admit.grammar.key):
            return
        source = self._sources[key]
        source.num_users -= 1
        if source.num_users == 0:
            self._may_fit = True
            if not self._is_on(key):
                self._wanted = [wanted for wanted in self._wanted if wanted is not source]
                del self._sources[key]

    def is_ready(self, admit: Admit) -> bool:
        """Whether a request's sequences can start, as far as a grammar is concerned."""
        if admit.grammar is None or not (key := admit.grammar.key):
            return True
        return self._sources[key].is_ready

    @property
    def needs_silence(self) -> bool:
        """Whether a suspect is prepared, or could be if nothing ran."""
        if not self._has_suspects:
            return False
        if self._preparing is not None:
            return self._sources[self._preparing].is_suspect
        return any(source.is_suspect and self._has_room(source) for source in self._wanted)

    def next_order(
        self, only: Collection[bytes] | None = None, *, is_silent: bool = True
    ) -> PrepareGrammar | None:
        """Return what the device shall prepare now; None: nothing.

        Args:
            only: keys of the grammars that may be prepared; None: all.
            is_silent: whether nothing runs.
        """
        if self._preparing is not None or not self._may_fit or not self._wanted:
            return None
        is_any_left = False
        wanted = self._wanted
        if self._has_suspects:  # the silence is for them
            wanted = sorted(wanted, key=lambda source: not source.is_suspect)
        for source in wanted:
            if (only is not None and source.grammar.key not in only) or (
                source.is_suspect and not is_silent
            ):
                is_any_left = True
            elif self._has_room(source):
                self._wanted.remove(source)
                self._preparing = source.grammar.key
                return PrepareGrammar(source.grammar, self._make_room())
        self._may_fit = is_any_left
        return None

    def note(self, ready: GrammarReady) -> bool:
        """Take an answer of the device; False: no request can have this grammar."""
        self._may_fit = True
        if self._preparing == ready.key:
            self._preparing = None
        source = self._sources.get(ready.key)
        if source is None:
            return True
        source.is_suspect = False
        source.is_ready = ready.error is None
        if not source.is_ready and not source.num_users:
            del self._sources[ready.key]
        return source.is_ready

    def forget(self, *, is_their_doing: bool) -> bytes | None:
        """The device is gone with all that it had.

        Args:
            is_their_doing: whether what it did can be the cause.

        Returns:
            The key of a grammar that has cost it its life twice.
        """
        key, self._preparing = self._preparing, None
        suspect = self._sources.get(key) if key is not None and is_their_doing else None
        is_culprit = suspect is not None and suspect.is_suspect
        if suspect is not None:
            suspect.is_suspect = self._has_suspects = True
        self._sources = {key: source for key, source in self._sources.items() if source.num_users}
        for source in self._sources.values():
            source.is_ready = False
        self._wanted = sorted(self._sources.values(), key=lambda wanted: wanted.place)
        self._may_fit = True
        return key if is_culprit else None

    def _is_on(self, key: bytes) -> bool:
        """Whether the device has it, or prepares it."""
        return self._preparing == key or self._sources[key].is_ready

    def _has_room(self, source: _Source) -> bool:
        used = [s for key, s in self._sources.items() if s.num_users and self._is_on(key)]
        if not used:
            return True
        num_bytes = sum(s.num_bytes for s in used) + source.num_bytes
        of_owner = sum(s.num_bytes for s in used if s.owner == source.owner)
        most = self._max_bytes // 2 if source.owner else self._max_bytes
        return num_bytes <= self._max_bytes and of_owner + source.num_bytes <= most

    def _make_room(self) -> tuple[bytes, ...]:
        """Give up what nothing uses, the eldest first, until all that is left fits."""
        released: list[bytes] = []
        num_bytes = self.num_bytes
        for key, source in list(self._sources.items()):
            if num_bytes <= self._max_bytes:
                break
            if not source.num_users and source.is_ready:
                num_bytes -= source.num_bytes
                released.append(key)
                del self._sources[key]
        return tuple(released)
