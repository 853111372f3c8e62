"""`trouper bench fairness`: what requests wait for each other, in virtual time."""

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from trouper.errors import invalid
from trouper.frontends.cli.bench.options import ReportOptions
from trouper.frontends.cli.options import expand_options

MACHINE = "cpu-135m"


@expand_options
def fairness(
    ctx: typer.Context,
    machine: Annotated[
        str, typer.Option(help="Machine whose steps are played: cpu-135m, cpu-7b or gpu-7b.")
    ] = MACHINE,
    workload: Annotated[
        list[str] | None, typer.Option(help="Workload to play; repeatable; all by default.")
    ] = None,
    order: Annotated[
        list[str] | None,
        typer.Option(help="Order to play: arrival, threshold or fair; repeatable; all by default."),
    ] = None,
    noise: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Deviation of a step's time, as a share of it.")
    ] = 0.1,
    *,
    report: ReportOptions,
) -> None:
    """Play workloads against the scheduler in virtual time: short requests beside long prompts, streams, greedy keys."""
    from trouper.bench import fairness as core
    from trouper.bench.virtual_time import MACHINES

    report.check()
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
