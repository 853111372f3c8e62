"""Measure how fast images are answered, what they cost other requests, and what a vision tower adds to start-up and memory.

    python -m trouper.bench.studies.models.images [--what first,again,…] [--rounds 3] [--output FILE.json]; `--help` lists all options

The model has the shape of SmolVLM-256M and random weights in bfloat16: an image of 640 x 480 becomes 13 tiles of 64 rows.
It is compared with transformers' `generate`, its image processor included.  Engines of one comparison are open together and
alternate, so that other work on the machine slows both.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, cast

from trouper import LLM, EngineArgs, LLMEngine, RequestOutputKind, SamplingParams
from trouper.bench.report import about, percentile, write
from trouper.bench.studies.models.image_limits import (
    event_loop,
    memory,
    processing,
    start_up,
)
from trouper.bench.studies.models.image_model import engine_options, prompt, timed, write_model
from trouper.bench.studies.models.image_peers import Library, VllmProcess
from trouper.inputs import PromptType

NUM_STREAMS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description="What images cost.")
    parser.add_argument("--what", default=",".join(name for name in STUDIES if name != "vllm"))
    parser.add_argument("--rounds", default=3, type=int)
    parser.add_argument("--encode-ms", default=30, type=int)
    parser.add_argument("--layers", default=30, type=int, help="of the text model")
    parser.add_argument("--longest-edge", default=2048, type=int, help="512 makes one tile")
    parser.add_argument("--requests", default=16, type=int, help="simultaneous ones of `crowd`")
    parser.add_argument("--seconds", default=10.0, type=float, help="of each turn of `loop`")
    parser.add_argument("--images", default=1000, type=int, help="different ones of `memory`")
    parser.add_argument("--vllm-python", help="an interpreter with vLLM, for `vllm`")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results = dict[str, Any]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, options.layers, options.longest_edge)
        for what in options.what.split(","):
            results[what] = STUDIES[what](folder, options)
            print(f"{what}: {results[what]}", flush=True)
    if options.output:
        write(str(options.output), {"about": about(sys.argv[1:]), "results": results})


def first_token(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Compare the seconds to the first token of an image with those of transformers, processing included."""
    library = Library(folder)
    one = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    seconds: dict[str, list[float]] = {"trouper": [], "transformers": []}
    num_tokens = 0.0
    with LLM(**engine_options(folder)) as llm:
        for seed in range(options.rounds + 1):
            found: list[Any] = []
            ours = timed(
                lambda seed=seed, found=found: found.extend(
                    llm.generate(cast("PromptType", prompt(seed)), one, use_tqdm=False)
                )
            )
            ids = list(found[0].prompt_token_ids)
            num_tokens = float(len(ids))
            theirs = timed(lambda seed=seed, ids=ids: library.generate(ids, seed, 1))
            if seed:
                seconds["trouper"].append(ours)
                seconds["transformers"].append(theirs)
    own, other = (min(values) for values in seconds.values())
    return {
        "prompt_tokens": num_tokens,
        "trouper_s": round(own, 3),
        "transformers_s": round(other, 3),
        "ratio": round(own / other, 3),
    }


def crowd(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Compare simultaneous requests, each with an image of its own and 64 tokens of output, with transformers one by one.

    Half of transformers' requests run before the engine's and half behind, so that a machine that slows down affects both.
    """
    library = Library(folder)
    params = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
    seconds: dict[str, list[float]] = {"trouper": [], "transformers": []}
    with LLM(**engine_options(folder, media_processor="process")) as llm:

        def ask(seeds: range) -> list[Any]:
            given = [cast("PromptType", prompt(seed)) for seed in seeds]
            return llm.generate(given, params, use_tqdm=False)

        # All prompts have the same ids.
        ids = list(ask(range(1))[0].prompt_token_ids)
        library.generate(ids, 0, 2)
        for turn in range(options.rounds):
            first = 1 + turn * options.requests
            seeds = range(first, first + options.requests)
            middle = first + options.requests // 2

            def one_by_one(seeds: range) -> None:
                for seed in seeds:
                    library.generate(ids, seed, 64)

            before = timed(lambda: one_by_one(range(first, middle)))  # noqa: B023
            seconds["trouper"].append(timed(lambda: ask(seeds)))  # noqa: B023
            behind = timed(lambda: one_by_one(range(middle, seeds.stop)))  # noqa: B023
            seconds["transformers"].append(before + behind)
    return {
        "requests": options.requests,
        "prompt_tokens": len(ids),
        **{f"{name}_s": round(median(values), 2) for name, values in seconds.items()},
        "times as fast": round(_ratio(seconds["transformers"], seconds["trouper"]), 2),
    }


def vllm(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Compare the first token and the requests of `crowd` with vLLM's CPU build.  Runs of both engines alternate.

    Both run the model as Idefics 3, because vLLM's processor of SmolVLM needs torchvision, which does not work with torch's CPU build.
    """
    if options.vllm_python is None:
        raise SystemExit("vllm: name an interpreter with vLLM by --vllm-python")
    write_model(folder, options.layers, options.longest_edge, is_idefics=True)
    seconds: dict[str, list[float]] = {
        f"{what} {name}": [] for what in ("first", "crowd") for name in ("trouper", "vllm")
    }
    # vLLM starts first, so that its start does not slow down the engine.
    with (
        VllmProcess(options.vllm_python, folder) as peer,
        LLM(**engine_options(folder, media_processor="process")) as llm,
    ):
        for turn in range(options.rounds + 1):
            for what, num, num_tokens in (("first", 1, 1), ("crowd", options.requests, 64)):
                first = 1000 * turn + (500 if num > 1 else 0)
                seeds = range(first, first + (num if turn else 1))
                given = [cast("PromptType", prompt(seed)) for seed in seeds]
                params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
                begin = perf_counter()
                found = llm.generate(given, params, use_tqdm=False)
                ours = perf_counter() - begin
                theirs, num_ids = peer.generate(seeds, num_tokens)
                assert num_ids == len(found[0].prompt_token_ids), "prompts differ"
                if turn:
                    seconds[f"{what} trouper"].append(ours)
                    seconds[f"{what} vllm"].append(theirs)
    return {
        **{f"{name} s": round(median(values), 2) for name, values in seconds.items()},
        "first ratio": round(_ratio(seconds["first trouper"], seconds["first vllm"]), 3),
        "crowd times as fast": round(_ratio(seconds["crowd vllm"], seconds["crowd trouper"]), 2),
    }


def _ratio(ones: list[float], others: list[float]) -> float:
    """Return the median of the ratios of turns."""
    return median(one / other for one, other in zip(ones, others, strict=True))


def again(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Compare a repeated image with its first request, and with a text as long as the new part of its prompt."""
    one = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    seconds: dict[str, list[float]] = {
        name: [] for name in ("new", "text behind", "as text", "text in front")
    }
    with LLM(**engine_options(folder)) as llm:

        def ask(given: Any) -> float:
            return timed(lambda: llm.generate(given, one, use_tqdm=False))

        ask(prompt(99))
        ask("a text, so that nothing is compiled below")
        for seed in range(options.rounds):
            words = f" Another question, number {seed}, of the same image?" * 4
            seconds["new"].append(ask(prompt(seed)))
            seconds["text behind"].append(ask(prompt(seed, behind=words)))
            # The last block of the image is not full, so some of its tokens are computed again.
            seconds["as text"].append(ask(f"{seed}" + "x" * 15 + words))
            seconds["text in front"].append(ask(prompt(seed, before=f"Number {seed}: ")))
    found = {name: min(values) for name, values in seconds.items()}
    return {f"{name} s": round(value, 4) for name, value in found.items()} | {
        "text behind / as text": round(found["text behind"] / found["as text"], 2),
        "text in front / new": round(found["text in front"] / found["new"], 3),
    }


def streams(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the gaps between tokens of streams: without an image, while one is encoded in slices, and while one is encoded at once."""
    found = dict[str, Any]()
    for name, encode_ms in (("slices", options.encode_ms), ("at once", 0)):
        args = EngineArgs(**engine_options(folder, encode_ms=encode_ms))
        with LLMEngine.from_engine_args(args) as engine:
            alone: list[float] = []
            beside: list[float] = []
            for seed in range(options.rounds + 1):
                quiet, busy = _gaps(engine, seed)
                if seed:
                    alone += quiet
                    beside += busy
        found[name] = {
            "without image p50 ms": round(1e3 * median(alone), 1),
            "beside image p50 ms": round(1e3 * median(beside), 1),
            "beside image p99 ms": round(1e3 * percentile(beside, 99), 1),
            "largest ms": round(1e3 * max(beside), 1),
            "tokens beside the image": len(beside),
        }
    return found


def _gaps(engine: LLMEngine, seed: int) -> tuple[list[float], list[float]]:
    """Return the seconds between steps with tokens of streams: before an image arrives, and until its first token."""
    endless = SamplingParams(max_tokens=1500, temperature=0, ignore_eos=True)
    endless.output_kind = RequestOutputKind.DELTA
    names = [f"{seed} {i}" for i in range(NUM_STREAMS)]
    for name in names:
        engine.add_request(name, f"a text {name}", endless)
    times = list[float]()
    for _ in range(40):
        engine.step()
        times.append(perf_counter())
    quiet = [b - a for a, b in pairwise(times[8:])]
    one = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    engine.add_request("image", cast("PromptType", prompt(seed)), one)
    busy, is_over = [perf_counter()], False
    while not is_over:
        outputs = engine.step()
        is_over = any(output.request_id == "image" for output in outputs)
        # An image encoded at once delays a single step, the one that also reads its rows.
        if outputs:
            busy.append(perf_counter())
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    return quiet, [b - a for a, b in pairwise(busy)]


def text(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Compare text requests to the model with and without its tower.

    In the second half of the turns the engines are opened in the opposite order.
    """
    shares = [
        share
        for is_first in (True, False)
        for share in _text_shares(folder, 10 * options.rounds, is_first=is_first)
    ]
    return {
        "turns": len(shares),
        "share": round(median(shares), 3),
        "quartiles": [round(percentile(shares, q), 3) for q in (25, 75)],
    }


def _text_shares(folder: Path, num_turns: int, *, is_first: bool) -> Iterator[float]:
    """Yield the speed of the model with a tower as a share of the text model's, turn by turn."""
    params = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
    prompts = [f"{i} a prompt of some tokens, without any image" for i in range(16)]
    common = engine_options(folder, enable_prefix_caching=False)
    with ExitStack() as stack:
        seeing, blind = (
            stack.enter_context(LLM(**common, language_model_only=not sees))
            for sees in (is_first, not is_first)
        )
        if not is_first:
            seeing, blind = blind, seeing
        for turn in range(-1, num_turns):
            pair = [(0, seeing), (1, blind)]
            spent = {
                i: timed(lambda llm=llm: llm.generate(prompts, params, use_tqdm=False))
                for i, llm in (pair if turn % 2 else reversed(pair))
            }
            if turn >= 0:
                yield spent[1] / spent[0]


STUDIES: dict[str, Callable[[Path, argparse.Namespace], dict[str, Any]]] = {
    "first": first_token,
    "again": again,
    "crowd": crowd,
    "vllm": vllm,
    "streams": streams,
    "text": text,
    "loop": event_loop,
    "processing": processing,
    "start": start_up,
    "memory": memory,
}


if __name__ == "__main__":
    main()
