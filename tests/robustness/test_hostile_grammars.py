"""Expensive grammars compile while streams run in a worker process: no stream is lost or silent for long.

`HOSTILE_GRAMMARS=1000 pytest -q -s -m slow tests/robustness/test_hostile_grammars.py -k many` draws
this many grammars, and prints the silences of the stream.
"""

import http.client
import itertools
import json
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from time import perf_counter

import anyio
import pytest

from trouper.bench.serve import local_server
from trouper.errors import GenerationError, GrammarError
from trouper.params import SamplingParams, StructuredOutputsParams

from .test_worker_requests import an_engine

pytestmark = pytest.mark.timeout(300)
STREAM = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)


def drawn(seed):
    """Draw one hostile grammar of a random kind and size."""
    dice = random.Random(f"hostile {seed}")
    size = int(2 ** dice.uniform(4, 17.6))  # up to 200,000

    def text(num, letters="abcdefghij"):
        return "".join(dice.choices(letters, k=num))

    kinds = {
        "literal": lambda: {"regex": text(size)},
        "one letter": lambda: {"regex": "a" * size},
        "options": lambda: {"regex": "a?" * (size // 16)},
        "mixed options": lambda: {"regex": "".join(f"{text(1)}?" for _ in range(size // 16))},
        "alternatives": lambda: {"regex": "|".join(text(9) for _ in range(size // 10))},
        "classes": lambda: {"regex": "".join(f"[{text(3)}]" for _ in range(size // 5))},
        "counts": lambda: {"regex": f"(a|b)*a(a|b){{{size // 8}}}"},
        "dots": lambda: {"regex": ".*".join(text(3) for _ in range(size // 40))},
        "choices": lambda: {"choice": [text(9) for _ in range(size // 12 + 1)]},
        "long choices": lambda: {"choice": [text(size // 4 + 1) for _ in range(4)]},
        "const": lambda: {"json": {"const": text(size)}},
        "enum": lambda: {"json": {"enum": [text(20) for _ in range(size // 24 + 1)]}},
        "properties": lambda: {"json": {"properties": {text(8): {"type": "string"} for _ in range(min(2_000, size // 8))}}},
        "lengths": lambda: {"json": {"type": "string", "minLength": size, "maxLength": 2 * size}},
        "rules": lambda: {"grammar": "start: x0\n" + "".join(f'x{i}: "a" x{i + 1} | "b"\n' for i in range(size // 64)) + f'x{size // 64}: "a"'},
    }  # fmt: skip
    return StructuredOutputsParams(**kinds[dice.choice(sorted(kinds))]())


class Siege:
    """Run an engine with a worker, an endless stream, and requests with random grammars; some clients disconnect."""

    def __init__(self, num_grammars):
        self.seeds = iter(range(num_grammars))
        self.silences, self.texts, self.poisoned = [], set(), []
        self.is_over = False

    async def run(self, num_at_once):
        async with an_engine("process") as (engine, worker_group):
            await self.sing(engine, "calm")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.sing_on, engine)
                async with anyio.create_task_group() as hostile:
                    for _ in range(num_at_once):
                        hostile.start_soon(self.ask, engine)
                self.is_over = True
        assert len(worker_group.peers) == 1
        assert len(self.texts) == 1
        assert self.poisoned == []

    async def sing(self, engine, name):
        last = anyio.current_time()
        async for output in engine.generate("def f(", STREAM, name):
            self.silences.append(anyio.current_time() - last)
            last, text = anyio.current_time(), output.outputs[0].text
        self.texts.add(text)

    async def sing_on(self, engine):
        number = 0
        while not self.is_over:
            number += 1
            await self.sing(engine, f"live {number}")

    async def ask(self, engine):
        for seed in self.seeds:
            params = SamplingParams(max_tokens=4, structured_outputs=drawn(seed))
            try:
                with anyio.move_on_after(0.2 if seed % 3 == 0 else 120):
                    async for _ in engine.generate("x =", params, f"hostile {seed}"):
                        pass
            except (GrammarError, GenerationError) as error:
                if "poisoned" in str(error):
                    self.poisoned.append(seed)


@pytest.mark.anyio
@pytest.mark.slow
async def test_random_grammars_cost_no_worker_or_stream():
    await Siege(6).run(6)


@pytest.mark.anyio
@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_many_drawn_grammars_cost_no_worker():
    siege = Siege(int(os.environ.get("HOSTILE_GRAMMARS", "150")))
    await siege.run(16)
    found = sorted(siege.silences)
    print(json.dumps({"p99": found[int(len(found) * 0.99)], "worst": found[-1]}))


class ServerSiege:
    """Send hostile grammars to a server process beside a stream, and record the silences of the stream.

    Other work on the machine makes threads wait for a processor, which says nothing about the server. So the time for which the
    main threads of server and worker waited in the kernel's run queue is subtracted from each silence.
    """

    def __init__(self, server):
        self._port = server.port
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
        (worker,) = [pid for pid, command in commands.items() if b"workers.worker" in command]
        self._stats = [Path(f"/proc/{pid}/schedstat") for pid in (server.pid, worker)]
        self.silences_s, self.statuses = [], set()
        self._is_over = threading.Event()

    def run(self, bodies):
        with ThreadPoolExecutor(17) as threads:
            live = threads.submit(self._sing)
            list(threads.map(self._ask, bodies, itertools.cycle((0.2, 120.0, 120.0))))
            self._is_over.set()
            live.result()

    @contextmanager
    def _post(self, body, timeout_s=120.0):
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=timeout_s)
        kind = {"content-type": "application/json"}
        with closing(connection):
            connection.request("POST", "/v1/completions", body, kind)
            with connection.getresponse() as response:
                yield response

    def _queued_s(self):
        stats = (*self._stats, Path("/proc/thread-self/schedstat"))
        return sum(int(stat.read_text().split()[1]) for stat in stats) / 1e9

    def _sing(self):
        body = {"prompt": "def f(", "max_tokens": 900, "temperature": 0, "ignore_eos": True}
        while not self._is_over.is_set():
            last = None
            with self._post(json.dumps({**body, "stream": True})) as response:
                for line in response:
                    if line.startswith(b"data: {"):
                        now = perf_counter(), self._queued_s()
                        if last is not None:
                            self.silences_s.append(now[0] - last[0] - (now[1] - last[1]))
                        last = now

    def _ask(self, body, timeout_s):
        try:
            with self._post(body, timeout_s) as response:
                self.statuses.add(response.status)
                response.read()
        except TimeoutError:
            pass


def body_of(seed):
    """Encode a request with a hostile grammar."""
    found = drawn(seed)
    rules = {name: getattr(found, name) for name in ("regex", "choice", "json", "grammar")}
    rules = {name: value for name, value in rules.items() if value is not None}
    return json.dumps({"prompt": "x =", "max_tokens": 4, "structured_outputs": rules})


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="reads Linux's run queue")
def test_stream_of_server_is_never_silent_for_long():
    bodies = [body_of(seed) for seed in range(int(os.environ.get("HOSTILE_GRAMMARS", "60")))]
    with local_server() as server:
        siege = ServerSiege(server)
        siege.run(bodies)
    found = sorted(siege.silences_s)
    print(json.dumps({"p99": found[int(len(found) * 0.99)], "worst": found[-6:]}))
    assert siege.statuses <= {200, 400}
    assert len(found) > 100
    assert found[-1] <= 0.1
