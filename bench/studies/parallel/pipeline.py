"""Measure the speedup of one prompt by pipeline stages with one core each, relative to one process on one core.

Run it as `python -m trouper.bench.studies.parallel.pipeline`; `--help` lists its options.
"""

import os
import sys
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import Annotated, Any

import anyio
import msgspec
import typer

from trouper.actors.engine.wiring import Engine
from trouper.bench.cli.options import GeometryOptions, ReportOptions
from trouper.bench.studies.command import run_study
from trouper.bench.studies.parallel.interleaved import in_turn
from trouper.config.args import EngineArgs
from trouper.config.engine_config import EngineConfig
from trouper.config.resolve import resolve
from trouper.frontends.cli.options import expand_options
from trouper.frontends.cli.values import integers
from trouper.params import SamplingParams

# Workers inherit this variable.
NUM_THREADS = "OMP_NUM_THREADS"
# Token ids that every model has.
VOCABULARY = range(1, 1000)
PARAMS = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)


def configs(
    args: EngineArgs, num_stages: int, chunk_tokens: int, num_chunks: int, *, stalls: bool
) -> tuple[EngineConfig, EngineConfig]:
    """Resolve engines with one stage and with several, for prompts of up to `num_chunks` chunks.

    A step is one chunk. With `stalls` only one step is in flight, so each waits for the previous one's result. The
    layers are divided evenly unless the environment sets a partition: a prompt reads the head only once, not in every
    chunk.
    """
    args.enable_prefix_caching = False
    args.max_num_seqs = 1
    args.max_num_batched_tokens = chunk_tokens
    args.max_model_len = chunk_tokens * num_chunks + 1
    args.device, args.device_worker = "cpu", "process"
    whole = resolve(args)
    args.pipeline_parallel_size = num_stages
    num_layers = whole.model.hf_config["num_hidden_layers"]
    bounds = [num_layers * stage // num_stages for stage in range(num_stages + 1)]
    even = tuple(end - begin for begin, end in pairwise(bounds))
    cut = resolve(args)
    if cut.layer_partition is None:
        cut = msgspec.structs.replace(cut, layer_partition=even)
    if stalls:
        scheduler = msgspec.structs.replace(cut.scheduler, max_steps_in_flight=1)
        cut = msgspec.structs.replace(cut, scheduler=scheduler)
    return whole, cut


async def measure(
    whole: EngineConfig,
    cut: EngineConfig,
    *,
    chunk_tokens: int,
    chunks: Sequence[int],
    num_rounds: int,
) -> list[dict[str, Any]]:
    """Return one record for each number of chunks: the median seconds of both engines, and their ratio."""
    records: list[dict[str, Any]] = []
    async with in_turn(whole, cut) as both:
        # The first step compiles kernels.
        await both.measure("first", partial(_seconds, 2 * chunk_tokens), 1)
        for num_chunks in chunks:
            one, several, turns = await both.measure(
                f"{num_chunks}", partial(_seconds, num_chunks * chunk_tokens), num_rounds
            )
            depth = cut.num_stages
            records.append(
                {
                    "num_chunks": num_chunks,
                    "chunk_tokens": chunk_tokens,
                    "num_stages": depth,
                    "one_stage_s": one,
                    "stages_s": several,
                    "gain": one / several,
                    "bound": num_chunks * depth / (num_chunks + depth - 1),
                    "seconds": turns,
                }
            )
    return records


async def _seconds(num_tokens: int, engine: Engine, name: str) -> float:
    ids = [VOCABULARY[i % len(VOCABULARY)] for i in range(num_tokens)]
    started = perf_counter()
    async for _ in engine.generate({"prompt_token_ids": ids}, PARAMS, name):
        pass
    return perf_counter() - started


def measure_on_one_core_each(
    whole: EngineConfig, cut: EngineConfig, **options: Any
) -> list[dict[str, Any]]:
    """Run `measure` on a new event loop, with one thread in each worker."""
    before = os.environ.get(NUM_THREADS)
    os.environ[NUM_THREADS] = "1"
    try:
        return anyio.run(partial(measure, whole, cut, **options), backend="trio")
    finally:
        if before is None:
            del os.environ[NUM_THREADS]
        else:
            os.environ[NUM_THREADS] = before


@expand_options
def pipeline(
    ctx: typer.Context,
    stages: Annotated[int, typer.Option(min=2, help="Number of stages, a core each.")] = 2,
    chunks: Annotated[
        Any,
        typer.Option(parser=integers, metavar="N,N,…", help="Numbers of chunks of the prompts."),
    ] = "8,32",
    chunk_tokens: Annotated[int, typer.Option(min=16, help="Tokens of a chunk.")] = 128,
    stall: Annotated[
        bool,
        typer.Option("--stall", help="Start each step only after the result of the previous one."),
    ] = False,
    num_iters: Annotated[int, typer.Option(min=1, help="Prompts of each engine, in turn.")] = 3,
    *,
    geometry: GeometryOptions,
    report: ReportOptions,
) -> None:
    """Measure how much faster stages on a core each compute a prompt than one process on one core."""
    report.check()
    whole, cut = configs(geometry.args(), stages, chunk_tokens, max(chunks), stalls=stall)
    records = measure_on_one_core_each(
        whole, cut, chunk_tokens=chunk_tokens, chunks=chunks, num_rounds=num_iters
    )
    report.finish(ctx, {"stall": stall, "results": records}, map(_line, records))


def _line(record: dict[str, Any]) -> str:
    return (
        f"{record['num_chunks']:4} chunks of {record['chunk_tokens']}: "
        f"one stage {record['one_stage_s']:.2f} s, {record['num_stages']} stages {record['stages_s']:.2f} s, "
        f"{record['gain']:.2f} times as fast (at most {record['bound']:.2f})"
    )


if __name__ == "__main__":
    sys.exit(run_study(pipeline))
