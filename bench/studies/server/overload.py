"""Measure an overloaded server: disconnecting clients, ten times too many clients, and many that disconnect at once.

    python -m trouper.bench.studies.server.overload [leaving] [overload] [cancelled] [--seconds 60] [--output FILE.json]

It starts `trouper serve` with the demo model for each scenario and sends requests from this process. With `--output`,
results of other scenarios in the file are kept.
"""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Iterable, Sequence
from functools import reduce
from operator import add
from pathlib import Path
from time import perf_counter
from typing import Any

from trouper.bench.report import about, percentile, write
from trouper.bench.serve import demo_of_length
from trouper.bench.studies.server.callers import ClientCall
from trouper.bench.studies.server.server_under_test import (
    PATIENCE_S,
    Client,
    ServerUnderTest,
    TimedTurn,
    served,
)

NUM_CLIENTS = 256
SHARE_LEAVING = 0.3
# Mean seconds until a client leaves, about half of the time of an answer.
MEAN_STAY_S = 6.0
# Turns of each behaviour: many, because the speed of a machine drifts by a tenth within seconds.
NUM_TURNS = 16
TURN_SETTLE_S = 0.75
NOBODY, STAY_AWAY, AT_ONCE = "nobody leaves", "leave and stay away", "leave and ask anew at once"
# Turns of overload, each between two saturated turns.
NUM_OVERLOADS = 20
OVERLOAD_SETTLE_S = 1.5
# Arrivals relative to the requests served in the turn before.
OVERLOAD = 10
NUM_CANCELLED = 200
LONG = 10_000  # tokens
# Resident memory grows until the whole KV cache has been used once, which takes less than this time.
WARM_S = 25.0
SETTLE_S = 5.0
CACHE = ("--kv-cache-memory-bytes", str(2**28))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure an overloaded server.")
    parser.add_argument("scenes", nargs="*", help=f"{', '.join(SCENES)}; by default all.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for name in options.scenes or SCENES:
        results[name] = SCENES[name](options.seconds, options.max_tokens)
        print(json.dumps({name: results[name]}, indent=1), flush=True)
    if options.output:
        if options.output.exists():
            results = json.loads(options.output.read_text())["results"] | results
        write(str(options.output), {"about": about(sys.argv[1:]), "results": results})


def warm(stage: ServerUnderTest, max_tokens: int) -> dict[str, float]:
    """Load the server for `WARM_S` seconds. Returns the resources that it holds when it is idle again."""
    end = perf_counter() + WARM_S
    stage.ask_on(NUM_CLIENTS, max_tokens, "warm", lambda: perf_counter() > end)
    stage.callers.run_until(end)
    return stage.end()


def leaving(seconds: float, max_tokens: int) -> dict[str, Any]:
    """Let some clients disconnect at random in the middle of their answers, while the others continue reading.

    Turns of three behaviours alternate, for `seconds` each in total: no client leaves; clients that leave stay away until the turn
    is over; clients that leave send a new request at once, which adds load.  The tokens of the other clients are compared with
    those of the neighbouring turns without leaving clients, interpolated because machines drift.
    """
    with served("--max-num-seqs", str(NUM_CLIENTS), *CACHE) as stage:
        idle = warm(stage, max_tokens)
        scene = _Leaving(stage, max_tokens)
        stage.callers.run_until(perf_counter() + SETTLE_S)
        order = [NOBODY]
        # The order alternates, so that neither behaviour always follows the other.
        for i in range(NUM_TURNS):
            order += [STAY_AWAY, AT_ONCE, NOBODY] if i % 2 else [AT_ONCE, STAY_AWAY, NOBODY]
        turns = [scene.play(way, seconds / NUM_TURNS) for way in order]
        scene.is_over = True
        others = [turn.tokens_s("others") for turn in turns]
        results: dict[str, Any] = {}
        for way in (NOBODY, STAY_AWAY, AT_ONCE):
            mine = [i for i, other in enumerate(order) if other == way]
            results[way] = total(turns[i] for i in mine).figures()
            if way != NOBODY:
                shares = [others[i] / _calm(others, i) for i in mine]
                results[way]["others, beside nobody leaving"] = _ratio(shares)
        return {
            **results,
            "others in each turn": [round(rate, 1) for rate in others],
            "idle before": idle,
            "idle after": stage.end(),
        }


class _Leaving:
    """Run clients of two kinds: some leave at random moments, the others never."""

    def __init__(self, stage: ServerUnderTest, max_tokens: int) -> None:
        self.is_over = False
        self._stage = stage
        self._random = random.Random(0)
        num_leaving = int(SHARE_LEAVING * NUM_CLIENTS)
        others = NUM_CLIENTS - num_leaving
        stage.ask_on(others, max_tokens, "others", lambda: self.is_over)
        self._leavers = stage.ask_on(num_leaving, max_tokens, "leaving", lambda: self.is_over)

    def play(self, way: str, seconds: float) -> TimedTurn:
        callers, begin = self._stage.callers, perf_counter()
        # Clients that left in the last turn return one by one.
        for client in self._leavers:
            callers.later(begin + self._random.uniform(0, TURN_SETTLE_S), client.ask)
        callers.run_until(begin + TURN_SETTLE_S)
        if way != NOBODY:
            for client in self._leavers:
                self._tempt(client, perf_counter() + seconds, comes_back=way == AT_ONCE)
        return self._stage.play(seconds)

    def _tempt(self, client: Client, end: float, *, comes_back: bool) -> None:
        """Schedule the moment at which the client leaves. It stays if that would be after `end`."""
        moment = perf_counter() + self._random.expovariate(1 / MEAN_STAY_S)

        def leave() -> None:
            client.leave()
            if comes_back:
                client.ask()
                self._tempt(client, end, comes_back=comes_back)

        if moment < end:
            self._stage.callers.later(moment, leave)


def _calm(rates: Sequence[float], i: int) -> float:
    """Interpolate the rate of turn i without leaving clients, from the turns without any (every third one)."""
    before = i - i % 3
    return rates[before] + (rates[before + 3] - rates[before]) * (i % 3) / 3


def total(turns: Iterable[TimedTurn]) -> TimedTurn:
    """Add up the counts of several turns."""
    return reduce(add, turns)


def overload(seconds: float, max_tokens: int) -> dict[str, Any]:
    """Send requests ten times as fast as the server answered them in the turn before, regardless of their outcomes.

    These turns alternate with saturated ones, in which `NUM_CLIENTS` clients send a new request after each answer.
    """
    with served(*CACHE) as stage:
        idle = warm(stage, max_tokens)
        scene = _Overload(stage, max_tokens)
        scene.play(SETTLE_S)
        turns = [scene.play(seconds / NUM_OVERLOADS)]
        arrivals: list[float] = []
        for _ in range(NUM_OVERLOADS):
            arrivals.append(OVERLOAD * turns[-1].num_tokens / turns[-1].seconds / max_tokens)
            turns += [scene.play(seconds / NUM_OVERLOADS, each) for each in (arrivals[-1], 0)]
        scene.is_over = True
        # Tokens as counted by the server, because clients count fewer where frames merge.  All of them belong to admitted
        # requests, which are answered to their ends.
        rates = [turn.num_tokens / turn.seconds for turn in turns]
        shares = [
            rates[i] / statistics.mean((rates[i - 1], rates[i + 1]))
            for i in range(1, len(turns), 2)
        ]
        refused = [call.ended - call.sent for call in scene.ended if call.outcome != "200"]
        begun = [call.first - call.sent for call in scene.ended if call.outcome == "200"]
        return {
            "saturated": total(turns[::2]).figures(),
            "overloaded": total(turns[1::2]).figures(),
            "arrivals_s": round(statistics.mean(arrivals), 1),
            "goodput": _ratio(shares),
            "tokens_s in each turn": [round(rate, 1) for rate in rates],
            "refused_ms": _latencies(refused),
            "first_token_ms": _latencies(begun),
            "idle before": idle,
            "idle after": stage.end(),
        }


class _Overload:
    """Run the clients of an overloaded server.

    When the arrivals stop, the admitted clients stay and send a new request after each answer, so the server is always full.
    """

    def __init__(self, stage: ServerUnderTest, max_tokens: int) -> None:
        self.is_over = False
        self.ended: list[ClientCall] = []  # in turns of overload
        self._stage = stage
        self._max_tokens = max_tokens
        self._random = random.Random(0)
        # New clients per second, or 0 for a saturated turn.
        self._arrivals_s = 0.0
        self._is_counted = False
        # The time of the next arrival.
        self._due = 0.0

    def play(self, seconds: float, arrivals_s: float = 0.0) -> TimedTurn:
        self._arrivals_s, self._due = arrivals_s, perf_counter()
        if arrivals_s:
            self._arrive()
        else:
            for _ in range(NUM_CLIENTS - self._stage.callers.num_open):
                self._ask()
        self._stage.callers.run_until(perf_counter() + OVERLOAD_SETTLE_S)
        self._is_counted = bool(arrivals_s)
        turn = self._stage.play(seconds)
        self._is_counted = False
        return turn

    def _ask(self) -> None:
        self._stage.ask(self._stage.some(self._max_tokens), "tokens", self._end)

    def _end(self, call: ClientCall) -> None:
        if self._is_counted:
            self.ended.append(call)
        if not (self._arrivals_s or self.is_over) and call.outcome == "200":
            self._ask()

    def _arrive(self) -> None:
        if self._arrivals_s:
            self._ask()
            self._due += self._random.expovariate(self._arrivals_s)
            self._stage.callers.later(self._due, self._arrive)


def _ratio(shares: Sequence[float]) -> dict[str, Any]:
    """Summarise the ratios of turns: mean, standard error, median and single values."""
    return {
        "mean": round(statistics.mean(shares), 4),
        "error of the mean": round(statistics.stdev(shares) / len(shares) ** 0.5, 4),
        "median": round(statistics.median(shares), 4),
        "of single turns": [round(share, 3) for share in shares],
    }


def cancelled(_: float, __: int) -> dict[str, Any]:
    """Cancel many long requests after half a second, and measure how fast one new request is answered then."""
    with (
        demo_of_length(LONG + 100) as model,
        served(model, "--max-num-seqs", str(NUM_CLIENTS)) as stage,
    ):
        calls = [stage.ask(LONG, "long", lambda _: None) for _ in range(NUM_CANCELLED)]
        stage.callers.run_until(perf_counter() + 0.5)
        num_begun = sum(call.first > 0 for call in calls)
        for call in calls:
            stage.callers.drop(call)
        one = stage.ask(1, "one", lambda _: None)
        stage.callers.run_until(perf_counter() + PATIENCE_S, lambda: one.outcome != "open")
        return {
            "cancelled": NUM_CANCELLED,
            "of which had begun": num_begun,
            "then one": one.outcome,
            "answer_s": round(one.ended - one.sent, 3),
            "idle after": stage.end(),
        }


def _latencies(seconds: list[float]) -> dict[str, float]:
    return {f"p{q:g}": round(1000 * percentile(seconds, q), 2) for q in (50, 99)} | {
        "max": round(1000 * max(seconds), 2)
    }


SCENES = {"leaving": leaving, "overload": overload, "cancelled": cancelled}

if __name__ == "__main__":
    main()
