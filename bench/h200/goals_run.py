"""Measure the goals of one preset with random weights, with trouper or with a peer on the same work.

    python -m trouper.bench.h200.goals_run qwen3-0.6b REPORT.json [--peer transformers-cb] [--tiny]

Decoding is greedy and ignores the end token; no text is made. trouper decodes prompts that its prefix cache contains,
so all sequences start in one step. A peer's step is the time of 33 tokens minus that of one, divided by 32.
"""

import argparse
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

from trouper import LLM, EngineArgs, SamplingParams
from trouper.bench import latency, report
from trouper.bench.h200.goals import DECODE_STEPS, GOALS, Goal, workload
from trouper.bench.peers import PeerEngine, Settings, Workload, started
from trouper.bench.throughput import model_folder
from trouper.config.checkpoint.model_path import GEOMETRIES
from trouper.config.resolve import resolve

NUM_REPEATS = 3
PEER_STEPS = 32
# The longest prompt in one step, and a peer's default.
STEP_TOKENS = 8192


def goals_of(model: str, *, is_tiny: bool) -> list[Goal]:
    goals = [goal for goal in GOALS if goal.model == model]
    return [goal.shrunk() for goal in goals] if is_tiny else goals


def engine_args(goals: Sequence[Goal]) -> EngineArgs:
    longest = max(goal.length for goal in goals)
    return EngineArgs(
        model=goals[0].model,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=max(longest + 1, *(2 * g.length for g in goals if g.kind == "workload")),
        max_num_seqs=max(goal.batch_size for goal in goals),
        max_num_batched_tokens=STEP_TOKENS,
    )


def measure(goals: Sequence[Goal]) -> Iterator[dict[str, Any]]:
    """Measure the goals of one model, and yield a record for each.

    One engine runs all of them, so its memory must suffice for the largest.
    """
    args = engine_args(goals)
    with latency.profile_folder(args) as folder, LLM.from_engine_args(args) as llm:
        for goal in goals:
            yield _record(goal, _measured(llm, goal, folder))


def _measured(llm: LLM, goal: Goal, folder: str) -> dict[str, Any]:
    if goal.kind == "decode":
        prompts, num_steps = decode_prompts(goal)
        generate = partial(_generate, llm, prompts, [num_steps] * goal.batch_size)
        generate()
        step = latency.step_breakdown(llm, generate, goal.batch_size, folder)
        if not step:
            raise RuntimeError(f"{goal.name}: no two full steps follow each other")
        idle = step["idle_share"]
        return {"seconds": step["step_us"] / 1e6, "idle_share": idle, "step": step}
    all_s: list[float] = []
    # The first repeat warms up and does not count.
    for number in range(1 + NUM_REPEATS):
        prompts, lengths = prompts_of(goal, number)
        llm.reset_prefix_cache()
        started = perf_counter()
        _generate(llm, prompts, lengths)
        all_s.append(perf_counter() - started)
    return {"seconds": median(all_s[1:]), "all_s": all_s[1:]}


def _generate(llm: LLM, prompts: list[list[int]], lengths: Sequence[int]) -> None:
    params = [
        SamplingParams(temperature=0, ignore_eos=True, max_tokens=length, detokenize=False)
        for length in lengths
    ]
    asked: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    llm.generate(asked, params, use_tqdm=False)


def measure_peer(goals: Sequence[Goal], name: str) -> Iterator[dict[str, Any]]:
    config = resolve(engine_args(goals), offline=True)
    largest = Workload(config.scheduler.max_num_seqs, config.max_model_len, 0)
    with ExitStack() as stack:
        folder = stack.enter_context(model_folder(config))
        settings = Settings(model=folder, dtype=config.dtype, load_format="dummy")
        peer = stack.enter_context(started(name, settings, [largest]))
        for goal in goals:
            yield _record(goal, {"seconds": _peer_seconds(peer, goal)})


def _peer_seconds(peer: PeerEngine, goal: Goal) -> float:
    def seconds(prompts: list[list[int]], lengths: list[int]) -> float:
        timed = [peer.measure(prompts, lengths).seconds for _ in range(1 + NUM_REPEATS)]
        return median(timed[1:])

    if goal.kind != "decode":
        return seconds(*prompts_of(goal, 0))
    prompts, _ = decode_prompts(goal)
    long, short = (seconds(prompts, [n] * len(prompts)) for n in (1 + PEER_STEPS, 1))
    return (long - short) / PEER_STEPS


def decode_prompts(goal: Goal) -> tuple[list[list[int]], int]:
    """Draw prompts, and return how many tokens to generate so that the goal's context is in the middle.

    The average length of the context during the steps is then that of the goal.
    """
    num_steps = min(DECODE_STEPS, goal.length // 2)
    return _random_prompts(goal, goal.length - num_steps // 2, 0), num_steps


def prompts_of(goal: Goal, number: int) -> tuple[list[list[int]], list[int]]:
    """Draw the prompts of a prefill or a workload, and their output lengths; a prefill has its own prompt for each number."""
    if goal.kind == "prefill":
        return _random_prompts(goal, goal.length, number), [1]
    prompts, lengths = workload(goal.batch_size, goal.length)
    size = GEOMETRIES[goal.model]["vocab_size"]
    return [[token % size for token in prompt] for prompt in prompts], lengths


def _random_prompts(goal: Goal, length: int, seed: int) -> list[list[int]]:
    draw: Callable[..., list[int]] = Random(seed).choices
    vocabulary = range(GEOMETRIES[goal.model]["vocab_size"])
    return [draw(vocabulary, k=length) for _ in range(goal.batch_size)]


def _record(goal: Goal, figures: dict[str, Any]) -> dict[str, Any]:
    print(f"{goal.name}: {1e3 * figures['seconds']:.4g} ms", file=sys.stderr, flush=True)
    return {"goal": goal._asdict(), **figures}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the goals of one geometry.")
    parser.add_argument("model", choices=sorted({goal.model for goal in GOALS}))
    parser.add_argument("report")
    parser.add_argument("--peer", help="engine to measure instead of trouper, e.g. transformers-cb")
    parser.add_argument("--tiny", action="store_true", help="test the procedure with a tiny model")
    options = parser.parse_args()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit("terminated")
    )  # and with us the peer's process
    goals = goals_of(options.model, is_tiny=options.tiny)
    records = list(measure_peer(goals, options.peer) if options.peer else measure(goals))
    report.write(options.report, {"about": report.about(sys.argv[1:]), "results": records})


if __name__ == "__main__":
    main()
