"""Admit requests: `with gate.enter(…) as ticket`.  Every exit from the block releases the request's places.

`FairQueue` makes the pure decisions.  The gate adds the impure parts: tasks that wait for their turn, the measured throughput, and the
errors for refused requests.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Protocol, Self

import anyio

from trouper.actors.engine.admission import CHARACTERS_PER_TOKEN
from trouper.frontends.server.admission.fair_queue import Entry, FairQueue, Full
from trouper.frontends.server.admission.overload import Level, QueueDelay, Throughput
from trouper.frontends.server.shared.errors import HTTPError

# An estimate for bodies before they are decoded.
BYTES_PER_TOKEN = CHARACTERS_PER_TOKEN
# The queue is limited to the work of this many seconds.
TTFT_TARGET_S = 10.0
# The upper limit of a sequence's estimated output in tokens, because `max_tokens` is often far larger than the output.
MAX_OUTPUT_ESTIMATE = 256
# The range of Retry-After in seconds.
RETRY_S = 1.0, 60.0
# Seconds between two scans of all tickets; a scan of 512 takes 0.6 ms.
LOOK_S = 0.25
# The fractional parts of multiples of the golden ratio are spread evenly, so refused clients do not all retry at once.
GOLDEN = 0.618033988749895
OVERLOADED = "the server is overloaded, try again later"


class EngineWork(Protocol):
    """Represent the engine's work for one request: a `Generation`, or several in succession.

    The gate reads from it the true cost of the request, and whether the request still occupies the engine.
    """

    @property
    def is_over(self) -> bool: ...

    @property
    def num_tokens(self) -> tuple[int, int]:
        """The number of prompt tokens, and of tokens generated so far."""
        ...


class AdmissionGate:
    """Admit, queue and refuse the requests of one model.

    Args:
        note_rejection: called with the reason of each refusal, for metrics.
        counters: the usage counters of another model's gate, if the usage of each key counts across models.

    Attributes:
        num_prefill_tokens: returns the number of the engine's prompt tokens whose requests have no output token yet.
    """

    def __init__(
        self, note_rejection: Callable[[str], None], counters: dict[str, int] | None = None
    ) -> None:
        self.admission = FairQueue(counters)
        self.throughput = Throughput()
        self.level = Level.CALM
        # The number of tokens that may wait even at a low throughput.
        self.min_waiting_tokens = 0
        # Whether a higher throughput allows more tokens to wait.
        self.is_adaptive = True
        self.delay = QueueDelay(math.inf)
        # The name of the limit in the metric of rejections.
        self.full_reason = "overloaded"
        self.max_prefill_tokens: int | None = None  # max_num_queued_tokens
        self.num_prefill_tokens: Callable[[], int] = int
        self.now: Callable[[], float] = anyio.current_time
        self._note_rejection = note_rejection
        self._num_refused = 0
        # The time of the first refusal since the last admission.
        self._refusing_since: float | None = None
        self._resumed_at = self._looked_at = -math.inf
        self._tickets: dict[Entry, AdmissionTicket] = {}
        # Work admitted by an earlier process, oldest first, which waits for room in this one.
        self._promised: deque[PromisedPlace] = deque()

    def __repr__(self) -> str:
        return f"<AdmissionGate {self.admission!r}>"

    def check(self, tenant: str, num_bytes: int) -> None:
        """Raise the HTTPError (429 or 503) that `enter` would raise, without reserving anything.

        The number of tokens is estimated from the size of the body.
        """
        self._check_promises()
        self._limit()
        num_tokens = num_bytes // BYTES_PER_TOKEN
        try:
            self.admission.check(tenant, num_tokens)
        except Full as full:
            if not self._release_read():
                raise self._refuse_full(full) from None
            self.check(tenant, num_bytes)

    def enter(self, tenant: str, num_bytes: int) -> "AdmissionTicket":
        """Reserve a place for a request after its body was read, if necessary by evicting others.

        The ticket must be used in a `with` block.  Raises HTTPError (429 or 503).
        """
        self._check_promises()
        self._limit()
        try:
            return self._admit(tenant, num_bytes)
        except Full as full:
            raise self._refuse_full(full) from None

    def _admit(
        self, tenant: str, num_bytes: int, *, is_promised: bool = False
    ) -> "AdmissionTicket":
        """Raises Full."""
        num_tokens = num_bytes // BYTES_PER_TOKEN
        try:
            entry, gone = self.admission.enter(tenant, num_tokens, is_promised=is_promised)
        except Full:
            if not self._release_read():
                raise
            return self._admit(tenant, num_bytes, is_promised=is_promised)
        self._refusing_since = None
        self._evict(gone)
        ticket = AdmissionTicket(self, entry, num_bytes)
        self._tickets[entry] = ticket
        return ticket

    def promise(self, tenant: str, num_bytes: int) -> "PromisedPlace":
        """Reserve a place for work that an earlier process admitted, now or as soon as there is room.

        Until then new requests are refused, so that a resumed answer never waits behind a new one.
        """
        place = PromisedPlace(self, tenant, num_bytes)
        self._promised.append(place)
        self.keep_promises()
        return place

    def keep_promises(self) -> None:
        """Admit promised work, oldest first, while there is room."""
        while self._promised and not (self.level >= Level.SHED_ALL or self._has_too_much_prefill):
            place = self._promised[0]
            self._limit()
            try:
                ticket = self._admit(place.tenant, place.num_bytes, is_promised=True)
            except Full:
                # It is tried again later, and fits at the latest when no other request is admitted.
                return
            self._promised.popleft()
            place.keep(ticket)

    def withdraw(self, place: "PromisedPlace") -> None:
        """Cancel a promise that was not kept yet.  Idempotent."""
        if place in self._promised:
            self._promised.remove(place)
            self.keep_promises()

    def _check_promises(self) -> None:
        """Raise HTTPError (503) while work of an earlier process waits for room."""
        if self._promised:
            text = "the server is resuming answers that were running before its restart; try again later"
            raise self.refuse("overloaded", text)

    def refusing_s(self) -> float:
        """Return how long all requests have been refused, in seconds; 0 if a request would be admitted now.

        The readiness check uses it, so that a load balancer chooses another server after a while.
        """
        if self._refusing_since is None:
            return 0.0
        is_refusing = self._promised or self.level >= Level.SHED_ALL or self._has_too_much_prefill
        if not is_refusing:
            try:
                self.admission.check("", 0)
            except Full:
                pass
            else:
                self._refusing_since = None
                return 0.0
        return self.now() - self._refusing_since

    def close(self, reason: HTTPError, tickets: "Iterable[AdmissionTicket] | None" = None) -> int:
        """Refuse all waiting requests, or only those among `tickets`, so that their handlers raise `reason`.

        Started requests are not affected.  Returns the number of refused requests.
        """
        chosen = None if tickets is None else {ticket.entry for ticket in tickets}
        gone = [e for e in self.admission.waiting() if chosen is None or e in chosen]
        for entry in gone:
            self.admission.leave(entry)
            self._tickets[entry].refuse(reason)
        return len(gone)

    def refuse(self, code: str, message: str, *, is_over_share: bool = False) -> HTTPError:
        """Return the error for a refused request, and count it.

        Its Retry-After is the time that the admitted work takes at the recent throughput, plus up to a quarter, so that clients refused
        together do not retry together.
        """
        self._num_refused += 1
        if self._refusing_since is None and not is_over_share:
            self._refusing_since = self.now()
        self._note_rejection(self.full_reason if code == "overloaded" else code)
        wait_s = self.throughput.time_s(self.admission.num_tokens)
        wait_s *= 1 + (self._num_refused * GOLDEN) % 1 / 4
        refusal = HTTPError(429 if is_over_share else 503, code, message)
        refusal.retry_after_s = min(max(wait_s, RETRY_S[0]), RETRY_S[1])
        return refusal

    def look(self, *, is_paused: bool = False) -> None:
        """Trim the queue if its delay has been too long for a while.  The monitor calls this regularly.

        The queue is reduced to the tokens that can be computed in time, beginning with the newest requests of the tenant with the most
        usage.  Time during which the engine `is_paused` does not count as delay.
        """
        now, entry = self.now(), self.admission.next_waiting()
        wait_s = 0.0
        if is_paused:
            self._resumed_at = now
        elif entry is not None:
            wait_s = now - max(self._tickets[entry].waits_since, self._resumed_at)
        self.delay.look(wait_s, now)
        if self.delay.stands:
            for gone in self.admission.trim(self._done_in_time):
                text = "the request has been dropped from the queue, because the queue is too long; try again later"
                self._tickets[gone].refuse(self.refuse("overloaded", text))

    def let_in(self) -> None:
        """Start the waiting requests for which there is room.

        Call it after every change that may free a place.  The monitor calls it, too, four times a second.
        """
        self.keep_promises()
        if self.admission.num_sequences == self.admission.num_started:
            return
        started = self.admission.next_starts()
        if not started and self._release_read():
            started = self.admission.next_starts()
        for entry in started:
            self._tickets[entry].let_in()

    def _limit(self) -> None:
        """Update the limit of waiting tokens.  Raises HTTPError if currently all requests are refused."""
        if self.level >= Level.SHED_ALL:
            raise self.refuse("overloaded", OVERLOADED)
        if self._has_too_much_prefill:
            text = "too many prompt tokens are queued (--max-num-queued-tokens); try again later"
            raise self.refuse("max_num_queued_tokens", text)
        pace = (self.throughput.per_s or 0.0) if self.is_adaptive else 0.0
        limit = max(self.min_waiting_tokens, int(pace * TTFT_TARGET_S))
        if self.delay.stands:
            limit = min(limit, self._done_in_time)
        self.admission.max_waiting_tokens = limit

    @property
    def _done_in_time(self) -> int:
        return int((self.throughput.per_s or 0.0) * self.delay.target_s)

    @property
    def _has_too_much_prefill(self) -> bool:
        limit = self.max_prefill_tokens
        if limit is None:
            return False
        outside = sum(t.num_prompt_tokens for t in self._tickets.values() if not t.generations)
        return outside + self.num_prefill_tokens() >= limit

    def _release_read(self) -> bool:
        """Free the places of requests that the engine has finished but whose clients are still reading.

        Scans at most once in `LOOK_S` seconds.  Returns whether a place became free.
        """
        now = self.now()
        if now < self._looked_at + LOOK_S:
            return False
        self._looked_at = now
        over = [entry for entry, ticket in self._tickets.items() if ticket.is_over]
        for entry in over:
            self._remove(entry)
        return bool(over)

    # For tickets

    def resize(self, entry: Entry, num_sequences: int, num_tokens: int, priority: int) -> None:
        if self.level >= Level.SHED_LOWEST and priority < 0 and not entry.is_promised:
            raise self.refuse(
                "overloaded", "the server is overloaded and refuses requests of negative priority"
            )
        try:
            gone = self.admission.resize(entry, num_sequences, num_tokens, priority)
        except Full as full:
            raise self._refuse_full(full) from None
        if gone:
            self._evict(gone)

    def wait(self, entry: Entry) -> None:
        self.admission.wait(entry)
        self.let_in()

    def leave(self, entry: Entry) -> None:
        self._remove(entry)
        self.let_in()

    def _remove(self, entry: Entry) -> None:
        ticket = self._tickets.pop(entry, None)
        if ticket is not None:
            self.admission.leave(entry, *ticket.cost)

    def _evict(self, gone: list[Entry]) -> None:
        for entry in gone:
            self._tickets[entry].refuse(self._refuse_full(Full(is_over_share=True)))

    def _refuse_full(self, full: Full) -> HTTPError:
        if full.is_over_share:
            text = "the server is full, and this key uses more than its share; try again later"
            return self.refuse("rate_limited", text, is_over_share=True)
        return self.refuse("overloaded", "the server is full, try again later")


class AdmissionTicket:
    """Hold the places of one request until the end of its `with` block.

    So a cancellation of the handler at any point frees them, too.
    """

    def __init__(self, gate: AdmissionGate, entry: Entry, num_bytes: int) -> None:
        self.entry = entry
        self.num_prompt_tokens = num_bytes // BYTES_PER_TOKEN
        # Empty until the engine has the request.
        self.generations: Sequence[EngineWork] = ()
        self.waits_since = math.inf
        self._gate = gate
        self._turn = anyio.Event()
        self._refusal: HTTPError | None = None

    def __repr__(self) -> str:
        return f"<AdmissionTicket {self.entry!r}>"

    def size(
        self, num_bytes: int, num_prompts: int, n: int, max_tokens: int | None, priority: int
    ) -> None:
        """Set the size of the request, with n completions of each prompt.

        Raises HTTPError, without a change, if there is no room.  The estimate of the output is bounded, because most requests end long
        before `max_tokens`.
        """
        self.num_prompt_tokens = num_bytes // BYTES_PER_TOKEN
        num_sequences = num_prompts * n
        output = num_sequences * min(max_tokens or MAX_OUTPUT_ESTIMATE, MAX_OUTPUT_ESTIMATE)
        num_tokens = n * self.num_prompt_tokens + output
        self._gate.resize(self.entry, num_sequences, num_tokens, priority)

    async def wait_turn(self) -> None:
        """Wait until the request may start.  Returns at once if it has started, and raises HTTPError if it is evicted.

        There is no time limit here: the request's deadline cancels the wait.
        """
        if not self._turn.is_set():
            self.waits_since = self._gate.now()
            self._gate.wait(self.entry)
        if not self._turn.is_set():
            await self._turn.wait()
        if self._refusal is not None:
            raise self._refusal

    def let_in(self) -> None:
        """Let the request start."""
        self._turn.set()

    def refuse(self, refusal: HTTPError) -> None:
        """End the wait with a refusal, because the request was evicted."""
        self._refusal = refusal
        self._turn.set()

    @property
    def is_over(self) -> bool:
        """Whether the engine has finished the request.

        A request can be over while its reply is still being sent to a slow client; its place is then free.
        """
        return bool(self.generations) and all(stream.is_over for stream in self.generations)

    @property
    def cost(self) -> tuple[int, int]:
        """The numbers of prompt tokens and of generated tokens for which the tenant is charged.

        For an aborted request they include everything computed until then.
        """
        counts = [stream.num_tokens for stream in self.generations]
        prompts, outputs = zip((0, 0), *counts, strict=True)
        return sum(prompts), sum(outputs)

    def leave(self) -> None:
        """Return the places.  Idempotent."""
        self._gate.leave(self.entry)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.leave()


class PromisedPlace:
    """Wait for and hold the place of work that an earlier process admitted, until the end of its `with` block."""

    def __init__(self, gate: AdmissionGate, tenant: str, num_bytes: int) -> None:
        self.tenant, self.num_bytes = tenant, num_bytes
        self._gate = gate
        self._ticket: AdmissionTicket | None = None
        self._is_kept = anyio.Event()

    def __repr__(self) -> str:
        return f"<PromisedPlace of {self.tenant!r}: {self._ticket!r}>"

    def keep(self, ticket: AdmissionTicket) -> None:
        """Hand over the place and wake the task that waits in `ticket`."""
        self._ticket = ticket
        self._is_kept.set()

    async def ticket(self) -> AdmissionTicket:
        """Wait until there is room, and return the ticket."""
        await self._is_kept.wait()
        assert self._ticket is not None
        return self._ticket

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._gate.withdraw(self)
        if self._ticket is not None:
            self._ticket.leave()
