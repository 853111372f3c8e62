"""Kill an engine's worker process repeatedly while it streams, and compare all tokens with an undisturbed run.

    python -m trouper.bench.studies.server.faults --kill-every 10 --seconds 60 --streams 16 --prompt-tokens 4096

It prints the mean number of tokens that a stream recomputes after a kill: less than one block, plus the steps in flight. The exit
status is 1 if a token is lost, repeated or changed.
"""

import argparse
import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import anyio

from trouper.actors.engine.wiring import Engine, open_engine
from trouper.actors.executor.devices.process import ProcessDevice
from trouper.actors.executor.workers.launching import LocalPeer, launch
from trouper.bench.serve import demo_of_length
from trouper.config.args import EngineArgs
from trouper.config.engine_config import EngineConfig
from trouper.config.resolve import resolve
from trouper.params import SamplingParams

PROMPTS = (
    "def f(",
    "class A:",
    "import os",
    "for x in",
    "# A function that",
    "x = [",
    "if a",
    "try:",
)
# Higher than any run needs: the engine's limit of restarts must not end a run.
MAX_KILLS = 1000


class StreamedRun:
    """The outputs of all streams of one run, and the longest time without a token in each.

    Two runs of the same requests have equal outputs, with and without kills.
    """

    def __init__(self) -> None:
        self.token_ids: dict[int, tuple[int, ...]] = {}
        self.num_lost = self.num_doubled = 0
        self.gaps_s: list[float] = []


async def stream(
    engine: Engine, number: int, num_tokens: int, run: StreamedRun, num_prompt: int = 0
) -> None:
    """Stream one request, and record its tokens and its longest time without a token.

    Even requests are greedy and odd ones have a seed, so that both are reproducible.
    """
    params = SamplingParams(
        temperature=number % 2, seed=number, max_tokens=num_tokens, ignore_eos=True
    )
    prompt: Any = f"{PROMPTS[number % len(PROMPTS)]} {number}"
    if num_prompt:
        dice = random.Random(number)
        prompt = {"prompt_token_ids": [dice.randrange(300, 3000) for _ in range(num_prompt)]}
    told: list[int] = []
    longest_s, last_s = 0.0, time.monotonic()
    async for output in engine.generate(prompt, params, f"{number}-{id(run)}"):
        token_ids = list(output.outputs[0].token_ids)
        now = time.monotonic()
        longest_s, last_s = max(longest_s, now - last_s), now
        run.num_lost += len(token_ids) < len(told)
        run.num_doubled += token_ids[: len(told)] != told
        told = token_ids
    run.token_ids[number] = tuple(told)
    run.gaps_s.append(longest_s)


async def run_streams(
    engine: Engine, requests: range, num_tokens: int, num_streams: int, num_prompt: int = 0
) -> StreamedRun:
    """Stream all requests, `num_streams` at a time. Returns their outputs in the order of the requests."""
    run, limiter = StreamedRun(), anyio.CapacityLimiter(num_streams)

    async def one(number: int) -> None:
        async with limiter:
            await stream(engine, number, num_tokens, run, num_prompt)

    async with anyio.create_task_group() as tasks:
        for number in requests:
            tasks.start_soon(one, number)
    return run


async def measure(args: argparse.Namespace) -> dict[str, float]:
    """Run requests for `args.seconds` with kills, then the same requests without kills."""
    length = args.prompt_tokens + args.tokens + 64
    with ExitStack() as stack:
        # The context of the demo model is shorter than the prompts.
        model = args.model or stack.enter_context(demo_of_length(length))
        config = resolve(
            EngineArgs(
                model=model, dtype="float32", device_worker="process", max_num_seqs=args.streams,
                max_worker_restarts=MAX_KILLS, worker_restart_window=1.0, max_model_len=length,
            )
        )  # fmt: skip
        return await _measure(config, args)


async def _measure(config: EngineConfig, args: argparse.Namespace) -> dict[str, float]:
    peers: list[LocalPeer] = []

    def start(rank: int, *, files: Sequence[int] = ()) -> LocalPeer:
        peers.append(launch(rank, files=files))
        return peers[-1]

    runs: list[StreamedRun] = []
    num_kills = 0
    async with open_engine(config, ProcessDevice(config, start)) as engine:
        run_all = partial(
            run_streams, engine, range(args.streams), args.tokens, args.streams, args.prompt_tokens
        )
        first = await run_all()

        async def kill() -> None:
            nonlocal num_kills
            while True:
                await anyio.sleep(args.kill_every)
                os.kill(peers[-1].pid, signal.SIGKILL)
                num_kills += 1

        end_s = time.monotonic() + args.seconds
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kill)
            while time.monotonic() < end_s:
                # Otherwise the second run would find its prompts in the cache.
                await engine.controls.reset_prefix_cache()
                runs.append(await run_all())
            tasks.cancel_scope.cancel()
        num_recomputed = engine.statistics().replicas[0].num_lost_tokens
    num_other = sum(run.token_ids[i] != first.token_ids[i] for run in runs for i in first.token_ids)
    return {
        "kills": num_kills,
        "workers": len(peers),
        "streams": len(runs) * args.streams,
        "streams_with_lost_tokens": sum(run.num_lost for run in runs),
        "streams_with_doubled_tokens": sum(run.num_doubled for run in runs),
        "streams_with_other_tokens": num_other,
        "recomputed_tokens_per_stream_and_kill": round(
            num_recomputed / max(1, num_kills) / args.streams, 1
        ),
        "longest_silence_s": round(max(gap for run in runs for gap in run.gaps_s), 2),
    }


def main() -> None:
    """Measure, and print the figures as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument(
        "--kill-every", type=float, default=10.0, help="seconds between two kills of a worker"
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        default=0,
        help="number of random tokens in each prompt; by default prompts are short texts",
    )
    parser.add_argument("--tokens", type=int, default=400)
    figures = anyio.run(partial(measure, parser.parse_args()), backend="trio")
    sys.stdout.write(json.dumps(figures) + "\n")
    is_bad = any(figures[name] for name in figures if name.startswith("streams_with"))
    sys.exit(1 if is_bad else 0)


if __name__ == "__main__":
    main()
