"""A whole server with a journal through several lives: engine, handlers, journal and clients, in virtual time.

In each life clients come, read some events, leave and come back behind their cursor.  A life ends by closing, by a kill at a drawn moment, which
may tear the write in progress, or by a loss of power.  The next server recovers from the same disk.  All of it is production code: only
the clock, the order of tasks, the threads, the device and the disk (`SimulatedDisk`) belong to the test.
"""

import copy
import json
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import anyio
import anyio.to_thread
import msgspec

from tests.server.client import Client as HttpClient
from tests.server.test_journal import MODEL, SimulatedDisk
from trouper.actors.engine.wiring import open_engine
from trouper.frontends.server.asgi import durable_requests as requests_module
from trouper.frontends.server.asgi.app import App
from trouper.frontends.server.asgi.routes import durable_route
from trouper.frontends.server.durable import journal as journal_module
from trouper.frontends.server.durable.journal import Journal
from trouper.frontends.server.durable.segments import JournalError, Segments
from trouper.frontends.server.generation import driver as driver_module
from trouper.frontends.server.generation import durable as durable_module
from trouper.frontends.server.generation import stream_readers as readers_module
from trouper.frontends.server.generation.durable import resume_streams
from trouper.frontends.server.http import context as context_module
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared.settings import ServerSettings

from .clients import Broken
from .expected import expected, sampling_of
from .oracles import require
from .ports import SimThreads, TracedRun
from .scenario import STEP_S, VOCAB_SIZE, Client, Scenario, Wish, draw_prompt, streams_of
from .simulated_device import Conditions, SimulatedDevice
from .world import config_of

EPOCH_S = 1e9
KEYS = ("one", "two")
MAX_JOURNAL_BYTES = 2**20
# In virtual seconds: no scenario has 10 % of that to do.
DEADLINE_S = 120.0
# After a refusal, as the server asks.
RETRY_S = 1.0


class Life(msgspec.Struct, kw_only=True):
    """How long a server lives, in virtual seconds, and how it ends.  The last one serves until all clients have everything."""

    lasts_s: float
    end: str = "close"


class DurableScenario(msgspec.Struct, kw_only=True):
    seed: int
    # Sizes of the engine.
    engine: Scenario
    clients: tuple[Client, ...]
    # Which of them ask for events.  The others want whole replies.
    are_streams: tuple[bool, ...]
    lives: tuple[Life, ...]
    policy: str = "group"
    full_rate: float = 0.0
    error_rate: float = 0.0
    # A call of the disk takes this long at most.
    thread_s: float = 0.002
    has_priorities: bool = False
    cancelled_at_step: int | None = None


def draw_durable(seed: int) -> DurableScenario:
    """The scenario that a seed stands for."""
    dice = streams_of(seed)
    lives, faults, lengths = dice("lives"), dice("faults"), dice("lengths")
    ends = [lives.choice(("close", "kill", "kill", "power")) for _ in range(lives.randrange(1, 4))]
    is_bad = faults.random() < 0.25
    clients = tuple(
        Client(wish=draw_durable_wish(lengths), request_id=f"r{i}", arrival_s=lengths.uniform(0, 10 * STEP_S))
        for i in range(lengths.randrange(1, 5))
    )  # fmt: skip
    return DurableScenario(
        seed=seed,
        engine=Scenario(
            seed=seed, clients=(), num_blocks=lengths.choice((8, 12, 40)), max_num_seqs=lengths.choice((1, 2, 4)),
            token_budget=lengths.choice((4, 16)), has_tokenizer=True, steps_in_flight=lengths.choice((1, 2)),
            stream_interval=lengths.choice((1, 1, 3)),
        ),
        clients=clients,
        are_streams=tuple(lengths.random() < 0.8 for _ in clients),
        lives=(
            *(Life(lasts_s=lives.uniform(0.0, 20 * STEP_S), end=end) for end in ends),
            Life(lasts_s=0.0),
        ),
        policy=faults.choice(("off", "group", "step")),
        full_rate=faults.choice((0.0, 0.05)) if is_bad else 0.0,
        error_rate=faults.choice((0.0, 0.05)) if is_bad else 0.0,
        thread_s=faults.choice((0.0, 0.002, 0.03)),
        has_priorities=faults.random() < 0.25,
    )  # fmt: skip


def draw_with_kills(seed: int) -> DurableScenario:
    """One that is killed while its slow disk writes, in the middle of long answers."""
    scenario, dice = draw_durable(seed), streams_of(seed)("kills")
    scenario.thread_s, scenario.full_rate, scenario.error_rate = 0.03, 0.0, 0.0
    kills = [Life(lasts_s=dice.uniform(5, 15) * STEP_S, end="kill") for _ in range(2)]
    scenario.lives = (*kills, Life(lasts_s=0.0))
    scenario.are_streams = (True,) * len(scenario.clients)
    for client in scenario.clients:
        client.wish.max_tokens, client.wish.stop, client.wish.ignore_eos = 14, (), True
    return scenario


def draw_durable_wish(dice: random.Random) -> Wish:
    is_random = dice.random() < 0.7
    return Wish(
        prompt=draw_prompt(dice, 16),
        max_tokens=dice.choice((1, 4, 8, 14)),
        n=dice.choice((1, 1, 2)) if is_random else 1,
        temperature=1.0 if is_random else 0.0,
        seed=dice.choice((None, 7, 11)) if is_random else None,
        stop=dice.choice(((), (), ("ab", "cd"), ("e",))),
        include_stop=dice.random() < 0.3,
        ignore_eos=dice.random() < 0.7,
    )


class Reader:
    """One client through all lives: what it has read of its answer."""

    def __init__(self, index: int, client: Client, *, is_stream: bool) -> None:
        self.index, self.client, self.is_stream = index, client, is_stream
        self.texts = [""] * client.wish.n
        self.reasons: list[str | None] = [None] * client.wish.n
        self.cursor: str | None = None
        self.id: str | None = None
        self.is_done = False
        # Whether all that it has read is in the journal.
        self.is_promised = True

    def __repr__(self) -> str:
        return f"<Reader {self.index} {self.id} at {self.cursor}: {self.texts} {self.reasons}>"

    @property
    def num_tokens(self) -> list[int]:
        """The tokens of each choice that its events have covered."""
        if self.cursor in (None, "end"):
            return []
        return [int(each) for each in self.cursor.partition("-")[0].split(".")]

    @property
    def headers(self) -> list[tuple[str, str]]:
        owner = KEYS[self.index % len(KEYS)]
        # Both owners use the same key.
        found = [
            ("authorization", f"Bearer {owner}"),
            ("idempotency-key", f"key {self.index // 2}"),
        ]
        return found if self.cursor is None else [*found, ("last-event-id", self.cursor)]

    @property
    def body(self) -> dict[str, Any]:
        wish = self.client.wish
        given = {
            "prompt": list(wish.prompt), "max_tokens": wish.max_tokens, "n": wish.n, "seed": wish.seed,
            "temperature": wish.temperature, "stop": list(wish.stop), "ignore_eos": wish.ignore_eos,
            "include_stop_str_in_output": wish.include_stop, "stream": self.is_stream,
        }  # fmt: skip
        return {name: value for name, value in given.items() if value not in (None, [])}

    def take(self, choices: list[dict[str, Any]]) -> None:
        for choice in choices:
            i = choice["index"]
            require(self.reasons[i] is None, "text behind the end", self, choice)
            self.texts[i] += choice["text"]
            self.reasons[i] = choice["finish_reason"]


class KillableDisk(SimulatedDisk):
    """A disk that a kill leaves as it was between two calls of the thread's work in progress, or within the last one, if it is a write."""

    def __init__(self, dice: random.Random, **rates: float) -> None:
        super().__init__(dice, **rates)
        self._left: Any = None
        # Before each call of the work in progress; and the file and the length of the last call, if it is a write.
        self._before: list[Any] = []
        self._last_write: tuple[str, int] | None = None
        self.num_errors = 0

    def note_done(self) -> None:
        """The thread has returned, and the journal knows it."""
        self._before.clear()
        self._last_write = None

    def _note_call(self, write: tuple[str, int] | None = None) -> None:
        self._before.append(self._contents())
        self._last_write = write

    def _contents(self) -> Any:
        """Copy everything that a later call may change."""
        files, unlinked = (
            {name: file.copied() for name, file in each.items()}
            for each in (self.files, self.unlinked)
        )
        return files, self.graves[:], unlinked

    def create(self, name: str) -> str:
        self._note_call()
        with self._counted():
            return super().create(name)

    def write(self, name: str, data: bytes) -> int:
        self._note_call((name, len(data)))
        num_written = super().write(name, data)
        self.num_errors += num_written < len(data)
        return num_written

    def sync(self, name: str) -> None:
        if name not in self.files:
            # It was replaced meanwhile, and its descriptor still works.
            return
        self._note_call()
        with self._counted():
            super().sync(name)

    def unlink(self, name: str) -> None:
        self._note_call()
        super().unlink(name)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            self.num_errors += 1
            raise

    def kill(self) -> None:
        """Save the disk for the next life, so that later calls change nothing there."""
        now = self._contents()
        self._left = self._dice.choice([*self._before, now, now])
        if self._left is now and self._last_write is not None:
            name, length = self._last_write
            file, num_torn = now[0][name], self._dice.randrange(length + 1)
            if num_torn and not file.has_failed:
                del file.data[-num_torn:]
                place, piece = file.since[-1]
                file.since[-1] = place, piece[:-num_torn]

    def begin_life(self, *, power: bool) -> None:
        if self._left is not None:
            self.files, self.graves, self.unlinked = self._left
            self._left = None
        self.end_life(power=power)
        self.note_done()


class DurableWorld(TracedRun):
    """Everything that one run knows."""

    def __init__(
        self,
        scenario: DurableScenario,
        trace: Callable[..., None] | None = None,
    ) -> None:
        super().__init__(scenario.seed, trace)
        self.scenario = scenario
        self.broken: Exception | None = None
        self.num_steps = 0
        self.readers = [
            Reader(i, client, is_stream=is_stream)
            for i, (client, is_stream) in enumerate(zip(scenario.clients, scenario.are_streams, strict=True))
        ]  # fmt: skip
        self.disk = KillableDisk(
            self._dice("disk"), full_rate=scenario.full_rate, error_rate=scenario.error_rate
        )
        self._threads = SimThreads(self._dice("threads"), 100, scenario.thread_s)
        self._is_dead = False
        self._journal: Journal = None  # type: ignore[assignment]  # of the present life
        # How often the disk had failed before this life.
        self._num_errors = 0

    def at_rest(self) -> None:
        """Called between two moments; must not raise there."""
        num_bytes = sum(len(file.data) for file in self.disk.files.values())
        if num_bytes > MAX_JOURNAL_BYTES:
            self.broken = Broken(f"the journal has {num_bytes} bytes")

    async def run(self) -> None:
        with self._patched(), anyio.move_on_after(DEADLINE_S) as deadline:
            for number, life in enumerate(self.scenario.lives):
                is_last = number == len(self.scenario.lives) - 1
                self.record("life", number, life.end)
                self._is_dead = False
                await self._live(life, is_last=is_last)
                self.disk.begin_life(power=life.end == "power")
                if life.end == "power" and self.scenario.policy != "step":
                    self._break_promises()
        if self.broken is not None:
            raise self.broken
        require(not deadline.cancelled_caught, "an answer never ends", self.readers)
        for reader in self.readers:
            self._check(reader)

    @contextmanager
    def _patched(self) -> Iterator[None]:
        """Virtual time and drawn threads for the server."""
        dice = self._dice("seeds")
        clock = SimpleNamespace(
            time=lambda: EPOCH_S + anyio.current_time(), monotonic=anyio.current_time
        )
        secrets = SimpleNamespace(
            randbits=dice.getrandbits, token_hex=lambda size: dice.randbytes(size).hex()
        )

        async def run_sync(
            function: Callable[..., Any], *args: Any, limiter: Any = None, **_: Any
        ) -> Any:
            if limiter is None:
                result = await self._threads.run_at_once(function, *args)
            else:
                async with limiter:
                    result = await self._threads.run_at_once(function, *args)
            self.disk.note_done()
            return result

        with ExitStack() as patches:
            for module in (
                journal_module, durable_module, driver_module, readers_module, requests_module,
            ):  # fmt: skip
                patches.enter_context(patch.object(module, "time", clock))
            patches.enter_context(patch.object(context_module, "token_hex", secrets.token_hex))
            for module in (durable_module, requests_module):
                patches.enter_context(patch.object(module, "secrets", secrets))
            patches.enter_context(patch.object(anyio.to_thread, "run_sync", run_sync))
            patches.enter_context(patch.object(journal_module.logger, "disabled", True))
            yield

    async def _live(self, life: Life, *, is_last: bool) -> None:
        scenario = self.scenario
        if is_last:
            # The last disk has no faults, so that every answer can end.
            self.disk.full_rate = self.disk.error_rate = 0.0
        sizes = scenario.engine
        device = SimulatedDevice(
            sizes.num_blocks + 1, sizes.block_size, VOCAB_SIZE, sizes.steps_in_flight, Conditions(STEP_S)
        )  # fmt: skip
        with anyio.CancelScope() as process:
            async with open_engine(config_of(sizes), device, self._threads) as engine:
                segments = Segments(
                    cast("Any", self.disk), MODEL, lambda: self._dice("ids").randbytes(16),
                    max_bytes=MAX_JOURNAL_BYTES, syncs=scenario.policy == "step",
                )  # fmt: skip
                try:
                    segments.begin()
                except JournalError:
                    # The server does not start, and the folder is as it was.
                    self.record("no start")
                    segments.close()
                    return
                self._check_recovered(segments)
                service = Service(ServerSettings(responses_store_bytes=2**20, api_keys=KEYS))
                service.open(engine)
                self._journal = service.journal = Journal(segments, scenario.policy, retain_s=600)  # type: ignore[arg-type]
                http = HttpClient(App(service))
                async with anyio.create_task_group() as writers:
                    await writers.start(service.journal.run_writer)
                    async with anyio.create_task_group() as tasks:
                        await tasks.start(service.background.run_tasks)
                        _, streams = service.journal.take_recovered()
                        resume_streams(service, streams, durable_route)
                        async with anyio.create_task_group() as audience:
                            for reader in self.readers:
                                audience.start_soon(self._visit_often, reader, http, is_last)
                            if not is_last:
                                await anyio.sleep(life.lasts_s)
                                self._end(life, process, audience.cancel_scope)
                        tasks.cancel_scope.cancel()
                    writers.cancel_scope.cancel()
                self.num_steps += 1
        if life.end == "close":
            require(not self.disk.open, "a descriptor is left", self.disk.open)

    def _end(self, life: Life, process: Any, audience: Any) -> None:
        self._is_dead = True
        self.record(life.end)
        if not self._journal.is_working or self.disk.num_errors > self._num_errors:
            # Clients were told, or the disk has lost what was on it.
            self._break_promises()
        self._num_errors = self.disk.num_errors
        if life.end == "close":
            audience.cancel()
        else:
            self.disk.kill()
            process.cancel()

    def _break_promises(self) -> None:
        for reader in self.readers:
            reader.is_promised = reader.is_promised and reader.id is None

    # Clients

    async def _visit_often(self, reader: Reader, http: HttpClient, is_last: bool) -> None:
        dice = self._dice(f"reader {reader.index} {anyio.current_time()}")
        await anyio.sleep(reader.client.arrival_s)
        while not reader.is_done and not self._is_dead:
            leaves_after = None if is_last or dice.random() < 0.6 else dice.randrange(6)
            await self._visit(reader, http, leaves_after)
            await anyio.sleep(RETRY_S if is_last else dice.choice((0.0, STEP_S, 8 * STEP_S)))
        if is_last and not self._is_dead:
            await self._read_again(reader, http)

    async def _visit(self, reader: Reader, http: HttpClient, leaves_after: int | None) -> None:
        """Ask, or come back behind the cursor, and read some events."""
        body, num_events, place = json.dumps(reader.body).encode(), 0, 0
        head = [("content-type", "application/json"), *reader.headers]
        async with http.stream("POST", "/v1/completions", body, head) as call:
            answer = call.answer
            while not reader.is_done and num_events != leaves_after:
                is_event = reader.is_stream and answer.status == 200

                def has_news() -> bool:
                    more = b"\n\n" in answer.body[place:] if is_event else answer.is_complete  # noqa: B023
                    return more or call.is_over.is_set() or answer.is_complete

                await call.wait_for(has_news)
                if self._is_dead:
                    return
                if not (reader.is_stream and answer.status == 200):
                    if answer.is_complete:
                        self._take_whole(reader, answer)
                    return
                end = answer.body.find(b"\n\n", place)
                if end < 0:
                    return
                frame, place = answer.body[place:end], end + 2
                if not frame.startswith(b":"):
                    num_events += 1
                    reader.id = answer.headers["x-stream-id"]
                    self._take_event(reader, frame)

    def _take_event(self, reader: Reader, frame: bytes) -> None:
        fields = dict(line.split(b": ", 1) for line in frame.split(b"\n"))
        self.record("event", reader.index, fields)
        content = fields[b"data"]
        if content == b"[DONE]":
            reader.is_done, reader.cursor = True, "end"
            return
        event = json.loads(content)
        if "error" in event:
            require(self._is_dead, "an answer failed", reader, event)
            return
        require(b"id" in fields, "an event without a cursor", reader, frame)
        require(fields[b"id"].decode() != reader.cursor, "an event twice", reader, frame)
        reader.cursor = fields[b"id"].decode()
        reader.take(event["choices"])

    def _take_whole(self, reader: Reader, answer: Any) -> None:
        self.record("whole", reader.index, answer.status, answer.body)
        if answer.status == 503 and not self._journal.is_working:
            return
        is_full = answer.status in (429, 503)
        require(answer.status == 200 or is_full, "an answer failed", reader, answer)
        if answer.status == 200:
            reader.id = answer.headers["x-stream-id"]
            reader.take(answer.json["choices"])
            reader.is_done = True

    async def _read_again(self, reader: Reader, http: HttpClient) -> None:
        """Read everything from the beginning; and a stranger reads nothing."""
        first = copy.copy(reader)
        again = Reader(reader.index, reader.client, is_stream=reader.is_stream)
        while not again.is_done:
            await self._visit(again, http, None)
            await anyio.sleep(RETRY_S)
        is_same = (again.texts, again.reasons) == (first.texts, first.reasons)
        if first.is_promised:
            require(again.id == first.id, "another stream", first, again)
            require(is_same, "another text", first, again)
        other = KEYS[(reader.index + 1) % len(KEYS)]
        answer = await http.get(f"/v1/streams/{again.id}", [("authorization", f"Bearer {other}")])
        require(answer.status == 404, "a stranger finds a stream", reader, answer)

    # What must hold

    def _check_recovered(self, segments: Segments) -> None:
        """Everything that a client has read is there, in the order of admission."""
        streams = segments.streams
        times = [stream.admitted.at for stream in streams.values()]
        require(times == sorted(times), "recovered out of order", times)
        for reader in self.readers:
            record = streams.get(reader.id or "")
            if record is None:
                is_lost = reader.id is not None and reader.is_promised
                require(not is_lost, "a stream is lost", reader, list(streams))
                continue
            is_whole = len(record.finished) == reader.client.wish.n or not reader.is_promised
            require(is_whole or not reader.is_done, "read before it was written", reader, record)
            for choice, num_read in enumerate(reader.num_tokens):
                num_kept = record.counts.get(choice, 0)
                is_kept = num_kept >= num_read or not reader.is_promised
                require(is_kept, "read before it was written", reader, num_kept, num_read)

    def _check(self, reader: Reader) -> None:
        """The pieces of all lives make up the text that the request has alone."""
        require(reader.is_done, "no end", reader)
        wish, sizes = reader.client.wish, self.scenario.engine
        if wish.seed is None and wish.temperature:
            # Its seed was drawn; the whole answer was compared with its pieces.
            return
        for index in range(wish.n):
            want = expected(
                wish, tuple(wish.prompt), sampling_of(wish, index, 0), sizes.max_model_len, True
            )
            found = reader.texts[index], reader.reasons[index]
            require(found == (want.text, want.finish_reason), "wrong text", reader, index, want)
