"""`trouper bench structured`: what outputs by a schema cost."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from trouper.config.args import EngineArgs
from trouper.config.resolve import resolve
from trouper.frontends.cli.bench.options import ReportOptions
from trouper.frontends.cli.options import expand_options
from trouper.frontends.cli.running import Interrupts, run_engine

if TYPE_CHECKING:
    from trouper.frontends.python.async_engine import AsyncLLMEngine


@expand_options
def structured(
    ctx: typer.Context,
    num_streams: Annotated[int, typer.Option(min=1, help="Streams that run at once.")] = 16,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of each stream.")] = 128,
    num_rounds: Annotated[
        int, typer.Option(min=1, help="Rounds of streams, free ones and by schema in turn.")
    ] = 3,
    num_schemas: Annotated[int, typer.Option(min=1, help="New schemas that are asked for.")] = 50,
    rate: Annotated[
        float, typer.Option(min=0.1, help="New schemas a second while the event loop is watched.")
    ] = 50.0,
    seed: Annotated[int, typer.Option(help="Seed of requests that give none.")] = 0,
    *,
    report: ReportOptions,
    engine_args: EngineArgs,
) -> None:
    """Measure streams by a schema against free ones, and what a new schema costs."""
    from trouper.bench import structured as core

    report.check()
    engine_args.seed = seed
    resolve(engine_args, offline=True)
    record: dict[str, Any] = {}

    async def act(engine: "AsyncLLMEngine", _: Interrupts) -> None:
        found = await core.measure(
            engine,
            num_streams=num_streams,
            num_tokens=output_len,
            num_rounds=num_rounds,
            num_new=num_schemas,
            rate=rate,
        )
        record.update(found)

    run_engine(engine_args, act, backend="asyncio")
    report.finish(ctx, record, _lines(record))


def _lines(record: dict[str, Any]) -> list[str]:
    gap, missed = record["loop_gap_ms"], record["missed"]
    work: list[str] = []
    if "mask_ms_per_step" in record:
        work = [
            f"masks take {record['mask_ms_per_step']:.2f} ms a step; "
            f"{100 * record['redrawn_share']:.0f} % of the tokens are drawn again"
        ]
    return [
        f"free {record['free_tok_s']:.0f} tokens/s, by a schema {record['structured_tok_s']:.0f}: "
        f"ratio {record['ratio']:.3f}",
        *work,
        f"a new schema adds {record['new_schema_ms']:.1f} ms to the first token",
        f"event loop late by p50 {gap['p50']:.2f}, p99 {gap['p99']:.2f}, max {gap['max']:.2f} ms "
        f"at {record['schemas_per_s']:g} new schemas a second",
        f"beyond its bound: {', '.join(missed)}" if missed else "all within their bounds",
    ]
