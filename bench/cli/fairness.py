"""`trouper bench fairness`: how long requests wait for others."""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import typer

from trouper.bench.cli.options import ReportOptions, note
from trouper.errors import invalid
from trouper.frontends.cli.options import expand_options
from trouper.frontends.cli.values import integers

MACHINE = "cpu-135m"


@expand_options
def fairness(
    ctx: typer.Context,
    machine: Annotated[
        str,
        typer.Option(help="Machine whose steps are played: cpu-1m, cpu-135m, cpu-7b or gpu-7b."),
    ] = MACHINE,
    workload: Annotated[
        list[str] | None, typer.Option(help="Workload to play; repeatable; all by default.")
    ] = None,
    order: Annotated[
        list[str] | None,
        typer.Option(help="Order to play: arrival, threshold or fair; repeatable; all by default."),
    ] = None,
    server: Annotated[
        bool,
        typer.Option(
            "--server", help="Measure servers on this machine, one for each order in turn."
        ),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help="Model of the servers; the demo with more positions by default."
        ),
    ] = None,
    num_long: Annotated[
        Any,
        typer.Option(
            parser=integers, metavar="N,N,…", help="Long prompts at once, for the servers."
        ),
    ] = "1,3",
    long_len: Annotated[
        int, typer.Option(min=600, help="Tokens of a long prompt, for the servers.")
    ] = 6000,
    noise: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Deviation of a step's time, as a share of it.")
    ] = 0.1,
    *,
    report: ReportOptions,
) -> None:
    """Measure how long requests wait for others, in virtual time with the real scheduler, or on real servers."""
    from trouper.bench import fair_server
    from trouper.bench import fairness as core
    from trouper.bench.virtual_time import MACHINES

    report.check()
    if server:
        orders = _known("order", order, fair_server.ORDERS)
        found = fair_server.measure(
            model, orders, num_long=num_long, long_tokens=long_len, tell=note
        )
        report.finish(ctx, {"results": found}, _server_lines(found))
        return
    workloads = _known("workload", workload, core.WORKLOADS)
    orders = _known("order", order, core.ORDERS)
    (name,) = _known("machine", [machine], MACHINES)
    results = [
        core.measure(each, MACHINES[name], way, noise=noise) for each in workloads for way in orders
    ]
    report.finish(ctx, {"results": results}, _lines(results))


def _known(option: str, wished: list[str] | None, known: dict[str, Any]) -> list[str]:
    for name in wished or ():
        if name not in known:
            raise invalid(option, f"must be one of {', '.join(known)}", name)
    return list(wished or known)


def _server_lines(results: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Make a table with a line for each number of long prompts, and one for streams."""
    for result in results:
        alone_ms = 1000 * result["short_alone_s"]["p50"]
        yield f"{result['order']}: a short request alone {alone_ms:.0f} ms, a long one {result['long_alone_s']:.2f} s"
        for num, found in result["beside"].items():
            over = found["over_alone"]
            yield (
                f"  beside {num:2} long: {found['num_short']} short, over alone p50 {over['p50']:.1f}, p95 {over['p95']:.1f}; "
                f"the long over their own work and that of the short {found['long_over_own']:.2f}"
            )
        gaps = result["streams"]["gap_s"]
        alone, beside = (1000 * gaps[name]["p99"] for name in ("alone", "beside"))
        yield f"  gap between tokens of streams, p99: alone {alone:.0f} ms, beside a long prompt {beside:.0f} ms"


def _lines(results: list[dict[str, Any]]) -> Iterator[str]:
    """Make a table with a line for each kind of request."""
    yield (
        f"{'workload':18}{'order':10}{'total s':>8}  {'kind':8}"
        f"{'first token s: p50':>19}{'p95':>8}{'p99':>8}{'over alone: p50':>17}{'p95':>8}{'max':>8}"
        f"{'gap ms: p50':>13}{'p99':>7}"
    )
    for result in results:
        head = f"{result['workload']:18}{result['order']:10}{result['total_s']:8.1f}"
        for kind, found in result["kinds"].items():
            first, over, gap = found["first_token_s"], found["over_alone"], found["gap_s"]
            gaps = f"{1000 * gap['p50']:13.0f}{1000 * gap['p99']:7.0f}" if gap else ""
            yield (
                f"{head}  {kind:8}{first['p50']:19.2f}{first['p95']:8.2f}{first['p99']:8.2f}"
                f"{over['p50']:17.1f}{over['p95']:8.1f}{over['max']:8.1f}{gaps}"
            )
            head = " " * len(head)
