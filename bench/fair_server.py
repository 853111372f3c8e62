"""Measure fairness on a real server: short requests and streams during long prompts, as ratios within one run.

A server is started for each scheduling order, and threads send requests over HTTP. Prompts are random token ids, so
they share no prefix. `trouper bench fairness` is the command.
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
from trouper.bench.virtual_time import quantiles

ORDERS: dict[str, tuple[str, ...]] = {
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
    """One streamed request, and the moments of its tokens.

    It uses a plain connection and a thread of its own, because many requests are open at the same time.
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
        """Send the request, and read its stream to the end.

        The time of each token is recorded.  It blocks its thread.

        Raises:

            RuntimeError: the server refuses the request.
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


def measure(
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
            with local_server(folder, *ORDERS[order], *options) as server:
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
    """The requests to one server."""

    def __init__(self, port: int, long_tokens: int) -> None:
        self._port, self._long_tokens = port, long_tokens
        self._dice = random.Random(0)

    def warm(self) -> None:
        """Let the server learn what its steps take.

        Its predictions are learnt from steps of several sizes.
        """
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
        """Ask short requests, one after the other, beside long prompts; repeated until enough have been asked."""
        waits: list[float] = []
        over_own: list[float] = []
        while len(waits) < NUM_SHORT and len(over_own) < MOST_ROUNDS:
            shorts, long_s = self._round(num_long)
            waits += shorts
            # What the long ones take by themselves, and what the short ones add to it.
            over_own.append(long_s / (num_long * long_alone_s + len(shorts) * alone_s))
        first = quantiles(waits)
        return {
            "num_short": len(waits),
            "first_token_s": first,
            "over_alone": {name: value / alone_s for name, value in first.items()},
            "long_over_own": median(over_own),
        }

    def _round(self, num_long: int) -> tuple[list[float], float]:
        """Return the first tokens of short requests while long prompts are computed, and the seconds of all these prompts."""
        began_s = perf_counter()
        longs = [self._ask(self._long_tokens) for _ in range(num_long)]
        threads = [threading.Thread(target=each.stream) for each in longs]
        for thread in threads:
            thread.start()
        shorts: list[Asked] = []
        while not all(each.tokens_s for each in longs) and len(shorts) < NUM_SHORT:
            # Moments without relation to the steps.
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
