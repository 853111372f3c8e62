"""The group of commands under `trouper bench`."""

import typer

from trouper.frontends.cli.bench.fairness import fairness
from trouper.frontends.cli.bench.kernels import kernels
from trouper.frontends.cli.bench.latency import latency
from trouper.frontends.cli.bench.loop_gap import loop_gap
from trouper.frontends.cli.bench.peers import peers
from trouper.frontends.cli.bench.pipeline import pipeline
from trouper.frontends.cli.bench.quantization import quantization
from trouper.frontends.cli.bench.ranks import ranks
from trouper.frontends.cli.bench.replicas import replicas
from trouper.frontends.cli.bench.serve import serve
from trouper.frontends.cli.bench.startup import startup
from trouper.frontends.cli.bench.structured import structured
from trouper.frontends.cli.bench.throughput import throughput
from trouper.frontends.cli.bench.worker import worker
from trouper.frontends.cli.help import PanelCommand, WholeSentenceGroup

bench = typer.Typer(
    cls=WholeSentenceGroup,
    help="Measure: throughput, latency, a server, start-up, kernels, peers, workers.",
)
for command in (
    throughput,
    latency,
    serve,
    fairness,
    startup,
    kernels,
    quantization,
    peers,
    pipeline,
    ranks,
    replicas,
    structured,
    worker,
):
    bench.command(cls=PanelCommand)(command)
bench.command("loop-gap", cls=PanelCommand)(loop_gap)
