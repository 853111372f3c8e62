"""Put load on an OpenAI-compatible server, which can also be started here, and measure latencies at its clients.

Arrival times follow vLLM's serving benchmark: gamma-distributed gaps (a Poisson process for burstiness 1), scaled so
that the last request arrives after exactly num / rate seconds. A request is sent at its time even if earlier ones are
slow, because real clients do not wait for each other either.

The client shares the machine with the server, so it must be cheap: it splits the bytes at line ends and decodes only
the fields below, which takes about 1 µs per event.
"""

import json
import math
import random
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Literal, NamedTuple

import anyio
import httpx2
import msgspec

from trouper.bench.datasets import SampleRequest
from trouper.bench.report import Latency, Point, num_good, summary
from trouper.config.model import DEMO_MODEL
from trouper.errors import TrouperError, TrouperValidationError

# An error quotes at most this many characters of an answer.
ERROR_CHARS = 200


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        return bool(self.text or (self.delta is not None and self.delta.content))


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class Outcome(msgspec.Struct):
    """The outcome of one request; times are in seconds on the client's clock.

    Attributes:
        due: when the request should be sent; `sent` is later if the concurrency is limited.
        first, last: arrival of the first and the last text.
        gaps: seconds between consecutive events with text.
        num_prompt_tokens, num_output_tokens: the server's counts.
        is_finished: whether the server sent a finish reason.
        is_done: whether the server sent `[DONE]`.
    """

    due: float
    sent: float = 0.0
    first: float | None = None
    last: float = 0.0
    ended: float = 0.0
    gaps: list[float] = []
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    is_finished: bool = False
    is_done: bool = False
    error: str | None = None

    def note_text(self, now: float) -> None:
        if self.first is None:
            self.first = now
        else:
            self.gaps.append(now - self.last)
        self.last = now

    def figures(self) -> dict[str, float]:
        """Return the latencies in ms; `tpot` exists only with more than one token.

        They have vLLM's names, so the two programs' reports can be compared.
        """
        found = {"e2el": self.ended - self.sent, "client_queue_time": self.sent - self.due}
        if self.first is not None:
            found["ttft"] = self.first - self.sent
            if self.num_output_tokens > 1:
                found["tpot"] = (self.last - self.first) / (self.num_output_tokens - 1)
        return {name: 1000 * value for name, value in found.items()}


class EventCutter:
    """Extracts the payloads of `data:` lines from chunks of bytes; an event may span several chunks.

    Lines end with \\n or \\r\\n. Comments and other fields are ignored.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


_decode = msgspec.json.Decoder(_Event).decode


async def ask(client: httpx2.AsyncClient, path: str, body: bytes, outcome: Outcome) -> None:
    """Send a request and record its times in `outcome`; a failure is stored in `outcome.error`, not raised.

    Times are taken when bytes arrive, and parsing waits until the end of the answer.
    """
    outcome.sent = perf_counter()
    try:
        async with client.stream("POST", path, content=body) as response:
            if response.status_code == 200:
                await _read(response, outcome)
            else:
                await response.aread()
                outcome.error = f"HTTP {response.status_code}"
    except httpx2.HTTPError as error:
        outcome.error = type(error).__name__
    outcome.ended = perf_counter()


async def _read(response: httpx2.Response, outcome: Outcome) -> None:
    """Read a stream to its end, so that the connection can be reused."""
    cutter = EventCutter()
    async for chunk in response.aiter_raw():
        now = perf_counter()
        for payload in cutter.feed(chunk):
            if outcome.error is None:
                outcome.error = _take(payload, now, outcome)
    if outcome.error is None and not outcome.is_done:
        outcome.error = "the stream was cut"


def _take(payload: bytes, now: float, outcome: Outcome) -> str | None:
    """Record one event of the stream; return an error if it is invalid, else None."""
    if payload == b"[DONE]":
        outcome.is_done = True
        return None if outcome.is_finished else "no finish_reason"
    try:
        event = _decode(payload)
    except msgspec.DecodeError as error:
        return f"bad event: {error}"[:ERROR_CHARS]
    if event.error is not None:
        return f"error event: {event.error}"[:ERROR_CHARS]
    if event.usage is not None:
        outcome.num_prompt_tokens = event.usage.prompt_tokens
        outcome.num_output_tokens = event.usage.completion_tokens or 0
    for choice in event.choices:
        if choice.finish_reason in ("error", "abort"):
            return f"finish_reason {choice.finish_reason}"
        outcome.is_finished |= choice.finish_reason is not None
        if choice.has_text:
            outcome.note_text(now)
    return None


class LocalServer(NamedTuple):
    """A running server process on this machine, with the process id to measure its memory and processor time."""

    port: int
    pid: int


@contextmanager
def local_server(*arguments: str) -> Iterator[LocalServer]:
    """Run `trouper serve` with these arguments on a free port until the block ends.

    Raises:
        SystemExit: the server did not start, or exited with a code other than 0.
    """
    command = [sys.executable, "-m", "trouper", "serve", *arguments, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        lines: list[str] = []
        for line in server.stderr:
            lines.append(line)
            if "serving" in line:
                break
        else:
            raise SystemExit("the server did not start: " + "".join(lines[-3:]).strip())
        # A full pipe would stop the server at its next log line.
        reader = threading.Thread(target=server.stderr.read)
        reader.start()
        try:
            yield LocalServer(int(re.findall(r":(\d+)", line)[-1]), server.pid)
        finally:
            server.terminate()
            reader.join()
    if server.returncode:
        raise SystemExit(f"the server exited with code {server.returncode}")


@contextmanager
def demo_of_length(num_positions: int) -> Iterator[str]:
    """Yield a folder with the demo model, changed to take more positions than it was trained on.

    Answers have no meaning beyond the trained positions, but their speed is real.
    """
    with tempfile.TemporaryDirectory() as folder:
        for file in DEMO_MODEL.iterdir():
            (Path(folder) / file.name).symlink_to(file)
        config = json.loads((DEMO_MODEL / "config.json").read_text())
        (Path(folder) / "config.json").unlink()
        config["max_position_embeddings"] = num_positions
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield folder


PATHS = {"completions": "completions", "chat": "chat/completions"}
METRICS = ("ttft", "tpot", "itl", "e2el", "client_queue_time")
PLOTTED = {"time to first token": "ttft", "time of a request": "e2el"}
OBJECTIVES = ("ttft", "tpot", "e2el")


class ServerError(TrouperError):
    """No server answered, or none of its answers was complete.

    A report without a single completed request would have no meaning. The message contains the most frequent error.
    """


class RequestLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load on a server: where and how to send requests; `timeout_s` is the maximum time without a byte."""

    url: str = "http://127.0.0.1:8000/v1"
    endpoint: Literal["completions", "chat"] = "completions"
    model: str = ""
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    seed: int = 0
    api_key: str | None = None
    timeout_s: float = 600.0
    percentiles: tuple[float, ...] = (50.0, 90.0, 99.0)
    goodput: dict[str, float] = {}
    extra_body: dict[str, Any] = {}

    def check(self) -> None:
        """Check all values before the first request is sent.

        Nothing has been sent by then.

        Raises:

            TrouperValidationError: a value is invalid; the message names its option.
        """
        if not self.url.startswith(("http://", "https://")):
            raise TrouperValidationError(
                "must begin with http:// or https://", parameter="url", value=self.url
            )
        for name, value in (("request_rate", self.request_rate), ("burstiness", self.burstiness)):
            if not value > 0:
                raise TrouperValidationError("must be positive", parameter=name, value=value)
        for q in self.percentiles:
            if not 0 <= q <= 100:
                raise TrouperValidationError(
                    "must be in [0, 100]", parameter="metric_percentiles", value=q
                )

    def body(self, request: SampleRequest) -> bytes:
        """Return the body of a request; the server's own sampling applies unless `extra_body` changes it.

        All bodies are encoded before the measurement, so that the client needs little time during it.
        """
        if self.endpoint == "chat":
            prompt: dict[str, Any] = {"messages": [{"role": "user", "content": request.text}]}
        else:
            prompt = {"prompt": request.text or request.prompt_token_ids}
        if request.schema is not None:
            named = {"name": "record", "schema": request.schema}
            prompt["response_format"] = {"type": "json_schema", "json_schema": named}
        body = {
            "model": self.model,
            **prompt,
            "max_tokens": request.output_len,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra_body,
        }
        return msgspec.json.encode(body)


def open_client(load: RequestLoad) -> httpx2.AsyncClient:
    headers = {"content-type": "application/json", "accept-encoding": "identity"}
    if load.api_key is not None:
        headers["authorization"] = f"Bearer {load.api_key}"
    try:
        return httpx2.AsyncClient(
            base_url=load.url.rstrip("/") + "/",
            headers=headers,
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            timeout=load.timeout_s,
            trust_env=False,
        )
    except (httpx2.InvalidURL, UnicodeError) as error:
        raise TrouperValidationError(str(error), parameter="url", value=load.url) from None


async def first_model(client: httpx2.AsyncClient, wanted: str = "") -> str:
    """Return `wanted`, or else the first model of `/v1/models`.

    The list is requested in both cases, to check that a server answers.  Raises ServerError if not.
    """
    try:
        answer = await client.get("models")
        answer.raise_for_status()
        return wanted or answer.json()["data"][0]["id"]
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        problem = str(error).partition("\n")[0] or type(error).__name__
        raise ServerError(f"no answer from {client.base_url}models: {problem}") from None
    except (ValueError, LookupError, TypeError):
        raise ServerError(f"{client.base_url}models lists no models") from None


async def send_all(
    client: httpx2.AsyncClient,
    load: RequestLoad,
    requests: Sequence[SampleRequest],
    step: Callable[[], object] = lambda: None,
) -> list[Outcome]:
    """Send each request at its arrival time, and return the outcomes in the order of the requests.

    A limit of concurrency delays requests in the client, and this time is reported separately.
    """
    rng = random.Random(load.seed)
    times = arrival_times(len(requests), load.request_rate, rng, burstiness=load.burstiness)
    places = anyio.CapacityLimiter(load.max_concurrency or math.inf)
    outcomes: list[Outcome] = []

    async def send(body: bytes, outcome: Outcome) -> None:
        async with places:
            await ask(client, PATHS[load.endpoint], body, outcome)
        step()

    bodies = [load.body(request) for request in requests]
    started = perf_counter()
    async with anyio.create_task_group() as tasks:
        for body, time in zip(bodies, times, strict=True):
            outcome = Outcome(due=started + time)
            outcomes.append(outcome)
            await anyio.sleep(max(0.0, outcome.due - perf_counter()))
            tasks.start_soon(send, body, outcome)
    return outcomes


async def measure(
    client: httpx2.AsyncClient,
    load: RequestLoad,
    requests: Sequence[SampleRequest],
    step: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Send all requests and return the record of the run under vLLM's keys."""
    cpu, started = process_time(), perf_counter()
    outcomes = await send_all(client, load, requests, step)
    duration = perf_counter() - started
    record = evaluate(outcomes, duration, load)
    # As a share of one core: near 1, the client itself was the bottleneck.
    record["client_cpu_share"] = (process_time() - cpu) / duration
    return record


def evaluate(outcomes: Sequence[Outcome], duration: float, load: RequestLoad) -> dict[str, Any]:
    """Summarize the outcomes under vLLM's keys; latencies are in ms and include only completed requests.

    Failed requests are counted by their errors. Throughputs are per second.
    """
    done = [outcome for outcome in outcomes if outcome.error is None]
    errors = Counter(outcome.error for outcome in outcomes if outcome.error is not None)
    figures = [outcome.figures() for outcome in done]
    num_in = sum(outcome.num_prompt_tokens for outcome in done)
    num_out = sum(outcome.num_output_tokens for outcome in done)
    record: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "errors": dict(errors.most_common()),
        "total_input_tokens": num_in,
        "total_output_tokens": num_out,
        "request_throughput": len(done) / duration,
        "output_throughput": num_out / duration,
        "total_token_throughput": (num_in + num_out) / duration,
        "max_concurrency": load.max_concurrency,
        "max_concurrent_requests": most_at_once(outcomes),
    }
    if load.goodput:
        record["request_goodput"] = num_good(figures, load.goodput) / duration
    values = {name: [f[name] for f in figures if name in f] for name in METRICS if name != "itl"}
    values["itl"] = [1000 * gap for outcome in done for gap in outcome.gaps]
    for name in METRICS:
        for statistic, value in summary(values[name], load.percentiles).items():
            record[f"{statistic}_{name}_ms"] = value
    return record


def most_at_once(outcomes: Sequence[Outcome]) -> int:
    """Return the largest number of simultaneously open requests, which may be below the allowed concurrency if the server is fast.

    Reports and plots show it.
    """
    edges = [(o.sent, 1) for o in outcomes] + [(o.ended, -1) for o in outcomes]
    highest = now = 0
    for _, change in sorted(edges):
        now += change
        highest = max(highest, now)
    return highest


def parse_goodput(texts: Sequence[str]) -> dict[str, float]:
    """Parse objectives such as `ttft:200`, a time to first token of at most 200 ms.

    Times are milliseconds.

    Raises:

        TrouperValidationError: an unknown name, or an invalid number.
    """
    objectives: dict[str, float] = {}
    for text in texts:
        name, _, limit = text.partition(":")
        try:
            objectives[name] = float(limit)
        except ValueError:
            objectives[name] = math.nan
        if name not in OBJECTIVES or not objectives[name] >= 0:
            raise TrouperValidationError(
                f"must be one of {', '.join(OBJECTIVES)}, a colon and milliseconds",
                parameter="goodput",
                value=text,
            )
    return objectives


def points(records: Sequence[dict[str, Any]]) -> list[Point]:
    """Return the points of the plot, at the allowed or else the observed concurrency; failed runs have none."""
    return [
        Point(
            record["max_concurrency"] or record["max_concurrent_requests"],
            record["output_throughput"],
            {
                name: Latency(record[f"median_{metric}_ms"], record[f"p99_{metric}_ms"])
                for name, metric in PLOTTED.items()
                if f"median_{metric}_ms" in record
            },
        )
        for record in records
        if "median_e2el_ms" in record
    ]


def arrival_times(
    num: int, rate: float, rng: random.Random, *, burstiness: float = 1.0
) -> list[float]:
    """Return the arrival time of each request, in seconds from the start.

    Args:
        rate: requests per second; with infinity all arrive at the start.
        burstiness: shape of the gamma distribution; below 1 requests arrive in bursts, above 1 more evenly.
    """
    if math.isinf(rate):
        return [0.0] * num
    gaps = [rng.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in range(num)]
    times = list(accumulate(gaps))
    scale = num / rate / times[-1] if times and times[-1] > 0 else 1.0
    return [time * scale for time in times]
