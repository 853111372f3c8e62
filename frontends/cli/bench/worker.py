"""`trouper bench worker`: the price of a worker process."""

from typing import Annotated

import typer

from trouper.config.resolve import resolve
from trouper.errors import TrouperValidationError
from trouper.frontends.cli.bench.options import ReportOptions, note
from trouper.frontends.cli.options import expand_options


@expand_options
def worker(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Folder or hub id; the demo model by default."),
    ] = None,
    streams: Annotated[
        str, typer.Option(help="Numbers of streams at once, separated by commas.")
    ] = "1,16,64",
    output_len: Annotated[
        int, typer.Option(min=1, help="Tokens to generate in each stream.")
    ] = 200,
    num_iters: Annotated[int, typer.Option(min=1, help="Timed rounds of each, in turn.")] = 5,
    *,
    report: ReportOptions,
) -> None:
    """Compare tokens a second with the model in a thread of the engine and in a process, in turn."""
    from trouper.bench import worker as core
    from trouper.config.args import EngineArgs

    report.check()
    numbers = _numbers(streams)
    resolve(EngineArgs(model=model, max_num_seqs=max(numbers)))
    results = core.measure(
        model, streams=numbers, num_tokens=output_len, num_rounds=num_iters, tell=note
    )
    lines = (
        f"{number:>4} streams: process / inline {found['process_over_inline']:.2f}  "
        f"({found['tokens_per_s']['process']:.0f} / {found['tokens_per_s']['inline']:.0f} tokens/s)"
        for number, found in results.items()
    )
    report.finish(ctx, {"results": results}, lines)


def _numbers(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) for word in words):
        raise TrouperValidationError(
            "must be positive numbers, separated by commas", parameter="streams", value=text
        )
    return tuple(int(word) for word in words)
