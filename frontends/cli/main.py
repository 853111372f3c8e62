"""`trouper`: the root command, and the one place where an exception becomes an exit code.

Environment variables that begin with TROUPER_ and that nothing reads: misspelt ones, most likely.
"""

import dataclasses
import difflib
import os
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Annotated, Any

import typer

from trouper import __version__
from trouper.config.args import EngineArgs
from trouper.config.command_line import join_dotted
from trouper.frontends.cli import output
from trouper.frontends.cli.arguments.help import PanelCommand, TextCommand, WholeSentenceGroup
from trouper.frontends.cli.arguments.server_options import option_names
from trouper.frontends.cli.batch.embed import embed, score
from trouper.frontends.cli.batch.generate import generate
from trouper.frontends.cli.batch.run_batch import run_batch
from trouper.frontends.cli.chat.commands import chat, complete
from trouper.frontends.cli.collect_env import collect_env
from trouper.frontends.cli.launch import launch
from trouper.frontends.cli.models import models
from trouper.frontends.cli.serve import serve

HELP_WIDTH = 100  # columns of the widest help
app = typer.Typer(
    name="trouper",
    cls=WholeSentenceGroup,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": HELP_WIDTH},
)
app.command(cls=PanelCommand)(generate)
app.command(cls=TextCommand)(chat)
app.command(cls=TextCommand)(complete)
app.command(cls=PanelCommand)(embed)
app.command(cls=PanelCommand)(score)
app.command(cls=PanelCommand)(serve)
app.command(cls=PanelCommand)(launch)
app.command(cls=PanelCommand)(run_batch)
app.command(cls=PanelCommand)(models)
app.command(cls=PanelCommand)(collect_env)


class BenchGroup(WholeSentenceGroup):
    """The commands of `trouper bench`, imported when one of them is needed.

    The benchmarks import the command line, so an import in this direction would close a circle.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self._table())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return self._table().get(cmd_name)

    def _table(self) -> dict[str, Any]:
        bench = import_module("trouper.bench.cli.app").bench
        commands: dict[str, Any] = typer.main.get_command(bench).commands  # pyright: ignore
        return commands


app.add_typer(
    typer.Typer(
        cls=BenchGroup, help="Measure: throughput, latency, a server, start-up, kernels, peers."
    ),
    name="bench",
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"trouper {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            "-v",
            callback=_print_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    """Run language and embedding models: at the terminal, as a server, or to measure them."""
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())
        return
    for line in unknown_variables(os.environ):
        output.complain(line)


def run_line(arguments: list[str] | None = None, commands: typer.Typer = app) -> int:
    """Run one command line and return its exit code; every error is one line on stderr."""
    # Shared with the command: its arguments go in, `debug` comes back.
    state: dict[str, Any] = {"arguments": sys.argv[1:] if arguments is None else arguments}
    output.prepare_streams()
    try:
        code = commands(
            join_dotted(state["arguments"]), prog_name="trouper", standalone_mode=False, obj=state
        )
    except (Exception, KeyboardInterrupt, BaseExceptionGroup) as error:
        if state.get("debug"):
            raise
        if isinstance(error, output.Interrupted) and output.is_terminal(sys.stderr):
            print(file=sys.stderr)  # the cursor stands behind ^C
        code, message = output.explain(error)
        output.complain(message)
        return code
    if code == output.EXIT_CTRL_C:  # typer's own answer to a KeyboardInterrupt
        output.complain("interrupted")
    return code if isinstance(code, int) else 0


def main() -> None:
    """Run the command line of this process and exit."""
    code = run_line()
    try:
        sys.stdout.flush()
    except OSError as error:  # results are lost; the interpreter would try once more
        output.complain(f"cannot write to stdout: {error.strerror}")
        os._exit(output.EXIT_CRASH)
    sys.stderr.flush()
    if code > output.EXIT_SIGNALLED:
        # A thread may still be inside a read of stdin, and the interpreter's shutdown would trip over
        # the lock that it holds.
        os._exit(code)
    sys.exit(code)


PREFIX = "TROUPER_"
# Variables that are no option of `serve`.
OWN = (
    "ALLOW_RUNTIME_LORA_UPDATING", "BATCH_INVARIANT", "CHAT_TEMPLATE_RENDER_TIMEOUT", "CLUSTER_KEY", "CONFIG",
    "CPU_BIND", "CPU_KVCACHE_SPACE", "DEVICE", "KEEP_ALIVE_ON_ENGINE_DEATH", "KERNELS", "LOG_STATS_INTERVAL",
    "PP_LAYER_PARTITION", "RAY_CPUS_PER_WORKER", "SERVER_DEV_MODE", "SMOLLM2", "TEST_FAULT",
)  # fmt: skip
# Kubernetes sets these for every container beside a service of the name "trouper".
OF_KUBERNETES = ("TROUPER_SERVICE_", "TROUPER_PORT_")


def known_variables() -> list[str]:
    """List the variables that some part of the program reads."""
    engine = [field.name for field in dataclasses.fields(EngineArgs)]
    return [PREFIX + name.upper() for name in (*OWN, *engine, *option_names())]


def unknown_variables(names: Iterable[str]) -> Iterator[str]:
    """Name each variable that nothing reads, with the one that was probably meant."""
    known = known_variables()
    for name in sorted(names):
        if not name.startswith(PREFIX) or name in known or name.startswith(OF_KUBERNETES):
            continue
        near = difflib.get_close_matches(name, known, 1, 0.75)
        yield f"warning: nothing reads the variable {name}" + (
            f"; did you mean {near[0]}?" if near else ""
        )
