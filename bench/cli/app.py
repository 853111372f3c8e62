"""The table of commands of `trouper bench`, and the shortest of them, `startup`."""

from typing import Annotated, Any

import typer

from trouper.bench.cli.fairness import fairness
from trouper.bench.cli.kernels import kernels
from trouper.bench.cli.options import ReportOptions, note
from trouper.bench.cli.peers import peers
from trouper.bench.cli.serve import serve
from trouper.bench.cli.throughput import latency, throughput
from trouper.bench.cli.tier import tier
from trouper.config.resolve import resolve
from trouper.frontends.cli.options import expand_options
from trouper.frontends.cli.values import PanelCommand, WholeSentenceGroup


@expand_options
def startup(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Folder or hub id; the demo model by default."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate in each start.")] = 32,
    num_iters_cold: Annotated[int, typer.Option(min=0, help="Timed starts with empty caches.")] = 3,
    num_iters_warmup: Annotated[
        int, typer.Option(min=0, help="Untimed starts before the warm ones.")
    ] = 1,
    num_iters_warm: Annotated[int, typer.Option(min=0, help="Timed starts with warm caches.")] = 3,
    *,
    report: ReportOptions,
) -> None:
    """Measure the time until import, --help, the first text and a ready server, each in new processes."""
    from trouper.bench import startup as core
    from trouper.config.args import EngineArgs

    report.check()
    # Reports mistakes before any process starts.
    resolve(EngineArgs(model=model))
    results = core.measure(
        model,
        num_iters_cold=num_iters_cold,
        num_iters_warmup=num_iters_warmup,
        num_iters_warm=num_iters_warm,
        max_tokens=max_tokens,
        report=lambda name, _: note(f"{name}: done"),
    )
    report.finish(ctx, {"results": results}, (_line(*item) for item in results.items()))


def _line(name: str, figures: dict[str, Any]) -> str:
    times = (f"{how} {values['median_s']:.3f} s" for how, values in figures.items())
    return f"{name:32} {', '.join(times)}"


bench = typer.Typer(cls=WholeSentenceGroup)
for command in (
    throughput,
    latency,
    serve,
    startup,
    kernels,
    fairness,
    tier,
    peers,
):
    bench.command(cls=PanelCommand)(command)
