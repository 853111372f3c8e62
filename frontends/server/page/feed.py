"""Stream frames to the viewers of the page, and serve its files.

A frame is made at most once a period, for any number of viewers.  No extra task is needed: all viewers wake at the same ticks of the clock,
the first one makes the frame, and the others send the same.  Without viewers nothing runs, and a slow viewer misses frames instead of
queueing them.

Files are read at the first request and cached with their compressed forms.  Only the names in `KINDS` are served, so no path from a request
reaches the file system.
"""

import gzip
import math
import time
from collections.abc import Iterable
from functools import cache
from hashlib import sha256
from pathlib import Path

import anyio
import msgspec

from trouper.actors.engine.engine import Engine
from trouper.actors.observability.observer import RecentEvents
from trouper.frontends.server.http.context import RequestContext, encode
from trouper.frontends.server.models.residency import residency_of
from trouper.frontends.server.page.frames import (
    MeasuredModel,
    ModelCard,
    RequestFrame,
    describe,
    model_card,
    model_name,
    planned_card,
    request_frames,
    server_frame,
)
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared.errors import HTTPError, unavailable

STATIC = Path(__file__).parent / "static"
TEXT, SCRIPT = b"text/plain; charset=utf-8", b"text/javascript; charset=utf-8"
KINDS = {
    "index.html": b"text/html; charset=utf-8",
    "page.css": b"text/css; charset=utf-8",
    "mark.svg": b"image/svg+xml",
    **dict.fromkeys(
        (
            "app.js",
            "answers.js",
            "ask.js",
            "engine.js",
            "images.js",
            "numbers.js",
            "play.js",
            "prose.js",
            "store.js",
            "tables.js",
            "vendor/htm-preact.js",
        ),
        SCRIPT,
    ),
    "vendor/LICENSES": TEXT,
    "vendor/table.toml": TEXT,
}


class PageFile(msgspec.Struct, frozen=True):
    """Hold one file, its gzip form, its content type, and its ETag, by which browsers validate their caches."""

    content: bytes
    packed: bytes
    kind: bytes
    etag: bytes


def find(name: str) -> PageFile | None:
    """Return a file of the page, or None if the name is unknown or the installation lacks the file."""
    return _read(name) if name in KINDS else None


@cache
def _read(name: str) -> PageFile | None:
    """Read a file of the page.  The cache is bounded by the names in `KINDS`."""
    try:
        content = (STATIC / name).read_bytes()
    except OSError:
        return None
    tag = sha256(content).hexdigest()[:20]
    return PageFile(content, gzip.compress(content, 9, mtime=0), KINDS[name], f'"{tag}"'.encode())


# A viewer's connection buffers up to 64 KiB, so all viewers together take 6 MiB.
MAX_VIEWERS = 100
# Divisible by the rates that viewers may choose.
TICKS_PER_S = 12
RATES = ("1", "2", "3", "4")
DEFAULT_HZ = "2"
# Seconds between two measurements of memory, which take 12 ms for each process and therefore run in a thread.
MEMORY_PERIOD_S = 5.0


# By model: its events, and the revision that a viewer has received.  A reloaded model has a new engine with new events.
Since = dict[str, tuple[RecentEvents, int]]


class EventFrame(msgspec.Struct, frozen=True):
    """Hold one event as a sentence for the page.  An event replaces an earlier one with the same id."""

    id: int
    model: str
    at: float
    kind: str
    text: str


class Feed:
    """Make the frames of one server, and cache the newest one for all viewers.  Only the server's event loop uses it."""

    def __init__(self, service: Service) -> None:
        self.num_viewers = 0
        # The number of frames made so far.
        self.num_made = 0
        self._service = service
        self._started_at = time.time()
        self._tick = -1
        self._shared = b""
        # The encoded requests of the newest frame by key.  None is for administrators, which see the requests of all keys.
        self._requests: dict[str | None, bytes] = {}
        # By service: its last engine and the model card of that engine, also after the engine was stopped.
        self._cards: dict[Service, tuple[Engine, ModelCard]] = {}
        self._memory: dict[int, int] = {}
        self._measured_s = -math.inf

    def __repr__(self) -> str:
        return f"<Feed for {self.num_viewers} viewers, {self.num_made} frames>"

    @property
    def services(self) -> tuple[Service, ...]:
        """The service of each model."""
        return tuple(self._service.services)

    def message(self, tick: int, tenant: str | None, since: Since, **own: bool) -> bytes:
        """Return a server-sent event for one viewer.

        Args:
            tick: a frame of this tick or a later one is used again; otherwise one is made.
            tenant: the viewer sees the requests of this key, or None for all.
            since: the events that the viewer has; it is brought up to date.
            own: further fields of this viewer's message.
        """
        if tick > self._tick:
            self._shared = encode(self._make())
            self._requests.clear()
            self._tick = tick
            self.num_made += 1
        if tenant not in self._requests:
            self._requests[tenant] = encode(self._requests_of(tenant))
        rest = encode({"events": self._events(since), **own})
        # All three are JSON objects, so the fields of one can follow those of another.
        parts = self._shared[:-1], self._requests[tenant][1:-1], rest[1:]
        return b"data: %b,%b,%b\n\n" % parts

    async def measure(self, now: float) -> None:
        """Read the memory of the processes again if the last reading is old."""
        if now < self._measured_s + MEMORY_PERIOD_S:
            return
        self._measured_s = now
        pids = [0, *(pid for service in self._open_services() for pid in _process_ids(service))]
        self._memory = await anyio.to_thread.run_sync(_memory_of, pids)

    def _make(self) -> object:
        models = [self._served(service) for service in self.services]
        residency = residency_of(self._service)
        return server_frame(
            self._service,
            models,
            at=time.time(),
            started_at=self._started_at,
            memory_bytes=self._memory.get(0, 0),
            budget_bytes=None if residency is None else residency.table.budget,
            viewers=self.num_viewers,
        )

    def _requests_of(self, tenant: str | None) -> dict[str, object]:
        requests: list[RequestFrame] = []
        num_more = 0
        for service in self._open_services():
            found, more = request_frames(service, tenant)
            requests += found
            num_more += more
        return {"requests": requests, "more": num_more}

    def _served(self, service: Service) -> MeasuredModel:
        engine, card = self._cards.get(service, (None, None))
        if service.is_starting:
            if card is None and residency_of(service) is not None:
                card = planned_card(service)
            return MeasuredModel(service, card, 0)
        if card is None or engine is not service.engine:
            card = model_card(service)
            self._cards[service] = service.engine, card
        num_bytes = sum(self._memory.get(pid, 0) for pid in _process_ids(service))
        return MeasuredModel(service, card, num_bytes)

    def _open_services(self) -> list[Service]:
        return [service for service in self.services if not service.is_starting]

    def _events(self, since: Since) -> list[EventFrame]:
        found: list[EventFrame] = []
        for service in self._open_services():
            log, name = service.engine.events, model_name(service)
            num_replicas = service.config.data_parallel_size
            known, revision = since.get(name, (log, 0))
            for event in log.since(revision if known is log else 0):
                text = describe(event, num_replicas)
                found.append(EventFrame(event.id, name, event.at, event.kind, text))
            since[name] = log, log.revision
        return found


async def watch(service: Service, context: RequestContext) -> None:
    """Send frames until the client leaves, the server stops, or the request's time is over.

    Raises:
        HTTPError: `hz` is out of range, or there are too many viewers.
    """
    hz = _rate(context)
    service = service.front
    if not isinstance(service.feed, Feed):
        service.feed = Feed(service)
    feed = service.feed
    if feed.num_viewers >= MAX_VIEWERS:
        raise unavailable("too_many_viewers", f"{MAX_VIEWERS} pages are open already")
    feed.num_viewers += 1
    try:
        await _send_frames(feed, service, context, TICKS_PER_S // hz)
    finally:
        feed.num_viewers -= 1


async def _send_frames(feed: Feed, service: Service, context: RequestContext, stride: int) -> None:
    await context.start_events()
    tenant = None if context.is_admin else context.tenant
    since: Since = {}
    tick = math.floor(anyio.current_time() * TICKS_PER_S)
    # A little before the deadline, so that the stream ends in order and the page opens another one.
    while not service.is_draining and context.age_s < context.timeout_s - 1:
        await feed.measure(anyio.current_time())
        may_control = {"may_control": context.is_admin, "has_control": context.has_control}
        await context.send_frame(feed.message(tick, tenant, since, **may_control))
        if context.is_gone:
            return
        now = anyio.current_time() * TICKS_PER_S
        tick = (math.floor(now + 0.01) // stride + 1) * stride
        await anyio.sleep_until(tick / TICKS_PER_S)
    await context.end_events(b"")


def _rate(context: RequestContext) -> int:
    given = context.query().get("hz", [DEFAULT_HZ])[0]
    if given not in RATES:
        raise HTTPError(400, "invalid_value", f"must be {', '.join(RATES)}", param="hz")
    return int(given)


def _process_ids(service: Service) -> Iterable[int]:
    return (pid for executor in service.engine.snapshot().executors for pid in executor.process_ids)


def _memory_of(pids: Iterable[int]) -> dict[int, int]:
    """Return the proportional memory of processes in bytes; 0 means this process.  Ended ones are left out."""
    found: dict[int, int] = {}
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid or 'self'}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        sizes = [int(line.split()[1]) for line in lines if line.startswith("Pss:")]
        found[pid] = 1024 * sum(sizes)
    return found
