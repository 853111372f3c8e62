"""`trouper bench tier`: measure what the tier on disk costs and saves, with a fast, a slow and a hanging disk."""

import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple
from unittest import mock

import typer

from trouper.bench.cli.options import ReportOptions, note
from trouper.frontends.cli.options import expand_options

# Simulated rate of the slow disk, in bytes per second.
SLOW = 2**20
# The tier writes in the background.  Its files count as complete when the folder has not grown for QUIET_S; wait at most
# MOST_QUIET_S.
QUIET_S, MOST_QUIET_S = 0.5, 120.0
FIRST_ID, LAST_ID = 10, 200


class _TierRun(NamedTuple):
    """The measurements of one engine, which gets the same prompts as the other engines of its round."""

    first_token_s: float
    load_s: float
    num_cached: int
    tokens: list[tuple[int, ...]]


@expand_options
def tier(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help="Folder or hub id; the demo with more positions by default."
        ),
    ] = None,
    input_len: Annotated[int, typer.Option(min=64, help="Tokens of each prompt.")] = 4000,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 64,
    num_prompts: Annotated[
        int, typer.Option(min=1, help="Prompts at once, after a single one.")
    ] = 8,
    repeat: Annotated[int, typer.Option(min=1, help="Rounds; medians are reported.")] = 5,
    load_format: Annotated[
        str, typer.Option(help="auto, or dummy for random weights of a folder's config.")
    ] = "auto",
    *,
    report: ReportOptions,
) -> None:
    """Measure engines without a tier on disk, with an empty and a filled one, and with a slow and a hanging disk.

    Each round starts all five engines with the same new prompts: first a single one, whose first token is timed,
    then several at once. `filled` is the engine after a restart.
    """
    from trouper.bench.serve import demo_of_length

    report.check()
    options = {"load_format": load_format, "max_model_len": input_len + output_len + 1}
    with (
        tempfile.TemporaryDirectory() as folder,
        demo_of_length(input_len + output_len + 1) as demo,
    ):
        rounds: list[dict[str, _TierRun]] = []
        for number in range(repeat):
            engines = _Engines(model or demo, Path(folder) / str(number), options)
            dice = random.Random(number)
            prompts = [
                [dice.randrange(FIRST_ID, LAST_ID) for _ in range(input_len)]
                for _ in range(1 + num_prompts)
            ]
            rounds.append(engines.play(prompts, output_len, is_last_without=number % 2 == 1))
            note(f"round {number + 1} of {repeat}: done")
    results = [_summary(name, rounds) for name in rounds[0]]
    report.finish(ctx, {"results": results}, _lines(results))


class _Engines:
    """Run the engines of a round one after the other, with the same folder."""

    def __init__(self, model: str, folder: Path, options: dict[str, Any]) -> None:
        self._model, self._folder, self._options = model, folder, options

    def play(
        self, prompts: Sequence[list[int]], output_len: int, *, is_last_without: bool
    ) -> dict[str, _TierRun]:
        """Run each engine.  In every other round the one without a tier runs last, because a machine's speed drifts."""
        from trouper.actors.executor.steps.tier_files import TierDisk

        class Slow(TierDisk):
            def read(self, path: str, most: int) -> bytearray:
                data = super().read(path, most)
                time.sleep(len(data) / SLOW)
                return data

            def write(self, path: str, parts: tuple[bytes | memoryview, ...]) -> None:
                time.sleep(sum(map(len, parts)) / SLOW)
                super().write(path, parts)

        goes_on = threading.Event()

        class Hanging(TierDisk):
            def read(self, path: str, most: int) -> bytearray:
                goes_on.wait()
                return super().read(path, most)

            def write(self, path: str, parts: tuple[bytes | memoryview, ...]) -> None:
                goes_on.wait()

        def without() -> _TierRun:
            return self._run(prompts, output_len, None)

        found = {} if is_last_without else {"off": without()}
        found["empty"] = self._run(prompts, output_len, TierDisk, settle=self._settle)
        found["filled"] = self._run(prompts, output_len, TierDisk)
        found["slow"] = self._run(prompts, output_len, Slow)
        # The hanging disk continues after the measurement, because otherwise its thread would never end.
        found["hanging"] = self._run(prompts, output_len, Hanging, settle=goes_on.set)
        return {"off": without(), **found} if is_last_without else found

    def _run(
        self,
        prompts: Sequence[list[int]],
        output_len: int,
        disk: Callable[[], Any] | None,
        settle: Callable[[], None] = lambda: None,
    ) -> _TierRun:
        from trouper import LLM, SamplingParams

        with _disk_of(disk), LLM(
            self._model,
            kv_tier_dir=None if disk is None else str(self._folder),
            skip_tokenizer_init=True,
            **self._options,
        ) as llm:  # fmt: skip

            def answers(some: Sequence[list[int]], num: int) -> tuple[float, Any]:
                given: Any = [{"prompt_token_ids": prompt} for prompt in some]
                params = SamplingParams(
                    temperature=0, max_tokens=num, ignore_eos=True, detokenize=False
                )
                began = time.perf_counter()
                results = llm.generate(given, params, use_tqdm=False)
                return time.perf_counter() - began, results

            # Warm up: record the steps, and let the scheduler learn their durations.
            answers([[5] * max(32, len(prompts[0]) // 4)], 16)
            first_s, (first,) = answers(prompts[:1], 1)
            load_s, results = answers(prompts[1:], output_len)
            settle()
            tokens = [tuple(result.outputs[0].token_ids) for result in (first, *results)]
            return _TierRun(first_s, load_s, first.num_cached_tokens or 0, tokens)

    def _settle(self) -> None:
        """Wait until all files are written."""
        end, size, same_s = time.monotonic() + MOST_QUIET_S, -1, time.monotonic()
        while time.monotonic() < min(end, same_s + QUIET_S):
            now = sum(1 for _ in self._folder.rglob("*"))
            if now != size:
                size, same_s = now, time.monotonic()
            time.sleep(QUIET_S / 10)


@contextmanager
def _disk_of(disk: Callable[[], Any] | None) -> Iterator[None]:
    """Replace the disk of engines in the block, because a real disk cannot be made slow on purpose."""
    from trouper.actors.executor.steps import tier_thread

    with mock.patch.object(tier_thread, "TierDisk", disk or tier_thread.TierDisk):
        yield


def _summary(name: str, rounds: Sequence[dict[str, _TierRun]]) -> dict[str, Any]:
    """Return the medians of one kind of engine, and its ratios to the engine without a tier in the same round."""
    runs = [(found[name], found["off"]) for found in rounds]
    return {
        "tier": name,
        "first_token_s": median(run.first_token_s for run, _ in runs),
        "first_token_ratio": median(run.first_token_s / off.first_token_s for run, off in runs),
        "load_s": median(run.load_s for run, _ in runs),
        "speed_ratio": median(off.load_s / run.load_s for run, off in runs),
        "num_cached_tokens": runs[0][0].num_cached,
        "equal_answers": sum(
            a == b for run, off in runs for a, b in zip(run.tokens, off.tokens, strict=True)
        ),
        "num_answers": sum(len(run.tokens) for run, _ in runs),
    }


def _lines(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield f"{'tier':10}{'first token s':>14}{'of off':>8}{'load s':>9}{'speed':>8}{'cached':>8}{'equal answers':>16}"
    for r in results:
        yield (
            f"{r['tier']:10}{r['first_token_s']:14.3f}{r['first_token_ratio']:8.3f}{r['load_s']:9.3f}"
            f"{r['speed_ratio']:8.3f}{r['num_cached_tokens']:8}{r['equal_answers']:9} of {r['num_answers']}"
        )
