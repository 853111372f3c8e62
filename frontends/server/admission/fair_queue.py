"""Decide which requests are admitted, which starts next, and which is evicted.  Pure.

    enter ─▶ ENTERED ─wait─▶ WAITING ─next_starts─▶ STARTED        leave: from any state, once

Laws:
1. Every request holds its places and its tokens from `enter` to `leave`.
2. Requests start by priority, then by the service that their tenant has received (a virtual token counter for each tenant: Sheng et al.,
   "Fairness in Serving Large Language Models", algorithm 2), then by arrival.
3. When the queue is full and a request of a tenant with less usage arrives, the newest waiting request of the tenant with the most usage is
   evicted.
"""

from bisect import insort
from enum import Enum

MAX_PRIORITY = 2**63
# A generated token takes about as long as two prompt tokens.  The paper uses the same weights.
OUTPUT_WEIGHT = 2


class Phase(Enum):
    """Name the states of an admitted request.

    A request enters when its body has been read, waits when its size is known, and starts when the engine receives it.
    """

    ENTERED = "entered"
    WAITING = "waiting"
    STARTED = "started"
    GONE = "gone"


class Full(Exception):
    """Report that the queue is full.

    With `is_over_share` the tenant already uses more than an equal share, and the server answers with 429 instead of 503.
    """

    def __init__(self, *, is_over_share: bool) -> None:
        super().__init__()
        self.is_over_share = is_over_share


class Entry:
    """Hold the state of one admitted request, and its size, for which its tenant is charged.

    Only `FairQueue` changes it.
    """

    def __init__(self, number: int, tenant: str, num_tokens: int) -> None:
        self.number = number  # in the order of arrival
        self.tenant = tenant
        self.num_sequences = 1
        # The expected tokens of prompt and output.
        self.num_tokens = num_tokens
        self.priority = 0
        self.phase = Phase.ENTERED
        # The tokens charged to the tenant's counter.
        self.num_charged = 0
        # Whether an earlier process admitted it.  Then it is neither refused for its size nor evicted.
        self.is_promised = False

    def __repr__(self) -> str:
        return f"<Entry {self.number} of {self.tenant!r} {self.phase.value}>"

    @property
    def order(self) -> tuple[int, int]:
        """The sort key among one tenant's requests: larger priority first, then earlier arrival."""
        return -self.priority, self.number


class FairQueue:
    """Hold the admitted requests within three limits: `max_sequences` in total, `max_waiting_tokens` of requests that have not started, and
    about `max_started` started sequences.

    A request larger than a limit is admitted if no other request counts against that limit.  Queues that share `counters` charge each
    tenant for its usage of all of them.
    """

    def __init__(self, counters: dict[str, int] | None = None) -> None:
        self.max_sequences = 0
        self.max_waiting_tokens = 0
        self.max_started = 0
        self.num_requests = 0
        self.num_sequences = 0
        self.num_started = 0  # sequences
        self.num_tokens = 0
        self.num_waiting_tokens = 0
        self._num_entered = 0
        # By tenant: the number of its sequences, and of the tokens of its requests that have not started.
        self._held: dict[str, list[int]] = {}
        # The waiting requests of each tenant in its own order.  No list is empty.
        self._waiting: dict[str, list[Entry]] = {}
        # The service that each tenant has received.  Bounded by the number of API keys.
        self.counters: dict[str, int] = {} if counters is None else counters
        self._last_tenant: str | None = None  # served last

    def __repr__(self) -> str:
        num_waiting = sum(map(len, self._waiting.values()))
        return f"<FairQueue {self.num_sequences} of {self.max_sequences}, {num_waiting} waiting>"

    def enter(
        self, tenant: str, num_tokens: int, *, is_promised: bool = False
    ) -> tuple[Entry, list[Entry]]:
        """Admit a request of one sequence.  Returns its entry and the entries evicted for it.  Raises Full.

        Only waiting requests of a tenant with more than its share are evicted, the newest first.
        """
        entry = Entry(self._num_entered, tenant, num_tokens)
        entry.is_promised = is_promised
        gone = self._make_room(entry)
        self._num_entered += 1
        self.num_requests += 1
        self._count(entry, 1)
        return entry, gone

    def check(self, tenant: str, num_tokens: int) -> None:
        """Raise Full if `enter` would raise it, without any change, so that a caller can refuse before it reads a body."""
        self._victims(Entry(self._num_entered, tenant, num_tokens))

    def resize(
        self, entry: Entry, num_sequences: int, num_tokens: int, priority: int
    ) -> list[Entry]:
        """Set the size of a request when its body has been decoded.  Returns the entries evicted for it.

        The request keeps its position in the order of arrival.  Raises Full, without a change, if there is no room.
        """
        self._count(entry, -1)
        before = entry.num_sequences, entry.num_tokens
        entry.num_sequences, entry.num_tokens, entry.priority = num_sequences, num_tokens, priority
        try:
            return self._make_room(entry)
        except Full:
            if entry.is_promised:
                return []
            entry.num_sequences, entry.num_tokens = before
            raise
        finally:
            self._count(entry, 1)

    def wait(self, entry: Entry) -> None:
        """Queue a request that is ready to start.

        If its tenant was idle, its counter is raised to the lowest of the waiting tenants, so that idle time earns no credit.
        """
        tenant = entry.tenant
        if tenant not in self._waiting:
            others = [self.counters[other] for other in self._waiting]
            floor = min(others, default=self.counters.get(self._last_tenant or "", 0))
            self.counters[tenant] = max(self.counters.get(tenant, 0), floor)
        entry.phase = Phase.WAITING
        insort(self._waiting.setdefault(tenant, []), entry, key=lambda entry: entry.order)

    @property
    def is_full(self) -> bool:
        """Whether no request can start now."""
        return self.num_started >= self.max_started

    def next_starts(self) -> list[Entry]:
        """Start the next requests, and return them.  The last one may exceed the limit, so that a large request can start, too.

        The tenants are charged for the estimated tokens at once, so that several starts in succession are fair, too.
        """
        started: list[Entry] = []
        while not self.is_full and (entry := self.next_waiting()) is not None:
            tenant = entry.tenant
            self._unqueue(entry)
            self._count(entry, -1)
            entry.phase = Phase.STARTED
            self._count(entry, 1)
            self._last_tenant = tenant
            entry.num_charged = entry.num_tokens
            self.counters[tenant] += entry.num_charged
            started.append(entry)
        return started

    def leave(self, entry: Entry, num_prompt_tokens: int = 0, num_output_tokens: int = 0) -> None:
        """Remove a request, and replace its tenant's estimated charge by the tokens that the engine has computed.  Idempotent."""
        if entry.phase is Phase.GONE:
            return
        if entry.phase is Phase.WAITING:
            self._unqueue(entry)
        if entry.phase is Phase.STARTED:
            cost = num_prompt_tokens + OUTPUT_WEIGHT * num_output_tokens
            self.counters[entry.tenant] += cost - entry.num_charged
        self._count(entry, -1)
        entry.phase = Phase.GONE
        self.num_requests -= 1

    def trim(self, num_tokens: int) -> list[Entry]:
        """Evict waiting requests until they have at most `num_tokens`: always the newest one of the tenant with the most usage.

        One request remains, whatever its size.
        """
        tokens = [entry.num_tokens for entry in self.waiting()]
        num_left, num_tokens_left = len(tokens), sum(tokens)
        gone: list[Entry] = []
        while num_left > 1 and num_tokens_left > num_tokens:
            held = {tenant: (held[0], held[1]) for tenant, held in self._held.items()}
            victim = self._victim(held, [], 0.0, MAX_PRIORITY)
            if victim is None:
                break
            self.leave(victim)
            gone.append(victim)
            num_left -= 1
            num_tokens_left -= victim.num_tokens
        return gone

    def next_waiting(self) -> Entry | None:
        """Return the request that starts next, or None if none is waiting."""
        return self._waiting[min(self._waiting, key=self._turn)][0] if self._waiting else None

    def waiting(self) -> list[Entry]:
        """Return all waiting requests, tenant by tenant."""
        return [entry for queue in self._waiting.values() for entry in queue]

    def _turn(self, tenant: str) -> tuple[int, int, int]:
        head = self._waiting[tenant][0]
        return -head.priority, self.counters[tenant], head.number

    def _unqueue(self, entry: Entry) -> None:
        queue = self._waiting[entry.tenant]
        queue.remove(entry)
        if not queue:
            del self._waiting[entry.tenant]

    def _count(self, entry: Entry, sign: int) -> None:
        num_sequences, num_tokens = sign * entry.num_sequences, sign * entry.num_tokens
        held = self._held.setdefault(entry.tenant, [0, 0])
        self.num_sequences += num_sequences
        held[0] += num_sequences
        if entry.phase is Phase.STARTED:
            self.num_started += num_sequences
        else:
            self.num_waiting_tokens += num_tokens
            held[1] += num_tokens
        self.num_tokens += num_tokens
        if not held[0]:
            del self._held[entry.tenant]

    def _make_room(self, request: Entry) -> list[Entry]:
        """Evict enough requests to make room for a new one, or raise Full without a change."""
        gone = self._victims(request)
        for victim in gone:
            self.leave(victim)
        return gone

    def _victims(self, request: Entry) -> list[Entry]:
        """Return the requests to evict for a new one.  Raises Full if evictions cannot make enough room."""
        num_sequences, num_tokens = self.num_sequences, self.num_waiting_tokens
        held = {tenant: (held[0], held[1]) for tenant, held in self._held.items()}
        mine = held.pop(request.tenant, (0, 0))
        share = self._share(mine[0] + request.num_sequences, mine[1] + request.num_tokens)
        gone: list[Entry] = []
        while (num_sequences and num_sequences + request.num_sequences > self.max_sequences) or (
            num_tokens and num_tokens + request.num_tokens > self.max_waiting_tokens
        ):
            victim = self._victim(held, gone, share, request.priority)
            if victim is None:
                raise Full(is_over_share=bool(held) and share > 1 / (len(held) + 1))
            gone.append(victim)
            num_sequences -= victim.num_sequences
            num_tokens -= victim.num_tokens
            held[victim.tenant] = _without(held[victim.tenant], victim)
        return gone

    def _victim(
        self, held: dict[str, tuple[int, int]], gone: list[Entry], share: float, priority: int
    ) -> Entry | None:
        """Return the newest waiting request of the tenant with the most usage, unless that would leave the tenant less than `share`."""
        for tenant in sorted(held, key=lambda tenant: self._share(*held[tenant]), reverse=True):
            queue = [
                entry
                for entry in self._waiting.get(tenant, ())
                if not (entry in gone or entry.is_promised)
            ]
            if not queue or queue[-1].priority > priority:
                continue
            if self._share(*_without(held[tenant], queue[-1])) >= share:
                return queue[-1]
        return None

    def _share(self, num_sequences: int, num_tokens: int) -> float:
        """Return a tenant's usage: its fraction of the limit that it uses most (dominant resource fairness)."""
        return max(
            num_sequences / max(1, self.max_sequences), num_tokens / max(1, self.max_waiting_tokens)
        )


def _without(held: tuple[int, int], entry: Entry) -> tuple[int, int]:
    return held[0] - entry.num_sequences, held[1] - entry.num_tokens
