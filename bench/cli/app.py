"""Define the group `trouper bench`, and its commands with few options: `startup`, `fairness` and `peers`.

Each command imports what it measures only when it runs, so that help is fast.
"""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import typer

from trouper.bench.cli.kernels import kernels
from trouper.bench.cli.options import ReportOptions, note, terminable, tokenizer_of
from trouper.bench.cli.serve import serve
from trouper.bench.cli.throughput import latency, throughput
from trouper.bench.cli.tier import tier
from trouper.config.args import EngineArgs
from trouper.config.resolve import resolve
from trouper.errors import invalid
from trouper.frontends.cli.options import expand_options
from trouper.frontends.cli.values import PanelCommand, WholeSentenceGroup, integers

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
    from trouper.bench import fairness as core
    from trouper.bench.virtual_time import MACHINES

    report.check()
    if server:
        orders = _known("order", order, core.SERVER_OPTIONS)
        found = core.measure_server(
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
    report.finish(ctx, {"results": results}, _table_lines(results))


def _known(option: str, wished: list[str] | None, known: dict[str, Any]) -> list[str]:
    for name in wished or ():
        if name not in known:
            raise invalid(option, f"must be one of {', '.join(known)}", name)
    return list(wished or known)


def _server_lines(results: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Make a table with a line for each number of long prompts, and one for streams."""
    for result in results:
        alone_ms = 1000 * result["short_alone_s"]["p50"]
        yield f"{result['order']}, on an idle server: a short request {alone_ms:.0f} ms, a long one {result['long_alone_s']:.2f} s"
        for num, found in result["beside"].items():
            over = found["over_alone"]
            yield (
                f"  with {num:2} long: {found['num_short']} short took p50 {over['p50']:.1f}, p95 {over['p95']:.1f} times as long; "
                f"all together {found['long_over_own']:.2f} times as long as one after the other"
            )
        gaps = result["streams"]["gap_s"]
        alone, beside = (1000 * gaps[name]["p99"] for name in ("alone", "beside"))
        yield f"  gap between tokens of streams, p99: {alone:.0f} ms, with a long prompt {beside:.0f} ms"


def _table_lines(results: list[dict[str, Any]]) -> Iterator[str]:
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


PYTHON: dict[str, Any] = {"metavar": "PATH", "rich_help_panel": "Peers"}


@expand_options
def peers(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Folder of the model; the demo model by default."),
    ] = None,
    gguf: Annotated[
        str | None, typer.Option(help="GGUF file of the same model, for llama.cpp.", metavar="FILE")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Type of the weights in all engines except llama.cpp.")
    ] = "bfloat16",
    quantization: Annotated[
        str | None,
        typer.Option(
            help="Quantization of trouper (int8 or int4), to compare with a GGUF file of that kind."
        ),
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            help="Workload as requests x input x output tokens; repeatable.", metavar="16x128x64"
        ),
    ] = None,
    repeat: Annotated[
        int, typer.Option(min=1, help="Number of rounds; every engine runs in each.")
    ] = 5,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal prompts.")] = 0,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="Engine to compare with: vllm, llama.cpp, transformers or transformers-cb; repeatable; by default all that are installed.",
            metavar="NAME",
            rich_help_panel="Peers",
        ),
    ] = None,
    alone: Annotated[
        bool, typer.Option("--alone", help="Measure trouper without any other engine.")
    ] = False,
    vllm_python: Annotated[
        str | None, typer.Option(help="Python interpreter of an environment with vLLM.", **PYTHON)
    ] = None,
    llama_python: Annotated[
        str | None,
        typer.Option(help="Python interpreter of an environment with llama-cpp-python.", **PYTHON),
    ] = None,
    llama_batched_bench: Annotated[
        str | None,
        typer.Option(
            help="llama.cpp's own benchmark program, to use instead of llama-cpp-python.", **PYTHON
        ),
    ] = None,
    hf_python: Annotated[
        str | None,
        typer.Option(
            help="Python interpreter of an environment with another transformers.", **PYTHON
        ),
    ] = None,
    *,
    report: ReportOptions,
) -> None:
    """Compare engines on the same prompts in alternating rounds; show medians, spread and ratios."""
    from trouper.actors.runtime.startup import num_physical_cores
    from trouper.bench import peers as core

    works = [core.parse_workload(text) for text in workload or core.WORKLOADS]
    pythons = {"vllm": vllm_python, "llama.cpp": llama_python, "transformers": hf_python}
    args = EngineArgs(
        model=model,
        dtype=dtype,
        quantization=quantization,
        max_model_len=max(w.input_len + w.output_len for w in works),
    )
    config = resolve(args, offline=True)
    settings = core.Settings(
        model=config.model.path,
        dtype=config.dtype,
        quantization=config.quantization,
        gguf=gguf,
        peers=() if alone else tuple(peer) if peer else None,
        pythons={name: python for name, python in pythons.items() if python is not None},
        llama_batched_bench=llama_batched_bench,
        threads=num_physical_cores(),
    )
    # Reports mistakes before any engine loads its model.
    settings.engines()
    report.check()
    _, vocabulary = tokenizer_of(config.tokenizer)
    with terminable():
        record = core.compare(settings, works, repeat, vocabulary, seed=seed, report=note)
    report.finish(ctx, record, _peer_lines(record))


def _peer_lines(record: dict[str, Any]) -> list[str]:
    ready = ", ".join(f"{name} {s:.1f} s" for name, s in record["ready_s"].items() if s)
    lines = [f"ready: {ready}"]
    lines.append(
        f"{'workload':26}{'engine':14}{'median s':>10}{'spread':>8}{'out tok/s':>11}{'all tok/s':>11}"
        f"{'trouper is':>12}"
    )
    for r in record["results"]:
        work = f"{r['requests']} × ({r['input_len']} in, {r['output_len']} out)"
        lines.append(
            f"{work:26}{r['engine']:14}{r['median_s']:10.3f}{100 * r['spread']:6.1f} %"
            f"{r['output_tok_s']:11.1f}{r['total_tok_s']:11.1f}{r['trouper_is']:10.2f} ×"
        )
    return lines


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
