"""`trouper bench startup`: how long a user waits."""

from typing import Annotated, Any

import typer

from trouper.frontends.cli.bench.options import ReportOptions, note
from trouper.frontends.cli.options import expand_options


@expand_options
def startup(
    ctx: typer.Context,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Folder or hub id; the demo when left out.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens that are generated.")] = 32,
    num_iters_cold: Annotated[int, typer.Option(min=0, help="Starts with empty caches.")] = 3,
    num_iters_warmup: Annotated[int, typer.Option(min=0, help="Starts before, untimed.")] = 1,
    num_iters_warm: Annotated[int, typer.Option(min=0, help="Starts after those.")] = 3,
    *,
    report: ReportOptions,
) -> None:
    """Time to import, --help, the first text and a ready server; each start is a process."""
    from trouper.bench import startup as core
    from trouper.config.args import EngineArgs

    report.check()
    EngineArgs(
        model=model
    ).resolve()  # here, because it finds mistakes before the first process does
    results = core.measure(
        model,
        num_iters_cold=num_iters_cold,
        num_iters_warmup=num_iters_warmup,
        num_iters_warm=num_iters_warm,
        max_tokens=max_tokens,
        tell=lambda name, _: note(f"{name}: done"),
    )
    report.finish(ctx, {"results": results}, (_line(*item) for item in results.items()))


def _line(name: str, figures: dict[str, Any]) -> str:
    times = (f"{how} {values['median_s']:.3f} s" for how, values in figures.items())
    return f"{name:32} {', '.join(times)}"
