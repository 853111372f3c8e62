"""The door of the house: `with door.enter(…) as ticket`, and every way out gives everything back.

`Admission` decides; here is who waits, and what those are told who cannot come in.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import anyio

from trouper.actors.engine.admission import CHARACTERS_PER_TOKEN
from trouper.frontends.server.admission.codel import QueueDelay
from trouper.frontends.server.admission.fair_queue import Admission, Entry, Full
from trouper.frontends.server.admission.overload import Level
from trouper.frontends.server.admission.throughput import Throughput
from trouper.frontends.server.errors import Refusal

if TYPE_CHECKING:
    from trouper.actors.engine.generation import Generation

BYTES_PER_TOKEN = CHARACTERS_PER_TOKEN  # of a body that nobody has read yet
TTFT_TARGET_S = 10.0  # as much work may wait as is done in this time
MAX_OUTPUT_ESTIMATE = 256  # of a sequence; `max_tokens` is often far more than what comes
RETRY_S = 1.0, 60.0  # the least and the most that anybody is asked to wait
LOOK_S = 0.25  # between two looks at all tickets, which take 0.6 ms of 512
GOLDEN = 0.618033988749895  # multiples of it, modulo 1, spread evenly: those refused now come back one by one


class Door:
    """Owns the tickets.  `num_prefill_tokens` counts what the engine has and has not begun to answer."""

    def __init__(self, note_rejection: Callable[[str], None]) -> None:
        self.admission = Admission()
        self.throughput = Throughput()
        self.level = Level.CALM
        self.min_waiting_tokens = 0  # may wait whatever the throughput
        self.is_adaptive = True  # more may wait where more is done
        self.delay = QueueDelay(math.inf)
        self.full_reason = "overloaded"  # for the metric: which limit it is
        self.max_prefill_tokens: int | None = None  # max_num_queued_tokens
        self.num_prefill_tokens: Callable[[], int] = int
        self._note_rejection = note_rejection
        self._num_refused = 0
        self._resumed_at = self._looked_at = -math.inf
        self._tickets: dict[Entry, Ticket] = {}

    def __repr__(self) -> str:
        return f"<Door {self.admission!r}>"

    def enter(self, tenant: str, num_bytes: int) -> "Ticket":
        """Reserve a place, before the body is read.  Raises Refusal: 429 or 503."""
        self._limit()
        try:
            entry, gone = self.admission.enter(tenant, num_bytes // BYTES_PER_TOKEN)
        except Full as full:
            raise self._refuse_full(full) from None
        self._show_out(gone)
        ticket = Ticket(self, entry, num_bytes)
        self._tickets[entry] = ticket
        return ticket

    def _limit(self) -> None:
        """How much may wait now.  Raises Refusal when nobody may come in, whoever it is."""
        if self.level >= Level.SHED_ALL:
            raise self.refuse("overloaded", "the server is overloaded, try again later")
        self._check_prefill()
        pace = (self.throughput.per_s or 0.0) if self.is_adaptive else 0.0
        limit = max(self.min_waiting_tokens, int(pace * TTFT_TARGET_S))
        if self.delay.stands:
            limit = min(limit, self._done_in_time)
        self.admission.max_waiting_tokens = limit

    def close(self, reason: Refusal, tickets: "Iterable[Ticket] | None" = None) -> int:
        """Whoever waits (or those of `tickets` who do) waits in vain; how many."""
        chosen = None if tickets is None else {ticket.entry for ticket in tickets}
        gone = [e for e in self.admission.waiting() if chosen is None or e in chosen]
        for entry in gone:
            self.admission.leave(entry)
            self._tickets[entry].refuse(reason)
        return len(gone)

    def refuse(self, code: str, message: str, *, is_over_share: bool = False) -> Refusal:
        """With the time in which what is here now will be done, at the pace of the last seconds."""
        self._num_refused += 1
        self._note_rejection(self.full_reason if code == "overloaded" else code)
        wait_s = self.throughput.time_s(self.admission.num_tokens)
        wait_s *= 1 + (self._num_refused * GOLDEN) % 1 / 4
        refusal = Refusal(429 if is_over_share else 503, code, message)
        refusal.retry_after_s = min(max(wait_s, RETRY_S[0]), RETRY_S[1])
        return refusal

    def look(self, *, is_paused: bool = False) -> None:
        """Called now and then: a queue that stands is cut to what is done in time.  A pause is no wait."""
        now, entry = anyio.current_time(), self.admission.next_waiting()
        wait_s = 0.0
        if is_paused:
            self._resumed_at = now
        elif entry is not None:
            wait_s = now - max(self._tickets[entry].waits_since, self._resumed_at)
        self.delay.look(wait_s, now)
        if self.delay.stands:
            for gone in self.admission.trim(self._done_in_time):
                text = "the wait has become too long, try again later"
                self._tickets[gone].refuse(self.refuse("overloaded", text))

    @property
    def _done_in_time(self) -> int:
        return int((self.throughput.per_s or 0.0) * self.delay.target_s)

    def let_in(self) -> None:
        """Whoever has room now.  What only waits for its reader takes none: the engine is done with it."""
        if self.admission.is_full and self.admission.next_waiting() is not None:
            self._let_go_of_read()
        for entry in self.admission.next_starts():
            self._tickets[entry].let_in()

    def _let_go_of_read(self) -> None:
        """Now and then: places of those for whom the engine is done, though not all of it has been read."""
        now = anyio.current_time()
        if now >= self._looked_at + LOOK_S:
            self._looked_at = now
            for entry in [entry for entry, ticket in self._tickets.items() if ticket.is_over]:
                self._let_go(entry)

    # For tickets

    def resize(self, entry: Entry, num_sequences: int, num_tokens: int, priority: int) -> None:
        if self.level >= Level.SHED_LOWEST and priority < 0:
            raise self.refuse("overloaded", "the server is overloaded: negative priority waits")
        try:
            self._show_out(self.admission.resize(entry, num_sequences, num_tokens, priority))
        except Full as full:
            raise self._refuse_full(full) from None

    def wait(self, entry: Entry) -> None:
        self.admission.wait(entry)
        self.let_in()

    def leave(self, entry: Entry) -> None:
        self._let_go(entry)
        self.let_in()

    def _let_go(self, entry: Entry) -> None:
        ticket = self._tickets.pop(entry, None)
        if ticket is not None:
            self.admission.leave(entry, *ticket.cost)

    def _show_out(self, gone: list[Entry]) -> None:
        for entry in gone:
            self._tickets[entry].refuse(self._refuse_full(Full(is_over_share=True)))

    def _refuse_full(self, full: Full) -> Refusal:
        if full.is_over_share:
            text = "this key has more than its share of a full server, try again later"
            return self.refuse("rate_limited", text, is_over_share=True)
        return self.refuse("overloaded", "the server is full, try again later")

    def _check_prefill(self) -> None:
        limit = self.max_prefill_tokens
        if limit is None:
            return
        outside = sum(t.num_prompt_tokens for t in self._tickets.values() if not t.generations)
        if outside + self.num_prefill_tokens() >= limit:
            raise self.refuse("max_num_queued_tokens", "too many prompt tokens wait")


class Ticket:
    """The places of one request; left on whatever way, at the latest with its block."""

    def __init__(self, door: Door, entry: Entry, num_bytes: int) -> None:
        self.entry = entry
        self.num_prompt_tokens = num_bytes // BYTES_PER_TOKEN
        self.generations: Sequence[Generation] = ()  # once the engine has them
        self.waits_since = math.inf
        self._door = door
        self._turn = anyio.Event()
        self._refusal: Refusal | None = None

    def __repr__(self) -> str:
        return f"<Ticket {self.entry!r}>"

    def size(
        self, num_bytes: int, num_prompts: int, n: int, max_tokens: int | None, priority: int
    ) -> None:
        """What the body asks for: n completions of each prompt.  Raises Refusal, all or nothing."""
        self.num_prompt_tokens = num_bytes // BYTES_PER_TOKEN
        num_sequences = num_prompts * n
        output = num_sequences * min(max_tokens or MAX_OUTPUT_ESTIMATE, MAX_OUTPUT_ESTIMATE)
        num_tokens = n * self.num_prompt_tokens + output
        self._door.resize(self.entry, num_sequences, num_tokens, priority)

    async def wait_turn(self) -> None:
        """Raises Refusal when somebody else gets the place."""
        self.waits_since = anyio.current_time()
        self._door.wait(self.entry)
        if not self._turn.is_set():
            await self._turn.wait()
        if self._refusal is not None:
            raise self._refusal

    def let_in(self) -> None:
        self._turn.set()

    def refuse(self, refusal: Refusal) -> None:
        self._refusal = refusal
        self._turn.set()

    @property
    def is_over(self) -> bool:
        """The engine is."""
        return bool(self.generations) and all(stream.is_over for stream in self.generations)

    @property
    def cost(self) -> tuple[int, int]:
        """Tokens of the prompts, and generated so far."""
        counts = [stream.num_tokens for stream in self.generations]
        return sum(prompt for prompt, _ in counts), sum(output for _, output in counts)

    def leave(self) -> None:
        """Its places are somebody else's; more than once is once."""
        self._door.leave(self.entry)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.leave()
