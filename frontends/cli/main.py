"""`trouper`: the root command and its table of commands.

All commands run through `run_line`, the only place that turns an exception into an exit code and one line on stderr.
The root command also warns about variables named TROUPER_… that nothing reads, because a misspelled variable would
otherwise be ignored silently.
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
from trouper.config.args import EngineArgs, join_dotted
from trouper.frontends.cli import output
from trouper.frontends.cli.batch.embed import embed, score
from trouper.frontends.cli.batch.generate import generate
from trouper.frontends.cli.batch.replay import replay
from trouper.frontends.cli.batch.run_batch import run_batch
from trouper.frontends.cli.chat.commands import chat, complete
from trouper.frontends.cli.collect_env import collect_env
from trouper.frontends.cli.launch import launch
from trouper.frontends.cli.library import load, ps, pull, rm, show, unload
from trouper.frontends.cli.models import models
from trouper.frontends.cli.serve import serve
from trouper.frontends.cli.server_options import option_names
from trouper.frontends.cli.values import PanelCommand, TextCommand, WholeSentenceGroup

# Help is never wider than this many columns.
HELP_WIDTH = 100
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
app.command(cls=PanelCommand)(replay)
app.command(cls=PanelCommand)(models)
app.command("list", cls=PanelCommand, help="List the models on this machine, as `models` does.")(
    models
)
app.command(cls=PanelCommand)(pull)
app.command(cls=PanelCommand)(show)
app.command(cls=PanelCommand)(rm)
app.command(cls=PanelCommand)(ps)
app.command(cls=PanelCommand)(load)
app.command(cls=PanelCommand)(unload)
app.command(cls=PanelCommand)(collect_env)


class BenchGroup(WholeSentenceGroup):
    """The group `trouper bench`, which imports its commands when one of them is needed.

    It imports them by name, because the benchmarks import the command line, and a plain import here would form a cycle.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self._table())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return self._table().get(cmd_name)

    def _table(self) -> dict[str, Any]:
        bench = import_module("trouper.bench.cli.app").bench
        group: Any = typer.main.get_command(bench)
        return group.commands


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
    """Run language and embedding models at the terminal or as a server, and measure them."""
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())
        return
    for line in unknown_variables(os.environ):
        output.complain(line)


def run_line(arguments: list[str] | None = None, commands: typer.Typer = app) -> int:
    """Run one command line and return its exit code; an error becomes one line on stderr.

    With `--debug` the exception is raised instead. `commands` replaces trouper's own commands, for the studies.
    """
    # The command reads its arguments from here, and sets `debug`.
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
            # The terminal has printed ^C, so the message needs a new line.
            print(file=sys.stderr)
        code, message = output.explain(error)
        output.complain(message)
        return code
    # typer itself turns a KeyboardInterrupt into this code.
    if code == output.EXIT_CTRL_C:
        output.complain("interrupted")
    return code if isinstance(code, int) else 0


def main() -> None:
    """Run the command line of this process and exit.

    Output is flushed here, so that a full disk or a closed pipe becomes an error and a nonzero exit code.
    """
    code = run_line()
    try:
        sys.stdout.flush()
    except OSError as error:
        output.complain(f"cannot write to stdout: {error.strerror}")
        # An ordinary exit would flush, and fail, once more.
        os._exit(output.EXIT_CRASH)
    sys.stderr.flush()
    if code > output.EXIT_SIGNALLED:
        # A thread may still be reading stdin and hold its lock, at which the interpreter's shutdown would fail.
        os._exit(code)
    sys.exit(code)


PREFIX = "TROUPER_"
# Variables without an option of the same name.
OTHER_VARIABLES = (
    "ALLOW_RUNTIME_LORA_UPDATING", "BATCH_INVARIANT", "CHAT_TEMPLATE_RENDER_TIMEOUT", "CLUSTER_KEY", "CONFIG",
    "CPU_BIND", "CPU_KVCACHE_SPACE", "DEVICE", "KEEP_ALIVE_ON_ENGINE_DEATH", "KERNELS", "LOG_STATS_INTERVAL", "MODELS",
    "PP_LAYER_PARTITION", "RAY_CPUS_PER_WORKER", "SERVER_DEV_MODE", "SMOLLM2", "TEST_FAULT",
)  # fmt: skip
# Kubernetes sets these in every container of a namespace that has a service named "trouper".
KUBERNETES_PREFIXES = ("TROUPER_SERVICE_", "TROUPER_PORT_")


def known_variables() -> list[str]:
    """Return the names of all environment variables TROUPER_… that the program reads."""
    engine = [field.name for field in dataclasses.fields(EngineArgs)]
    return [PREFIX + name.upper() for name in (*OTHER_VARIABLES, *engine, *option_names())]


def unknown_variables(names: Iterable[str]) -> Iterator[str]:
    """Yield a warning for each variable TROUPER_… that nothing reads, with the most similar known name.

    Variables that Kubernetes sets for a service named trouper are not reported.
    """
    known = known_variables()
    for name in sorted(names):
        if not name.startswith(PREFIX) or name in known or name.startswith(KUBERNETES_PREFIXES):
            continue
        near = difflib.get_close_matches(name, known, 1, 0.75)
        yield f"warning: the environment variable {name} has no effect" + (
            f"; did you mean {near[0]}?" if near else ""
        )
