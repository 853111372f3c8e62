"""Compare tensor-parallel ranks with one process on the same cores, or with one GPU: a prompt and decode steps.

Run it as `python -m trouper.bench.studies.parallel.ranks`; `--help` lists its options.
"""

import sys
from collections.abc import Sequence
from functools import partial
from time import perf_counter
from typing import Annotated, Any, Literal

import anyio
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

# Token ids that every model has.
VOCABULARY = range(1, 1000)
# The prompt tokens of a decoding sequence.
SHORT = 16
# The KV memory of each engine, because both use the first GPU.
GPU_KV_BYTES = 2**32


def configs(
    args: EngineArgs,
    num_ranks: int,
    num_prompt_tokens: int,
    num_rows: int,
    num_outputs: int,
    device: str = "cpu",
) -> tuple[EngineConfig, EngineConfig]:
    """Resolve one process and several ranks, for prompts and streams of these sizes."""
    args.enable_prefix_caching = False
    args.max_num_seqs = num_rows
    args.max_num_batched_tokens = max(num_prompt_tokens, num_rows * SHORT)
    args.max_model_len = max(num_prompt_tokens + 1, SHORT + num_outputs)
    # Compression would speed up single rows only.
    args.compress_weights = False
    args.device, args.device_worker = device, "process"
    if device == "cuda":
        args.kv_cache_memory_bytes = GPU_KV_BYTES
    whole = resolve(args)
    args.tensor_parallel_size = num_ranks
    return whole, resolve(args)


async def measure(
    whole: EngineConfig,
    cut: EngineConfig,
    *,
    num_prompt_tokens: int,
    rows: Sequence[int],
    num_outputs: int,
    num_rounds: int,
) -> list[dict[str, Any]]:
    """Return a record for the prompt and for each number of rows: the median seconds of both engines, and their ratio."""
    async with in_turn(whole, cut) as both:

        async def record(
            what: str, num_tokens: int, num_outputs: int, num_rows: int
        ) -> dict[str, Any]:
            seconds_of = partial(_seconds, num_tokens, num_outputs, num_rows)
            # The first turn compiles kernels and records steps.
            await both.measure(f"{what}-first", seconds_of, 1)
            one, several, turns = await both.measure(what, seconds_of, num_rounds)
            return {
                "what": what, "num_ranks": cut.tensor_parallel_size, "one_process_s": one, "ranks_s": several,
                "ratio": one / several, "seconds": turns,
            }  # fmt: skip

        records = [await record(f"prompt of {num_prompt_tokens}", num_prompt_tokens, 1, 1)]
        for num_rows in rows:
            name = f"step of {num_rows} rows"
            records.append(await record(name, SHORT, num_outputs, num_rows))
        return records


async def _seconds(
    num_tokens: int, num_outputs: int, num_rows: int, engine: Engine, name: str
) -> float:
    """Return the seconds of a prompt, or with several outputs those of one step after the first tokens."""
    params = SamplingParams(
        temperature=0, max_tokens=num_outputs, ignore_eos=True, detokenize=False
    )
    first_s: list[float] = []

    async def stream(row: int) -> None:
        ids = [VOCABULARY[(i + row) % len(VOCABULARY)] for i in range(num_tokens)]
        is_first = True
        async for _ in engine.generate({"prompt_token_ids": ids}, params, f"{name}-{row}"):
            if is_first:
                first_s.append(perf_counter())
                is_first = False

    started = perf_counter()
    async with anyio.create_task_group() as tasks:
        for row in range(num_rows):
            tasks.start_soon(stream, row)
    if num_outputs == 1:
        return perf_counter() - started
    return (perf_counter() - max(first_s)) / (num_outputs - 1)


def measure_both(whole: EngineConfig, cut: EngineConfig, **options: Any) -> list[dict[str, Any]]:
    """Run `measure` on a new event loop."""
    return anyio.run(partial(measure, whole, cut, **options), backend="trio")


@expand_options
def ranks(
    ctx: typer.Context,
    ranks: Annotated[int, typer.Option(min=2, help="Number of tensor-parallel ranks.")] = 2,
    device: Annotated[
        Literal["cpu", "cuda"], typer.Option(help="Where: cpu, or cuda with a GPU for each rank.")
    ] = "cpu",
    prompt_tokens: Annotated[int, typer.Option(min=16, help="Tokens of the prompt.")] = 512,
    rows: Annotated[
        Any,
        typer.Option(parser=integers, metavar="N,N,…", help="Numbers of sequences that decode."),
    ] = "1,32",
    output_tokens: Annotated[int, typer.Option(min=2, help="Output tokens of each sequence.")] = 32,
    num_iters: Annotated[int, typer.Option(min=1, help="Rounds of each engine, in turn.")] = 3,
    *,
    geometry: GeometryOptions,
    report: ReportOptions,
) -> None:
    """Measure a prompt and decode steps with ranks, relative to one process on the same cores or one GPU."""
    report.check()
    whole, cut = configs(geometry.args(), ranks, prompt_tokens, max(rows), output_tokens, device)
    records = measure_both(
        whole,
        cut,
        num_prompt_tokens=prompt_tokens,
        rows=rows,
        num_outputs=output_tokens,
        num_rounds=num_iters,
    )
    report.finish(ctx, {"results": records}, map(_line, records))


def _line(record: dict[str, Any]) -> str:
    return (
        f"{record['what']:20} one process {1000 * record['one_process_s']:.1f} ms, "
        f"{record['num_ranks']} ranks {1000 * record['ranks_s']:.1f} ms, {record['ratio']:.2f} of its speed"
    )


if __name__ == "__main__":
    sys.exit(run_study(ranks))
