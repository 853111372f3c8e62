"""The compiled grammars of one device, and the grammars to compile next.

Compiling may take seconds.  The device compiles during its steps, and a sequence starts when its grammar is ready, so no step waits.

Laws:
1. The device prepares one grammar at a time, the smallest first, so an expensive grammar delays only more expensive ones.
2. All compiled grammars, used ones and cached ones, take at most `MAX_GRAMMAR_BYTES`.
3. The requests of one client use at most half of that.  A single grammar always has room, so each grammar is prepared at the latest
   when all requests with grammars have ended.
4. If the device dies while it prepares a grammar, the grammar is prepared again while nothing else runs.  If the device dies again,
   the requests with this grammar fail.
"""

from bisect import insort
from collections.abc import Collection

import msgspec

from trouper.actors.messages.requests import Admit, Grammar, GrammarReady, PrepareGrammar

# In each process that follows grammars.
MAX_GRAMMAR_BYTES = 512 * 2**20
# The growth of a matcher during an output: at most 50,000 states, and rarely a hundred.
GROWTH_BYTES = 2**20
# Losses of the device while it prepares one grammar.
MAX_DEATHS = 2


class _Source(msgspec.Struct, eq=False):
    """The entry of all requests with equal grammar sources."""

    grammar: Grammar
    # The client of the first request with this source.
    owner: str
    number: int
    num_users: int = 0
    is_ready: bool = False
    # The device has died while it prepared this grammar.
    is_suspect: bool = False

    @property
    def num_bytes(self) -> int:
        return self.grammar.rules.num_bytes + GROWTH_BYTES

    @property
    def place(self) -> tuple[int, int]:
        """Return the key by which wanted sources are sorted.

        Small sources compile faster and should not wait for a large one.
        """
        return self.num_bytes, self.number


class GrammarLedger:
    """The account of one device's grammars: the compiled, the used and the wanted ones.

    Memory for them is limited, so unused grammars are dropped, the least recently used first.
    """

    def __init__(self, max_bytes: int = MAX_GRAMMAR_BYTES) -> None:
        self._max_bytes = max_bytes
        # By key, the most recently used at the end.
        self._sources: dict[bytes, _Source] = {}
        # Used and not ready, the smallest first.
        self._wanted: list[_Source] = []
        self._preparing: bytes | None = None
        self._num_made = 0
        # Whether there is or was a suspect.
        self._has_suspects = False
        # False after a search that found no room, until something changes.
        self._may_fit = False

    def __repr__(self) -> str:
        return f"<GrammarLedger: {len(self._sources)} grammars, {len(self._wanted)} wanted>"

    @property
    def num_bytes(self) -> int:
        """Count the bytes of the grammars that the device has or prepares.

        A grammar counts with the size of its rules and a fixed amount for its growth during use.
        """
        return sum(source.num_bytes for key, source in self._sources.items() if self._is_on(key))

    def use(self, admit: Admit) -> None:
        """Note that a request needs its grammar from now on.

        Requests with equal sources share one grammar.
        """
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
        """Note that a request has ended.  Its compiled grammar stays cached while there is room.

        A later request with the same source can then start immediately.
        """
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
        """Whether a request has no grammar, or a compiled one.

        Only then may the request start, because every step needs the masks.
        """
        if admit.grammar is None or not (key := admit.grammar.key):
            return True
        return self._sources[key].is_ready

    @property
    def needs_silence(self) -> bool:
        """Whether a suspect is being prepared, or could be prepared if nothing else ran.

        A suspect is compiled while nothing else runs, so that a crash can only be its fault.
        """
        if not self._has_suspects:
            return False
        if self._preparing is not None:
            return self._sources[self._preparing].is_suspect
        return any(source.is_suspect and self._has_room(source) for source in self._wanted)

    def next_order(
        self, only: Collection[bytes] | None = None, *, is_silent: bool = True
    ) -> PrepareGrammar | None:
        """Return the order to prepare the next grammar.  Returns None if there is none to prepare now.

        Args:
            only: keys of the grammars that may be prepared.  None allows all.
            is_silent: whether no step is in flight.
        """
        if self._preparing is not None or not self._may_fit or not self._wanted:
            return None
        is_any_left = False
        wanted = self._wanted
        if self._has_suspects:
            # Suspects go first, because the device is kept silent for them.
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
        """Take the answer of the device.  Returns False if the grammar does not compile.

        Requests that wait for it can then start, or must end with the error.
        """
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
        """Forget all compiled grammars, because the device is lost.

        Args:
            is_their_doing: whether the work of the device may be the cause of the loss.

        Returns:
            The key of a grammar that killed the device twice during its preparation, or None.
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
        """Whether the device has this grammar or prepares it."""
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
        """Release unused grammars, the least recently used first, until the rest fits.  Returns their keys."""
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
