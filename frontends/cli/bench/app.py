"""The group of commands under `trouper bench`."""

import typer

from trouper.frontends.cli.bench.kernels import kernels
from trouper.frontends.cli.bench.latency import latency
from trouper.frontends.cli.bench.loop_gap import loop_gap
from trouper.frontends.cli.bench.peers import peers
from trouper.frontends.cli.bench.quantization import quantization
from trouper.frontends.cli.bench.serve import serve
from trouper.frontends.cli.bench.startup import startup
from trouper.frontends.cli.bench.throughput import throughput

bench = typer.Typer(help="Measure: throughput, latency, a server, start-up, kernels, peers.")
for command in (throughput, latency, serve, startup, kernels, quantization, peers):
    bench.command()(command)
bench.command("loop-gap")(loop_gap)
