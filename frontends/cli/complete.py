"""`trouper complete`: completion of prompts by a server."""

from functools import partial
from typing import Annotated, Any

import typer

from trouper.errors import RemoteError, TrouperClientError
from trouper.frontends.cli import output
from trouper.frontends.cli.options import DEFAULT_MAX_TOKENS, SamplingOptions, expand_options
from trouper.frontends.cli.remote import CONNECTING, RemoteOptions, RemoteServer
from trouper.frontends.cli.running import Interrupts, run_open
from trouper.frontends.cli.stats import ASKED, AnswerUsage, StatsOption, Stopwatch
from trouper.frontends.cli.terminal import read_line, show, terminal_kept


@expand_options
def complete(
    ctx: typer.Context,
    quick: Annotated[
        str | None,
        typer.Option("--quick", "-q", metavar="PROMPT", help="Complete this one prompt, and end."),
    ] = None,
    stats: StatsOption = False,
    *,
    remote: RemoteOptions,
    sampling: SamplingOptions,
) -> None:
    """Complete each line of stdin at an OpenAI-compatible server.

    For example: trouper complete --url http://127.0.0.1:8000 -q "def f("

    Ctrl-C stops a text; at the prompt it ends the program, as Ctrl-D does.
    """
    fields = {"max_tokens": DEFAULT_MAX_TOKENS, **sampling.given(), **(ASKED if stats else {})}
    with terminal_kept():
        run_open(RemoteServer(remote), partial(_complete, quick, fields, stats), CONNECTING)


async def _complete(
    quick: str | None,
    fields: dict[str, Any],
    shows_stats: bool,
    server: RemoteServer,
    interrupts: Interrupts,
) -> None:
    async def go_on(prompt: str) -> None:
        usage: AnswerUsage | None = None
        watch = Stopwatch(show)
        with interrupts.stoppable():
            usage = await server.complete(fields, prompt, watch.hear)
        print()
        if shows_stats:
            watch.report(usage)

    if quick is not None:
        await go_on(quick)
        return
    while (line := await read_line()) is not None:
        if line.strip():
            try:
                await go_on(line.removesuffix("\n"))
            except (TrouperClientError, RemoteError) as error:
                output.complain(output.explain(error)[1])
