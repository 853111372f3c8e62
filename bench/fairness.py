"""Measure fairness: how long short requests, streams and other keys wait for long prompts.

By default the real policy runs in virtual time, on a model of a machine fitted to measured step times. Figures are ratios to the same
request on an idle machine, or to the same workload in order of arrival.

On a real server, the ratios are taken within one run: a server is started for each scheduling order, and threads send requests over
HTTP. Prompts are random token ids, so they share no prefix. `trouper bench fairness` is the command.
"""

import http.client
import json
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from time import perf_counter, sleep
from typing import Any

from trouper.bench.serve import demo_of_length, local_server
from trouper.bench.virtual_time import (
    Played,
    VirtualClient,
    VirtualMachine,
    VirtualRun,
    policy_of,
    quantiles,
    teach,
)

# Tokens of a long prompt.
LONG = 20_000
# Tokens of the small requests that an agent sends during a long one.
TITLES = 161, 586
# A request is satisfied if it takes at most this many times as long as on an idle machine.
SATISFIED = 3.0


def titles(machine: VirtualMachine, num_long: int) -> list[VirtualClient]:
    """Return short requests spread over the computation of long prompts, all with one key.

    It models a chat program that asks for short titles while documents are summarised.
    """
    dice, unit = random.Random(5), machine.alone_s(LONG) * num_long
    clients = [VirtualClient(0.001 * i, LONG, 64, "long", "a") for i in range(num_long)]
    for i in range(24):
        arrival_s = unit * (i + dice.random()) / 24 * 0.95 + 0.01
        clients.append(VirtualClient(arrival_s, dice.choice(TITLES), 24, "short", "a"))
    return clients


def streams(machine: VirtualMachine) -> list[VirtualClient]:
    """Return 16 streams and ten documents that arrive while they run.

    It models a server with chats and a batch of documents at the same time.
    """
    chats = [VirtualClient(0.001 * i, 40, 600, "stream", f"u{i % 4}") for i in range(16)]
    return [*chats, *(VirtualClient(2.0 + 0.01 * i, 10_000, 16, "long", "docs") for i in range(10))]


def stream_and_prompt(machine: VirtualMachine) -> list[VirtualClient]:
    """Return 16 streams and one prompt of 20,000 tokens.

    The pauses of the streams show how long one prompt can block them. Nothing else competes with them.
    """
    chats = [VirtualClient(0.001 * i, 40, 600, "stream", f"u{i % 4}") for i in range(16)]
    return [*chats, VirtualClient(1.0, LONG, 16, "long", "docs")]


def agents(machine: VirtualMachine) -> list[VirtualClient]:
    """Return requests with five keys, a few of them very long, at 70 % of the machine's capacity.

    Their lengths follow a heavy-tailed distribution, like the requests of coding agents.
    """
    dice, arrival_s = random.Random(3), 0.0
    clients: list[VirtualClient] = []
    for _ in range(250):
        num_prompt = max(16, min(24_000, int(60 * dice.paretovariate(0.75))))
        kind = "short" if num_prompt < 500 else "middle" if num_prompt < 4000 else "long"
        num_output, key = dice.choice((16, 32, 64, 128)), f"k{dice.randrange(5)}"
        clients.append(VirtualClient(0.0, num_prompt, num_output, kind, key))
    work_s = sum(machine.alone_s(client.num_prompt) for client in clients)
    for client in clients:
        arrival_s += dice.expovariate(0.7 * len(clients) / work_s)
        client.arrival_s = arrival_s
    return clients


def greedy_key(machine: VirtualMachine) -> list[VirtualClient]:
    """Return twelve long prompts with one key, short requests with another, and one long prompt with a third.

    It shows whether one client can take the share of the others.
    """
    dice, unit, arrival_s = random.Random(4), machine.alone_s(LONG), 1.0
    clients = [VirtualClient(0.01 * i, LONG, 8, "greedy", "mallory") for i in range(12)]
    while arrival_s < 10 * unit:
        clients.append(
            VirtualClient(arrival_s, dice.choice((100, 161, 300, 586)), 24, "short", "alice")
        )
        arrival_s += dice.expovariate(6 / unit)
    return [*clients, VirtualClient(unit / 2, LONG, 24, "long", "bob")]


def short_only(machine: VirtualMachine) -> list[VirtualClient]:
    """Return short requests at 56 % of the machine's capacity. Fairness must not make the ordinary case slower."""
    dice, arrival_s = random.Random(6), 0.0
    clients: list[VirtualClient] = []
    for _ in range(300):
        arrival_s += dice.expovariate(0.148 / 0.45 / machine.alone_s(150))
        clients.append(VirtualClient(arrival_s, dice.randrange(60, 240), 32, "short", "k"))
    return clients


def overload(machine: VirtualMachine) -> list[VirtualClient]:
    """Return short requests that arrive faster than the machine computes them."""
    dice, unit = random.Random(6), machine.alone_s(150)
    return [
        VirtualClient(
            i * unit * 0.9 * dice.uniform(0.5, 1.5), dice.randrange(60, 240), 32, "short", "k"
        )
        for i in range(200)
    ]


def batch(machine: VirtualMachine) -> list[VirtualClient]:
    """Return twelve prompts of 8,000 tokens without streaming."""
    return [
        VirtualClient(0.001 * i, 8000, 64, "long", f"k{i % 2}", is_stream=False) for i in range(12)
    ]


def long_batch(machine: VirtualMachine) -> list[VirtualClient]:
    """Return a batch of about five minutes without streaming."""
    num_prompts = max(12, int(300 / machine.alone_s(8000)))
    return [
        VirtualClient(0.001 * i, 8000, 64, "long", f"k{i % 2}", is_stream=False)
        for i in range(num_prompts)
    ]


def flood(machine: VirtualMachine) -> list[VirtualClient]:
    """Return short requests at 90 % of the machine's capacity, and a long prompt with the same key.

    An order by remaining work would starve the long prompt.
    """
    dice, unit, arrival_s = random.Random(7), machine.alone_s(300), 0.0
    clients = [VirtualClient(0.5, LONG, 8, "long", "a")]
    for _ in range(400):
        arrival_s += dice.expovariate(0.9 / unit)
        clients.append(VirtualClient(arrival_s, 300, 4, "short", "a"))
    return clients


WORKLOADS: dict[str, Callable[[VirtualMachine], list[VirtualClient]]] = {
    "titles-1": lambda machine: titles(machine, 1),
    "titles-3": lambda machine: titles(machine, 3),
    "titles-10": lambda machine: titles(machine, 10),
    "streams": streams,
    "stream-and-prompt": stream_and_prompt,
    "agents": agents,
    "greedy-key": greedy_key,
    "short-only": short_only,
    "overload": overload,
    "batch": batch,
    "long-batch": long_batch,
    "flood": flood,
}
ORDERS: dict[str, dict[str, Any]] = {
    "arrival": {"max_step_ms": 0},
    "threshold": {"max_step_ms": 0, "long_prefill_token_threshold": 256},
    "fair": {"max_step_ms": None},
}


def measure(
    workload: str, machine: VirtualMachine, order: str, *, noise: float = 0.1
) -> dict[str, Any]:
    """Run a workload in one order of prompts, in virtual time.

    Returns the first-token times, pauses and shares of its clients.  `noise` is the relative random error of step
    times.
    """
    policy = policy_of(machine, **ORDERS[order])
    if policy.turns is not None:
        teach(policy.turns.times, machine)
    played = VirtualRun(WORKLOADS[workload](machine), machine, policy, noise=noise).finish()
    return {
        "workload": workload,
        "machine": machine.name,
        "order": order,
        **describe(played, machine),
    }


def describe(played: Played, machine: VirtualMachine) -> dict[str, Any]:
    """Return figures of all clients together, and of each kind of client.

    Slowdowns are ratios to the time of the same request on an idle machine.
    """
    clients = played.clients
    slowdowns = [c.first_token_s / machine.alone_s(c.num_prompt) for c in clients]
    shares = [1 / slowdown for slowdown in slowdowns]
    kinds = {
        kind: _describe_kind([c for c in clients if c.kind == kind], machine)
        for kind in dict.fromkeys(c.kind for c in clients)
    }
    return {
        "total_s": played.total_s,
        "jain_index": sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares)),
        "satisfied": sum(slowdown <= SATISFIED for slowdown in slowdowns) / len(slowdowns),
        "kinds": kinds,
    }


def _describe_kind(clients: Sequence[VirtualClient], machine: VirtualMachine) -> dict[str, Any]:
    slowdowns = [c.first_token_s / machine.alone_s(c.num_prompt) for c in clients]
    gaps = [gap for client in clients for gap in client.gaps_s]
    return {
        "num": len(clients),
        "first_token_s": quantiles(client.first_token_s for client in clients),
        "over_alone": quantiles(slowdowns),
        "gap_s": quantiles(gaps),
        "predicted": _num_expected(clients),
        "end_s": max(client.tokens_s[-1] for client in clients),
    }


def _num_expected(clients: Sequence[VirtualClient]) -> float | None:
    """Return the share of first tokens within 20 % of their predicted time, or None without exact predictions."""
    ratios = [c.expected_s / c.first_token_s for c in clients if c.expected_s and not c.is_least]
    return sum(abs(ratio - 1) <= 0.2 for ratio in ratios) / len(ratios) if ratios else None


SERVER_OPTIONS: dict[str, tuple[str, ...]] = {
    "arrival": ("--max-step-ms", "0"),
    "threshold": ("--max-step-ms", "0", "--long-prefill-token-threshold", "256"),
    "fair": (),
}
NUM_OUTPUT = 8
NUM_STREAMS = 16
STREAM_TOKENS = 200
NUM_ALONE = 9
# Short requests sent together with each number of long prompts.
NUM_SHORT = 24
MOST_ROUNDS = 24
# The longest pause between two short requests.
MOST_PAUSE_S = 0.1
TIMEOUT_S = 600.0


class Asked:
    """One streamed request, and the arrival times of its tokens.

    It blocks on a plain connection, so each of several simultaneous requests needs a thread.
    """

    def __init__(self, port: int, dice: random.Random, num_prompt: int, max_tokens: int) -> None:
        self.num_prompt = num_prompt
        prompt = [dice.randrange(3, 200) for _ in range(num_prompt)]
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        self._body = json.dumps(body).encode()
        self._port = port
        self.tokens_s: list[float] = []
        self.sent_s = 0.0

    def stream(self) -> "Asked":
        """Send the request, and read its stream to the end, recording the time of each token.

        Raises:

            RuntimeError: the server refused the request.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)
        self.sent_s = perf_counter()
        connection.request(
            "POST", "/v1/completions", self._body, {"content-type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {response.read()[:200]!r}")
        for line in response:
            if line.startswith(b"data: {") and b'"text"' in line:
                self.tokens_s.append(perf_counter())
        connection.close()
        return self

    @property
    def first_token_s(self) -> float:
        return self.tokens_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.tokens_s, self.tokens_s[1:], strict=False)]


def measure_server(
    model: str | None,
    orders: Sequence[str],
    *,
    num_long: Sequence[int] = (1, 3, 10),
    long_tokens: int = 8000,
    options: Sequence[str] = (),
    tell: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """Measure fairness on a server, once for each order of prompts.

    `model` is by default the demo model with more positions.  Returns a record for each order and number of long
    prompts, with ratios to an idle server.
    """
    results: list[dict[str, Any]] = []
    with _model(model, long_tokens + 1000) as folder:
        for order in orders:
            with local_server(folder, *SERVER_OPTIONS[order], *options) as server:
                scene = _Scene(server.port, long_tokens)
                scene.warm()
                results.append({"order": order, **scene.play(num_long)})
            tell(f"{order}: measured")
    return results


@contextmanager
def _model(model: str | None, num_positions: int) -> Iterator[str]:
    if model is not None:
        yield model
    else:
        with demo_of_length(num_positions) as folder:
            yield folder


class _Scene:
    """Send the requests of the measurements to one server."""

    def __init__(self, port: int, long_tokens: int) -> None:
        self._port, self._long_tokens = port, long_tokens
        self._dice = random.Random(0)

    def warm(self) -> None:
        """Send requests of several sizes, from which the server learns to predict the duration of its steps."""
        for num_prompt in (60, 200, 300, 700, 1500, self._long_tokens // 2):
            self._ask(num_prompt).stream()

    def play(self, num_long: Sequence[int]) -> dict[str, Any]:
        alone = [self._short().stream().first_token_s for _ in range(NUM_ALONE)]
        long_alone = self._ask(self._long_tokens).stream().first_token_s
        alone_s = quantiles(alone)["p50"]
        beside = {num: self._beside(num, alone_s, long_alone) for num in num_long}
        return {
            "short_alone_s": quantiles(alone),
            "long_alone_s": long_alone,
            "beside": beside,
            "streams": self._streams(),
        }

    def _beside(self, num_long: int, alone_s: float, long_alone_s: float) -> dict[str, Any]:
        """Measure short requests, one after the other, while long prompts run.  Repeats until there are `NUM_SHORT`."""
        waits: list[float] = []
        over_own: list[float] = []
        while len(waits) < NUM_SHORT and len(over_own) < MOST_ROUNDS:
            shorts, long_s = self._round(num_long)
            waits += shorts
            # Relative to the time of the same long and short requests one after the other on an idle server.
            over_own.append(long_s / (num_long * long_alone_s + len(shorts) * alone_s))
        first = quantiles(waits)
        return {
            "num_short": len(waits),
            "first_token_s": first,
            "over_alone": {name: value / alone_s for name, value in first.items()},
            "long_over_own": median(over_own),
        }

    def _round(self, num_long: int) -> tuple[list[float], float]:
        """Return the times to the first tokens of short requests while long prompts run, and the seconds for all long prompts."""
        began_s = perf_counter()
        longs = [self._ask(self._long_tokens) for _ in range(num_long)]
        threads = [threading.Thread(target=each.stream) for each in longs]
        for thread in threads:
            thread.start()
        shorts: list[Asked] = []
        while not all(each.tokens_s for each in longs) and len(shorts) < NUM_SHORT:
            # Random pauses, so that requests arrive independently of the server's steps.
            sleep(self._dice.uniform(0, MOST_PAUSE_S))
            shorts.append(self._short().stream())
        for thread in threads:
            thread.join()
        end_s = max(each.tokens_s[0] for each in longs)
        beside = [short.first_token_s for short in shorts if short.sent_s < end_s]
        return beside, end_s - began_s

    def _streams(self) -> dict[str, Any]:
        """Measure streams without and with a simultaneous long prompt."""
        found: dict[str, Any] = {}
        for name, num_long in (("alone", 0), ("beside", 1)):
            streams = [self._ask(20, STREAM_TOKENS) for _ in range(NUM_STREAMS)]
            longs = [self._ask(self._long_tokens) for _ in range(num_long)]
            threads = [threading.Thread(target=each.stream) for each in (*streams, *longs)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            found[name] = quantiles(gap for stream in streams for gap in stream.gaps_s)
        return {"gap_s": found}

    def _short(self) -> Asked:
        return self._ask(self._dice.randrange(150, 600))

    def _ask(self, num_prompt: int, max_tokens: int = NUM_OUTPUT) -> Asked:
        return Asked(self._port, self._dice, num_prompt, max_tokens)
