"""The choice of a replica for a request.  Pure.

Laws:
1. A replica that is not available is chosen only where none is; one that has failed is never chosen.
2. A request that names a replica gets it while that one is available; then it counts as one that names none.
3. A session stays with one replica, as long as that one is available and not overloaded; when a replica goes, only
   its own sessions change their place (rendezvous hash).
4. Any other request goes to the replica with the earliest expected first token.  Short prompts pass long ones, so the tokens ahead do
   not measure that wait.  Replicas within NEAR of the earliest count as equal.
5. Among equals, and when a replica cannot estimate, the least work ahead decides: tokens not computed yet,
   less those of its own prompt that are cached there.  Ties go to the fewest rows, then in turn.

Tokens are counted, not requests: a prompt of 8,192 tokens is the work of a hundred short ones.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

ROW_TOKENS = 4  # work of a row that decodes, in tokens of a prompt: it is in every step
# A multiple of the earliest first token.  Nine of ten predictions are more accurate.
NEAR = 1.25
OVERLOAD = 1.5  # times the least work, and a step's budget on top: here a session gives way to load
MAX_PREFIXES = 2**16  # blocks remembered, of some 100 bytes each


class ReplicaLoad(msgspec.Struct, frozen=True):
    """Work that is ahead of a new request on a replica."""

    num_tokens: int  # of prompts, not computed yet
    num_rows: int  # unfinished sequences
    is_available: bool = True
    has_failed: bool = False  # it will never be available
    expected_s: float | None = None  # seconds until the first token of the request

    @property
    def num_ahead(self) -> int:
        """All of it in tokens."""
        return self.num_tokens + ROW_TOKENS * self.num_rows


class Demand(msgspec.Struct, frozen=True):
    """Describes what a request asks of a replica, and what it gives it to do."""

    num_tokens: int  # that are known, none of them computed
    num_rows: int
    rank: int | None = None  # the replica that it names
    session_id: str | None = None  # of the conversation that it belongs to
    block_hashes: Sequence[bytes] = ()  # of the prefix that a cache may have


class PrefixTable:
    """Which replicas were given a prompt with which blocks: at most `max_prefixes`, the least recently used go first."""

    def __init__(self, num_replicas: int, max_prefixes: int = MAX_PREFIXES) -> None:
        self._all = (1 << num_replicas) - 1
        self._num_replicas = num_replicas
        self._max_prefixes = max_prefixes
        self._holders: OrderedDict[bytes, int] = OrderedDict()  # block hash -> bits of replicas

    def __len__(self) -> int:
        return len(self._holders)

    def note(self, hashes: Sequence[bytes], replica: int) -> None:
        """A replica has been given a prompt with this chain of blocks."""
        holders = self._holders
        for name in reversed(hashes):  # so the beginning, which most share, stays longest
            holders[name] = holders.get(name, 0) | 1 << replica
            holders.move_to_end(name)
        while len(holders) > self._max_prefixes:
            holders.popitem(last=False)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Count for each replica the blocks of the chain that it should have, from the first on."""
        counts = [0] * self._num_replicas
        matching = self._all
        for count, name in enumerate(hashes, 1):
            matching &= self._holders.get(name, 0)
            if not matching:
                break
            for replica in range(self._num_replicas):
                if matching >> replica & 1:
                    counts[replica] = count
        return counts

    def forget(self, replica: int) -> None:
        """A replica has lost its cache."""
        rest = self._all & ~(1 << replica)
        for name, holders in list(self._holders.items()):
            if holders & rest:
                self._holders[name] = holders & rest
            else:
                del self._holders[name]


class Router:
    """Chooses replicas; its state is the prefix table and whose turn it is at a tie.

    Args:
        step_tokens: the budget of one step.
    """

    def __init__(
        self, num_replicas: int, step_tokens: int, max_prefixes: int = MAX_PREFIXES
    ) -> None:
        self.prefixes = PrefixTable(num_replicas, max_prefixes)
        self._num_replicas = num_replicas
        self._step_tokens = step_tokens
        self._turn = 0

    def choose(
        self,
        loads: Sequence[ReplicaLoad],
        num_cached: Sequence[int],
        *,
        rank: int | None = None,
        session_id: str | None = None,
    ) -> int:
        """Choose a replica.

        Args:
            loads: one for each replica.
            num_cached: tokens of the prompt that each should have in its cache.
            rank: the replica that the request names.
            session_id: of the conversation that it belongs to.
        """
        living = [i for i in range(self._num_replicas) if not loads[i].has_failed]
        candidates = [i for i in living if loads[i].is_available] or living
        if rank in candidates:
            return rank
        if session_id is not None:
            favourite = max(candidates, key=lambda i: _rendezvous(session_id, i))
            least = min(loads[i].num_ahead for i in candidates)
            if loads[favourite].num_ahead <= OVERLOAD * least + self._step_tokens:
                return favourite
        chosen = min(
            _earliest(candidates, loads),
            key=lambda i: (
                loads[i].num_ahead - num_cached[i],
                loads[i].num_rows,
                (i - self._turn) % self._num_replicas,
            ),
        )
        self._turn = chosen + 1
        return chosen


def _earliest(candidates: Sequence[int], loads: Sequence[ReplicaLoad]) -> Sequence[int]:
    """Keep the candidates whose first token is expected about first.  Keeps all when one of them cannot estimate."""
    expected = {i: loads[i].expected_s for i in candidates}
    known = {i: seconds for i, seconds in expected.items() if seconds is not None}
    if len(known) < len(expected):
        return candidates
    most_s = NEAR * min(known.values())
    return [i for i, seconds in known.items() if seconds <= most_s]


def _rendezvous(session_id: str, replica: int) -> bytes:
    return hashlib.sha256(f"{replica}:{session_id}".encode()).digest()
