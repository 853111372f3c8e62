"""`trouper bench quantization`: the loss of quality by rounded weights."""

from typing import Annotated

import typer

from trouper.frontends.cli.bench.options import ReportOptions
from trouper.frontends.cli.options import expand_options


@expand_options
def quantization(
    ctx: typer.Context,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Folder or hub id; the demo when left out.")
    ] = None,
    num_chars: Annotated[int, typer.Option(min=1, help="Characters of each text.")] = 600,
    num_files: Annotated[
        int, typer.Option(min=1, max=6, help="Number of texts to compare on.")
    ] = 6,
    *,
    report: ReportOptions,
) -> None:
    """Measure KL divergence, equal top tokens and perplexity of int8 and int4 beside the plain weights."""
    from trouper.bench.quantization import measure

    report.check()
    results = measure(model, num_chars=num_chars, num_files=num_files)
    lines = (
        f"{r['quantization']:10}KL {r['mean_kl_nats']:7.4f} nats   same top token "
        f"{r['same_top_token']:6.1%}   perplexity {r['perplexity']:8.2f}"
        for r in results
    )
    report.finish(ctx, {"results": results}, lines)
