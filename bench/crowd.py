"""A crowd at the server's door: clients that leave, ten times as many as can be served, and many that all leave.

    python -m trouper.bench.crowd [leaving] [overload] [cancelled] [--seconds 60] [--output FILE.json]

Starts `trouper serve` on the demo model for each scene, and asks it over sockets from this process. With `--output`
the results of other scenes stay in the file.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from trouper.bench.arrivals import arrival_times
from trouper.bench.callers import Call
from trouper.bench.figures import percentile
from trouper.bench.report import about, write
from trouper.bench.stage import PATIENCE_S, Stage, lateness, served
from trouper.config import DEMO_MODEL

NUM_CLIENTS = 256
SHARE_LEAVING = 0.3
MEAN_STAY_S = 6.0  # about half as long as an answer takes
NUM_TURNS = 20  # in which some leave, each between two in which nobody does: machines drift by a tenth in seconds
TURN_SETTLE_S = 0.5
OVERLOAD = 10  # × the requests that were served
NUM_CANCELLED = 200
LONG = 10_000  # tokens
WARM_S = 25.0  # in which the whole cache is used once: until then resident memory grows
SETTLE_S = 5.0
CACHE = ("--kv-cache-memory-bytes", str(2**28))


def main() -> None:
    parser = argparse.ArgumentParser(description="A crowd at the server's door.")
    parser.add_argument("scenes", nargs="*", help=f"{', '.join(SCENES)}; all when left out.")
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


def warm(stage: Stage, max_tokens: int) -> dict[str, float]:
    """What the server holds when it is idle, after work."""
    end = perf_counter() + WARM_S
    stage.ask_on(NUM_CLIENTS, max_tokens, "warm", lambda: perf_counter() > end)
    stage.callers.run(end)
    return stage.end()


def leaving(seconds: float, max_tokens: int) -> dict[str, Any]:
    """Some disconnect at random and come back at once, while the others read on; in turns with nobody leaving."""
    rng = random.Random(0)
    is_over = do_leave = False
    num_leaving = int(SHARE_LEAVING * NUM_CLIENTS)

    def may_leave() -> bool:
        return do_leave

    with served("--max-num-seqs", str(NUM_CLIENTS), *CACHE) as stage:
        idle = warm(stage, max_tokens)
        stage.ask_on(NUM_CLIENTS - num_leaving, max_tokens, "others", lambda: is_over)
        stage.ask_on(
            num_leaving,
            max_tokens,
            "leaving",
            lambda: is_over,
            lambda: rng.expovariate(1 / MEAN_STAY_S),
            may_leave,
        )
        stage.play(SETTLE_S)
        turns: list[dict[str, Any]] = []
        gaps = Counter[float](), Counter[float]()
        for i in range(2 * NUM_TURNS + 1):
            do_leave = i % 2 == 1
            stage.play(TURN_SETTLE_S)
            before = stage.gaps()
            turns.append(stage.play(seconds / NUM_TURNS))
            gaps[do_leave].update(stage.gaps() - before)
        is_over, do_leave = True, False
        others = [turn["tokens_s"]["others"] for turn in turns]
        shares = [
            others[i] / statistics.mean((others[i - 1], others[i + 1]))
            for i in range(1, len(turns), 2)
        ]
        return {
            "nobody leaves": together(turns[::2], gaps[False]),
            "some leave": together(turns[1::2], gaps[True]),
            "others in each turn": others,
            "others": round(statistics.mean(shares), 4),
            "others, error of the mean": round(statistics.stdev(shares) / len(shares) ** 0.5, 4),
            "others, of single turns": [round(share, 3) for share in shares],
            "idle before": idle,
            "idle after": stage.end(),
        }


def together(turns: list[dict[str, Any]], gaps: Counter[float]) -> dict[str, Any]:
    """What was seen in several turns, as if in one."""
    seconds = sum(turn["seconds"] for turn in turns)
    kinds = turns[0]["tokens_s"]
    requests: Counter[str] = Counter()
    for turn in turns:
        requests.update(turn["requests"])
    return {
        "seconds": round(seconds, 1),
        "tokens_s": {
            kind: round(statistics.mean(turn["tokens_s"][kind] for turn in turns), 1)
            for kind in kinds
        },
        "requests": dict(requests),
        "loop_late_ms": lateness(gaps),
        "client_cpu_share": round(statistics.mean(t["client_cpu_share"] for t in turns), 3),
    }


def overload(seconds: float, max_tokens: int) -> dict[str, Any]:
    """Requests come ten times as fast as they were served, whatever becomes of them."""
    is_over = False
    with served(*CACHE) as stage:
        idle = warm(stage, max_tokens)
        calls: list[Call] = []

        def saturated() -> dict[str, Any]:
            nonlocal is_over
            is_over = False
            stage.ask_on(NUM_CLIENTS, max_tokens, "tokens", lambda: is_over)
            stage.play(SETTLE_S)
            seen = stage.play(seconds / 3)
            is_over = True
            return seen

        before = saturated()
        rate = OVERLOAD * before["requests"]["200"] / before["seconds"]
        start = perf_counter()
        for time in arrival_times(int(rate * (SETTLE_S + seconds)), rate, random.Random(0)):
            stage.callers.later(
                start + time, lambda: stage.ask(stage.some(max_tokens), "tokens", calls.append)
            )
        stage.play(SETTLE_S)
        calls.clear()
        during = stage.play(seconds)
        ended = calls.copy()
        stage.end()
        after = saturated()
        calm = (before["tokens_s"]["tokens"] + after["tokens_s"]["tokens"]) / 2
        return {
            "saturated before": before,
            "overloaded": during,
            "saturated after": after,
            "arrivals_s": round(rate, 1),
            "goodput": round(during["tokens_s"]["tokens"] / calm, 4),
            "refused_ms": _latencies([c.ended - c.sent for c in ended if c.outcome != "200"]),
            "first_token_ms": _latencies([c.first - c.sent for c in ended if c.outcome == "200"]),
            "idle before": idle,
            "idle after": stage.end(),
        }


def cancelled(_: float, __: int) -> dict[str, Any]:
    """Many long requests that are all left after half a second; then one."""
    with longer_demo() as model, served(model, "--max-num-seqs", str(NUM_CLIENTS)) as stage:
        calls = [stage.ask(LONG, "long", lambda _: None) for _ in range(NUM_CANCELLED)]
        stage.callers.run(perf_counter() + 0.5)
        num_begun = sum(call.first > 0 for call in calls)
        for call in calls:
            stage.callers.drop(call)
        one = stage.ask(1, "one", lambda _: None)
        stage.callers.run(perf_counter() + PATIENCE_S, lambda: one.outcome != "open")
        return {
            "cancelled": NUM_CANCELLED,
            "of which had begun": num_begun,
            "then one": one.outcome,
            "answer_s": round(one.ended - one.sent, 3),
            "idle after": stage.end(),
        }


@contextmanager
def longer_demo() -> Iterator[str]:
    """The demo model with more positions than it was trained on."""
    with tempfile.TemporaryDirectory() as folder:
        for file in DEMO_MODEL.iterdir():
            (Path(folder) / file.name).symlink_to(file)
        config = json.loads((DEMO_MODEL / "config.json").read_text())
        (Path(folder) / "config.json").unlink()
        config["max_position_embeddings"] = LONG + 100
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield folder


def _latencies(seconds: list[float]) -> dict[str, float]:
    return {f"p{q:g}": round(1000 * percentile(seconds, q), 2) for q in (50, 99)} | {
        "max": round(1000 * max(seconds), 2)
    }


SCENES = {"leaving": leaving, "overload": overload, "cancelled": cancelled}

if __name__ == "__main__":
    main()
