"""Measure the cost of structured outputs: requests with a schema relative to the same requests without one.

Both kinds generate the same number of tokens, so their times are comparable. They alternate, and the result is the
median of the ratios of each round, so that a drift of the machine cancels.

Run it as `python -m trouper.bench.studies.scheduling.structured`; `--help` lists its options.
"""

import sys
from collections.abc import Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import typer

from trouper.bench.cli.options import ReportOptions
from trouper.bench.report import summary
from trouper.bench.studies.command import run_study
from trouper.bench.studies.scheduling.loop_gap import Heartbeat
from trouper.config.args import EngineArgs
from trouper.config.resolve import resolve
from trouper.frontends.cli.options import expand_options
from trouper.frontends.cli.running import Interrupts, run_engine
from trouper.metrics import Counter, Histogram
from trouper.params import RequestOutputKind, SamplingParams
from trouper.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from trouper.frontends.python.async_engine import AsyncLLMEngine


PERCENTILES = (50.0, 99.0)
NUM_FIELDS = 12
# Bounds of the figures: the smallest ratio, and the largest number of milliseconds.
BOUNDS = {"ratio": 0.95, "new_schema_ms": 10.0, "loop_gap_p99_ms": 5.0}
KINDS: tuple[dict[str, Any], ...] = (
    {"type": "string", "maxLength": 12},
    {"type": "integer"},
    {"type": "number"},
    {"type": "boolean"},
    {"enum": ["low", "middle", "high"]},
    {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 8},
)


def schema(number: int = 0, *, num_items: int = 1) -> dict[str, Any]:
    """Return a schema of an object with 12 fields, whose names contain `number`.

    Args:
        num_items: number of these objects in an array; with enough of them, every output is cut at max_tokens.
    """
    fields = {f"field_{number}_{i}": KINDS[i % len(KINDS)] for i in range(NUM_FIELDS)}
    item = {"type": "object", "properties": fields, "required": [*fields]}
    item["additionalProperties"] = False
    return {"type": "array", "items": item, "minItems": num_items}


async def measure(
    engine: "AsyncLLMEngine",
    *,
    num_streams: int = 16,
    num_tokens: int = 128,
    num_rounds: int = 3,
    num_new: int = 50,
    rate: float = 50.0,
) -> dict[str, Any]:
    """Measure streams with and without a schema, the first token with a new schema, and the event loop while new schemas arrive.

    Args:
        num_streams: simultaneous streams of `num_tokens` each.
        num_rounds: rounds of streams without and with a schema; the results are medians.
        num_new: number of schemas sent only once.
        rate: new schemas per second while the event loop is measured.
    """
    structured = StructuredOutputsParams(json=schema(num_items=64))
    await _first_token_ms(engine, None)
    # The first schema also prepares the vocabulary.
    very_first_ms = await _first_token_ms(engine, structured)
    await _streams(engine, num_streams, 8, structured)
    await _streams(engine, num_streams, 8, None)
    before = await _counted(engine)
    free, bound = [], []
    for _ in range(num_rounds):
        free.append(await _streams(engine, num_streams, num_tokens, None))
        bound.append(await _streams(engine, num_streams, num_tokens, structured))
    work = _work(before, await _counted(engine))
    plain_ms, new_ms = [], []
    for i in range(1, num_new + 1):
        plain_ms.append(await _first_token_ms(engine, None))
        new_ms.append(await _first_token_ms(engine, StructuredOutputsParams(json=schema(i))))
    record = {
        "free_tok_s": _median(free),
        "structured_tok_s": _median(bound),
        "ratio": _median([b / f for f, b in zip(free, bound, strict=True)]),
        "rounds_tok_s": [[round(f, 1), round(b, 1)] for f, b in zip(free, bound, strict=True)],
        **work,
        "very_first_schema_ms": very_first_ms,
        "first_token_ms": summary(plain_ms, PERCENTILES),
        "first_token_new_schema_ms": summary(new_ms, PERCENTILES),
        "new_schema_ms": _median(new_ms) - _median(plain_ms),
        "loop_gap_ms": await _loop_gap_ms(engine, num_new, rate),
        "schemas_per_s": rate,
        "bounds": BOUNDS,
    }
    record["missed"] = missed(record)
    return record


def missed(record: Mapping[str, Any]) -> list[str]:
    """Return the names of the bounds exceeded by a record. The study fails if there are any."""
    kept = {
        "ratio": record["ratio"] >= BOUNDS["ratio"],
        "new_schema_ms": record["new_schema_ms"] <= BOUNDS["new_schema_ms"],
        "loop_gap_p99_ms": record["loop_gap_ms"]["p99"] <= BOUNDS["loop_gap_p99_ms"],
    }
    return [name for name, is_kept in kept.items() if not is_kept]


async def _counted(engine: "AsyncLLMEngine") -> dict[str, float]:
    """Read the engine's counters of grammar work."""
    found: dict[str, float] = {}
    for metric in await engine.get_metrics():
        name = metric.name.partition(":")[2]
        if name.startswith("grammar_"):
            if isinstance(metric, Histogram):
                found[f"{name}_sum"], found[f"{name}_count"] = metric.sum, metric.count
            elif isinstance(metric, Counter):
                found[name] = metric.value
    return found


def _work(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return the cost of grammars per step and the share of resampled tokens, or nothing without statistics."""
    gained = {name: value - before[name] for name, value in after.items()}
    if not gained.get("grammar_mask_seconds_count"):
        return {}
    return {
        "mask_ms_per_step": 1000
        * gained["grammar_mask_seconds_sum"]
        / gained["grammar_mask_seconds_count"],
        "redrawn_share": gained["grammar_redrawn_tokens"] / gained["grammar_tokens"],
    }


async def _streams(
    engine: "AsyncLLMEngine", num: int, num_tokens: int, structured: StructuredOutputsParams | None
) -> float:
    """Run this many simultaneous streams and return their tokens per second."""
    found = 0

    async def stream(seed: int) -> None:
        nonlocal found
        found += await _tokens(engine, seed, num_tokens, structured)

    started = perf_counter()
    async with anyio.create_task_group() as streams:
        for seed in range(num):
            streams.start_soon(stream, seed)
    return found / (perf_counter() - started)


async def _tokens(
    engine: "AsyncLLMEngine",
    seed: int,
    num_tokens: int,
    structured: StructuredOutputsParams | None,
) -> int:
    params = SamplingParams(
        max_tokens=num_tokens,
        seed=seed,
        ignore_eos=True,
        structured_outputs=structured,
        output_kind=RequestOutputKind.DELTA,
    )
    num = 0
    async with engine.generate("A record: ", params) as outputs:
        async for output in outputs:
            num += len(output.outputs[0].token_ids)
    return num


async def _first_token_ms(
    engine: "AsyncLLMEngine", structured: StructuredOutputsParams | None
) -> float:
    started = perf_counter()
    await _tokens(engine, 0, 1, structured)
    return 1000 * (perf_counter() - started)


async def _loop_gap_ms(engine: "AsyncLLMEngine", num: int, rate: float) -> dict[str, float]:
    """Send new schemas at a steady rate, and return how late a heartbeat woke meanwhile."""
    heartbeat = Heartbeat(0.001)
    async with anyio.create_task_group() as beats:
        beats.start_soon(heartbeat.beat)
        async with anyio.create_task_group() as asks:
            for i in range(num):
                structured = StructuredOutputsParams(json=schema(10_000 + i))
                asks.start_soon(_tokens, engine, i, 4, structured)
                await anyio.sleep(1 / rate)
        beats.cancel_scope.cancel()
    return summary(heartbeat.late_ms, PERCENTILES)


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


@expand_options
def structured(
    ctx: typer.Context,
    num_streams: Annotated[int, typer.Option(min=1, help="Streams that run at once.")] = 16,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of each stream.")] = 128,
    num_rounds: Annotated[
        int, typer.Option(min=1, help="Rounds of streams without and with a schema.")
    ] = 3,
    num_schemas: Annotated[int, typer.Option(min=1, help="Number of new schemas.")] = 50,
    rate: Annotated[
        float,
        typer.Option(min=0.1, help="New schemas per second while the event loop is measured."),
    ] = 50.0,
    seed: Annotated[int, typer.Option(help="Seed of requests without one.")] = 0,
    *,
    report: ReportOptions,
    engine_args: EngineArgs,
) -> None:
    """Measure streams with a schema relative to streams without one, and the cost of a new schema."""
    report.check()
    engine_args.seed = seed
    config = resolve(engine_args, offline=True)
    record: dict[str, Any] = {}

    async def act(engine: "AsyncLLMEngine", _: Interrupts) -> None:
        found = await measure(
            engine,
            num_streams=num_streams,
            num_tokens=output_len,
            num_rounds=num_rounds,
            num_new=num_schemas,
            rate=rate,
        )
        record.update(found)

    run_engine(config, act, backend="asyncio")
    report.finish(ctx, record, _lines(record))


def _lines(record: dict[str, Any]) -> list[str]:
    gap, missed = record["loop_gap_ms"], record["missed"]
    work: list[str] = []
    if "mask_ms_per_step" in record:
        work = [
            f"masks take {record['mask_ms_per_step']:.2f} ms a step; "
            f"{100 * record['redrawn_share']:.0f} % of the tokens are sampled again"
        ]
    return [
        f"without a schema {record['free_tok_s']:.0f} tokens/s, with a schema {record['structured_tok_s']:.0f}: "
        f"ratio {record['ratio']:.3f}",
        *work,
        f"a new schema adds {record['new_schema_ms']:.1f} ms to the first token",
        f"event loop late by p50 {gap['p50']:.2f}, p99 {gap['p99']:.2f}, max {gap['max']:.2f} ms "
        f"at {record['schemas_per_s']:g} new schemas a second",
        f"exceeds its bound: {', '.join(missed)}"
        if missed
        else "all figures are within their bounds",
    ]


if __name__ == "__main__":
    sys.exit(run_study(structured))
