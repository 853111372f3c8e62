"""Choose a replica for a request, so that its first token comes early and its prefix is in the cache.

Laws:
1. A replica is chosen only if it is available, or if no replica is.  A failed one is never chosen.
2. A request that names a replica gets it while that replica is available.  Otherwise the choice is free.
3. A session stays with one replica while that replica is available and not overloaded.  If a replica is lost, only its own sessions
   move (rendezvous hashing).
4. Any other request goes to the replica with the earliest expected first token.  Replicas within NEAR of the earliest count as equal.
   The tokens ahead do not measure this wait, because short prompts pass long ones.
5. Among equals, and if a replica cannot estimate, the least work ahead decides: the tokens without KV, minus the cached tokens of the
   request's own prompt.  Ties go to the fewest rows, then to each replica by turns.

The unit of work is a token, not a request: a prompt of 8,192 tokens is the work of a hundred short ones.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

# The work of a decoding row in prompt tokens, because it is in every step.
ROW_TOKENS = 4
# A multiple of the earliest first token.  Nine of ten predictions are more accurate.
NEAR = 1.25
# A session leaves its replica if the work there is more than this multiple of the least work plus the budget of a step.
OVERLOAD = 1.5
# Blocks in the table of prefixes, of some 100 bytes each.
MAX_PREFIXES = 2**16


class ReplicaLoad(msgspec.Struct, frozen=True):
    """The work ahead of a new request on a replica.

    The router chooses the replica with the earliest expected first token, or else with the least work.
    """

    # Prompt tokens without KV.
    num_tokens: int
    # Unfinished sequences.
    num_rows: int
    is_available: bool = True
    # It will never be available again.
    has_failed: bool = False
    # Seconds until the first token of the request.  None without an estimate.
    expected_s: float | None = None

    @property
    def num_ahead(self) -> int:
        """Return the work in tokens.

        A sequence in decoding counts as a fixed number of tokens, because it slows each step.
        """
        return self.num_tokens + ROW_TOKENS * self.num_rows


class Demand(msgspec.Struct, frozen=True):
    """The work of a request, and its wishes about the replica.

    `rank` and `session_id` are wishes of the client; the other fields determine how long the request takes where.
    """

    # Known tokens without KV.
    num_tokens: int
    num_rows: int
    # The named replica.
    rank: int | None = None
    # The conversation.
    session_id: str | None = None
    # Of the prefix that a cache may have.
    block_hashes: Sequence[bytes] = ()


class PrefixTable:
    """Remember which replicas got prompts with which blocks.

    It keeps at most `max_prefixes` blocks, and forgets the least recently used first.
    """

    def __init__(self, num_replicas: int, max_prefixes: int = MAX_PREFIXES) -> None:
        self._all = (1 << num_replicas) - 1
        self._num_replicas = num_replicas
        self._max_prefixes = max_prefixes
        self._holders: OrderedDict[bytes, int] = OrderedDict()  # block hash -> bits of replicas

    def __len__(self) -> int:
        return len(self._holders)

    def note(self, hashes: Sequence[bytes], replica: int) -> None:
        """Note that a replica gets a prompt with this chain of blocks.

        The chain need not be complete in the table: the oldest blocks are dropped one by one.
        """
        holders = self._holders
        # Reversed, so the beginning of the chain is kept longest: most prompts share it.
        for name in reversed(hashes):
            holders[name] = holders.get(name, 0) | 1 << replica
            holders.move_to_end(name)
        while len(holders) > self._max_prefixes:
            holders.popitem(last=False)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Count for each replica the leading blocks of the chain that should be in its cache.

        The number may be too high, because replicas evict blocks without a message.
        """
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
        """Forget the blocks of a replica, because its cache is lost.

        Requests then no longer prefer this replica for its cache.
        """
        rest = self._all & ~(1 << replica)
        for name, holders in list(self._holders.items()):
            if holders & rest:
                self._holders[name] = holders & rest
            else:
                del self._holders[name]


class Router:
    """Choose replicas.  Its state is the table of prefixes and the next replica at a tie.

    Args:
        step_tokens: the token budget of one step.
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
            num_cached: tokens of the prompt that should be in the cache of each replica.
            rank: the named replica.
            session_id: the conversation of the request.
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
    """Keep the candidates with the earliest expected first tokens.  Keeps all when one of them cannot estimate."""
    expected = {i: loads[i].expected_s for i in candidates}
    known = {i: seconds for i, seconds in expected.items() if seconds is not None}
    if len(known) < len(expected):
        return candidates
    most_s = NEAR * min(known.values())
    return [i for i, seconds in known.items() if seconds <= most_s]


def _rendezvous(session_id: str, replica: int) -> bytes:
    return hashlib.sha256(f"{replica}:{session_id}".encode()).digest()
