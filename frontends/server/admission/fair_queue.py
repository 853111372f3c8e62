"""Who is in the house, who is next, who has to go.  Pure.

    enter ─▶ READING ─wait─▶ WAITING ─next_starts─▶ STARTED        leave: from anywhere, once

Laws.  Every request holds its places and its tokens from `enter` to `leave`.  Priority decides first, then
the tenant that has been served least (a virtual token counter for each: Sheng et al., "Fairness in
Serving Large Language Models", algorithm 2), then who came first.  A full house shows the
youngest waiting request of the largest tenant to the door when a smaller tenant knocks.
"""

from bisect import insort
from enum import Enum

MAX_PRIORITY = 2**63
OUTPUT_WEIGHT = 2  # a generated token takes about as long as two of a prompt; the paper's weights


class Phase(Enum):
    """Where a request is."""

    READING = "reading"
    WAITING = "waiting"
    STARTED = "started"
    GONE = "gone"


class Full(Exception):
    """No room.  `is_over_share`: this tenant has more than its part of it."""

    def __init__(self, *, is_over_share: bool) -> None:
        super().__init__()
        self.is_over_share = is_over_share


class Entry:
    """One request in the house; written by `Admission` alone."""

    def __init__(self, number: int, tenant: str, num_tokens: int) -> None:
        self.number = number  # in the order of coming
        self.tenant = tenant
        self.num_sequences = 1
        self.num_tokens = num_tokens  # expected, prompt and output
        self.priority = 0
        self.phase = Phase.READING
        self.num_charged = 0  # to the tenant's counter

    def __repr__(self) -> str:
        return f"<Entry {self.number} of {self.tenant!r} {self.phase.value}>"

    @property
    def order(self) -> tuple[int, int]:
        """Among the requests of one tenant."""
        return -self.priority, self.number


class Admission:
    """At most `max_sequences` are in, `max_waiting_tokens` not started, about `max_started` started.

    What is larger than a limit is let in when nobody else is counted there.
    """

    def __init__(self) -> None:
        self.max_sequences = 0
        self.max_waiting_tokens = 0
        self.max_started = 0
        self.num_requests = 0
        self.num_sequences = 0
        self.num_started = 0  # sequences
        self.num_tokens = 0
        self.num_waiting_tokens = 0
        self._num_entered = 0
        self._held: dict[str, list[int]] = {}  # tenant -> its sequences, its tokens not started
        self._waiting: dict[str, list[Entry]] = {}  # tenant -> in its own order, never empty
        self._counters: dict[str, int] = {}  # tenant -> service received; as many as there are keys
        self._last_tenant: str | None = None  # the last that was served

    def __repr__(self) -> str:
        num_waiting = sum(map(len, self._waiting.values()))
        return f"<Admission {self.num_sequences} of {self.max_sequences}, {num_waiting} waiting>"

    def enter(self, tenant: str, num_tokens: int) -> tuple[Entry, list[Entry]]:
        """A place for a request nothing is known of yet, and whoever had to go for it.  Raises Full."""
        entry = Entry(self._num_entered, tenant, num_tokens)
        gone = self._make_room(entry)
        self._num_entered += 1
        self.num_requests += 1
        self._count(entry, 1)
        return entry, gone

    def resize(
        self, entry: Entry, num_sequences: int, num_tokens: int, priority: int
    ) -> list[Entry]:
        """What is asked for is known, before it waits: all of it or nothing.  Raises Full."""
        self._count(entry, -1)
        before = entry.num_sequences, entry.num_tokens
        entry.num_sequences, entry.num_tokens, entry.priority = num_sequences, num_tokens, priority
        try:
            return self._make_room(entry)
        except Full:
            entry.num_sequences, entry.num_tokens = before
            raise
        finally:
            self._count(entry, 1)

    def wait(self, entry: Entry) -> None:
        """It is ready to start."""
        tenant = entry.tenant
        if tenant not in self._waiting:  # what it did not ask for meanwhile is no credit
            others = [self._counters[other] for other in self._waiting]
            floor = min(others, default=self._counters.get(self._last_tenant or "", 0))
            self._counters[tenant] = max(self._counters.get(tenant, 0), floor)
        entry.phase = Phase.WAITING
        insort(self._waiting.setdefault(tenant, []), entry, key=lambda entry: entry.order)

    @property
    def is_full(self) -> bool:
        """Nobody can start."""
        return self.num_started >= self.max_started

    def next_starts(self) -> list[Entry]:
        """Everybody whose turn has come; the last may exceed the limit, so that none is too large."""
        started: list[Entry] = []
        while not self.is_full and (entry := self.next_waiting()) is not None:
            tenant = entry.tenant
            self._unqueue(entry)
            self._count(entry, -1)
            entry.phase = Phase.STARTED
            self._count(entry, 1)
            self._last_tenant = tenant
            entry.num_charged = entry.num_tokens
            self._counters[tenant] += entry.num_charged
            started.append(entry)
        return started

    def leave(self, entry: Entry, num_prompt_tokens: int = 0, num_output_tokens: int = 0) -> None:
        """With what it really took.  Idempotent."""
        if entry.phase is Phase.GONE:
            return
        if entry.phase is Phase.WAITING:
            self._unqueue(entry)
        if entry.phase is Phase.STARTED:
            cost = num_prompt_tokens + OUTPUT_WEIGHT * num_output_tokens
            self._counters[entry.tenant] += cost - entry.num_charged
        self._count(entry, -1)
        entry.phase = Phase.GONE
        self.num_requests -= 1

    def trim(self, num_tokens: int) -> list[Entry]:
        """Whoever waits beyond so many tokens, gone: each time the youngest of the largest tenant.

        One stays, however large.
        """
        tokens = [entry.num_tokens for entry in self.waiting()]
        num_left, num_tokens_left = len(tokens), sum(tokens)
        gone: list[Entry] = []
        while num_left > 1 and num_tokens_left > num_tokens:
            held = {tenant: (held[0], held[1]) for tenant, held in self._held.items()}
            victim = self._victim(held, [], 0.0, MAX_PRIORITY)
            assert victim is not None
            self.leave(victim)
            gone.append(victim)
            num_left -= 1
            num_tokens_left -= victim.num_tokens
        return gone

    def next_waiting(self) -> Entry | None:
        """Whose turn it is."""
        return self._waiting[min(self._waiting, key=self._turn)][0] if self._waiting else None

    def waiting(self) -> list[Entry]:
        """Everybody who waits, tenant by tenant."""
        return [entry for queue in self._waiting.values() for entry in queue]

    def _turn(self, tenant: str) -> tuple[int, int, int]:
        head = self._waiting[tenant][0]
        return -head.priority, self._counters[tenant], head.number

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

    def _make_room(self, guest: Entry) -> list[Entry]:
        """Who had to go for a guest that is not counted: all at once, or nobody.  Raises Full."""
        num_sequences, num_tokens = self.num_sequences, self.num_waiting_tokens
        held = {tenant: (held[0], held[1]) for tenant, held in self._held.items()}
        mine = held.pop(guest.tenant, (0, 0))
        share = self._share(mine[0] + guest.num_sequences, mine[1] + guest.num_tokens)
        gone: list[Entry] = []
        while (num_sequences and num_sequences + guest.num_sequences > self.max_sequences) or (
            num_tokens and num_tokens + guest.num_tokens > self.max_waiting_tokens
        ):
            victim = self._victim(held, gone, share, guest.priority)
            if victim is None:
                raise Full(is_over_share=bool(held) and share > 1 / (len(held) + 1))
            gone.append(victim)
            num_sequences -= victim.num_sequences
            num_tokens -= victim.num_tokens
            held[victim.tenant] = _without(held[victim.tenant], victim)
        for victim in gone:
            self.leave(victim)
        return gone

    def _victim(
        self, held: dict[str, tuple[int, int]], gone: list[Entry], share: float, priority: int
    ) -> Entry | None:
        """The last in the queue of the largest tenant, unless that makes it smaller than the guest."""
        for tenant in sorted(held, key=lambda tenant: self._share(*held[tenant]), reverse=True):
            queue = [entry for entry in self._waiting.get(tenant, ()) if entry not in gone]
            if not queue or queue[-1].priority > priority:
                continue
            if self._share(*_without(held[tenant], queue[-1])) >= share:
                return queue[-1]
        return None

    def _share(self, num_sequences: int, num_tokens: int) -> float:
        """Of the house: of whichever of the two it holds more (dominant resource fairness)."""
        return max(
            num_sequences / max(1, self.max_sequences), num_tokens / max(1, self.max_waiting_tokens)
        )


def _without(held: tuple[int, int], entry: Entry) -> tuple[int, int]:
    return held[0] - entry.num_sequences, held[1] - entry.num_tokens
